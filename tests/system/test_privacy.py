"""Requests and answers stay between users and nodes: clients share no KV, and no file has a word or
token of them.

One site with TLS whose daemons log at debug, started with a umask that hides nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import stat
import struct
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from edgeshard import Client
from edgeshard.client import Completion
from edgeshard.client.completion import CompletionBuilder
from edgeshard.domain.deployments.deployment import DeploymentPhase, parse_spec
from edgeshard.domain.errors import DeadlineError, EdgeShardError, InvalidArgumentError
from edgeshard.domain.identity import Role
from edgeshard.domain.requests.generation import (
    Finished,
    FinishReason,
    GenerateRequest,
    Generation,
    Started,
    Token,
)
from edgeshard.local.child_daemons import ChildDaemon
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.tls import TlsFiles
from edgeshard.wire.generation import generate_request_to_wire
from tests.support.identities import Identities, tls_options
from tests.support.site import SOON_S, Site

DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
SPEC = {
    "name": "tales", "model": "fairy-tales", "source": "a", "dtype": "float32", "concurrency": 4,
    "layers": "a=0:6,b=6:12", "prefix_cache": True, "max_context": 384,
    "speculation": "off",  # computed tokens are counted
}  # fmt: skip
BLOCK_TOKENS = 16
CANARIES = ("Zyxomoravian", "Quetzelbrunn", "Wimpelthrop", "Ostrogander")
PROMPT = (
    "Once upon a time Zyxomoravian quokkas met a king who had three sons and a daughter, and the "
    "king said to the "
    "eldest of them that he should go out into the wide world"
)
NEW = 24
RUN = 4
"""This number of consecutive tokens counts as a piece of a text."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Said:
    """The content that a file must not have."""

    texts: set[str] = field(default_factory=lambda: set(CANARIES))
    tokens: set[tuple[int, ...]] = field(default_factory=set)

    def add(self, done: Completion) -> Completion:
        self.texts.add(done.text)
        self.tokens.add(done.prompt_token_ids + done.token_ids)
        return done

    def traces(self) -> list[bytes]:
        """Texts as they are and as JSON has them; runs of tokens in decimal, as integers of 4 and 8
        bytes, and as messages have them."""
        found = {
            form.encode()
            for text in self.texts
            for form in (text, json.dumps(text)[1:-1], repr(text)[1:-1])
        }
        for tokens in self.tokens:
            for run in runs(tokens, RUN):
                found |= {
                    separator.join(map(str, run)).encode()
                    for separator in (",", ", ", " ", "\n", ",\n")
                }
                found |= {struct.pack(f"<{RUN}{size}", *run) for size in "IQ"}
            found |= {b"".join(map(varint, run)) for run in runs(tokens, 2 * RUN)}
        return sorted(found)


def runs(tokens: Sequence[int], length: int) -> Iterable[tuple[int, ...]]:
    return (tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1))


def varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


class Watched(Site):
    """`out` has the output of edgectl."""

    def __init__(self, directory: Path, out: Path, **options: Any) -> None:
        super().__init__(directory, models={"fairy-tales": DEMO_MODEL}, **options)
        self.out, self.said = out, Said()

    def files(self, name: str) -> TlsFiles:
        return self.identities.of(Role.CLIENT, name)

    async def complete(
        self,
        name: str,
        prompt: str = PROMPT,
        new_tokens: int = NEW,
        begun: asyncio.Event | None = None,
    ) -> Completion:
        """By the client of this name; `begun` is set when it has a token."""
        now = asyncio.get_running_loop().time
        builder = CompletionBuilder(now(), logprobs=False)
        async with Client(self.cluster.address, self.files(name)) as client:
            async for event in client.generate(
                "tales", prompt, max_new_tokens=new_tokens, ignore_eos=True, timeout_s=120
            ):
                builder.add(event, now())
                if begun is not None and isinstance(event, Token):
                    begun.set()
        return self.said.add(builder.build())

    async def edgectl(self, *arguments: str) -> tuple[int | None, bytes, bytes]:
        files = self.identities.of(Role.OPERATOR, "admin")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "edgeshard.cli.main", "--coordinator", self.cluster.address,
            *tls_options(files), *arguments,
            cwd=self.out, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(120):
            stdout, stderr = await process.communicate()
        return process.returncode, stdout, stderr

    async def tokens_run(self) -> int:
        """Tokens that the head's stage has run in this epoch, as its node last reported."""
        return (await self.client.node("a")).stages[0].tokens_done

    async def ready(self) -> bool:
        deployment = await self.client.deployment("tales")
        nodes = await self.client.nodes()
        return deployment.phase is DeploymentPhase.READY and all(node.placeable for node in nodes)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watched]:
    directory, out = tmp_path_factory.mktemp("watched"), tmp_path_factory.mktemp("written")
    identities = Identities(tmp_path_factory.mktemp("identities"))
    debug = ["--log-level", "debug"]
    for name in ("coordinator", "a", "b", "c"):
        (directory / name).mkdir()
        (directory / name).chmod(0o777)
    before = os.umask(0)
    try:
        options = {"agent_arguments": debug, "coordinator_arguments": debug}
        async with Watched(directory, out, identities=identities, **options) as site:
            await site.client.deploy(parse_spec(SPEC))
            yield site
    finally:
        os.umask(before)


async def check_sharing(site: Watched, *, known_to: Sequence[str]) -> None:
    """Two clients ask the same: each one's first request runs whole, unless it has asked before.

    Counted from the first request on, so that a node's late report of one request is in the sum
    after the next.
    """
    hits, expected = set(known_to), await site.tokens_run()
    for name in ("alice", "bob", "alice", "bob", "alice"):
        prompt = len((await site.complete(name)).prompt_token_ids)
        cached = (prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS if name in hits else 0
        assert prompt > 2 * BLOCK_TOKENS
        expected += prompt - cached + NEW - 1
        hits.add(name)
        run, deadline = -1, asyncio.get_running_loop().time() + SOON_S
        while run != expected and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
            run = await site.tokens_run()
        assert run == expected, name


async def test_a_prefix_is_shared_with_its_client_and_no_other(site: Watched) -> None:
    await check_sharing(site, known_to=())


@pytest.mark.long
async def test_whose_a_prefix_is_survives_the_loss_of_a_node_and_of_the_coordinator(
    site: Watched,
) -> None:
    """In a new epoch, and after its client resumes it, a request's prefix still belongs only to
    that client."""
    long = 160
    undisturbed = await site.complete("alice", new_tokens=long)
    begun = asyncio.Event()
    running = asyncio.create_task(site.complete("alice", new_tokens=long, begun=begun))
    await asyncio.wait_for(begun.wait(), 60)
    await site.cluster.agents["b"].kill()
    await restart_coordinator(site)
    assert (await running).token_ids == undisturbed.token_ids
    await site.cluster.start_agent("b")
    await site.until(site.ready)
    await check_sharing(site, known_to=("alice",))


async def restart_coordinator(site: Watched) -> None:
    """At the address that it had."""
    coordinator = site.cluster.coordinator
    coordinator.keep_address()
    await coordinator.kill()
    await site.cluster.start_coordinator()


async def refused(site: Watched, prompt: str | Sequence[int], **options: object) -> EdgeShardError:
    async with Client(site.cluster.address, site.files("alice")) as client:
        with pytest.raises(EdgeShardError) as caught:
            await client.complete("tales", prompt, **options)  # type: ignore[arg-type]
    return caught.value


async def broken_text(site: Watched) -> None:
    """A request whose text is not UTF-8."""
    request = GenerateRequest("tales", Generation(f"The king of {CANARIES[1]} said", 4), "")
    data = generate_request_to_wire(request).SerializeToString().replace(b" said", b" s\xffid")
    assert b"\xff" in data
    async with open_channel(site.cluster.address, site.files("alice")) as channel:
        call = channel.unary_stream(
            "/edgeshard.proto.v1.InferenceService/Generate",
            lambda message: message,
            lambda message: message,
        )
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in call(data, timeout=30):
                pass


async def ask_in_every_way(site: Watched) -> list[bytes]:
    """Requests that succeed, are cancelled, refused and lost, a trace and dumps; what edgectl
    printed meanwhile."""
    printed: list[bytes] = []
    errors = [
        await refused(site, f"{CANARIES[2]} " * 600),
        await refused(site, [*range(7, 40), 100_000]),
        await refused(site, PROMPT, max_new_tokens=10_000, clip_new_tokens=False),
        await refused(site, PROMPT, stop=(CANARIES[3], "")),
        await refused(site, PROMPT, max_new_tokens=300, ignore_eos=True, timeout_s=0.3),
    ]
    assert [type(error) for error in errors] == [InvalidArgumentError] * 4 + [DeadlineError]
    site.said.tokens.add(tuple(range(7, 40)))
    printed += [str(error).encode() for error in errors]
    await broken_text(site)
    async with Client(site.cluster.address, site.files("alice")) as client:
        events = client.generate(
            "tales", PROMPT, max_new_tokens=300, request_id="to-cancel", ignore_eos=True
        )
        async with aclosing(events) as stream:
            async for event in stream:
                if isinstance(event, Started):
                    assert await client.cancel("to-cancel")
                assert not isinstance(event, Finished) or event.reason is FinishReason.CANCELLED
    recording = asyncio.create_task(
        site.edgectl("trace", "tales", "--seconds", "4", "-o", "trace.json")
    )
    while not recording.done():
        await site.complete("bob", f"{PROMPT}, said {CANARIES[1]}")
    words = f"Then {CANARIES[3]} came"
    outcomes = [await recording, await site.edgectl("debug", "dump", "-o", "site.json")]
    asked = await site.edgectl("generate", "tales", "-p", words, "--max-tokens", "12", "--stats")
    printed += [asked[2]]
    long = await site.edgectl("generate", "tales", "-p", f"{words} " * 100, "--max-tokens", "4")
    assert long[0] == 2 and b"error: prompt" in long[2]
    outcomes += [
        asked,
        await site.edgectl("get", "deployments", "-o", "json"),
        await site.edgectl("get", "nodes"),
    ]
    for code, _, stderr in outcomes:
        assert code == 0, stderr
    site.said.texts.add(asked[1].decode().strip())
    printed += [
        long[1],
        long[2],
        *(item for outcome in outcomes[:2] + outcomes[3:] for item in outcome[1:]),
    ]
    return printed


@pytest.mark.long
async def test_no_file_and_no_output_has_a_word_or_a_token_of_users(site: Watched) -> None:
    printed = await ask_in_every_way(site)
    # The head's node is lost in mid-answer, and the remaining processes are dumped.
    begun = asyncio.Event()
    running = asyncio.create_task(site.complete("alice", f"{PROMPT} of {CANARIES[1]}", 160, begun))
    await asyncio.wait_for(begun.wait(), 60)
    await site.cluster.agents["a"].kill()
    code, *outputs = await site.edgectl("debug", "dump", "-o", "later.json")
    assert code == 0, outputs
    await running
    traces = site.said.traces()
    found = re.compile(b"|".join(re.escape(trace) for trace in traces))
    files = [
        path
        for root in (site.cluster.directory, site.out)
        for path in root.rglob("*")
        if path.is_file()
    ]
    names = {path.name for path in files}
    assert {
        "state.sqlite",
        "coordinator.log",
        "a.log",
        "b.log",
        "c.log",
        "trace.json",
        "site.json",
    } <= names
    for name, content in [
        *((str(path), read(path)) for path in files),
        *(("output", item) for item in printed),
    ]:
        hit = found.search(content)
        assert hit is None, f"{name} has {hit[0]!r}"
    assert found.search(b"the prompt was " + PROMPT.encode()), "it would be found"
    tokens = next(iter(site.said.tokens))
    for form in (str(list(tokens)), json.dumps(tokens, indent=0)):
        assert found.search(form.encode())
    assert found.search(struct.pack(f"<{len(tokens)}I", *tokens))


def read(path: Path) -> bytes:
    """The bytes of a file. Empty for a blob, whose name is its digest, for a file of the model, and
    for an index of SQLite's journal, which has consecutive page numbers."""
    if path.name.endswith(".sqlite-shm"):
        return b""
    # weights; to look through packed ones takes minutes
    if path.parent.name in (
        "linked",
        "packed",
    ):
        return b""
    content = path.read_bytes()
    return b"" if hashlib.sha256(content).hexdigest() == path.name else content


async def test_every_file_is_its_owners_alone_and_no_daemon_leaves_a_core(site: Watched) -> None:
    await site.edgectl("debug", "dump", "-o", "again.json")
    paths = [path for root in (site.cluster.directory, site.out) for path in root.rglob("*")]
    open_to_others = {
        str(path): f"{mode:04o}"
        for path in paths
        # A model's own file is linked unchanged; only the owner may enter the folder around it.
        if path.parent.name != "linked" and (mode := stat.S_IMODE(path.lstat().st_mode)) & 0o077
    }
    assert len(paths) > 100 and not open_to_others
    daemons: list[ChildDaemon] = [
        site.cluster.coordinator,
        site.cluster.agents["b"],
        site.cluster.agents["c"],
    ]
    for daemon in daemons:
        limits = Path(f"/proc/{daemon.pid}/limits").read_text()
        assert re.search(r"^Max core file size +0 ", limits, re.MULTILINE), daemon.name
