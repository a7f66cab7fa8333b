"""The addresses that a token names: those by which others reach this coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.rpc.addresses import WILDCARDS, outgoing_address
from edgeshard.rpc.tls import join_address, split_address


@dataclass(frozen=True, slots=True)
class Addresses:
    """The host:port of the coordinator and of its enrolment; `advertise` is the host that others dial, "" for the
    listener's or the machine's own."""

    coordinator: str
    enrolment: str
    advertise: str = ""

    def for_joiner(self, host: str = "") -> tuple[str, str]:
        """Both addresses with the host that a joiner is to dial. Raises InvalidArgumentError for a text that is no
        host."""
        chosen = host or self.advertise
        return self._with_host(self.coordinator, chosen), self._with_host(self.enrolment, chosen)

    def _with_host(self, address: str, chosen: str) -> str:
        own, port = split_address(address)
        if not chosen:
            chosen = own if own not in WILDCARDS else outgoing_address()
        if any(character in chosen for character in " /[]") or len(chosen) > 253:
            raise InvalidArgumentError(f"host {chosen[:80]!r} is no host: give a name or an address", field="host")
        return join_address(chosen, port)
