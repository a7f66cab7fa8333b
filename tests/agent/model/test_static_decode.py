"""Decode steps in buffers of fixed shapes: the same numbers as step by step, whatever comes,
recorded once a shape.

Without a GPU, a `Tape` replaces a CUDA graph: it records the operations on tensors once and repeats
them on the same memory, without running the model's Python again. If there is a GPU, the same cases
run with real graphs.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from edgeshard_agent.model import rotary
from edgeshard_agent.model.attention.gathered import GatheredSpans
from edgeshard_agent.model.attention.kv import KvMemory, KvPool
from edgeshard_agent.model.decoder import DecoderModules
from edgeshard_agent.model.projection import Projection
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.static_decode import (
    LARGEST_BATCH,
    SWITCH,
    CudaGraphs,
    Recorder,
    Rerun,
    StaticShape,
    Work,
    recorder_for,
)
from edgeshard_agent.model.weights.weights import StageWeights
from edgeshard_agent.ops import native
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.safetensors_directory import SafetensorsDirectory
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan
from tests.agent.model.families import decoder_of, has_experts
from tests.support.forms import in_form

KV_BLOCKS = 40
BLOCK_TOKENS = 4
CONTEXT = 64
WHOLE = LayerRange(0, 4)
HALVES = (LayerRange(0, 2), LayerRange(2, 4))

_NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=_NEEDS_GPU)]
STATIC = [
    "llama-options",
    "qwen3-windows",
    "gemma3-text",
    "gpt2-options",
    "opt-350m",
    "phi3-partial",
]

_READS_BACK = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "lift_fresh")


class Tape:
    """A recorder that treats the processor's memory as CUDA graphs treat theirs, host reads and
    all."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, work: Work) -> Work:
        self.recorded += 1
        notes = _Notes()
        with notes, _NoReading():
            output = work()
        return lambda: _repeat(notes.calls, output)


@dataclass
class _Call:
    function: Any
    arguments: Any
    options: Any
    result: Any


class _NoReading(TorchFunctionMode):
    """Refuses what reads the processor's memory directly and would copy from a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("tolist", "numpy", "cpu", "data_ptr"):
            raise RuntimeError(f"{func} reads from the device")
        return func(*args, **(kwargs or {}))


class _Notes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _READS_BACK:
            raise RuntimeError(
                f"{func} reads from the device, or makes a tensor from a number of the host"
            )
        result = func(*args, **(kwargs or {}))
        self.calls.append(_Call(func, args, kwargs or {}, result))
        return result


def _repeat(calls: Sequence[_Call], output: torch.Tensor) -> torch.Tensor:
    for call in calls:
        fresh = call.function(*call.arguments, **call.options)
        for old, new in zip(tree_leaves(call.result), tree_leaves(fresh), strict=True):
            if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)
    return output


@dataclass(frozen=True)
class Strict:
    """A recorder that must not fail: a stage would silently run on without it."""

    inner: Recorder

    def record(self, work: Work) -> Work:
        try:
            return self.inner.record(work)
        except RuntimeError as error:
            raise AssertionError("not recorded") from error


class Refusing:
    """A recorder on a device that captures nothing."""

    def record(self, work: Work) -> Work:
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture
def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules' operators are torch's, as on an accelerator: the kernels' operations are on no
    tape."""
    monkeypatch.setenv(native.SWITCH, "0")
    monkeypatch.setattr(Projection, "pack", lambda _: None)
    monkeypatch.setattr(rotary, "is_on_cpu", lambda _: False)


def load(
    checkpoint: Any,
    layers: LayerRange,
    recorder: Recorder | None,
    device: str = "cpu",
    dtype: DType = DType.FLOAT32,
    kv_dtype: DType | None = None,
) -> StageModel:
    return StageModel.with_kv(
        StageWeights.load(
            SafetensorsDirectory(checkpoint.path),
            checkpoint.config,
            layers,
            dtype=dtype,
            device=device,
        ),
        KvMemory(kv_dtype or dtype, KV_BLOCKS, BLOCK_TOKENS, slots=8),
        recorder=recorder,
    )


def stages(
    checkpoint: Any, recorder: Callable[[], Recorder | None], device: str = "cpu"
) -> list[StageModel]:
    return [load(checkpoint, layers, recorder(), device) for layers in HALVES]


def recorder_on(device: str) -> Callable[[], Recorder]:
    return lambda: Strict(Tape() if device == "cpu" else CudaGraphs(torch.device(device)))


@dataclass
class RandomHead:
    """Forms steps as they may come: prefills, decodes of some, shared prefixes, frees and blocks
    used again."""

    chance: random.Random
    free: list[int] = field(default_factory=lambda: list(range(KV_BLOCKS)))
    holders: Counter[int] = field(default_factory=Counter)
    tables: dict[int, list[int]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    sampled: set[int] = field(default_factory=set)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def steps(self, count: int) -> Iterator[tuple[StepPlan, np.ndarray]]:
        for _ in range(count):
            plan = self._plan()
            yield (
                plan,
                np.array(
                    [self.chance.randrange(61) for _ in range(plan.token_count)], dtype=np.int64
                ),
            )

    def _plan(self) -> StepPlan:
        frees = [request for request in self.tables if self.chance.random() < 0.08]
        for request in frees:
            self.holders.subtract(self.tables[request])
            self.free += [block for block in self.tables.pop(request) if not self.holders[block]]
            del self.lengths[request]
        self.chance.shuffle(self.free)
        grants: list[KvGrant] = []
        spans: list[Span] = []
        older = list(self.tables)
        for request in older:
            if self.chance.random() < 0.8:
                self._extend(request, 1, grants, spans)
        while self.chance.random() < 0.3:
            request = next(self.numbers)
            if older and self.chance.random() < 0.3:
                self._share(request, self.chance.choice(older), grants)
            self._extend(request, self.chance.choice((1, 1, 2, 5, 13, 31)), grants, spans)
        self.chance.shuffle(spans)
        return StepPlan(tuple(frees), tuple(grants), tuple(spans))

    def _share(self, request: int, other: int, grants: list[KvGrant]) -> None:
        """Begin a table with the blocks another one filled in earlier steps."""
        blocks = self.tables[other][: (self.lengths[other] - 1) // BLOCK_TOKENS]
        if blocks:
            self._grant(request, blocks, len(blocks) * BLOCK_TOKENS, grants)
            self.lengths[request] = len(blocks) * BLOCK_TOKENS

    def _grant(self, request: int, blocks: list[int], filled: int, grants: list[KvGrant]) -> None:
        table = self.tables.setdefault(request, [])
        grants.append(KvGrant(request, len(table), tuple(blocks), filled))
        self.holders.update(blocks)
        table += blocks

    def _extend(self, request: int, count: int, grants: list[KvGrant], spans: list[Span]) -> None:
        first = self.lengths.get(request, 0)
        needed = -(-(first + count) // BLOCK_TOKENS) - len(self.tables.get(request, ()))
        if needed > len(self.free) or first + count > CONTEXT:
            return
        if needed > 0:
            self._grant(request, [self.free.pop() for _ in range(needed)], 0, grants)
        self.lengths[request] = first + count
        sampling = None if request in self.sampled else Sampling()
        self.sampled.add(request)
        spans.append(Span(request, first, count, True, sampling))


def run(
    pipeline: Sequence[StageModel], plan: StepPlan, tokens: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden states between the stages, logits) of a step, on the CPU."""
    hidden = pipeline[0].execute(plan, tokens).hidden
    if hidden is None:
        pipeline[1].execute(plan)
        return torch.empty(0), torch.empty(0, 1)
    return hidden.cpu(), pipeline[1].logits(plan, hidden).cpu()


def compare(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * max(1.0, float(wanted.std())))


def same_tokens(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    best = wanted.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] >= 2e-4
    return torch.equal(found.argmax(-1)[clear], wanted.argmax(-1)[clear])


# -- the same numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", STATIC)
@pytest.mark.usefixtures("as_on_an_accelerator")
@pytest.mark.one_in(3)
def test_random_steps_give_what_the_ordinary_path_gives(checkpoint: Any, device: str) -> None:
    ordinary = stages(checkpoint, lambda: None)
    static = stages(checkpoint, recorder_on(device), device)
    seen: set[int] = set()

    @settings(max_examples=in_form(5, 15) if device == "cpu" else 40, deadline=None)
    @given(st.integers(0, 1 << 30))
    def check(seed: int) -> None:
        for stage in (*ordinary, *static):
            stage.reset()
        for plan, tokens in RandomHead(random.Random(seed)).steps(30):
            wanted, found = run(ordinary, plan, tokens), run(static, plan, tokens)
            seen.add(len(plan.spans))
            if plan.spans:
                compare(found[0], wanted[0])
                compare(found[1], wanted[1])
                assert same_tokens(found[1], wanted[1])

    check()
    assert len(seen) > 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (DType.BFLOAT16, DType.BFLOAT16),
        (DType.FLOAT16, DType.FLOAT16),
        (DType.FLOAT32, DType.BFLOAT16),
    ],
)
@pytest.mark.usefixtures("as_on_an_accelerator")
def test_fewer_bits_stay_near(
    checkpoint_of: Callable[[str], Any], tiny_head: Any, device: str, dtype: DType, kv_dtype: DType
) -> None:
    """On CUDA these are the dtypes whose prompts flash attention takes, whole and in pieces."""
    checkpoint = checkpoint_of("llama-plain")
    stage = load(checkpoint, WHOLE, recorder_on(device)(), device, dtype, kv_dtype)
    head = tiny_head([stage], checkpoint.sequences)
    errors = []
    for spans in (
        [(0, 6), (1, 4)],
        [(0, 7), (1, 1)],
        [(0, 1), (1, 1)],
        [(1, 5)],
        [(0, 1)],
        [(1, 1), (0, 1)],
    ):
        for request, logits in head.step(spans).items():
            end = head.lengths[request]
            reference = checkpoint.reference[request][end - len(logits) : end]
            errors.append(float((logits.cpu().float() - reference).abs().mean() / reference.std()))
    assert 0 < max(errors) < 0.05


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("as_on_an_accelerator")
def test_a_step_after_another_shape_and_back_reads_its_own_buffers(
    checkpoint_of: Callable[[str], Any], tiny_head: Any, device: str
) -> None:
    checkpoint = checkpoint_of("llama-plain")
    head = tiny_head([load(checkpoint, WHOLE, recorder_on(device)(), device)], checkpoint.sequences)
    for request in range(3):
        head.step([(request, 5)])
    for batch in ((0, 1, 2), (2,), (0, 1), (1, 0, 2), (2,), (0, 2)):
        for request, logits in head.step([(request, 1) for request in batch]).items():
            reference = checkpoint.reference[request][head.lengths[request] - 1]
            compare(logits[0].cpu(), reference)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("as_on_an_accelerator")
def test_a_result_outlives_the_next_step(checkpoint_of: Callable[[str], Any], device: str) -> None:
    stage = load(checkpoint_of("llama-plain"), HALVES[0], recorder_on(device)(), device)
    stage.execute(
        StepPlan(grants=(KvGrant(1, 0, (5, 9)),), spans=(Span(1, 0, 3, sampling=Sampling()),)),
        np.arange(3),
    )
    first = stage.execute(StepPlan(spans=(Span(1, 3, 1),)), np.array([7])).hidden
    assert first is not None
    kept = first.clone()
    stage.execute(StepPlan(spans=(Span(1, 4, 1),)), np.array([8]))
    assert torch.equal(first, kept)


# -- shapes ----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, LARGEST_BATCH), st.integers(1, 5000), st.integers(0, 5000))
def test_shapes_hold_a_step_and_are_few(rows: int, blocks: int, more: int) -> None:
    shape = StaticShape.holding(rows, blocks, blocks + more)
    assert rows <= shape.rows < 2 * rows and shape.rows & (shape.rows - 1) == 0
    assert blocks <= shape.blocks <= blocks + more
    assert shape.blocks < max(9, 2 * blocks)
    assert shape.blocks & (shape.blocks - 1) == 0 or shape.blocks == blocks + more


@pytest.mark.usefixtures("as_on_an_accelerator")
def test_each_shape_is_recorded_once(checkpoint_of: Callable[[str], Any], tiny_head: Any) -> None:
    tape = Tape()
    checkpoint = checkpoint_of("llama-plain")
    stage = load(checkpoint, WHOLE, tape)
    for _ in range(2):
        stage.reset()
        head = tiny_head([stage], [np.arange(CONTEXT) % 61] * 3)
        head.step([(0, 29), (1, 3), (2, 3)])  # no step of decodes
        assert tape.recorded in (0, 4)
        for spans in ([0], [1, 2], [2], [0, 1, 2], [1, 2, 0], [0], [0], [0]):
            head.step([(request, 1) for request in spans])
    # One row and two, four for three, and one in the wider table that position 32 begins.
    assert tape.recorded == 4


def test_too_many_requests_and_pieces_of_prompts_go_the_ordinary_way(
    checkpoint_of: Callable[[str], Any], tiny_head: Any
) -> None:
    tape = Tape()
    head = tiny_head(
        [load(checkpoint_of("llama-plain"), WHOLE, tape)], [np.arange(CONTEXT) % 61] * 3
    )
    head.step([(0, 1), (1, 2)])
    assert tape.recorded == 0
    static = head.stages[0]._static
    assert static is not None
    one_token = [Span(request, 4, 1) for request in range(LARGEST_BATCH + 1)]
    assert static.takes(one_token[:-1]) and not static.takes(one_token) and not static.takes([])


# -- memory ----------------------------------------------------------------------------------------


def rows_of(pool: KvPool, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    arena = pool.arena(layer)
    return arena.keys, arena.values


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("as_on_an_accelerator")
def test_rows_that_belong_to_nobody_write_to_the_scratch_block_alone(
    checkpoint_of: Callable[[str], Any], tiny_head: Any, device: str
) -> None:
    checkpoint = checkpoint_of("llama-plain")
    stage = load(checkpoint, WHOLE, recorder_on(device)(), device)
    head = tiny_head([stage], checkpoint.sequences)
    for request in range(3):
        head.step([(request, 6)])
    head.step([(0, 1), (1, 1), (2, 1)])  # recording may run a step more than once
    before = [[rows.clone() for rows in rows_of(stage.pool, layer)] for layer in range(4)]
    head.step([(0, 1), (1, 1), (2, 1)])
    written = {
        head.tables[request][7 // BLOCK_TOKENS] * BLOCK_TOKENS + 7 % BLOCK_TOKENS
        for request in range(3)
    }
    scratch = KV_BLOCKS * BLOCK_TOKENS
    for layer in range(4):
        for old, new in zip(before[layer], rows_of(stage.pool, layer), strict=True):
            changed = (old != new).flatten(1).any(-1).nonzero().flatten().tolist()
            assert written <= set(changed) <= written | {scratch}


def test_the_scratch_block_is_the_heads_to_give_no_more_than_any_other_beyond_the_pool(
    checkpoint_of: Callable[[str], Any],
) -> None:
    checkpoint = checkpoint_of("llama-plain")
    plain, static = load(checkpoint, WHOLE, None).pool, load(checkpoint, WHOLE, Rerun()).pool
    assert plain.scratch_block is None and static.scratch_block == KV_BLOCKS
    assert static.bytes_capacity == plain.bytes_capacity and static.blocks == plain.blocks
    assert static.arena(0).slots == plain.arena(0).slots + BLOCK_TOKENS
    with pytest.raises(Exception, match="does not exist"):
        static.grant(1, 0, [KV_BLOCKS])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("as_on_an_accelerator")
def test_what_others_left_in_the_memory_is_never_read(
    checkpoint_of: Callable[[str], Any], device: str
) -> None:
    """Keys that are not a number, beyond a request's length or in blocks of others, would make its
    own so."""
    stage = load(checkpoint_of("llama-plain"), HALVES[0], recorder_on(device)(), device)
    for layer in range(2):
        for rows in rows_of(stage.pool, layer):
            rows.fill_(torch.nan)
    stage.execute(
        StepPlan(grants=(KvGrant(1, 0, (0, 3)),), spans=(Span(1, 0, 3, sampling=Sampling()),)),
        np.arange(3),
    )
    for position in range(3, 6):
        hidden = stage.execute(StepPlan(spans=(Span(1, position, 1),)), np.array([position])).hidden
        assert hidden is not None and torch.isfinite(hidden).all()


# -- recording -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("as_on_an_accelerator")
def test_what_cannot_be_recorded_runs_as_it_is_and_says_so_once(
    checkpoint_of: Callable[[str], Any], tiny_head: Any
) -> None:
    checkpoint = checkpoint_of("qwen2-windows")
    head = tiny_head([load(checkpoint, WHOLE, Refusing())], checkpoint.sequences)
    with capture_logs() as logs:
        head.step([(0, 4), (1, 4)])
        for batch in ((0,), (0, 1), (1,)):
            for request, logits in head.step([(request, 1) for request in batch]).items():
                compare(logits[0], checkpoint.reference[request][head.lengths[request] - 1])
    assert [entry["event"] for entry in logs] == ["decode_not_recorded"]
    assert "not permitted" in logs[0]["why"]


@pytest.mark.usefixtures("as_on_an_accelerator")
@pytest.mark.one_in(3)
def test_every_model_but_mixtures_and_those_with_states_is_recorded(
    checkpoint: Any, variant: str, tiny_head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture, states = has_experts(variant), bool(decoder_of(variant).shape.states)
    tape = Tape()
    static = load(checkpoint, WHOLE, tape)
    with capture_logs() as logs:
        for stage in (static, load(checkpoint, WHOLE, Rerun())):
            head = tiny_head([stage], checkpoint.sequences)
            head.step([(0, 4)])
            compare(head.step([(0, 1)])[0][0], checkpoint.reference[0][4])
        assert tape.recorded == (0 if mixture or states else 1) and not logs
        # it could not be
        if mixture and not states and decoder_of(variant).architecture.chunks is None:
            monkeypatch.setattr(DecoderModules, "is_static", True)
            head = tiny_head([load(checkpoint, WHOLE, tape)], checkpoint.sequences)
            head.step([(0, 4)])
            compare(head.step([(0, 1)])[0][0], checkpoint.reference[0][4])
            assert "reads from the device" in logs[0]["why"]


def test_a_graph_is_for_cuda_and_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recorder_for("cpu") is None
    assert isinstance(recorder_for("cuda:1"), CudaGraphs)
    monkeypatch.setenv(SWITCH, "0")
    assert recorder_for("cuda:1") is None


# -- what these tests stand on ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "reading",
    [
        lambda x: x[: int(x.sum())],
        lambda x: x[: len(x.tolist())],
        lambda x: x + torch.tensor([2.0]),
        torch.nonzero,
    ],
)
def test_a_tape_refuses_what_a_capture_refuses(
    reading: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(RuntimeError, match="reads from the device"):
        Tape().record(lambda: reading(torch.ones(3)))


def test_a_tape_repeats_numbers_of_the_host_as_they_were() -> None:
    buffer, calls = torch.zeros(2), []

    def work() -> torch.Tensor:
        calls.append(1)
        return (buffer * 10 + len(calls)).view(1, 2)

    replay = Tape().record(work)
    for value in (3.0, 4.0):
        buffer.fill_(value)
        assert replay().tolist() == [[value * 10 + 1] * 2]
    assert calls == [1]


@pytest.mark.usefixtures("as_on_an_accelerator")
def test_lengths_from_the_host_instead_of_the_buffer_are_caught(
    checkpoint_of: Callable[[str], Any], tiny_head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_decodes: Any = GatheredSpans.of_decodes
    real = of_decodes.__func__

    def frozen(cls: Any, pool: Any, tables: torch.Tensor, lengths: torch.Tensor) -> GatheredSpans:
        step: GatheredSpans = real(
            cls, pool, tables, torch.full(lengths.shape, 5, dtype=torch.int32)
        )
        return step

    monkeypatch.setattr(GatheredSpans, "of_decodes", classmethod(frozen))
    checkpoint = checkpoint_of("llama-plain")
    head = tiny_head([load(checkpoint, WHOLE, Tape())], checkpoint.sequences)
    head.step([(0, 4)])
    compare(head.step([(0, 1)])[0][0], checkpoint.reference[0][4])
    with pytest.raises(AssertionError):
        compare(head.step([(0, 1)])[0][0], checkpoint.reference[0][5])
