"""An invitation as text: one short word, which people copy, and read to each other.

After the prefix, in base64 without padding: the address of the coordinator, the address of its
listener for enrolment, a byte for role and length of the id, id, site with its length in front,
digest of the authority, secret. An address is a byte for its form, followed by the host and two
bytes for the port.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import shlex
from itertools import pairwise

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.identity import (
    AUTHORITY_DIGEST_BYTES,
    SECRET_BYTES,
    Invitation,
    JoinToken,
    Principal,
    Role,
)
from edgeshard.domain.ids import check_name

TOKEN_PREFIX = "edgeshard2-"
"""Says what the text is, and which form it has."""
MOST_TOKEN_CHARACTERS = 1024
_ROLES = (Role.AGENT, Role.CLIENT, Role.OPERATOR)
_V4, _V6, _SAME_HOST, _NAME = range(4)
"""Forms of a host; a name of N bytes has the form `_NAME` + N - 1."""
_LONGEST_HOST = 253


def invitation_to_text(invitation: Invitation) -> str:
    """One word without characters that mean anything to a shell.

    It has at most 120 characters if site and id have 29 together and the host is an IPv4 address.
    With an IPv6 address they may have 17, with a host's name 33 including the name. Raises
    InvalidArgumentError naming `host`.
    """
    principal = invitation.principal
    content = b"".join(
        (
            *_addresses_to_bytes(invitation.coordinator, invitation.enrolment),
            bytes([_ROLES.index(principal.role) << 6 | len(principal.id)]),
            principal.id.encode(),
            bytes([len(principal.site)]),
            principal.site.encode(),
            invitation.authority,
            invitation.secret,
        )
    )
    return TOKEN_PREFIX + base64.urlsafe_b64encode(content).decode().rstrip("=")


_BOOTSTRAP = (
    "import hashlib,http.client as h,ssl,sys;sys.excepthook=lambda*e:sys.exit(ascii(e[1])[:999]);"
    "c=h.HTTPSConnection(sys.argv[1],timeout=30,"
    'context=ssl._create_unverified_context());c.request("GET","/join.py");s=c.getresponse().read(1<<20);'
    'hashlib.sha256(s).hexdigest()==sys.argv[2] or sys.exit("not what the site offered: take '
    'another line");exec(s)'
)
"""Fetches a program from whoever answers, and runs it only if its sha256 is the one of the line. An
error is printed in ASCII, because whoever answered may have sent its text."""


def line_without_edgeshard(token: JoinToken) -> str:
    """The command that joins a machine which has Python and nothing of EdgeShard; "" if the site
    has no wheels.

    Options of `edgectl join` may follow it. Raises as `invitation_to_text`.
    """
    if not token.packages:
        return ""
    words = (
        _BOOTSTRAP,
        token.packages,
        token.bootstrap_sha256,
        invitation_to_text(token.invitation),
    )
    return shlex.join(("python3", "-c", *words))


def invitation_from_text(text: str) -> Invitation:
    """Raises InvalidArgumentError naming `token`, and never shows it."""
    content = text.strip().removeprefix(TOKEN_PREFIX)
    try:
        if not text.strip().startswith(TOKEN_PREFIX) or len(text) > MOST_TOKEN_CHARACTERS:
            raise ValueError
        decoded = base64.b64decode(
            content + "=" * (-len(content) % 4), altchars=b"-_", validate=True
        )
        return _Reader(decoded).invitation()
    except (ValueError, IndexError, binascii.Error, InvalidArgumentError):
        raise InvalidArgumentError(
            f"the token is damaged or incomplete: copy the whole word, {TOKEN_PREFIX}..., that "
            "edgectl "
            "token create printed",
            field="token",
            reason="TOKEN",
        ) from None


def _addresses_to_bytes(*addresses: str) -> list[bytes]:
    split = [
        (host.removeprefix("[").removesuffix("]"), int(port))
        for host, _, port in (address.rpartition(":") for address in addresses)
    ]
    endpoints = [("", 0), *split]
    return [
        (bytes([_SAME_HOST]) if host == before else _host_to_bytes(host)) + port.to_bytes(2)
        for (before, _), (host, port) in pairwise(endpoints)
    ]


def _host_to_bytes(host: str) -> bytes:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    # Any address that would be read differently than it is written, such as one with a zone, is
    # written as a name.
    if address is not None and str(address) == host and not getattr(address, "scope_id", None):
        return bytes([_V4 if address.version == 4 else _V6]) + address.packed
    name = host.encode()
    if not 0 < len(name) <= _LONGEST_HOST:
        raise InvalidArgumentError(
            f"host {host[:80]!r} is not a host: give a name or an address", field="host"
        )
    return bytes([_NAME + len(name) - 1]) + name


class _Reader:
    """Takes one thing after the other. Raises ValueError or IndexError if the bytes end too early,
    or continue."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    def invitation(self) -> Invitation:
        host, coordinator = self._address("")
        _, enrolment = self._address(host)
        (kind,) = self._take(1)
        id = check_name(self._take(kind & 63).decode(), "id")
        site = check_name(self._take(self._take(1)[0]).decode(), "site")
        authority, secret = self._take(AUTHORITY_DIGEST_BYTES), self._take(SECRET_BYTES)
        if self._at != len(self._content):
            raise ValueError
        return Invitation(
            authority, Principal(site, _ROLES[kind >> 6], id), coordinator, enrolment, secret
        )

    def _address(self, before: str) -> tuple[str, str]:
        """The host, and host:port."""
        (form,) = self._take(1)
        if form == _V4:
            host = str(ipaddress.IPv4Address(self._take(4)))
        elif form == _V6:
            host = str(ipaddress.IPv6Address(self._take(16)))
        else:
            host = before if form == _SAME_HOST else self._take(form - _NAME + 1).decode()
        if not host.isprintable() or any(character in host for character in " /[]"):
            raise ValueError
        port = int.from_bytes(self._take(2))
        return host, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _take(self, count: int) -> bytes:
        chunk = self._content[self._at : self._at + count]
        if len(chunk) != count:
            raise ValueError
        self._at += count
        return chunk
