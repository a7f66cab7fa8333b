"""The certificate of the HTTP gateway beyond loopback, by the site's own authority: clients trust that once."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.identity.authority import new_key, now, private_pem, request_for
from edgeshard.rpc.addresses import WILDCARDS, outgoing_address
from edgeshard.rpc.tls import TlsFiles, split_address
from edgeshard.rpc.tls_files import write_files
from edgeshard_coordinator.membership.membership import Issuing

_HOST = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*", re.I)


@dataclass(frozen=True, slots=True)
class GatewayCertificate:
    """The certificate of the listener at `address`, with the hosts by which clients may call it:
    `names`, and the machine's own. It names no member of the site, and no client can use it."""

    issuing: Issuing
    directory: Path
    address: str
    names: tuple[str, ...] = ()

    def hosts(self) -> tuple[str, ...]:
        """The first is the one to show. Raises InvalidArgumentError for a name that is none."""
        for name in self.names:
            if not _HOST.fullmatch(name) and not _is_address(name):
                raise InvalidArgumentError(
                    f"--http-name {name[:80]!r} is not a host: give a name such as myhost.local, or an address",
                    field="http-name",
                )
        listener = split_address(self.address, "http-listen")[0]
        reached = outgoing_address() if listener in WILDCARDS else listener
        own = socket.gethostname().partition(".")[0].lower()
        more = (own, f"{own}.local", "localhost", "127.0.0.1") if _HOST.fullmatch(own) else ("localhost", "127.0.0.1")
        return tuple(dict.fromkeys((*self.names, reached, *more)))

    def made(self) -> TlsFiles:
        """A new one, with a key of its own, in `directory`. Raises as `hosts`, and OSError."""
        key = new_key()
        certificate, authorities = self._issued(request_for(key))
        return write_files(self.directory, authorities, certificate, private_pem(key))

    async def renewed(self, request: bytes) -> tuple[bytes, bytes]:
        """A certificate for a request, in PEM, and the authorities, as `rpc.renewal` expects them."""
        return self._issued(request)

    def _issued(self, request: bytes) -> tuple[bytes, bytes]:
        issuing = self.issuing
        certificate = issuing.authority.issue_for_hosts(self.hosts(), request, now(), issuing.life)
        return certificate, issuing.files.ca.read_bytes()


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
