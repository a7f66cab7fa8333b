"""Experts on the disk with a cache: the bits of the plain engine at any budget, and one read each
in a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgeshard_agent.engine.recording import StepRecorder
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.blocks import ExpertModules
from edgeshard_agent.model.projection import Projection
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.expert_store import ExpertStore
from edgeshard_agent.model.weights.weight_loading import Packing
from edgeshard_agent.model.weights.weights import StageWeights
from edgeshard_agent.ops.native import native_available
from edgeshard_agent.store.packed_units import PackedUnits

from bench.training.expert_learning import learn
from edgeshard.architectures import EXPERT_WIDTHS
from edgeshard.domain.errors import DataLossError
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.models.residency import in_disk_blocks
from edgeshard.domain.nodes.device import StageFilling
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan
from edgeshard.process.clock import SystemClock
from tests.agent.model.test_bits import CONFIGS, LAYERS, VOCAB, RandomWeights
from tests.support.packing import chosen_sources

pytestmark = pytest.mark.skipif(
    not native_available(), reason="packed files are for native kernels"
)
PLAIN = CONFIGS["qwen3_moe"]
EXPERTS = 8
MIXED = PLAIN | {EXPERT_WIDTHS: ["24824448", "22222222", "88888888", "44444442"]}
OLMOE = CONFIGS["llama"] | {"model_type": "olmoe", "num_experts": EXPERTS, "num_experts_per_tok": 2}
"""In transformers' layers."""
MINIMAX = CONFIGS["llama"] | {
    "model_type": "minimax_m2",
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    EXPERT_WIDTHS: MIXED[EXPERT_WIDTHS],
}
TOKENS = np.random.default_rng(4).integers(0, VOCAB, 60)
TABLE = learn(
    np.random.default_rng(0).integers(0, EXPERTS, (200, LAYERS, 2)).astype(np.int16), EXPERTS
).values()
MODEL = Digest("6" * 64)


def load(
    config: dict[str, Any],
    kept: PackedUnits | None,
    quantisation: Quantisation | None = None,
    budget: int | None = None,
    expert_table: Any = None,
    **options: Any,
) -> StageModel:
    packing = None
    if kept is not None:
        sources = chosen_sources(
            kept, MODEL, config, LayerRange(0, LAYERS), DType.BFLOAT16, quantisation
        )
        packing = Packing(sources, budget, expert_table=expert_table)
    return StageModel.with_kv(
        StageWeights.load(
            RandomWeights({key: value for key, value in config.items() if key != EXPERT_WIDTHS}),
            config,
            LayerRange(0, LAYERS),
            dtype=DType.BFLOAT16,
            device="cpu",
            quantisation=quantisation,
            packing=packing,
            **options,
        ),
        KvMemory(DType.BFLOAT16, 8, 16),
    )


def units(path: Path) -> PackedUnits:
    path.mkdir(exist_ok=True)
    return PackedUnits(path)


def steps(stage: StageModel) -> list[torch.Tensor]:
    """The logits of a prompt of 40 tokens and of 20 tokens that follow one by one."""
    grant, found = KvGrant(0, 0, tuple(range(4))), []
    for first, end in ((0, 40), *((at, at + 1) for at in range(40, 60))):
        sampling = None if first else Sampling()
        plan = StepPlan(
            grants=() if first else (grant,),
            spans=(Span(0, first, end - first, sampling=sampling),),
        )
        found.append(stage.logits(plan, TOKENS[first:end]))
    return found


def budget_of(plain: StageModel, share: float) -> int:
    """Bytes of everything except experts, of two experts, and of a fraction of the others."""
    modules = plain.weights.modules
    sizes = [
        sum(part.packed_bytes for part in expert.modules() if isinstance(part, Projection))
        for experts in modules.modules()
        if isinstance(experts, ExpertModules)
        for expert in experts
    ]
    rounded = [in_disk_blocks(size) for size in sizes]
    return (
        plain.parameter_bytes
        - sum(sizes)
        + 2 * max(rounded)
        + int(share * (sum(rounded) - 2 * max(rounded)))
    )


def store_of(stage: StageModel) -> ExpertStore:
    assert stage.weights.filled.experts is not None
    return stage.weights.filled.experts


@pytest.mark.parametrize(
    ("config", "quantisation"),
    [
        (PLAIN, None),
        (PLAIN, Quantisation.INT8),
        (MIXED, Quantisation.INT4),
        (OLMOE, None),
        (CONFIGS["gpt_oss"], Quantisation.INT4),
        (MINIMAX, Quantisation.INT8),
    ],
)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("table", [None, TABLE], ids=["even", "table"])
@pytest.mark.one_in(3)
def test_bits_are_those_of_the_plain_engine(
    config: dict[str, Any],
    quantisation: Quantisation | None,
    share: float,
    table: Any,
    tmp_path: Path,
) -> None:
    plain = load(config, None, quantisation)
    budget = budget_of(plain, share)
    stage = load(
        config, units(tmp_path / "packed"), quantisation, budget=budget, expert_table=table
    )
    store = store_of(stage)
    most, waited = 0, store._wait

    def noting(expert: tuple[int, int]) -> None:
        nonlocal most
        waited(expert)
        most = max(most, store.memory_bytes)

    store._wait = noting  # type: ignore[method-assign]
    for found, wanted in zip(steps(stage), steps(plain), strict=True):
        assert torch.equal(found, wanted)
    experts = sum(unit.large_bytes for group in store.units for unit in group)
    assert most <= budget - (plain.parameter_bytes - experts), (
        "peak memory is non-experts and budget"
    )
    assert store.cache.counts.needed > LAYERS * 40
    stage.weights.close()


def test_a_prompt_reads_each_expert_once_in_a_layer(tmp_path: Path) -> None:
    least = budget_of(load(PLAIN, None), 0.0)
    stage = load(PLAIN, units(tmp_path / "packed"), budget=least)
    store = store_of(stage)
    reads: list[tuple[int, int]] = []
    for layer, group in enumerate(store.units):
        for expert, unit in enumerate(group):
            real = unit.file.read_large

            def noting(
                *args: Any, real: Any = real, key: tuple[int, int] = (layer, expert), **options: Any
            ) -> None:
                reads.append(key)
                real(*args, **options)

            object.__setattr__(unit.file, "read_large", noting)
    steps(stage)[0]
    first = reads[: len(set(reads))]
    assert len(first) == len(set(first)) <= LAYERS * EXPERTS
    stage.weights.close()


def test_all_of_them_fit_and_nothing_is_cached(tmp_path: Path) -> None:
    plain = load(PLAIN, None)
    stage = load(PLAIN, units(tmp_path / "packed"), budget=2 * plain.parameter_bytes)
    assert stage.weights.filled.experts is None
    for found, wanted in zip(steps(stage), steps(plain), strict=True):
        assert torch.equal(found, wanted)


def test_a_damaged_expert_ends_the_step(tmp_path: Path) -> None:
    least = budget_of(load(PLAIN, None), 0.0)
    stage = load(PLAIN, units(tmp_path / "packed"), budget=least)
    for path in (tmp_path / "packed").glob("*expert*"):
        data = bytearray(path.read_bytes())
        data[-1000:] = bytes(1000)
        path.write_bytes(data)
    assert not stage.is_damaged
    with pytest.raises(DataLossError):
        steps(stage)
    assert stage.is_damaged, "the next epoch loads it anew"
    stage.weights.close()


def test_what_the_cache_does_is_told(tmp_path: Path) -> None:
    plain = load(PLAIN, None)
    assert plain.experts is None and plain.streaming is None
    budget = budget_of(plain, 0.5)
    stage = load(PLAIN, units(tmp_path / "packed"), budget=budget)
    store = store_of(stage)
    each = [unit.large_bytes for group in store.units for unit in group]
    began = stage.experts
    assert began is not None and stage.streaming is None
    assert (began.cached_bytes, began.hits, began.misses, began.read_bytes, began.hit_rate) == (
        0,
        0,
        0,
        0,
        0.0,
    )
    assert began.total_bytes == sum(each) and max(each) <= began.room_bytes == budget - (
        plain.parameter_bytes - sum(each)
    ) - max(each)
    recorder = StepRecorder(SystemClock())
    stage.observe_reads(recorder)
    steps(stage)
    stage.observe_reads(None)
    told, counts = stage.experts, store.cache.counts
    assert (
        told is not None and told.hits == counts.hits and told.hits + told.misses == counts.needed
    )
    assert told.hits > 0 < told.misses and told.hit_rate == counts.hit_rate
    assert 0 < told.cached_bytes <= told.room_bytes and told.waited_s > 0.0
    reads = recorder.reads
    assert sum(read.size_bytes for read in reads) == told.read_bytes == told.misses * each[0], (
        "each miss is a read"
    )
    assert {read.layer for read in reads} == set(range(LAYERS))
    assert {read.expert for read in reads} <= set(range(EXPERTS)) and len(reads) > EXPERTS
    stage.weights.close()


def test_loading_counts_experts_once_however_they_come(tmp_path: Path) -> None:
    """From tensors and from packed files, with and without a cache: the same bytes, except for the
    files' padding."""
    plain, kept = load(PLAIN, None), units(tmp_path / "packed")
    budget = budget_of(plain, 0.0)
    for _ in range(2):
        said: list[StageFilling] = []
        stage = load(PLAIN, kept, budget=budget, progress=said.append)
        told = [filling.done_bytes for filling in said]
        assert (
            told == sorted(told)
            and plain.parameter_bytes <= told[-1] <= 1.1 * plain.parameter_bytes
        )
        assert stage.parameter_bytes == plain.parameter_bytes
        stage.weights.close()
