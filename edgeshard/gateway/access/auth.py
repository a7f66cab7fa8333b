"""The callers of the gateway, and the check of their keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request

from edgeshard.domain.control.site import ServedModel
from edgeshard.domain.errors import DeniedError, NotFoundError
from edgeshard.gateway.backend import Backend


def opens(models: frozenset[str] | None, deployment: str, model: str) -> bool:
    """Whether a key for these models, by the name of a deployment or a model (None: all), is one
    for a deployment."""
    return models is None or not models.isdisjoint((deployment, model))


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: the identity that quotas and logs know, the models it may use (None:
    all), and whether it reads all metrics.

    `check` raises UnauthenticatedError or DeniedError once the right to send it has ended. Call it
    after the last wait and directly before each effect: a body, a queue or another answer may take
    minutes.
    """

    identity: str
    models: frozenset[str] | None = None
    metrics: bool = False
    check: Callable[[], object] = field(kw_only=True, compare=False, repr=False)

    def may_use(self, served: ServedModel) -> bool:
        """Whether the caller may use this model."""
        return opens(self.models, served.deployment, served.model)

    def find(self, site: Backend, model: str) -> ServedModel:
        """The model that answers under this name.

        A key for only some models learns nothing of others, not even whether they exist. Raises
        DeniedError naming `model`, and as `Backend.find` does.
        """
        try:
            return site.find(model, self.models)
        except NotFoundError:
            if self.models is None or model in self.models:
                raise
            raise DeniedError(
                f"this API key does not allow model {model[:80]!r}, only "
                f"{', '.join(sorted(self.models))}; "
                "request another key from the operator",
                field="model",
                reason="KEY_SCOPE",
            ) from None


def unending() -> None:
    """The check of a caller whose right does not end: who needs no key."""


def caller_of(request: Request) -> Caller:
    """The caller that the entrance admitted."""
    caller = request.scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


class Authenticator(Protocol):
    """The check of keys."""

    def enter(self, key: str | None, what: str, address: str) -> Caller:
        """The caller with `key` (None: without one) that requests `what` from `address`
        (host:port).

        Raises UnauthenticatedError.
        """
