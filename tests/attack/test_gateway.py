"""Attacks on a gateway only, in this process: bodies, connections, and requests that are two."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from edgeshard.gateway.app import make_app
from edgeshard.gateway.connections.listen import HttpListen
from edgeshard.gateway.connections.server import GatewayServer
from edgeshard.identity.authority import Authority, now
from edgeshard.rpc.tls_files import issue_files
from tests.attack import bodies, http_connections, smuggling
from tests.attack.conftest import TwoKeys
from tests.attack.raw import dial, head, status_of
from tests.support.clockwork import Clockwork
from tests.support.http import Http

pytestmark = pytest.mark.timing

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
PATH = "/v1/chat/completions"


@pytest.mark.parametrize("chunked", [False, True])
async def test_unfinished_bodies_of_one_key_take_a_bounded_part(http: Http, chunked: bool) -> None:
    """Two of 12 bodies of 16 MiB fit, or the received parts of bodies without a length.

    The others are refused at once, and another key is answered.
    """
    attack = bodies.unfinished(
        http.url, "mallory", count=12, sent=8 << 20, chunked=chunked, seconds=6.0
    )
    attacking = asyncio.create_task(attack)
    await asyncio.sleep(0.5)
    assert (await http.post(PATH, CHAT)).status == 200
    statuses = await attacking
    assert statuses[429] >= (10 if not chunked else 8), statuses


async def test_a_refused_body_says_when_to_come_again(http: Http) -> None:
    writers = [(await dial(http.url))[1] for _ in range(2)]
    for writer in writers:
        writer.write(head("POST", PATH, "mallory", f"Content-Length: {16 << 20}"))
    await asyncio.sleep(0.2)
    answer = await Http(http.url, "mallory").post(PATH, CHAT)
    assert answer.status == 429 and answer.headers["retry-after"] == "1"
    assert answer.error["code"] == "too_many_bodies" and answer.error["param"] == "body"
    for writer in writers:
        writer.close()
    status = 0
    async with asyncio.timeout(30):
        while status != 200:
            status = (await Http(http.url, "mallory").post(PATH, CHAT)).status
            await asyncio.sleep(0.05)


async def test_a_body_that_drips_is_given_up(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeshard.gateway.access import bodies as reading

    monkeypatch.setattr(reading, "GRACE_S", 0.5)
    statuses = await bodies.dripping(http.url, "mallory", count=3, seconds=10.0)
    assert statuses == {504: 3}


@pytest.mark.parametrize("begin", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"])
async def test_silent_connections_do_not_close_the_gateway(http: Http, begin: bytes) -> None:
    async with http.opened("POST", PATH, {**CHAT, "stream": True}) as stream:
        async with http_connections.silent(http.url, count=520, begin=begin) as held:
            assert (await http.post(PATH, CHAT)).status == 200
            assert http_connections.still_open(held) <= 384
        assert b"".join([part async for part in stream.parts()]).endswith(b"data: [DONE]\n\n"), (
            "who has a key stays"
        )


async def test_connections_that_never_begin_tls_do_not_close_the_gateway(tmp_path: Path) -> None:
    from edgeshard.domain.identity import coordinator_of

    files = issue_files(Authority.create("here", now()), coordinator_of("here"), tmp_path / "pki")
    server = GatewayServer(
        make_app(Clockwork(), TwoKeys()), HttpListen("127.0.0.1:0", files.cert, files.key)
    )
    await server.start()
    try:
        async with http_connections.silent(server.url, count=520) as held:
            reader, writer = await dial(server.url)
            writer.write(head("GET", "/v1/models", "honest"))
            assert await status_of(reader, 30.0) == 200
            assert http_connections.still_open(held) <= 384
            writer.close()
    finally:
        await server.stop()


async def test_a_newcomer_is_answered_while_silent_ones_come_and_go(http: Http) -> None:
    churning = asyncio.create_task(http_connections.churning(http.url, seconds=3.0, at_once=520))
    answered = 0
    while not churning.done():
        assert (await http.post(PATH, CHAT)).status == 200
        answered += 1
    assert answered >= 5 and await churning > 600


@pytest.mark.parametrize("name", smuggling.REQUESTS)
async def test_a_request_that_may_be_two_is_refused_and_closed(
    http: Http, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    statuses, closed = await smuggling.sent(http.url, smuggling.REQUESTS[name])
    before = [200] if name == "a bare LF in the second request" else []
    assert closed and statuses == [*before, 400], "nothing behind it is answered"
    assert not [record for record in caplog.records if record.levelname == "ERROR"], (
        "nobody fills the log with it"
    )


async def test_a_fault_behind_an_answer_ends_the_connection(
    http: Http, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await dial(http.url)
    writer.write(head("POST", "/health", None, "Transfer-Encoding: chunked"))
    assert await status_of(reader, 30.0) == 401
    writer.write(b"0\r\nX: y\n\n" + smuggling.INNER)
    async with asyncio.timeout(30):
        rest = await reader.read()
    assert b"HTTP/1.1" not in rest, "it was answered"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    writer.close()


async def test_what_a_body_holds_is_no_line_of_http(http: Http) -> None:
    pretty = json.dumps(CHAT, indent=2).encode()
    assert b"\n" in pretty and (await http.post(PATH, pretty)).status == 200
