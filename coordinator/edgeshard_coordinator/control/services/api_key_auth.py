"""The identity of a caller by HTTP."""

from __future__ import annotations

from functools import partial

from edgeshard.domain.errors import UnauthenticatedError
from edgeshard.domain.identity import key_identity
from edgeshard.gateway.access.auth import Caller, unending
from edgeshard_coordinator.control.persistence.audit_log import AuditLog
from edgeshard_coordinator.membership.api_keys import PREFIX, KeyBook

ANYONE = ""
"""The identity of a caller without a key if none is required: everybody's in plaintext."""


class ApiKeyAuthenticator:
    """Admits a caller with a key of the site; anybody else too, if it `asks` for none."""

    def __init__(self, keys: KeyBook, audit: AuditLog, *, asks: bool = True) -> None:
        self._keys = keys
        self._audit = audit
        self._asks = asks

    def enter(self, key: str | None, what: str, address: str) -> Caller:
        try:
            return self._caller(key)
        except UnauthenticatedError as error:
            self._audit.add("nobody", what, "", error.reason, address, by_operator=False, kind="HTTP")
            raise

    def _caller(self, key: str | None) -> Caller:
        # Clients that must be given some key send "EMPTY", "none" and the like.
        if not self._asks and (key is None or not key.startswith(PREFIX)):
            return Caller(ANYONE, metrics=True, check=unending)
        if key is None:
            raise UnauthenticatedError(
                "the API key is missing in Authorization or x-api-key: send `Authorization: Bearer KEY`; an "
                "operator creates a key with edgectl key create NAME",
                field="api_key",
                reason="NO_API_KEY",
            )
        api_key = self._keys.find(key)
        identity = key_identity(api_key.name, api_key.key_id)
        models = frozenset(api_key.models) if api_key.models else None
        return Caller(identity, models, api_key.metrics, check=partial(self._keys.check, identity))
