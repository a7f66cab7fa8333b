"""The port from which machines without EdgeShard get it: without a good token, no byte of a wheel
is sent."""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from edgeshard_coordinator.control.persistence.audit_log import AuditLog
from edgeshard_coordinator.membership.membership import Issuing, Membership
from edgeshard_coordinator.membership.store import MembershipStore
from edgeshard_coordinator.membership.tokens import FAILURES_PER_MINUTE
from edgeshard_coordinator.packages import listener as listening
from edgeshard_coordinator.packages.listener import PackagesListener
from edgeshard_coordinator.packages.shelf import Shelf

from edgeshard.domain.clock import Clock
from edgeshard.domain.identity import Denial, Enrolment, JoinToken, Principal, Role, TokenRequest
from edgeshard.identity import authority
from edgeshard.identity.authority import new_key, request_for
from edgeshard.process.clock import SystemClock
from edgeshard.rpc.denials import Denials
from edgeshard.rpc.tls import TlsFiles, split_address
from tests.support.identities import Identities

pytestmark = pytest.mark.timing

WHEEL = "edgeshard-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
CONTENT = b"the bytes of a wheel " * 500_000  # more than sockets hold
LIST = "/wheels?platform=x86_64&pythons=3.13,3.11&accelerator=cpu"
FETCH = f"/wheels/x86_64-py311-cpu/{WHEEL}"


def fill(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / WHEEL).write_bytes(CONTENT)
    (folder / "install.sh").write_text("echo installed\n")
    (folder / "notes.txt").write_text("not for others")
    digest = hashlib.sha256(CONTENT).hexdigest()
    (folder / "requirements.txt").write_text(f"edgeshard==0.1.0 --hash=sha256:{digest}\n")


@dataclass
class Site:
    """A membership and its listener; the wall clock is `later` than it is."""

    directory: Path
    clock: Clock = field(default_factory=SystemClock)
    later: timedelta = timedelta()

    def now(self) -> datetime:
        return authority.now() + self.later

    async def start(self) -> None:
        self.identities = identities = Identities(self.directory, "mill")
        issuing = Issuing(identities.authority, identities.coordinator(), timedelta(days=1))
        store = MembershipStore(self.directory / "state" / "membership.sqlite")
        self.denials = Denials()
        self.membership = Membership("mill", store, self.denials, issuing, self.now, self.clock.now)
        await self.membership.open()
        self.audit = AuditLog(self.directory / "audit", self.clock)
        self.audit.start()
        fill(self.directory / "wheels" / "x86_64-py311-cpu")
        shelf = Shelf(self.directory / "wheels")
        self.listener = self.new_listener(shelf)
        self.address = await self.listener.start()
        self.trust = ssl.create_default_context(
            cadata=identities.authority.certificate_pem.decode()
        )

    def new_listener(self, shelf: Shelf) -> PackagesListener:
        tls = self.identities.coordinator()
        return PackagesListener(
            "127.0.0.1:0", tls, self.membership, self.denials, shelf, self.audit
        )

    def show(self, files: TlsFiles) -> None:
        """Have later requests show this certificate."""
        self.trust.load_cert_chain(files.cert, files.key)

    async def token(self, ttl_s: float = 60.0) -> JoinToken:
        return await self.membership.create_token(
            TokenRequest(Role.AGENT, "b", ttl_s), "a:1", "a:2"
        )

    async def dial(
        self, own: str = "127.0.0.1"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = split_address(self.address)
        name = "coordinator.coordinator.mill"
        return await asyncio.open_connection(
            host, port, ssl=self.trust, server_hostname=name, local_addr=(own, 0), limit=1 << 16
        )

    async def ask(
        self, path: str, secret: bytes | None = None, own: str = "127.0.0.1", **headers: str
    ) -> Answer:
        reader, writer = await self.dial(own)
        writer.write(request_for_path(path, secret, **headers))
        found = await reader.read(-1)
        writer.close()
        head, _, body = found.partition(b"\r\n\r\n")
        return Answer(int(head.split()[1]), body)


@dataclass
class Answer:
    status: int
    body: bytes

    @property
    def said(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


def request_for_path(path: str, secret: bytes | None = None, **headers: str) -> bytes:
    if secret is not None:
        headers["Authorization"] = f"EdgeShard {secret.hex()}"
    lines = [
        f"GET {path} HTTP/1.1",
        "Host: x",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode()


@asynccontextmanager
async def started(directory: Path) -> AsyncIterator[Site]:
    site = Site(directory)
    await site.start()
    try:
        yield site
    finally:
        await site.listener.stop()
        await site.audit.stop()
        await site.membership.close()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with started(tmp_path) as found:
        yield found


async def test_who_has_a_token_gets_the_wheels_and_may_join_still(site: Site) -> None:
    token = await site.token()
    listed = (await site.ask(LIST, token.secret)).said
    assert (listed["folder"], listed["python"]) == ("x86_64-py311-cpu", "3.11")
    assert [file["name"] for file in listed["files"]] == [WHEEL, "install.sh", "requirements.txt"]
    fetched = await site.ask(FETCH, token.secret)
    assert fetched.status == 200 and fetched.body == CONTENT
    assert listed["files"][0]["sha256"] == hashlib.sha256(fetched.body).hexdigest()
    rest = await site.ask(FETCH, token.secret, Range=f"bytes={len(CONTENT) - 7}-")
    assert rest.status == 206 and rest.body == CONTENT[-7:]
    await site.membership.enrol(Enrolment(token.token_id, token.secret, request_for(new_key())))
    entries = [
        (entry.who, entry.what, entry.target, entry.result)
        for entry in await site.audit.newest(100)
    ]
    assert ("agent/b", "ListWheels", "x86_64-py311-cpu", "ok") in entries
    assert ("agent/b", "FetchWheel", WHEEL, "ok") in entries


@pytest.mark.parametrize("how", ["none", "wrong", "used", "expired", "revoked"])
async def test_who_has_no_good_token_gets_no_byte(site: Site, how: str) -> None:
    token = await site.token()
    secret: bytes | None = token.secret
    if how == "none":
        secret = None
    elif how == "wrong":
        secret = bytes(16)
    elif how == "used":
        await site.membership.enrol(Enrolment(token.token_id, token.secret, request_for(new_key())))
    elif how == "expired":
        site.later = timedelta(hours=1)
    else:
        await site.membership.revoke(Role.AGENT, "b")
    for path in (LIST, FETCH, f"{FETCH}x"):
        answer = await site.ask(path, secret)
        assert answer.status == 403
        assert WHEEL.encode() not in answer.body and CONTENT[:20] not in answer.body
    entries = await site.audit.newest(100)
    assert (
        sum(
            entry.what in ("ListWheels", "FetchWheel") and entry.result != "ok" for entry in entries
        )
        == 3
    )


@pytest.mark.parametrize("role", [Role.AGENT, Role.CLIENT, Role.OPERATOR])
async def test_a_member_gets_the_wheels_by_its_certificate(site: Site, role: Role) -> None:
    site.show(site.identities.of(role, "b"))
    assert (await site.ask(LIST)).said["files"][0]["name"] == WHEEL
    assert (await site.ask(FETCH)).body == CONTENT
    entries = [(entry.who, entry.what, entry.result) for entry in await site.audit.newest(100)]
    assert (f"{role}/b", "FetchWheel", "ok") in entries


async def test_a_revoked_member_gets_no_byte(site: Site) -> None:
    site.show(site.identities.of(Role.AGENT, "b"))
    site.denials.replace([Denial(Principal("mill", Role.AGENT, "b"), ())])
    for path in (LIST, FETCH):
        answer = await site.ask(path)
        assert answer.status == 403 and answer.said["reason"] == "REVOKED"
    assert [entry.result for entry in await site.audit.newest(100)] == ["REVOKED", "REVOKED"]


async def test_a_certificate_of_another_site_ends_the_handshake(site: Site) -> None:
    site.show(Identities(site.directory / "other", "mill").of(Role.AGENT, "b"))
    with pytest.raises((OSError, IndexError)):
        await site.ask(LIST)


async def test_anybody_gets_the_script_and_the_authority(site: Site) -> None:
    script = await site.ask("/join.py")
    assert hashlib.sha256(script.body).hexdigest() == site.listener.script_sha256
    assert b"BEGIN CERTIFICATE" in (await site.ask("/authorities")).body


@pytest.mark.parametrize(
    "path",
    [
        "/wheels/x86_64-py311-cpu/notes.txt",
        "/wheels/x86_64-py311-cpu/..%2f..%2fstate%2fmembership.sqlite",
        "/wheels/x86_64-py311-cpu/../../state/membership.sqlite",
        "/wheels/..%2fwheels%2fx86_64-py311-cpu/install.sh",
        "/wheels/x86_64-py311-cpu//etc/passwd",
        "/wheels/..",
        "/wheelsx/y/z",
        "/",
    ],
)
async def test_nothing_else_is_served(site: Site, path: str) -> None:
    token = await site.token()
    assert (await site.ask(path, token.secret)).status == 404


async def test_a_machine_without_wheels_hears_what_there_is(site: Site) -> None:
    token = await site.token()
    refused = await site.ask("/wheels?platform=aarch64&pythons=3.13&accelerator=cpu", token.secret)
    assert refused.status == 409
    assert (
        "wheels for x86_64 with Python 3.11, but this machine is aarch64 with Python 3.13"
        in refused.said["message"]
    )
    assert (await site.ask("/wheels?platform=x86_64", token.secret)).said["field"] == "accelerator"


async def test_a_wheel_that_is_not_the_one_of_the_requirements_is_not_served(site: Site) -> None:
    token = await site.token()
    (site.directory / "wheels" / "x86_64-py311-cpu" / WHEEL).write_bytes(b"another")
    for path in (LIST, FETCH):
        assert (await site.ask(path, token.secret)).said["reason"] == "OTHER_WHEEL"


async def test_a_guesser_keeps_out_nobody_but_himself(site: Site) -> None:
    token = await site.token()
    met = [(await site.ask(LIST, bytes(16))).status for _ in range(FAILURES_PER_MINUTE + 1)]
    assert met == [403] * FAILURES_PER_MINUTE + [429]
    assert (await site.ask(LIST, token.secret)).status == 429
    assert (await site.ask(LIST, token.secret, own="127.0.0.2")).status == 200


async def test_silent_connections_of_one_address_keep_out_no_other(site: Site) -> None:
    host, port = split_address(site.address)
    async with AsyncExitStack() as stack:
        for _ in range(listening.MOST_OF_ONE):
            _, writer = await asyncio.open_connection(host, port)
            stack.callback(writer.close)
        reader, writer = await asyncio.open_connection(host, port)
        stack.callback(writer.close)
        assert await reader.read() == b""  # closed as it came
        assert (await site.ask("/join.py", own="127.0.0.2")).status == 200


async def test_transfers_of_one_address_are_few(site: Site) -> None:
    token = await site.token()
    async with AsyncExitStack() as stack:
        for _ in range(listening.MOST_TRANSFERS_OF_ONE):
            reader, writer = await site.dial()
            stack.callback(writer.close)
            writer.write(request_for_path(FETCH, token.secret))
            await reader.readuntil(b"\r\n\r\n")  # and no more
        refused = await site.ask(FETCH, token.secret)
        assert refused.status == 429 and float(refused.said["retry_after_s"]) > 0
        assert (await site.ask(FETCH, token.secret, own="127.0.0.2")).body == CONTENT


async def test_requests_of_one_address_are_counted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "REQUESTS_PER_MINUTE", 3)
    await site.listener.stop()
    limited = site.new_listener(site.listener._shelf)
    site.address = await limited.start()
    met = [(await site.ask("/join.py")).status for _ in range(4)]
    await limited.stop()
    assert met == [200, 200, 200, 429]


async def test_what_is_no_get_is_refused_and_too_long_is_closed(site: Site) -> None:
    for request, met in (
        (b"POST / HTTP/1.1\r\n\r\n", b"HTTP/1.1 400"),
        (b"GET /" + b"x" * 10_000, b""),
    ):
        reader, writer = await site.dial()
        writer.write(request)
        assert (await reader.read())[:12] == met
        writer.close()


@pytest.mark.parametrize(
    "target",
    [
        "//[",
        "/[",
        "/wheels?" + "&".join(f"a{number}=1" for number in range(9)),
        "/wheels?platform=%ff",
        "/wheels?platform=%zz",
        "/wheels/%",
        "/wheels/%e4",
        "/wheels/x86_64-py311-cpu/%00install.sh",
        "/wheels/a/%1b[2J",
        "/wheels/a/%E2%80%AE",
        "/wheels/\x1b",
        "/wheels/\x00",
        "/wheels/\xff",
        "/#",
        "wheels",
        "https://x/wheels",
        "*",
        "",
    ],
)
async def test_a_malformed_target_is_an_error_of_its_field(
    site: Site, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await site.dial()
    writer.write(f"GET {target} HTTP/1.1\r\n\r\n".encode("latin-1"))
    head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 400 "), head
    assert json.loads(body)["field"] in ("target", "request")
    assert "packages_failed" not in caplog.text


@pytest.mark.parametrize(
    "path", ["//", "//x", "/wheels//", "/wheels/a/b/../c", "/a%2Fb", "/?" + "?" * 30]
)
async def test_an_odd_path_is_one_that_is_not_there(site: Site, path: str) -> None:
    assert (await site.ask(path)).status in (403, 404)
