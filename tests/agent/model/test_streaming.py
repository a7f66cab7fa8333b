"""Stages from packed files, in memory and streamed from the disk, give the bits of stages loaded
from checkpoints."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from edgeshard_agent.engine.recording import StepRecorder
from edgeshard_agent.model.attention import attention as attention_module
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.decoder import DecoderModules
from edgeshard_agent.model.stage import StageModel, StageOutput
from edgeshard_agent.model.weights import packed_modules as units_module
from edgeshard_agent.model.weights.weight_loading import Packing
from edgeshard_agent.model.weights.weights import StageWeights
from edgeshard_agent.ops import huge_pages
from edgeshard_agent.ops.native import native_available
from edgeshard_agent.store.packed_units import PackedUnits

from bench.safetensors_directory import SafetensorsDirectory
from edgeshard.architectures import expected_tensors
from edgeshard.architectures.units import UnitForm, held_of, tensors_of_units
from edgeshard.domain.errors import DataLossError, FailedPreconditionError, ResourceExhaustedError
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.models.packed_units import NOTHING_HELD
from edgeshard.domain.nodes.device import StageFilling, WeightLoadingWork
from edgeshard.domain.requests.step import StepPlan
from edgeshard.process.clock import SystemClock
from tests.support.forms import one_in
from tests.support.packing import chosen_sources

pytestmark = [
    pytest.mark.timing,
    pytest.mark.skipif(not native_available(), reason="packed files are for native kernels"),
]
MODEL = Digest("5" * 64)
SPANS = (((0, 9), (1, 5)), ((0, 1), (1, 11), (2, 12)), ((0, 1), (1, 1), (2, 1)))


class NothingLeft:
    """A checkpoint that must not be read any more; it still knows its names."""

    def __init__(self, source: SafetensorsDirectory) -> None:
        self._names = source.names()

    def names(self) -> Any:
        return self._names

    def read(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read from the checkpoint")


def load(
    checkpoint: Any,
    units: PackedUnits | None,
    *,
    budget: int | None = None,
    prefetched: int = 1,
    source: Any = None,
    **options: Any,
) -> StageModel:
    layers = options.pop("layers", None) or LayerRange(0, _layer_count(checkpoint))
    dtype = options.pop("dtype", DType.FLOAT32)
    packing = None
    if units is not None:
        sources = chosen_sources(
            units, MODEL, checkpoint.config, layers, dtype, options.get("quantisation")
        )
        packing = Packing(sources, budget, prefetched=prefetched)
    return StageModel.with_kv(
        StageWeights.load(
            source or SafetensorsDirectory(checkpoint.path),
            checkpoint.config,
            layers,
            dtype=dtype,
            device="cpu",
            packing=packing,
            **options,
        ),
        KvMemory(dtype, 40, 16, slots=8),
    )


def _layer_count(checkpoint: Any) -> int:
    from edgeshard.architectures import parse_config

    return parse_config(checkpoint.config).layer_count


def logits(stage: StageModel, checkpoint: Any, tiny_head: Any) -> Iterator[torch.Tensor]:
    head = tiny_head([stage], checkpoint.sequences)
    for spans in SPANS:
        yield from head.step(spans).values()


def _packed(tmp_path: Path) -> PackedUnits:
    return PackedUnits(tmp_path / "packed")


def _least_budget(checkpoint: Any, units: PackedUnits, prefetched: int, **options: Any) -> int:
    """The smallest budget, computed from the missing bytes that a refusal reports."""
    with pytest.raises(ResourceExhaustedError) as refused:
        load(checkpoint, units, budget=1, prefetched=prefetched, **options)
    return 1 + int(refused.value.message.split("too few by ")[1].split(":")[0])


@pytest.mark.one_in(6)
def test_a_family_from_packed_files_and_streamed(
    variant: str, checkpoint: Any, tiny_head: Any, tmp_path: Path
) -> None:
    plain = load(checkpoint, None)
    wanted = list(logits(plain, checkpoint, tiny_head))
    units = _packed(tmp_path)
    first = load(checkpoint, units)
    count = _layer_count(checkpoint)
    for layers in (LayerRange(0, 1), LayerRange(count - 1, count), LayerRange(0, count)):
        of_units = tensors_of_units(checkpoint.config, layers, None).values()
        assert frozenset().union(*of_units) == expected_tensors(checkpoint.config, layers).keys()
    if not units.files():
        assert not isinstance(first.weights.modules, DecoderModules)
        with pytest.raises(FailedPreconditionError, match="cannot be streamed"):
            load(checkpoint, units, budget=1)
        return
    every = frozenset(range(_layer_count(checkpoint)))
    form = UnitForm(MODEL, first.dtype, None, first.shape)
    held = held_of(form, checkpoint.config, frozenset(units.ids))
    assert held.layers == every and held.head, (
        "by the ids of its files, others know what this node has"
    )
    assert (
        held_of(replace(form, dtype=DType.FLOAT16), checkpoint.config, frozenset(units.ids))
        == NOTHING_HELD
    )
    nothing = NothingLeft(SafetensorsDirectory(checkpoint.path))
    again = load(checkpoint, units, source=nothing)
    assert again.parameter_bytes == plain.parameter_bytes
    for stage in (first, again):
        assert all(map(torch.equal, logits(stage, checkpoint, tiny_head), wanted))
    budget = _least_budget(checkpoint, units, 0, source=nothing)
    streamed = load(checkpoint, units, budget=budget, prefetched=0, source=nothing)
    assert streamed.parameter_bytes == plain.parameter_bytes
    store = streamed.weights.filled.store
    # tests/agent/model/test_expert_store.py is about these
    if streamed.weights.filled.experts is not None:
        assert all(map(torch.equal, logits(streamed, checkpoint, tiny_head), wanted))
    elif _layer_count(checkpoint) > 1:
        assert store is not None
        assert all(map(torch.equal, logits(streamed, checkpoint, tiny_head), wanted))
        assert store.counts.layers_read >= len(SPANS) * _layer_count(checkpoint)
    streamed.release()


@pytest.mark.parametrize(
    ("dtype", "quantisation", "variant", "prefetched"),
    one_in(
        5,
        product(
            [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16],
            [None, Quantisation.INT8, Quantisation.INT4_HEAD_INT4],
            ["llama-plain", "qwen3_moe-sparse-step"],
            [0, 1],
        ),
    ),
)
def test_bits_in_all_dtypes(
    checkpoint: Any,
    tiny_head: Any,
    tmp_path: Path,
    dtype: DType,
    quantisation: Quantisation | None,
    prefetched: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if dtype is DType.FLOAT16:
        if quantisation is not None:
            pytest.skip("kernels of small integers take float32 and bfloat16")
        # its matrices are plain tensors
        monkeypatch.setattr(units_module, "SMALL_TENSOR_BYTES", 256)
    options: dict[str, Any] = {"dtype": dtype, "quantisation": quantisation}
    wanted = list(logits(load(checkpoint, None, **options), checkpoint, tiny_head))
    units = _packed(tmp_path)
    least = _least_budget(checkpoint, units, prefetched, **options)
    for budget in (least, least + 1000, None):
        stage = load(checkpoint, units, budget=budget, prefetched=prefetched, **options)
        assert (stage.weights.filled.store is None) == (budget is None)
        assert all(map(torch.equal, logits(stage, checkpoint, tiny_head), wanted))
        stage.release()


@pytest.mark.parametrize("variant", ["llama-plain"])
@pytest.mark.parametrize("native_rows", [attention_module.MOST_NATIVE_ROWS, 8, 0])
def test_a_sweep_reads_once_and_gives_what_its_steps_give(
    checkpoint: Any,
    tiny_head: Any,
    tmp_path: Path,
    native_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # In one native call for all, in several with other steps between, and in none.
    monkeypatch.setattr(attention_module, "MOST_NATIVE_ROWS", native_rows)
    units = _packed(tmp_path)
    plain = load(checkpoint, None)
    streamed = load(checkpoint, units, budget=_least_budget(checkpoint, units, 1), prefetched=1)
    store = streamed.weights.filled.store
    assert store is not None
    # The steps of one sweep, in order: two chunks of one prompt, another prompt, and a decode after
    # both.
    wanted: list[StageOutput] = []
    swept: list[StageOutput] = []
    behind: list[torch.Tensor] = []
    for stage, seen in ((plain, wanted), (streamed, swept)):
        head = tiny_head([stage], checkpoint.sequences)
        steps = [head.plan(spans) for spans in (((0, 9),), ((0, 4),), ((1, 12),), ((0, 1), (1, 1)))]
        inputs = [head.inputs(step) for step in steps]
        if stage is plain:
            seen.extend(stage.execute(*step) for step in zip(steps, inputs, strict=True))
        else:
            before = store.counts.layers_read
            outputs = stage.execute_sweep(list(zip(steps, inputs, strict=True)))
            seen.extend(outputs)
            round_of_layers = store.streamed_bytes // (
                store.counts.bytes_read // store.counts.layers_read
            )
            assert store.counts.layers_read - before <= round_of_layers + 2, (
                "read ahead of the next sweep"
            )
        behind.extend(head.step([(request, 1)])[request] for request in (0, 1))
    assert torch.equal(behind[0], behind[2])
    assert torch.equal(behind[1], behind[3])
    assert [output.result.tokens for output in swept] == [output.result.tokens for output in wanted]
    freed = head.plan(((2, 3),))
    steps = [(freed, head.inputs(freed)), (StepPlan(frees=(2,)), None)]
    assert len(streamed.execute_sweep(steps)) == 1, (
        "a step that frees a request of the sweep waits for the next"
    )
    assert streamed.execute(StepPlan(frees=(2,))).result.tokens == ()
    streamed.release()


@pytest.mark.parametrize("variant", ["llama-plain"])
def test_reads_are_told_while_somebody_observes_them(
    checkpoint: Any, tiny_head: Any, tmp_path: Path
) -> None:
    units = _packed(tmp_path)
    streamed = load(checkpoint, units, budget=_least_budget(checkpoint, units, 1), prefetched=1)
    store = streamed.weights.filled.store
    assert store is not None
    recorder = StepRecorder(SystemClock())
    streamed.observe_reads(recorder)
    head = tiny_head([streamed], checkpoint.sequences)
    began = time.monotonic()
    for spans in SPANS:
        head.step(spans)
    streamed.observe_reads(None)
    reads = recorder.reads
    streamed_layers = {read.layer for read in reads}
    assert len(reads) >= 2 * len(streamed_layers) and all(
        store.streams(layer) for layer in streamed_layers
    )
    assert all(began - 60 < read.began_s <= read.ended_s for read in reads)
    assert [a.ended_s <= b.began_s for a, b in pairwise(reads)] == [True] * (len(reads) - 1), (
        "one at a time"
    )
    each = store.streamed_bytes // len({layer for layer in range(64) if store.streams(layer)})
    assert {read.size_bytes for read in reads} == {each}
    streamed.release()


@pytest.mark.parametrize("variant", ["llama-plain"])
def test_a_damaged_or_vanished_file_is_named_and_made_again(
    checkpoint: Any, tmp_path: Path, tiny_head: Any
) -> None:
    units = _packed(tmp_path)
    wanted = list(logits(load(checkpoint, units), checkpoint, tiny_head))
    for damage in (_flip_last, _cut_last, _flip_first, lambda path: path.unlink()):
        files = sorted((tmp_path / "packed").iterdir())
        damage(files[0])
        if files[0].exists():
            with pytest.raises(DataLossError) as named:
                load(checkpoint, units)
            assert named.value.reason == "PACKED_DAMAGED" and files[0].name in named.value.message
            assert not files[0].exists()
        again = load(checkpoint, units)
        assert files[0].exists()
        assert all(map(torch.equal, logits(again, checkpoint, tiny_head), wanted))


def _flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-4000] ^= 1
    path.write_bytes(data)


def _flip_first(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)


def _cut_last(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4096])


@pytest.mark.parametrize("variant", ["llama-plain"])
def test_without_room_a_stage_loads_and_packs_nothing(checkpoint: Any, tmp_path: Path) -> None:
    units = PackedUnits(tmp_path / "packed", lambda: 0)
    load(checkpoint, units)
    assert units.files() == []
    with pytest.raises(ResourceExhaustedError, match="the disk has no room to pack layer-0"):
        load(checkpoint, units, budget=_least_budget(checkpoint, units, 0), prefetched=0)


@pytest.mark.parametrize("variant", ["llama-plain", "qwen3_moe-sparse-step"])
def test_packing_what_streams_leaves_nothing_of_it_in_memory(
    checkpoint: Any, tmp_path: Path, tiny_head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor of a few bytes would hold the chunk in which its layer was packed, and all chunks
    are the model."""
    taken, mapping = list[tuple[weakref.ref[Any], int]](), huge_pages._mapping

    def noting(size: int) -> Any:
        memory, start = mapping(size)
        taken.append((weakref.ref(memory), size))
        return memory, start

    units = _packed(tmp_path)
    budget = _least_budget(checkpoint, units, 0)
    wanted = list(logits(load(checkpoint, None), checkpoint, tiny_head))
    monkeypatch.setattr(huge_pages, "_mapping", noting)
    held = []
    for _ in ("packed now", "packed already"):
        for arena in (huge_pages.WEIGHTS, huge_pages.SMALL_WEIGHTS):
            monkeypatch.setattr(arena, "_chunk_bytes", 32 << 10)
            arena.part()
        taken.clear()
        stage = load(checkpoint, units, budget=budget, prefetched=0)
        gc.collect()
        held.append(sum(size for memory, size in taken if memory() is not None))
        assert all(map(torch.equal, logits(stage, checkpoint, tiny_head), wanted))
        stage.release()
    assert held[0] <= held[1] + (32 << 10)


@pytest.mark.parametrize("variant", ["llama-plain", "qwen3_moe-sparse-step"])
def test_what_is_done_is_told_while_a_stage_is_packed_and_while_it_is_read(
    checkpoint: Any, tmp_path: Path
) -> None:
    units = _packed(tmp_path)
    packed, read = list[StageFilling](), list[StageFilling]()
    load(checkpoint, units, progress=packed.append)
    load(checkpoint, units, progress=read.append)
    for said, work in ((packed, WeightLoadingWork.PACKING), (read, WeightLoadingWork.READING)):
        assert {filling.work for filling in said} == {work}
        done = [filling.done_bytes for filling in said]
        assert done[0] == 0 and done == sorted(done) and done[-1] == said[-1].total_bytes > 0
        assert len(set(done)) >= _layer_count(checkpoint), "each unit counts when it is done"
        assert said[-1].left_s == 0.0 and any(filling.left_s for filling in said)
