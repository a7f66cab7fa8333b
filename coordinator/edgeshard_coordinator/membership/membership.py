"""The members of the site: processes that are admitted, for a time, and those that are refused.
Also the service that joiners call, and the certificate of the HTTP gateway."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import structlog

from edgeshard.domain.errors import (
    DeniedError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from edgeshard.domain.identity import (
    SECRET_BYTES,
    Denial,
    Enrolment,
    JoinToken,
    OpenToken,
    Principal,
    Role,
    TokenRequest,
    coordinator_of,
    no_open_token,
    token_id_of,
)
from edgeshard.identity.authority import (
    Authority,
    key_digest,
    new_key,
    now,
    private_pem,
    request_for,
)
from edgeshard.identity.certificates import bundle_of, ders_of, is_signed_by, serial_of
from edgeshard.proto.v1 import identity_pb2 as pb
from edgeshard.proto.v1 import identity_pb2_grpc
from edgeshard.rpc.access import peer_address
from edgeshard.rpc.addresses import WILDCARDS, outgoing_address
from edgeshard.rpc.denials import Denials
from edgeshard.rpc.tls import TlsFiles, split_address
from edgeshard.rpc.tls_files import write_files
from edgeshard.wire.identity import enrolment_from_wire
from edgeshard_coordinator.membership import tokens
from edgeshard_coordinator.membership.store import MembershipStore
from edgeshard_coordinator.membership.tokens import TokenRecord

log = structlog.get_logger()


async def _nothing(principal: Principal) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Issuing:
    """The maker of certificates: the site's authority, the authorities that processes trust (in the
    files), and the life of each certificate."""

    authority: Authority
    files: TlsFiles
    life: timedelta


@dataclass(eq=False)
class Membership:
    """Lets processes into the site and refuses them. `now` is the wall clock's time, `steady`
    seconds that only grow.

    Without `issuing`, certificates are made by hand, and here they can only be refused. The
    coordinator's server goes by `denials`.
    """

    site: str
    _store: MembershipStore
    denials: Denials
    _issuing: Issuing | None
    _now: Callable[[], datetime]
    _steady: Callable[[], float]

    def __post_init__(self) -> None:
        self._failures = tokens.Failures()
        # Between reading a token and writing that it was used, and between reading a denial and
        # writing it.
        self._lock = asyncio.Lock()
        self._on_denied: Callable[[Principal], Awaitable[None]] = _nothing
        self._on_changed: Callable[[], None] = lambda: None

    async def open(
        self,
        on_denied: Callable[[Principal], Awaitable[None]] = _nothing,
        on_changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Read the denials from disk. `on_denied` ends all that a revoked principal has open;
        `on_changed` is called when the list of denials is another."""
        self._on_denied, self._on_changed = on_denied, on_changed
        self.denials.replace(await self._store.open())

    async def close(self) -> None:
        await self._store.close()

    async def create_token(
        self, request: TokenRequest, coordinator: str, enrolment: str, creator: str = ""
    ) -> JoinToken:
        """A token that lets one process in; `creator` is the operator's name.

        Raises FailedPreconditionError if no certificates are made here, InvalidArgumentError for
        another `ttl_s` than 10 s to 7 days, ResourceExhaustedError if too many tokens are open.
        """
        authorities, ttl_s = self.authorities(), tokens.check_ttl(request.ttl_s)
        principal = Principal(self.site, request.role, request.id)
        secret = secrets.token_bytes(SECRET_BYTES)
        now = self._now().timestamp()
        if await self._store.count(now) >= tokens.MOST_TOKENS:
            raise ResourceExhaustedError(
                f"there are {tokens.MOST_TOKENS} tokens that have not expired; wait, or give "
                "shorter lives",
                reason="TOO_MANY_TOKENS",
            )
        token = TokenRecord(
            token_id_of(secret),
            tokens.digest_of(secret),
            principal,
            now + ttl_s,
            created_at=now,
            creator=creator,
        )
        await self._store.save(token)
        log.info("token_created", principal=str(principal), token_id=token.token_id, ttl_s=ttl_s)
        return JoinToken(authorities, principal, coordinator, enrolment, secret)

    async def open_tokens(self) -> tuple[OpenToken, ...]:
        """The tokens that are neither used nor expired, the oldest first."""
        records = await self._store.open_tokens(self._now().timestamp())
        return tuple(token.without_secret() for token in records)

    async def revoke_token(self, token_id: str) -> None:
        """Refuse every join with this token from now on. Raises NotFoundError if no open token has
        this id."""
        async with self._lock:
            if not await self._store.forget_token(token_id, self._now().timestamp()):
                raise no_open_token()
        log.warning("token_revoked", token_id=token_id)

    def authorities(self) -> tuple[bytes, ...]:
        """The authorities that the site trusts, in DER; first the signer of the coordinator's own
        certificate, which joiners are shown. Raises FailedPreconditionError if no certificates are
        made here."""
        files = self._check_issues().files
        certificate = files.cert.read_bytes()
        authorities = ders_of(files.ca.read_bytes())
        return tuple(
            sorted(
                authorities,
                key=lambda authority: not is_signed_by(certificate, bundle_of([authority])),
            )
        )

    async def enrol(self, enrolment: Enrolment, address: str = "") -> tuple[bytes, bytes]:
        """A certificate for a token, and the authorities to trust, both in PEM; `address` is the
        joiner's, host:port.

        Raises DeniedError for an invalid token, InvalidArgumentError for bytes that are no request,
        ResourceExhaustedError if too many from this address have failed.
        """
        issuing = self._check_issues()
        async with self._attempt(enrolment.token_id, address) as now:
            request_digest = key_digest(enrolment.request)
            token = await self._store.find(enrolment.token_id)
            used = tokens.redeemed(token, enrolment.secret, request_digest, now)
            # First: a token that is not on disk as used would be good for another.
            await self._store.save(used)
            certificate = issuing.authority.issue(
                used.principal, enrolment.request, self._now(), issuing.life
            )
            await self._accept(used.principal, certificate)
        log.info("enrolled", principal=str(used.principal), token_id=used.token_id)
        return certificate, issuing.files.ca.read_bytes()

    async def invited(self, secret: bytes, address: str = "") -> Principal:
        """The principal that may join by the token of a secret, which remains valid. Raises as
        `enrol`, also for a token that was used."""
        token_id = token_id_of(secret)
        async with self._attempt(token_id, address) as now:
            return tokens.redeemed(await self._store.find(token_id), secret, "", now).principal

    @asynccontextmanager
    async def _attempt(self, token_id: str, address: str) -> AsyncIterator[float]:
        """One attempt at a time, with the time in seconds since 1970. Counts failures. Raises
        ResourceExhaustedError if too many from this address have failed."""
        subscriber = tokens.subscriber_of(address)
        self._failures.check(subscriber, self._steady())
        try:
            async with self._lock:
                # Check again: other attempts at the same time may have failed meanwhile.
                self._failures.check(subscriber, self._steady())
                yield self._now().timestamp()
        except (DeniedError, InvalidArgumentError) as error:
            self._failures.count(subscriber, self._steady())
            log.warning(
                "enrolment_refused", token_id=token_id[:32], address=subscriber, reason=error.reason
            )
            raise

    async def renew(
        self, principal: Principal, request: bytes, check: Callable[[], None] = lambda: None
    ) -> tuple[bytes, bytes]:
        """Another certificate of the caller. Raises FailedPreconditionError if no certificates are
        made here, and the error of `check` for a caller that was revoked since the call began."""
        issuing = self._check_issues()
        async with self._lock:
            check()
            certificate = issuing.authority.issue(principal, request, self._now(), issuing.life)
            await self._accept(principal, certificate)
        log.info("certificate_issued", principal=str(principal))
        return certificate, issuing.files.ca.read_bytes()

    async def revoke(self, role: Role, id: str) -> None:
        """Refuse every certificate there is of a principal; tokens for it are void. It may join
        again by another."""
        principal = Principal(self.site, role, id)
        if principal == coordinator_of(self.site):
            raise InvalidArgumentError("role: the coordinator cannot revoke itself", field="role")
        async with self._lock:
            await self._store.deny(Denial(principal))
            others = [denial for denial in self.denials.list() if denial.principal != principal]
            self.denials.replace([*others, Denial(principal)])
        log.warning("principal_revoked", principal=str(principal))
        self._on_changed()
        await self._on_denied(principal)

    async def _accept(self, principal: Principal, certificate: bytes) -> None:
        """Accept a certificate of a principal that was denied."""
        denied = {denial.principal: denial for denial in self.denials.list()}
        if principal in denied:
            denied[principal] = await self._store.accept(denied[principal], serial_of(certificate))
            self.denials.replace(denied.values())
            self._on_changed()

    def _check_issues(self) -> Issuing:
        if self._issuing is None:
            raise FailedPreconditionError(
                "this coordinator issues no certificates: start it with --ca-key, the authority's "
                "key, and "
                "--enrol-listen, the address where processes join; or make certificates with "
                "edgectl "
                "certificate",
                field="ca-key",
                reason="NO_AUTHORITY",
            )
        return self._issuing


class EnrolmentServicer(identity_pb2_grpc.EnrolmentServiceServicer):
    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    async def Enrol(self, request: pb.EnrolRequest, context: Any) -> pb.EnrolResponse:
        certificate, authorities = await self._membership.enrol(
            enrolment_from_wire(request), peer_address(context)
        )
        return pb.EnrolResponse(certificate=certificate, authorities=authorities)

    async def GetAuthorities(
        self, request: pb.GetAuthoritiesRequest, context: Any
    ) -> pb.GetAuthoritiesResponse:
        return pb.GetAuthoritiesResponse(authorities=self._membership.authorities())


_HOST = re.compile(
    r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*", re.I
)


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
                    f"--http-name {name[:80]!r} is not a host: give a name such as myhost.local, "
                    "or an address",
                    field="http-name",
                )
        listener = split_address(self.address, "http-listen")[0]
        reached = outgoing_address() if listener in WILDCARDS else listener
        own = socket.gethostname().partition(".")[0].lower()
        more = (
            (own, f"{own}.local", "localhost", "127.0.0.1")
            if _HOST.fullmatch(own)
            else ("localhost", "127.0.0.1")
        )
        return tuple(dict.fromkeys((*self.names, reached, *more)))

    def made(self) -> TlsFiles:
        """A new one, with a key of its own, in `directory`. Raises as `hosts`, and OSError."""
        key = new_key()
        certificate, authorities = self._issued(request_for(key))
        return write_files(self.directory, authorities, certificate, private_pem(key))

    async def renewed(self, request: bytes) -> tuple[bytes, bytes]:
        """A certificate for a request, in PEM, and the authorities, as `rpc.renewal` expects
        them."""
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
