"""Real processes whose certificates come and go: renewed under streams, revoked under a stream."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
import pytest

from edgeshard.client import Client
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.identity import Role
from edgeshard.domain.ids import NodeName
from edgeshard.domain.requests.generation import GenerateOptions, Token
from edgeshard.identity import authority
from edgeshard.identity.certificates import validity_of
from edgeshard.proto.v1 import stage_pb2_grpc
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.tls import TlsFiles
from tests.support.load import Stream
from tests.support.membership import SecureSite, joined
from tests.support.stalling_proxy import StallingProxy

pytestmark = pytest.mark.timeout(600)
DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
SPEC = {
    "name": "tales",
    "model": "tiny-tales",
    "source": "a",
    "dtype": "float32",
    "layers": "a=0:4,b=4:9,c=9:12",
    "concurrency": 8,
    "max_context": 512,
}
PROMPT = "Once upon a time there was a king who had three sons"
STREAMS = 8
LIFE_S = 30


async def answer(client: Client, new_tokens: int) -> tuple[int, ...]:
    return (
        await client.complete("tales", PROMPT, max_new_tokens=new_tokens, ignore_eos=True)
    ).token_ids


@pytest.mark.long
async def test_streams_outlive_their_certificates_and_every_link(tmp_path: Path) -> None:
    """Certificates of 30 seconds. Once all certificates with which nodes and client began have
    expired, every connection of the site is cut at once. By then each dialler has another
    certificate, and no stream is dropped."""
    async with contextlib.AsyncExitStack() as stack:
        mill = await stack.enter_async_context(
            SecureSite(tmp_path, "--certificate-life", f"{LIFE_S}s")
        )
        front = await stack.enter_async_context(StallingProxy(mill.coordinator.address).running())
        proxies = [front]
        first: dict[str, bytes] = {}
        for name in ("a", "b", "c"):
            files = await joined(mill, Role.AGENT, name)
            first[name] = files.cert.read_bytes()
            proxy = await stack.enter_async_context(StallingProxy("127.0.0.1:1").running())
            options = ("--coordinator", front.address, "--advertise", proxy.address)
            proxy.aim((await mill.start_agent(name, files, *options)).address)
            proxies.append(proxy)
        files = await joined(mill, Role.OPERATOR, "kim")
        first["kim"] = files.cert.read_bytes()
        client = await stack.enter_async_context(Client(front.address, files))
        await client.add_model(DEMO_MODEL, "tiny-tales")
        await client.deploy(parse_spec(SPEC))
        expected = await answer(client, 400)
        over = asyncio.Event()

        progress = [0] * STREAMS

        async def stream(number: int) -> int:
            """Answers, one after the other, until all is over; each begun before that is whole."""
            count = 0
            while not over.is_set():
                tokens: list[int] = []
                async for event in client.generate(
                    "tales", PROMPT, max_new_tokens=400, ignore_eos=True
                ):
                    tokens += [event.token] if isinstance(event, Token) else []
                    progress[number] = len(tokens)
                assert tuple(tokens) == expected
                count += 1
                progress[number] = 0
            return count

        streams = [asyncio.create_task(stream(number)) for number in range(STREAMS)]
        try:
            latest = max(validity_of(pem).ends for pem in first.values())
            while authority.now() <= latest:
                await asyncio.sleep(0.1)
                assert not any(task.done() for task in streams), [
                    task.result() for task in streams if task.done()
                ]
            kept = {
                name: (tmp_path / name / "pki" / "cert.pem").read_bytes()
                for name in ("a", "b", "c")
            }
            kept["kim"] = files.cert.read_bytes()
            assert all(
                kept[name] != pem and validity_of(kept[name]).ends > latest
                for name, pem in first.items()
            )
            while not all(0 < tokens < 350 for tokens in progress):  # noqa: ASYNC110 - each in the middle of an answer
                await asyncio.sleep(0.01)
            assert sum(proxy.cut() for proxy in proxies) >= 2 * (3 * 3 + 1)
            over.set()
            counts = await asyncio.gather(*streams)
        finally:
            for task in streams:
                task.cancel()
        assert min(counts) >= 1
        assert all(node.connected for node in await client.nodes())


async def test_a_node_that_is_revoked_under_a_stream_leaves_and_no_token_is_lost(
    tmp_path: Path,
) -> None:
    """Within a heartbeat: another epoch continues without it, it is refused everywhere, and its
    agent ends."""
    async with SecureSite(tmp_path) as mill, mill.client_of() as admin:
        files = {name: await joined(mill, Role.AGENT, name) for name in ("a", "b", "c", "d")}
        await asyncio.gather(*(mill.start_agent(name, files[name]) for name in files))
        await admin.add_model(DEMO_MODEL, "tiny-tales")
        before = await admin.deploy(parse_spec(SPEC))
        expected = await answer(admin, 200)
        stream = Stream("tales", PROMPT, GenerateOptions(max_new_tokens=200, ignore_eos=True))
        running = asyncio.create_task(stream.run(admin))
        await stream.has(5)
        await admin.revoke(Role.AGENT, "b")
        await running
        assert stream.error is None and stream.ids == expected
        after = await admin.deployment("tales")
        assert after.epoch > before.epoch and "b" not in [
            stage.node_name for stage in after.placement.stages
        ]
        assert "b" not in [node.name for node in await admin.nodes()]
        await mill.agents["b"].ended(60.0)
        assert (
            "was removed from the site" in mill.agents["b"].log_tail()
            or "revoked" in mill.agents["b"].log_tail()
        )
        await refused_by_its_neighbours(mill, files["b"])
        with pytest.raises(Exception, match="revoked"):
            await mill.start_agent("b", files["b"])
        await mill.start_agent("b", await joined(mill, Role.AGENT, "b"))
        assert "b" in [node.name for node in await admin.nodes()]


async def refused_by_its_neighbours(mill: SecureSite, files: TlsFiles) -> None:
    """Its open calls at another node also end with a refusal, although its certificate has not
    expired."""
    async with open_channel(mill.agents["a"].address, files, node=NodeName("a")) as channel:
        call: Any = stage_pb2_grpc.StageServiceStub(channel).Probe()
        # Nothing is written: a message after the refusal would end the call with another status.
        assert await asyncio.wait_for(call.code(), 60) is grpc.StatusCode.PERMISSION_DENIED
        assert "revoked" in await call.details()
