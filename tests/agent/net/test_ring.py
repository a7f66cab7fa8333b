"""Three stages over real gRPC streams in one process: mishaps on the hops never change a token."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from edgeshard_agent.engine.compute_thread import ComputeThread
from edgeshard_agent.engine.drafter import Drafter
from edgeshard_agent.hosting.around import ForHead, HostServices, LoadedModel, model_key
from edgeshard_agent.hosting.hosted_stage import HostedStage
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.draft_steps import DraftSteps
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights
from edgeshard_agent.net import link_sender
from edgeshard_agent.net.link_receiver import LinkReceiver, StageServicer
from edgeshard_agent.net.link_sender import LinkSender
from edgeshard_agent.ops.native import native_available
from edgeshard_agent.scheduler.guessing import NgramDrafter
from edgeshard_agent.store.blob_cache import BlobCache, Pin

from bench.safetensors_directory import SafetensorsDirectory
from edgeshard import WIRE_VERSION
from edgeshard.domain.control.commands import PrepareStage
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.guesses import MOST_GUESSES
from edgeshard.domain.deployments.placement import PlacedStage, Placement, Speculation
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, NodeId, NodeName, RequestId
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import StagePhase
from edgeshard.domain.requests.step import ReturnedStep, StepResult
from edgeshard.process.clock import SystemClock
from edgeshard.proto.v1 import common_pb2, head_pb2, stage_pb2
from edgeshard.proto.v1.head_pb2_grpc import HeadServiceServicer, add_HeadServiceServicer_to_server
from edgeshard.proto.v1.stage_pb2_grpc import add_StageServiceServicer_to_server
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.server import Server
from edgeshard.wire.frames import Frame
from edgeshard.wire.link import LinkMessage
from tests.support.hybrids import save_hybrid

pytestmark = pytest.mark.timing

CUTS = [LayerRange(0, 1), LayerRange(1, 3), LayerRange(3, 4)]
NEW_TOKENS = 24
PROMPTS = [[5, 9, 2], [40, 41], list(range(3, 60)), [7]]


class Front(HeadServiceServicer):
    """The coordinator's end of `Attach`: sends requests, collects outputs."""

    def __init__(self) -> None:
        self.down: asyncio.Queue[head_pb2.AttachResponse] = asyncio.Queue()
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, asyncio.Future[str]] = {}

    def start(
        self, name: str, prompt: list[int], new_tokens: int = NEW_TOKENS, **options: Any
    ) -> asyncio.Future[str]:
        self.tokens[name] = []
        self.ended[name] = asyncio.get_running_loop().create_future()
        generation = head_pb2.Generation(
            prompt_tokens=prompt, max_new_tokens=new_tokens, ignore_eos=True, **options
        )
        start = head_pb2.StartRequest(request_id=name, generation=generation)
        self.down.put_nowait(head_pb2.AttachResponse(start=start))
        return self.ended[name]

    def cancel(self, name: str) -> None:
        self.down.put_nowait(
            head_pb2.AttachResponse(cancel=head_pb2.CancelRequest(request_id=name))
        )

    async def Attach(
        self, request_iterator: AsyncIterator[head_pb2.AttachRequest], context: Any
    ) -> Any:
        await context.send_initial_metadata(())
        reading = asyncio.create_task(self._read(request_iterator))
        try:
            while True:
                yield await self.down.get()
        finally:
            reading.cancel()

    async def _read(self, messages: AsyncIterator[head_pb2.AttachRequest]) -> None:
        async for message in messages:
            kind = message.WhichOneof("message")
            if kind in ("token", "tokens"):
                for token in [message.token] if kind == "token" else message.tokens.tokens:
                    self.tokens[token.request_id].append(token.token)
                    if token.finish_reason:
                        self.ended[token.request_id].set_result(str(token.finish_reason))
            elif kind in ("finished", "failed"):
                ended = getattr(message, kind)
                self.ended[ended.request_id].set_result(
                    kind if kind == "failed" else str(ended.reason)
                )


class Ring:
    def __init__(self, front: Front, stages: list[HostedStage], broken: list[str]) -> None:
        self.front = front
        self.stages = stages
        self.broken = broken

    async def kv_bytes(self) -> int:
        return sum(stage.status().kv_bytes_in_use for stage in self.stages)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 (a stage has no event for what it holds)
                await asyncio.sleep(0.005)


@asynccontextmanager
async def open_ring(
    model: Path,
    cuts: list[LayerRange],
    directory: Path,
    kv_blocks: int = 40,
    saved_states: int = 8,
    speculation: Speculation = Speculation.OFF,
    drafts: bool = False,
    **options: Any,
) -> AsyncIterator[Ring]:
    """Real servers, real streams, real weights; one event loop and one compute thread stand for all
    nodes. With `drafts` the head's has the model itself as a draft."""
    torch.set_num_threads(1)
    front = Front()
    worker = ComputeThread(1)
    broken = list[str]()
    coordinator = Server("127.0.0.1:0", None)
    add_HeadServiceServicer_to_server(front, coordinator.grpc)
    dial = partial(open_channel, await coordinator.start(), None)
    servers = [Server("127.0.0.1:0", None) for _ in cuts]
    servicers = [StageServicer() for _ in cuts]
    for server, servicer in zip(servers, servicers, strict=True):
        add_StageServiceServicer_to_server(servicer, server.grpc)
    addresses = [await server.start() for server in servers]
    placed = [
        PlacedStage(i, NodeId(f"n{i}"), NodeName(f"n{i}"), address, cut, 0, 0)
        for i, (address, cut) in enumerate(zip(addresses, cuts, strict=True))
    ]
    placement = Placement(
        tuple(placed),
        kv_block_tokens=16,
        kv_blocks=kv_blocks,
        micro_batch=2,
        micro_batches=3,
        saved_states=saved_states,
        speculation=speculation,
        guess_slots=MOST_GUESSES,
    )
    spec = DeploymentSpec(name="ring", model="tiny", source="n0", dtype=DType.FLOAT32, **options)
    config = json.loads((model / "config.json").read_text())
    memory = KvMemory(
        DType.FLOAT32,
        kv_blocks,
        16,
        slots=placement.slots_of(config["max_position_embeddings"]),
        guess_slots=placement.used_guess_slots,
    )

    def stage_of(layers: LayerRange) -> StageModel:
        source = SafetensorsDirectory(model)
        return StageModel.with_kv(
            StageWeights.load(source, config, layers, dtype=DType.FLOAT32, device="cpu"), memory
        )

    stages = []
    for index, cut in enumerate(cuts):
        prepare = PrepareStage(spec, placement, index, Epoch(1), Digest("0" * 64))
        weights = stage_of(cut)
        pin = Pin(BlobCache(directory, 1 << 20), [])
        drafter = (
            Drafter(DraftSteps(stage_of(LayerRange(0, 4)), 2), 2, 96)
            if drafts and not index
            else None
        )
        loaded = LoadedModel(
            model_key(prepare), weights, ForHead(None, frozenset({95})), pin, 0.0, drafter
        )
        around = HostServices(
            NodeId(f"n{index}"), worker, servicers[index], dial, None, SystemClock(), lambda: None
        )
        stages.append(HostedStage(prepare, loaded, around, lambda d, e: broken.append(d)))
    try:
        for stage in stages:
            stage.start()
        async with asyncio.timeout(60):
            await stages[0].activate()
        yield Ring(front, stages, broken)
    finally:
        for stage in stages:
            await stage.stop()
        for server in (coordinator, *servers):
            await server.stop(0)
        worker.close()


def unsplit(model_path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens that the unsplit model generates, by transformers."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)  # fmt: skip # noqa: E501
        outputs.append(made[0, len(prompt) :].tolist())
    return outputs


@pytest.fixture(scope="module")
def tiny_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 4 layers; three of them keep states of requests."""
    path = tmp_path_factory.mktemp("models") / "tiny-hybrid"
    save_hybrid(path, vocab_size=96, max_position_embeddings=256)
    return path


@pytest.fixture(params=["llama", "hybrid"])
def model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"tiny_{request.param}")
    return path


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> list[list[int]]:
    return unsplit(tiny_llama, PROMPTS)


async def generate_all(ring: Ring, name: str = "r") -> list[list[int]]:
    ended = [ring.front.start(f"{name}{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    async with asyncio.timeout(60):
        await asyncio.gather(*ended)
    return [ring.front.tokens[f"{name}{i}"] for i in range(len(PROMPTS))]


@pytest.mark.parametrize(
    "cuts", [CUTS, [LayerRange(0, 2), LayerRange(2, 4)], [LayerRange(0, 4)]], ids=len
)
async def test_concurrent_requests_get_the_unsplit_models_tokens(
    tiny_llama: Path, reference: list[list[int]], cuts: list[LayerRange], tmp_path: Path
) -> None:
    async with open_ring(tiny_llama, cuts, tmp_path) as ring:
        assert await generate_all(ring) == reference
        await ring.until(lambda: all(s.status().kv_bytes_in_use == 0 for s in ring.stages))


async def test_shared_beginnings_preemptions_and_cancels_keep_everybodys_tokens(
    model: Path, tmp_path: Path
) -> None:
    """Ten requests in a pool that holds three of them, coming one after the other; every third is
    cancelled."""
    dice = random.Random(3)
    trunk = [dice.randrange(90) for _ in range(32)]
    prompts = [trunk + [dice.randrange(90) for _ in range(dice.randint(1, 9))] for _ in range(10)]
    async with open_ring(model, CUTS, tmp_path, 12, kv_overcommit=True, prefix_cache=True) as ring:
        ended = []
        for number, prompt in enumerate(prompts):
            ended.append(ring.front.start(f"r{number}", prompt))
            if number == 0:
                await ring.until(lambda: len(ring.front.tokens["r0"]) > 0)
            if number % 3 == 2:
                name = f"r{number - 1}"
                await ring.until(partial(lambda name: len(ring.front.tokens[name]) > 2, name))
                ring.front.cancel(name)
        async with asyncio.timeout(60):
            await asyncio.gather(*ended)
        for number, right in enumerate(unsplit(model, prompts)):
            got = ring.front.tokens[f"r{number}"]
            assert got == (right[: len(got)] if number % 3 == 1 else right)
        head = ring.stages[0].head
        assert head is not None
        stats = head.stats
        assert stats.preemptions > 0 and stats.prefix_hit_tokens > 0
        await ring.until(lambda: all(s.status().kv_bytes_in_use == 0 for s in ring.stages))


class Mishaps:
    """Stands in for the sender's write: duplicates, holds back, flips, cuts and breaks, by a seeded
    roll of dice."""

    def __init__(self, seed: int, rate: float) -> None:
        self.rng = random.Random(seed)
        self.rate = rate
        self.seen: set[str] = set()
        self._write = link_sender._write

    async def write(self, call: Any, message: LinkMessage) -> None:
        if not isinstance(message, Frame) or self.rng.random() > self.rate:
            await self._write(call, message)
            return
        what = self.rng.choice(["duplicate", "flip", "cut", "break"])
        self.seen.add(what)
        if what == "duplicate":
            await self._write(call, message)
        elif what == "flip":
            raw = bytearray(message.header)
            raw[self.rng.randrange(len(raw))] ^= 1 << self.rng.randrange(8)
            message = Frame(header=bytes(raw))
        elif what == "cut":
            message = Frame(header=message.header)
        elif what == "break":
            # The frame may or may not have arrived when the connection goes.
            if self.rng.random() < 0.5:
                await self._write(call, message)
            call.cancel()
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "cut"
            )
        await self._write(call, message)

    def telling(self) -> Callable[[LinkReceiver, Frame], None]:
        """Stands in for the head's way to the stage that samples: guesses go lost, flip, or come
        after their step."""
        late: list[Frame] = []
        tell = LinkReceiver.tell
        ways = cycle(["told", "told late", "told", "told damaged", "told", "not told"])

        def told(receiver: LinkReceiver, frame: Frame) -> None:
            for before in [late.pop()] if late else []:
                tell(receiver, before)
            what = next(ways)
            self.seen.add(what)
            if what == "told late":
                late.append(frame)
            elif what == "told damaged":
                raw = bytearray(frame.header)
                raw[self.rng.randrange(len(raw))] ^= 1 << self.rng.randrange(8)
                tell(receiver, Frame(header=bytes(raw), crc32c=frame.crc32c))
            elif what == "told":
                tell(receiver, frame)

        return told


@pytest.mark.skipif(not native_available(), reason="torch's operators do not promise equal bits")
async def test_a_node_in_the_middle_learns_how_many_tokens_are_guessed_and_not_which(
    tiny_llama: Path, reference: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that its two links bring it, but activations and times, is the same bytes whichever
    tokens are guessed."""
    wrong = [token for token in range(90) if token not in reference[0]][:2]
    captured: list[list[bytes]] = []
    heard = set[tuple[int, int]]()
    told, hear = LinkReceiver._take, LinkSender._heard

    def take(receiver: LinkReceiver, frame: Frame) -> Any:
        if receiver.from_stage == 0:
            header = stage_pb2.FrameHeader.FromString(frame.header)
            header.forward.ClearField("timings")
            captured[-1].append(header.SerializeToString())
        return told(receiver, frame)

    def listen(sender: LinkSender, message: LinkMessage | None) -> None:
        if isinstance(message, Frame):
            heard.add((sender.hop.from_stage, sender.hop.to_stage))
        hear(sender, message)

    monkeypatch.setattr(LinkReceiver, "_take", take)
    monkeypatch.setattr(LinkSender, "_heard", listen)
    for token in wrong:
        captured.append([])
        monkeypatch.setattr(
            NgramDrafter, "propose", lambda self, tokens, limit, token=token: [token] * limit
        )
        async with open_ring(tiny_llama, CUTS, tmp_path, speculation=Speculation.GUESSES) as ring:
            async with asyncio.timeout(60):
                await ring.front.start("r", PROMPTS[0])
            assert ring.front.tokens["r"] == reference[0]
            await ring.until(lambda: all(s.status().kv_bytes_in_use == 0 for s in ring.stages))
    headers = [stage_pb2.FrameHeader.FromString(header) for header in captured[0]]
    assert (
        sum(span.guesses.assumed_count for header in headers for span in header.forward.spans) > 3
    )
    assert captured[0] == captured[1]
    assert heard == {(2, 0)}


@pytest.mark.parametrize("seed", range(3))
async def test_mishaps_on_the_hops_never_change_a_token(
    model: Path, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links break and recover in the middle of answers, also for a model with states. Its slots are
    used again, and the longest prompt begins from saved states the second time."""
    mishaps = Mishaps(seed, rate=0.2)
    monkeypatch.setattr(link_sender, "_write", mishaps.write)
    monkeypatch.setattr(link_sender, "FIRST_RETRY_S", 0.001)
    async with open_ring(model, CUTS, tmp_path, saved_states=3, prefix_cache=True) as ring:
        right = unsplit(model, PROMPTS)
        assert await generate_all(ring) == right
        assert await generate_all(ring, "again") == right
        head = ring.stages[0].head
        assert head is not None and head.stats.prefix_hit_tokens == 48
        assert not ring.broken and len(mishaps.seen) == 4
        await ring.until(lambda: all(s.status().kv_bytes_in_use == 0 for s in ring.stages))


@pytest.mark.skipif(not native_available(), reason="torch's operators do not promise equal bits")
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("model", "drafts"), [("llama", False), ("llama", True), ("hybrid", False)], indirect=["model"]
)
@pytest.mark.parametrize("seed", range(2))
async def test_mishaps_between_guesses_never_change_a_token(
    model: Path, seed: int, drafts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links break and recover; each request runs by itself, so that tokens are guessed for it. The
    drawn tokens repeat often enough for some guesses to be right, but not all. A draft's guesses
    are right if they arrive in time. Not with states, which leave few slots for guesses."""

    async def one_by_one(ring: Ring) -> dict[str, list[int]]:
        for number, prompt in enumerate(PROMPTS):
            sampling = common_pb2.Sampling(temperature=0.35, seed=number)
            async with asyncio.timeout(60):
                await ring.front.start(f"r{number}", prompt, 80, sampling=sampling)
        return ring.front.tokens

    async with open_ring(model, CUTS, tmp_path) as ring:
        right = await one_by_one(ring)
        assert ring.stages[0].status().guesses is None
    texts = [[*prompt, *right[f"r{number}"]] for number, prompt in enumerate(PROMPTS)]

    def remembered(_: NgramDrafter, tokens: Sequence[int], limit: int) -> list[int]:
        end = len(tokens)
        text = next(text for text in texts if text[:end] == list(tokens))
        return [
            token if (end + number) % 4 else token ^ 1
            for number, token in enumerate(text[end : end + limit])
        ]

    if model.name == "tiny-hybrid":
        monkeypatch.setattr(NgramDrafter, "propose", remembered)
    mishaps = Mishaps(seed, rate=0.2)
    monkeypatch.setattr(link_sender, "_write", mishaps.write)
    monkeypatch.setattr(link_sender, "FIRST_RETRY_S", 0.001)
    monkeypatch.setattr(LinkReceiver, "tell", mishaps.telling())
    async with open_ring(
        model, CUTS, tmp_path, speculation=Speculation.GUESSES, drafts=drafts
    ) as ring:
        assert await one_by_one(ring) == right
        guesses = ring.stages[0].status().guesses
        assert guesses is not None and guesses.guessed > guesses.right > 0
        assert not ring.broken and mishaps.seen >= {"told late", "told damaged", "not told"}
        await ring.until(lambda: all(s.status().kv_bytes_in_use == 0 for s in ring.stages))


async def test_a_cancel_frees_every_stage(tiny_llama: Path, tmp_path: Path) -> None:
    async with open_ring(tiny_llama, CUTS, tmp_path) as ring:
        ended = ring.front.start("r", [3, 4, 5], 200)
        await ring.until(lambda: len(ring.front.tokens["r"]) > 3)
        assert all(stage.status().kv_bytes_in_use > 0 for stage in ring.stages)
        ring.front.cancel("r")
        await ended
        await ring.until(lambda: all(s.status().kv_bytes_in_use == 0 for s in ring.stages))
        assert len(ring.front.tokens["r"]) < 200


async def test_a_stage_that_cannot_run_a_step_breaks_its_epoch_and_its_requests_stay(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_ring(tiny_llama, [LayerRange(0, 4)], tmp_path) as ring:

        def refuse(*_: Any) -> Any:
            raise EdgeShardError("out of order")

        monkeypatch.setattr(ring.stages[0].loaded.model, "execute_sweep", refuse)
        head = ring.stages[0].head
        assert head is not None
        ended = ring.front.start("r", [3])
        await ring.until(lambda: ring.broken == [DeploymentName("ring")])
        later = ring.front.start("later", [3])
        await ring.until(lambda: {held.request_id for held in head.held()} == {"r", "later"})
        assert not ended.done() and not later.done()
        assert ring.front.tokens["r"] == ring.front.tokens["later"] == []


async def test_strangers_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    """Another epoch, another hop, another pipeline, another version, or no hello at all."""
    async with open_ring(tiny_llama, CUTS, tmp_path) as ring:
        target = ring.stages[0].prepare.placement.stages[1].address
        good: dict[str, Any] = {
            "deployment": "ring",
            "epoch": 1,
            "from_stage": 0,
            "to_stage": 1,
            "dialler_sends": True,
        }
        cases: list[tuple[dict[str, Any], str]] = [
            ({"epoch": 0}, "STALE_EPOCH"),
            ({"epoch": 2}, "NOT_PREPARED"),
            ({"deployment": "other"}, "NO_SUCH_STAGE"),
            ({"from_stage": 2}, "INVALID_ARGUMENT"),
            ({"wire_version": 99}, "WIRE_VERSION"),
        ]
        from edgeshard.proto.v1.stage_pb2_grpc import StageServiceStub
        from edgeshard.wire.status import from_rpc_error

        async with open_channel(target, None) as channel:
            for change, reason in cases:
                call = StageServiceStub(channel).Exchange()
                hello = stage_pb2.LinkHello(**{**good, "wire_version": WIRE_VERSION, **change})
                await call.write(
                    stage_pb2.ExchangeRequest(message=stage_pb2.LinkMessage(hello=hello))
                )
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    while await call.read() is not grpc.aio.EOF:
                        pass
                    await link_sender._raise_end(call)
                assert from_rpc_error(refused.value).reason == reason
        assert not ring.broken


@pytest.mark.parametrize("cuts", [CUTS, [LayerRange(0, 4)]], ids=len)
async def test_a_head_that_fails_breaks_its_stage(
    tiny_llama: Path, tmp_path: Path, cuts: list[LayerRange]
) -> None:
    """It computes nothing more, and the coordinator would send it requests. Those that it has wait
    for an epoch."""
    async with open_ring(tiny_llama, cuts, tmp_path) as ring:
        stage = ring.stages[0]
        assert await ring.front.start("long", [3] * 1000, 1) == "failed", "too long for the model"
        assert not ring.broken and stage.status().phase is StagePhase.ACTIVE
        ended = ring.front.start("r", [3, 4, 5], 200)
        await ring.until(lambda: len(ring.front.tokens["r"]) > 2)
        assert stage.head is not None
        stage.head.on_return(ReturnedStep(10_000, StepResult()))
        assert ring.broken == ["ring"] and stage.status().phase is StagePhase.FAILED
        assert not ended.done() and RequestId("r") in {
            held.request_id for held in stage.head.held()
        }
