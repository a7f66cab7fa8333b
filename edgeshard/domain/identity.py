"""The identity of a site's process: a role and an id, which its certificate carries."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import sha256
from typing import Annotated

from edgeshard.domain.errors import InvalidArgumentError, NotFoundError, invalid
from edgeshard.domain.ids import check_id, check_name

SCHEME = "edgeshard://"
SECRET_BYTES = 16
"""Length of a token's secret: 128 bits."""
AUTHORITY_DIGEST_BYTES = 24
"""Length of the digest, from a sha256. With 192 bits no second certificate can be found, and more
would make tokens longer."""
MOST_KEY_MODELS = 64
"""That one API key names."""
KEY_ROLE = "key"
"""The role of API keys, which have no certificate."""
_KEY_ID_SIGN = "#"
"""A character that no name has."""
_TOKEN_ID = re.compile("[0-9a-f]{16}")
"""What `token_id_of` returns."""


class Role(StrEnum):
    """The part of a process in its site."""

    COORDINATOR = "coordinator"
    AGENT = "agent"
    """Its id is the name of its node."""
    CLIENT = "client"
    """An application that generates."""
    OPERATOR = "operator"


def key_identity(name: str, key_id: str) -> str:
    """The identity of an API key in requests, `key/NAME#ID`.

    No certificate has this role, so a key is never taken for a client of that name. A later key of
    the same name has another id, so it shares nothing with a revoked one.
    """
    return f"{KEY_ROLE}/{name}{_KEY_ID_SIGN}{key_id}"


def key_id_of(identity: str) -> str:
    """The id of the API key with this identity; "" for any other identity."""
    return identity.partition(_KEY_ID_SIGN)[2]


def shown_identity(identity: str) -> str:
    """The identity as people read and write it: `key/NAME` for an API key."""
    return identity.partition(_KEY_ID_SIGN)[0]


@dataclass(frozen=True, slots=True)
class Principal:
    """One process of one site. `site` and `id` are names as `check_name` takes them."""

    site: str
    role: Role
    id: str

    def __str__(self) -> str:
        return f"{self.role} {self.id}"

    @property
    def uri(self) -> str:
        """`edgeshard://SITE/ROLE/ID`: the only URI in a certificate's alternative names."""
        return f"{SCHEME}{self.site}/{self.role}/{self.id}"

    @property
    def dns_name(self) -> str:
        """`ID.ROLE.SITE`: the name by which whoever dials it verifies its certificate, whatever
        address it has."""
        return f"{self.id}.{self.role}.{self.site}"


@dataclass(frozen=True, slots=True)
class Denial:
    """A principal's certificates are refused, except those that were made later.

    `accepted` are their serial numbers, in hexadecimal.
    """

    principal: Principal
    accepted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Invitation:
    """The content of a token's text: what a process needs to find its site, to distinguish it from
    others, and to be admitted.

    `authority` is the `authority_digest` of the signer of the coordinator's certificate. The
    addresses are host:port of the coordinator and of its listener for enrolment. Only the process
    may see `secret`.
    """

    authority: bytes
    principal: Principal
    coordinator: str
    enrolment: str
    secret: bytes = field(repr=False)

    @property
    def token_id(self) -> str:
        return token_id_of(self.secret)

    @property
    def has_address(self) -> bool:
        """Whether it has the site's address. If not, it has only the ports, and the site is
        discovered."""
        return not self.enrolment.startswith(":")

    def without_address(self) -> Invitation:
        coordinator, enrolment = (
            f":{text.rpartition(':')[2]}" for text in (self.coordinator, self.enrolment)
        )
        return replace(self, coordinator=coordinator, enrolment=enrolment)


def authority_digest(certificate: bytes) -> bytes:
    """The digest of a certificate in DER, `AUTHORITY_DIGEST_BYTES` long."""
    return sha256(certificate).digest()[:AUTHORITY_DIGEST_BYTES]


def token_id_of(secret: bytes) -> str:
    """The id by which the coordinator finds a token. It reveals nothing of the secret, and may be
    logged."""
    return sha256(b"edgeshard token id\0" + secret).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class JoinToken:
    """A token as the coordinator makes it.

    `authorities` are certificates in DER, the signer of the coordinator's first. `packages` is
    host:port of the site's package listener, `bootstrap_sha256` the first program's digest, in
    hexadecimal. Both are "" if there is no listener. The other fields are its `invitation`'s.
    """

    authorities: tuple[bytes, ...]
    principal: Principal
    coordinator: str
    enrolment: str
    secret: bytes = field(repr=False)
    packages: str = ""
    bootstrap_sha256: str = ""

    @property
    def token_id(self) -> str:
        return token_id_of(self.secret)

    @property
    def invitation(self) -> Invitation:
        authority = authority_digest(self.authorities[0])
        return Invitation(authority, self.principal, self.coordinator, self.enrolment, self.secret)


def _check_port(port: int, field: str) -> int:
    if not 0 <= port <= 65535:
        raise InvalidArgumentError(f"{field}: {port} is not a port; give 0 to 65535", field=field)
    return port


@dataclass(frozen=True, slots=True)
class WheelServer:
    """The address at which a site hands out EdgeShard: `host` is "" for the host by which the
    caller reaches the coordinator, `port` is 0 if there is no such server."""

    host: str = ""
    port: Annotated[int, _check_port] = 0


def _check_invited(role: Role, _: str) -> Role:
    return parse_role(role)


def _check_invited_name(id: str, _: str) -> str:
    return check_name(id, "name")


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """An operator wants a token for a principal of this role and id, good for `ttl_s` seconds.
    `host` is what the process will dial, "" for what the coordinator takes for its own address."""

    role: Annotated[Role, _check_invited]
    id: Annotated[str, _check_invited_name]
    ttl_s: float
    host: str = ""


@dataclass(frozen=True, slots=True)
class OpenToken:
    """A token that still lets a process in, without its secret.

    Times are in seconds since 1970. `creator` is ROLE/ID of the operator. If an older version
    created the token, `created_at` is 0 and `creator` is "".
    """

    token_id: str
    role: Annotated[Role, _check_invited]
    id: Annotated[str, _check_invited_name]
    created_at: float
    expires_at: float
    creator: str


def no_open_token() -> NotFoundError:
    """The error for an id of no open token. It repeats nothing, because people paste the token
    itself."""
    return NotFoundError(
        "token: there is no valid token with this id; edgectl token list prints the valid ones, "
        "and "
        "edgectl node revoke refuses a process that has joined",
        field="token",
        reason="UNKNOWN_TOKEN",
    )


def check_token_id(text: str) -> str:
    """Return the id of a token. Raises NotFoundError for any other text, so that no secret is sent
    or logged."""
    if _TOKEN_ID.fullmatch(text) is None:
        raise no_open_token()
    return text


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key for the HTTP gateway, without its secret.

    `models` are those it may use, by name of deployment or model; () is all. `tokens_per_minute`
    and `requests` at once are limits, None if it has none of its own. `key_id` and `created_at`, in
    seconds since 1970, are set by the site. With `metrics` it reads all metrics of the site,
    including the token counts of others' requests.
    """

    name: str
    models: tuple[str, ...] = ()
    tokens_per_minute: int | None = None
    requests: int | None = None
    key_id: str = ""
    created_at: float = 0.0
    metrics: bool = False

    def check(self) -> None:
        """Raise InvalidArgumentError naming the first field that no key has."""
        check_name(self.name, "name")
        if len(self.models) > MOST_KEY_MODELS:
            raise InvalidArgumentError.about("models", f"more than {MOST_KEY_MODELS} are named")
        for model in self.models:
            check_name(model, "models")
        for field_name, value in (
            ("tokens_per_minute", self.tokens_per_minute),
            ("requests", self.requests),
        ):
            if value is not None and not 1 <= value <= 1_000_000_000:
                raise invalid(field_name, "must be 1 to 1000000000")


@dataclass(frozen=True, slots=True)
class DashboardLink:
    """A link that opens the dashboard in an operator's browser, valid once and for `ttl_s` seconds.
    The secret is the fragment of `url`, which a browser sends to no server."""

    url: str = field(repr=False)
    ttl_s: float


def _check_token_id(text: str, _: str) -> str:
    return check_id(text, "token")


@dataclass(frozen=True, slots=True)
class Enrolment:
    """A token shown in exchange for a certificate; `request` is a certificate signing request in
    PEM."""

    token_id: Annotated[str, _check_token_id]
    secret: bytes = field(repr=False)
    request: bytes


def parse_role(text: str) -> Role:
    """The role of this name. Raises InvalidArgumentError naming `role` if there are no tokens for
    it."""
    choices = (Role.AGENT, Role.CLIENT, Role.OPERATOR)
    if text not in choices:
        raise invalid("role", f"{text[:40]!r} is none of {', '.join(choices)}", "INVALID_ROLE")
    return Role(text)


def coordinator_of(site: str) -> Principal:
    """A site has one coordinator."""
    return Principal(site, Role.COORDINATOR, "coordinator")


def principal_from_uri(uri: str) -> Principal:
    """The principal of a certificate's URI. Raises InvalidArgumentError with reason NO_ROLE for any
    other URI."""
    parts = uri.removeprefix(SCHEME).split("/")
    if not uri.startswith(SCHEME) or len(parts) != 3 or parts[1] not in set(Role):
        roles = ", ".join(Role)
        raise InvalidArgumentError(
            f"the certificate's URI is {uri[:100]!r}, not {SCHEME}SITE/ROLE/ID with a role of "
            f"{roles}",
            field="certificate",
            reason="NO_ROLE",
        )
    site, role, id = parts
    return Principal(check_name(site, "certificate"), Role(role), check_name(id, "certificate"))
