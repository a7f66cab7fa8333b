"""The addresses that a token names: those by which others reach this coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.identity import WheelServer
from edgeshard.rpc.addresses import WILDCARDS, outgoing_address
from edgeshard.rpc.tls import join_address, split_address


@dataclass(frozen=True, slots=True)
class Addresses:
    """The host:port of the coordinator, of its enrolment, and of `packages`, its package listener
    ("" if it has none). `advertise` is the host that others dial, "" for the listener's or the
    machine's own. `bootstrap_sha256` is the digest of the program that a machine without EdgeShard
    runs first."""

    coordinator: str
    enrolment: str
    advertise: str = ""
    packages: str = ""
    bootstrap_sha256: str = ""

    def for_joiner(self, host: str = "") -> tuple[str, str]:
        """The first two addresses with the host that a joiner is to dial. Raises
        InvalidArgumentError for a text that is no host."""
        joiner_host = host or self.advertise
        return self._with_host(self.coordinator, joiner_host), self._with_host(
            self.enrolment, joiner_host
        )

    def packages_for(self, host: str = "") -> str:
        """`packages` with that host. Raises as `for_joiner`."""
        return self._with_host(self.packages, host or self.advertise) if self.packages else ""

    def wheel_server(self) -> WheelServer:
        """The address of `packages` for a member, who reaches the coordinator already.

        Its host is left out if that is the coordinator's too, so that a member dials the host that
        it knows.
        """
        if not self.packages:
            return WheelServer()
        host, port = split_address(self.packages)
        own, _ = split_address(self.coordinator)
        is_shared = bool(self.advertise) or host in WILDCARDS or host == own
        return WheelServer("" if is_shared else host, port)

    def _with_host(self, address: str, host: str) -> str:
        own, port = split_address(address)
        if not host:
            host = own if own not in WILDCARDS else outgoing_address()
        if any(character in host for character in " /[]") or len(host) > 253:
            raise InvalidArgumentError(
                f"host {host[:80]!r} is not a host: give a name or an address", field="host"
            )
        return join_address(host, port)
