"""HTTPS for machines that have Python and nothing of EdgeShard: one request a connection, small
requests, few at once.

`/join.py` and `/authorities` are public. Lists and wheels are for members of the site, by their
certificates, and for callers with the secret of a valid token.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import parse_qs, unquote

import structlog

from edgeshard.domain.audit import OK
from edgeshard.domain.errors import (
    Code,
    DeniedError,
    EdgeShardError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.identity import SECRET_BYTES, Principal
from edgeshard.identity.certificates import bundle_of, principal_of
from edgeshard.rpc.denials import Denials
from edgeshard.rpc.following import FollowingContext
from edgeshard.rpc.tls import TlsFiles, join_address, split_address
from edgeshard_coordinator.control.persistence.audit_log import AuditLog
from edgeshard_coordinator.membership.membership import Membership
from edgeshard_coordinator.membership.tokens import Failures, subscriber_of
from edgeshard_coordinator.packages import bootstrap
from edgeshard_coordinator.packages.shelf import Shelf, WheelTarget

log = structlog.get_logger()

REQUEST_LIMIT_BYTES = 8192
TIME_LIMIT_S = 10.0
"""Time for a handshake and the arrival of a request."""
CHUNK_BYTES, CHUNK_LIMIT_S = 256 << 10, 30.0
"""A reader who does not take a chunk within the limit is disconnected."""
MOST_CONNECTIONS, MOST_OF_ONE = 64, 8
MOST_TRANSFERS, MOST_TRANSFERS_OF_ONE = 8, 2
"""At once, in all and of one subscriber (`subscriber_of`)."""
REQUESTS_PER_MINUTE = 600
"""Requests of one subscriber. A folder has about 60 files."""
SCHEME = "EdgeShard"
"""Scheme of the header Authorization; the secret follows, in hexadecimal."""
_STATUS = {
    Code.INVALID_ARGUMENT: "400 Bad Request",
    Code.PERMISSION_DENIED: "403 Forbidden",
    Code.NOT_FOUND: "404 Not Found",
    Code.FAILED_PRECONDITION: "409 Conflict",
    Code.RESOURCE_EXHAUSTED: "429 Too Many Requests",
}
_BACKLOG = 64
_RANGE = re.compile(r"bytes=(\d{1,15})-", re.ASCII)
_CHARACTER = r"(?:[\w.~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})"
_TARGET = re.compile(rf"(/{_CHARACTER}*)(?:\?((?:{_CHARACTER}|\?)*))?", re.ASCII)
"""Path and query of a target (RFC 3986, 3.3 and 3.4)."""
MAX_PARAMETERS = 8
"""Most parameters of a query; a list of wheels has three."""


def script() -> bytes:
    """The program that a new machine runs first; it needs only Python."""
    return inspect.getsource(bootstrap).encode()


@dataclass(frozen=True, slots=True)
class _Request:
    """`certificate` is the caller's in PEM, empty if it showed none; the handshake has verified
    it."""

    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    address: str
    certificate: bytes = b""

    def asked(self, name: str) -> str:
        values = self.query.get(name, [])
        if len(values) != 1 or not values[0].isprintable():
            raise InvalidArgumentError(f"{name} is missing, or there twice", field=name)
        return values[0]


@dataclass(frozen=True, slots=True)
class _Answer:
    """`body`, or the part after `offset` of a `file` of `size` bytes."""

    body: bytes = b""
    kind: str = "application/json"
    status: str = "200 OK"
    file: Path | None = None
    offset: int = 0
    size: int = 0


class PackagesListener:
    """Serves a shelf on `address`, host:port, with the coordinator's certificate. `denials` are of
    members whose certificates were revoked."""

    def __init__(
        self,
        address: str,
        tls: TlsFiles,
        membership: Membership,
        denials: Denials,
        shelf: Shelf,
        audit: AuditLog,
    ) -> None:
        self._address = address
        self._tls = tls
        self._membership = membership
        self._denials = denials
        self._shelf = shelf
        self._audit = audit
        self._script = script()
        self.script_sha256 = sha256(self._script).hexdigest()
        self._open: Counter[str] = Counter()
        self._transfers: Counter[str] = Counter()
        self._requests = Failures(REQUESTS_PER_MINUTE, 256, "requests of your address")
        self._tasks: set[asyncio.Task[None]] = set()
        self._hashing = asyncio.Lock()

    async def start(self) -> str:
        """Listen; returns the real host:port. Raises UnavailableError if the port is taken."""
        host, port = split_address(self._address, "wheels-listen")
        self._context = FollowingContext(self._tls, verify=ssl.CERT_OPTIONAL).context
        try:
            self._socket = socket.create_server(
                (host, port),
                family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                backlog=_BACKLOG,
            )
        except OSError as error:
            raise UnavailableError(
                f"--wheels-listen {self._address}: {error.strerror or error}; choose another port",
                field="wheels-listen",
                reason="PORT_IN_USE",
            ) from None
        self._socket.setblocking(False)
        self._spawn(self._accept())
        return join_address(host, self._socket.getsockname()[1])

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        """Close excess connections before their handshake: that costs next to nothing."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(self._socket)
            except OSError:
                await asyncio.sleep(0.1)  # there are no descriptors for the moment
                continue
            address = join_address(*peer[:2])
            one = subscriber_of(address)
            if self._open.total() >= MOST_CONNECTIONS or self._open[one] >= MOST_OF_ONE:
                connection.close()
                continue
            self._open[one] += 1
            self._spawn(self._served(connection, address, one))

    async def _served(self, connection: socket.socket, address: str, one: str) -> None:
        try:
            async with asyncio.timeout(TIME_LIMIT_S):
                reader, writer = await self._secured(connection)
        except (TimeoutError, OSError):
            connection.close()
            self._leave(self._open, one)
            return
        try:
            await self._answered(reader, writer, address, one)
        except (TimeoutError, OSError):
            pass  # a reader that is gone, or too slow
        finally:
            self._leave(self._open, one)
            writer.close()
            with suppress(TimeoutError, OSError):
                await asyncio.wait_for(writer.wait_closed(), TIME_LIMIT_S)

    async def _secured(
        self, connection: socket.socket
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(REQUEST_LIMIT_BYTES, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=TIME_LIMIT_S
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def _answered(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str, one: str
    ) -> None:
        async with asyncio.timeout(TIME_LIMIT_S):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.LimitOverrunError, asyncio.IncompleteReadError):
                return
        try:
            self._requests.check(one, monotonic())
            self._requests.count(one, monotonic())
            answer = await self._answer(_request(head, address, _certificate_of(writer)))
            if answer.file is not None:
                async with self._transferring(one):
                    await _send(writer, answer)
                return
        except EdgeShardError as error:
            answer = _refusal(error)
        except Exception:
            log.exception("packages_failed")
            answer = _refusal(
                InternalError("the request failed unexpectedly; see the coordinator's log")
            )
        await _send(writer, answer)

    async def _answer(self, request: _Request) -> _Answer:
        if request.path == "/join.py":
            return _Answer(self._script, "text/x-python")
        if request.path == "/authorities":
            return _Answer(bundle_of(self._membership.authorities()), "application/x-pem-file")
        folder, _, name = request.path.removeprefix("/wheels").removeprefix("/").partition("/")
        if not request.path.startswith("/wheels") or bool(folder) != bool(name):
            raise NotFoundError(
                "this address serves only /join.py, /authorities and /wheels", field="path"
            )
        what = "FetchWheel" if name else "ListWheels"
        try:
            principal = await self._principal(request)
        except DeniedError as error:
            self._audit.add("nobody", what, name, error.reason, request.address, by_operator=False)
            raise
        return await (
            self._file(request, principal, folder, name)
            if name
            else self._listing(request, principal)
        )

    async def _principal(self, request: _Request) -> Principal:
        """The member or the holder of a token that sent the request. Raises DeniedError for any
        other caller."""
        if not request.certificate:
            return await self._membership.invited(_secret_of(request), request.address)
        principal = principal_of(request.certificate)
        self._denials.check_certificate(principal, lambda: request.certificate)
        return principal

    async def _listing(self, request: _Request, principal: Principal) -> _Answer:
        pythons = request.asked("pythons").split(",") if request.query.get("pythons") else []
        machine = WheelTarget(request.asked("platform"), pythons[:8], request.asked("accelerator"))
        folder = self._shelf.folder_for(machine)
        async with self._hashing:  # the first asker hashes for all
            files = await asyncio.to_thread(self._shelf.files, folder)
        self._note(principal, "ListWheels", folder.name, request.address)
        listing = {
            "folder": folder.name,
            "python": folder.python,
            "files": [asdict(file) for file in files],
        }
        return _Answer(json.dumps(listing).encode())

    async def _file(
        self, request: _Request, principal: Principal, folder_name: str, name: str
    ) -> _Answer:
        folder = self._shelf.named(folder_name)
        async with self._hashing:
            files = await asyncio.to_thread(self._shelf.files, folder)
        served_file = next((file for file in files if file.name == name), None)
        if served_file is None:
            raise NotFoundError("the folder does not contain this file", field="name")
        range_match = _RANGE.fullmatch(request.headers.get("range", "bytes=0-"))
        offset = min(int(range_match[1]), served_file.size) if range_match is not None else 0
        self._note(principal, "FetchWheel", name, request.address)
        status = "206 Partial Content" if offset else "200 OK"
        return _Answer(
            b"",
            "application/octet-stream",
            status,
            folder.path / served_file.name,
            offset,
            served_file.size,
        )

    def _note(self, principal: Principal, what: str, target: str, address: str) -> None:
        self._audit.add(
            f"{principal.role}/{principal.id}", what, target, OK, address, by_operator=False
        )

    @asynccontextmanager
    async def _transferring(self, one: str) -> AsyncIterator[None]:
        if (
            self._transfers.total() >= MOST_TRANSFERS
            or self._transfers[one] >= MOST_TRANSFERS_OF_ONE
        ):
            raise ResourceExhaustedError(
                "other machines are fetching wheels; try again",
                reason="TRANSFERS",
                retry_after_s=2.0,
            )
        self._transfers[one] += 1
        try:
            yield
        finally:
            self._leave(self._transfers, one)

    @staticmethod
    def _leave(counts: Counter[str], one: str) -> None:
        counts[one] -= 1
        if not counts[one]:
            del counts[one]


def _certificate_of(writer: asyncio.StreamWriter) -> bytes:
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return ssl.DER_cert_to_PEM_cert(der).encode() if der is not None else b""


def _request(head: bytes, address: str, certificate: bytes) -> _Request:
    """Raises InvalidArgumentError if it is no GET of HTTP/1.1, or its target is malformed."""
    line, *rest = head.decode("latin-1").split("\r\n")
    method, _, target = line.partition(" ")
    target, _, version = target.partition(" ")
    if method != "GET" or not version.startswith("HTTP/1."):
        raise InvalidArgumentError("this is not a GET request of HTTP/1.1", field="request")
    path, query = _parts_of(target)
    headers = {
        name.lower(): value.strip() for name, _, value in (field.partition(":") for field in rest)
    }
    return _Request(path, query, headers, address, certificate)


def _parts_of(target: str) -> tuple[str, dict[str, list[str]]]:
    """The decoded path and parameters of a target. Raises InvalidArgumentError naming `target`."""
    split = _TARGET.fullmatch(target)
    try:
        if split is not None:
            path = unquote(split[1], errors="strict")
            query = parse_qs(split[2] or "", max_num_fields=MAX_PARAMETERS, errors="strict")
            if path.isprintable():
                return path, query
    except ValueError:
        pass
    raise InvalidArgumentError(
        f"the target is not a path of printable characters with at most {MAX_PARAMETERS} "
        "parameters: fetch what the "
        "list of wheels names",
        field="target",
        reason="BAD_TARGET",
    )


def _secret_of(request: _Request) -> bytes:
    scheme, _, text = request.headers.get("authorization", "").partition(" ")
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if scheme != SCHEME or len(secret) != SECRET_BYTES:
        raise DeniedError(
            "wheels are for members of this site and for holders of a token: show a certificate or "
            "a token",
            field="token",
            reason="NO_TOKEN",
        )
    return secret


def _refusal(error: EdgeShardError) -> _Answer:
    body = {"message": error.message, "field": error.field, "reason": error.reason}
    if error.retry_after_s is not None:
        body["retry_after_s"] = str(round(error.retry_after_s, 1))
    return _Answer(
        json.dumps(body).encode(), status=_STATUS.get(error.code, "500 Internal Server Error")
    )


async def _send(writer: asyncio.StreamWriter, answer: _Answer) -> None:
    """Raises TimeoutError for a reader that is too slow, OSError for one that is gone."""
    length = len(answer.body) if answer.file is None else answer.size - answer.offset
    head = (
        f"HTTP/1.1 {answer.status}\r\nContent-Type: {answer.kind}\r\nContent-Length: {length}\r\n"
    )
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + answer.body)
    await asyncio.wait_for(writer.drain(), CHUNK_LIMIT_S)
    if answer.file is None:
        return
    with await asyncio.to_thread(answer.file.open, "rb") as file:
        file.seek(answer.offset)
        while length > 0 and (
            chunk := await asyncio.to_thread(file.read, min(CHUNK_BYTES, length))
        ):
            length -= len(chunk)
            writer.write(chunk)
            await asyncio.wait_for(writer.drain(), CHUNK_LIMIT_S)
