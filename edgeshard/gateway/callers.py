"""Who sends requests, and what lets them in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request

from edgeshard.domain.errors import DeniedError
from edgeshard.domain.site import ServedModel


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: the identity that quotas and logs know, and the models it may use (None: all)."""

    identity: str
    models: frozenset[str] | None = None

    def may_use(self, served: ServedModel) -> bool:
        return self.models is None or not self.models.isdisjoint((served.deployment, served.model))

    def check(self, served: ServedModel) -> None:
        """Raise DeniedError for a model that the key is not for."""
        if not self.may_use(served):
            raise DeniedError(
                f"this API key is not for model {served.deployment}: ask the operator for one that is",
                field="model",
                reason="KEY_SCOPE",
            )


def caller_of(request: Request) -> Caller:
    """Whom the entrance let in."""
    caller = request.scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


class Doors(Protocol):
    """Who may come in."""

    def enter(self, key: str | None, what: str, address: str) -> Caller:
        """The caller that shows `key`, None without one; `what` is asked for, from `address` (host:port).

        Raises UnauthenticatedError.
        """
        ...
