"""Principals whose certificates a server refuses although their time is not over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from edgeshard.domain.errors import DeniedError
from edgeshard.domain.identity import Denial, Principal


class Denials:
    """The denials of one process. Certificates made after a principal was admitted again are
    accepted."""

    def __init__(self) -> None:
        self._accepted: dict[Principal, tuple[str, ...]] = {}
        self._followers: list[Callable[[], None]] = []

    def follow(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever the denials are replaced."""
        self._followers.append(changed)

    def replace(self, denials: Iterable[Denial]) -> None:
        """From now on refuse only these. Their open calls end."""
        self._accepted = {denial.principal: denial.accepted for denial in denials}
        for changed in self._followers:
            changed()

    def list(self) -> tuple[Denial, ...]:
        """The denials that hold now."""
        return tuple(Denial(principal, accepted) for principal, accepted in self._accepted.items())

    def check(self, context: Any, principal: Principal) -> None:
        """Raise DeniedError for a caller whose certificate was revoked; `context` is of its
        call."""
        self.check_certificate(principal, lambda: context.auth_context()["x509_pem_cert"][0])

    def check_certificate(self, principal: Principal, pem: Callable[[], bytes]) -> None:
        """Raise DeniedError for a principal whose certificate, which `pem` reads, was revoked."""
        accepted = self._accepted.get(principal)
        if accepted is None:
            return
        from edgeshard.identity.certificates import serial_of  # only a site that revokes needs it

        if serial_of(pem()) not in accepted:
            raise DeniedError(
                f"the certificate of {principal} was revoked; an operator can admit it again with "
                "edgectl token create",
                field="certificate",
                reason="REVOKED",
            )
