"""The bootstrap program reads a token as the library does: it has to do without the library."""

from __future__ import annotations

import asyncio
import json
import shlex
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from edgeshard_coordinator.packages import bootstrap

from edgeshard.domain.identity import (
    AUTHORITY_DIGEST_BYTES,
    SECRET_BYTES,
    Invitation,
    JoinToken,
    Principal,
    Role,
)
from edgeshard.wire.invitations import invitation_to_text, line_without_edgeshard
from tests.attack.terminal import STEERING
from tests.attack.test_terminal import is_plain
from tests.support.identities import Identities

SECRET = bytes(range(SECRET_BYTES))
HOSTS = ("10.0.0.2", "[2001:db8::1]", "site.example.org", "h", "h" * 253, "müllerei.example")


@pytest.mark.parametrize(("first", "second"), [*product(HOSTS, HOSTS)])
def test_a_token_is_read_as_by_the_library(first: str, second: str) -> None:
    for site, id, role in (
        ("mill", "b", Role.AGENT),
        ("m" * 63, "b" * 63, Role.OPERATOR),
        ("m", "b", Role.CLIENT),
    ):
        authority = bytes(AUTHORITY_DIGEST_BYTES - 1) + b"x"
        said = Invitation(
            authority, Principal(site, role, id), f"{first}:7600", f"{second}:7601", SECRET
        )
        token = bootstrap.TokenContent(f" {invitation_to_text(said)}\n")
        assert (token.site, token.authority, token.secret) == (site, authority, SECRET)


@pytest.mark.parametrize(
    "text", ["", "edgeshard2-", "edgeshard2-AA", "edgeshard1-AMCoAQ", "edgeshard2-!!!!"]
)
def test_what_is_no_token_ends_it(text: str) -> None:
    with pytest.raises(SystemExit) as end:
        bootstrap.TokenContent(text)
    assert "the token is damaged" in str(end.value)


def test_the_line_is_one_of_a_shell_and_there_is_none_without_wheels() -> None:
    token = JoinToken((b"der",), Principal("mill", Role.AGENT, "b"), "a:1", "a:2", SECRET)
    assert line_without_edgeshard(token) == ""
    offered = replace(token, packages="a; rm -rf:7602", bootstrap_sha256="0" * 64)
    words = shlex.split(line_without_edgeshard(offered))
    assert words[:2] == ["python3", "-c"]
    assert words[3:] == ["a; rm -rf:7602", "0" * 64, invitation_to_text(token.invitation)]
    compile(words[2], "line", "exec")
    assert len(words[2]) < 350


STEER = "".join(STEERING)
HOSTILE = {
    "no status": f"{STEER}\r\n\r\n",
    "version": f"HTTP/{STEER} 200 OK\r\n\r\n",
    "status": f"HTTP/1.1 {STEER} OK\r\n\r\n",
    "long": f"{STEER * 3000}\r\n\r\n",
    "reason": f"HTTP/1.1 403 No{STEER}\r\n\r\n",
    "header": f"HTTP/1.1 403 No\r\n{STEER}: {STEER}\r\nContent-Length: {STEER}\r\n\r\n",
    "message": "HTTP/1.1 403 No\r\n\r\n" + json.dumps({"message": STEER}, ensure_ascii=False),
    "message of escapes": "HTTP/1.1 403 No\r\n\r\n" + json.dumps({"message": STEER}),
    "long message": "HTTP/1.1 403 No\r\n\r\n" + json.dumps({"message": STEER * 900}),
    "key of a message": "HTTP/1.1 403 No\r\n\r\n" + json.dumps({"message": {STEER: [STEER]}}),
    "deep": "HTTP/1.1 403 No\r\n\r\n" + "[" * 60_000,
    "chunks": f"HTTP/1.1 403 No\r\nTransfer-Encoding: chunked\r\n\r\n{STEER}\r\n",
    "authorities": f"HTTP/1.1 200 OK\r\n\r\n-----BEGIN CERTIFICATE-----\n{STEER}\n-----END "
    f"CERTIFICATE-----{STEER}",
}


@asynccontextmanager
async def answering(directory: Path, said: str) -> AsyncIterator[str]:
    """The address of a machine in the middle: it answers every request over TLS so."""
    files = Identities(directory).coordinator()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert, files.key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said.encode("utf-8"))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def printed_by(*words: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    text, _ = await process.communicate()
    assert process.returncode == 1, text
    return text.decode("utf-8")


@pytest.mark.parametrize("kind", HOSTILE)
async def test_whoever_answers_cannot_steer_the_terminal(kind: str, tmp_path: Path) -> None:
    token = JoinToken((b"der",), Principal("mill", Role.AGENT, "b"), "a:1", "a:2", SECRET)
    said = invitation_to_text(token.invitation)
    async with answering(tmp_path, HOSTILE[kind]) as address:
        offered = replace(token, packages=address, bootstrap_sha256="0" * 64)
        program = Path(tmp_path) / "join.py"
        # Waiting between attempts is not tested here.
        program.write_text(
            Path(bootstrap.__file__)
            .read_text("utf-8")
            .replace("time.sleep(1.0)", "time.sleep(0.0)")
        )
        texts = await asyncio.gather(
            printed_by(sys.executable, *shlex.split(line_without_edgeshard(offered))[1:]),
            printed_by(sys.executable, str(program), address, "0" * 64, said),
        )
    for text in texts:
        assert all(is_plain(line) for line in text.split("\n")), repr(text)
        assert len(text) < 1500
        assert "Traceback" not in text


@pytest.mark.parametrize(
    "listed",
    [
        "",
        "[" * 100_000,
        "[]",
        {"folder": "x", "files": 1},
        {"folder": "../x", "files": []},
        {"folder": STEER, "files": []},
        {"folder": "x", "files": [{"name": "../a", "size": 1, "sha256": "0"}]},
        {"folder": "x", "files": [{"name": "a", "size": "1", "sha256": "0"}]},
        {"folder": "x", "files": [{"name": "a", "size": 1}]},
    ],
)
def test_a_list_that_is_none_ends_it(listed: object) -> None:
    with pytest.raises(SystemExit) as end:
        bootstrap.listing_of((listed if isinstance(listed, str) else json.dumps(listed)).encode())
    assert "list of files is none" in str(end.value)
