"""Real measurements of small things: that they are there, positive, in proportion, and not of a
warm cache."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgeshard_agent.measuring.compute import BlockSort, Profiler, block_sorts, fingerprint
from edgeshard_agent.measuring.facts import read_facts
from edgeshard_agent.measuring.overhead import measure_overhead
from edgeshard_agent.measuring.rotation import (
    CACHE_FALLBACK_BYTES,
    BlockRotation,
    LayerForm,
    cache_bytes,
    copies_needed,
)
from edgeshard_agent.measuring.stopwatch import CpuQuota, Stopwatch, is_steady, summarise
from edgeshard_agent.model.library import library_config
from edgeshard_agent.model.modules import weight_bytes
from edgeshard_agent.model.projection import Projection
from edgeshard_agent.ops.native import native_available

from edgeshard.architectures import expected_tensors, read_config
from edgeshard.domain.errors import InvalidArgumentError, ResourceExhaustedError
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import Part, attended_pairs
from edgeshard.domain.nodes.profile import ComputeProfile, Effort, LayerKind, LayerProfile, Sample
from edgeshard.planning.inputs.shapes import model_from_config
from edgeshard.profiles.fit import fit_layer, fit_profile
from edgeshard.profiles.grid import FIRST_GRID, FULL_GRID, QUICK_GRID, Grid, Repeats
from edgeshard.profiles.report import parse_profile, profile_text
from tests.agent.model.families import LAYERS, VARIANTS

pytestmark = pytest.mark.timing

torch.set_num_threads(1)

# Points so far apart that a busy machine does not change their order.
ROUGH = Grid((1, 64, 512), (0, 64), (1, 64), (16, 512), Repeats(2, 3, 8, 0.05))
CACHE = 1 << 20
MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "mlp_only_layers": [0, 2],
}
GEMMA = {
    "model_type": "gemma3_text",
    "head_dim": 16,
    "sliding_window": 32,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    """Wide enough that arithmetic is more than overhead."""
    return {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 80,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


@pytest.fixture(scope="module")
def measured(config: dict[str, Any]) -> tuple[ComputeProfile, float, list[tuple[str, int, int]]]:
    told: list[tuple[str, int, int]] = []
    began = time.process_time()
    form = LayerForm(config, DType.FLOAT32, "cpu")
    profiler = Profiler(
        form, 1, ROUGH, cache=CACHE, progress=lambda *news: told.append((news[0], *news[1:]))
    )
    return profiler.run(), time.process_time() - began, told


def test_a_measurement_is_short_positive_and_tells_its_progress(
    measured: tuple[ComputeProfile, float, list[tuple[str, int, int]]], config: dict[str, Any]
) -> None:
    profile, seconds, told = measured
    assert seconds < 20  # of a core: about 2 s
    for layer in profile.layers:
        assert all(
            sample.seconds > 0 and sample.repeats >= 2 for sample in layer.prefill + layer.decode
        )
    assert [layer.kind for layer in profile.layers] == [
        LayerKind.EMBEDDING,
        LayerKind.BLOCK,
        LayerKind.HEAD,
    ]
    spec = model_from_config("small", config)
    assert [layer.parameters for layer in profile.layers] == [
        spec.embedding_parameters,
        spec.blocks[0].parameters,
        spec.head_parameters,
    ]
    assert profile.layers[1].layers == 80
    assert 0 < profile.step_overhead_s < 0.1
    assert 0 < profile.memory.daemon_bytes < profile.memory.total_bytes
    done = [news[1] for news in told]
    assert done == list(range(len(done))) and told[-1][2] == len(told)
    assert parse_profile(ComputeProfile, profile_text(profile)) == profile


def test_more_work_takes_longer(
    measured: tuple[ComputeProfile, float, list[tuple[str, int, int]]],
) -> None:
    block = fit_profile(measured[0]).of_kind(LayerKind.BLOCK)[0]
    times = [block.prefill_s(tokens, 0) for tokens in (1, 64, 512)]
    assert times[0] < times[1] < times[2]
    assert block.decode_s(1, 64) < block.decode_s(64, 64)
    assert block.prefill_s(512, 64) > block.prefill_s(64, 64)


def test_copies_outweigh_the_caches(
    measured: tuple[ComputeProfile, float, list[tuple[str, int, int]]],
) -> None:
    for layer in measured[0].layers:
        assert layer.rotated_bytes > FULL_GRID.caches * CACHE


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize(
    "row",
    [
        "nemotron_h-groups",
        "nemotron_h-latent",
        "bamba-partial",
        "falcon_h1-bare",
        "mamba2-tied",
        "qwen3_5-text",
    ],
)
def test_layers_that_keep_states_or_nothing_are_measured(row: str, dtype: DType) -> None:
    values = json.loads(VARIANTS[row].library_config().to_json_string(use_diff=False))
    grid = Grid((1, 8), (0, 16), (1, 2), (16, 32), Repeats(1, 1, 1, 0.01))
    profile = Profiler(LayerForm(values, dtype, "cpu"), 1, grid, cache=1 << 10).run()
    blocks = {block.parameters for block in model_from_config("tiny", values).blocks}
    assert {layer.parameters for layer in profile.layers[1:-1]} == blocks
    assert sum(layer.layers for layer in profile.layers[1:-1]) == LAYERS


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1, 3 << 20, 127 << 20, 128 << 20, 1 << 30])
def test_copies_are_enough_and_not_one_more(size: int) -> None:
    copies = copies_needed(size, 128 << 20)
    assert copies * size > 128 << 20
    assert copies == 1 or (copies - 1) * size <= 128 << 20


@pytest.mark.parametrize("tokens", [1, 3], ids=["decode", "prefill"])
def test_a_rotation_holds_copies_of_their_own_and_uses_them_in_turn(
    tiny_config: dict[str, Any], tokens: int
) -> None:
    rotation = BlockRotation(LayerForm(tiny_config, DType.FLOAT32, "cpu"), 3, 3, 64)
    weights = [block.mlp.gate_up.packed for block in rotation._blocks]
    assert len({id(weight) for weight in weights}) == 3
    stored = sum(weight_bytes(block) for block in rotation._blocks)
    assert rotation.rotated_bytes == stored == 3 * 4 * sorts_of(tiny_config)[0].parameters
    keys = [rotation.pool.arena(index).keys for index in range(3)]
    for expected in ({0, 1}, {2, 0}):
        for each in keys:
            each.zero_()
        rotation.turn(2)
        output = rotation.run(rotation.step(2, tokens, 20))
        assert output.shape == (1, 2 * tokens, 64) and torch.isfinite(output).all()
        assert {index for index, each in enumerate(keys) if each.any()} == expected, (
            "who wrote its keys has run"
        )


def test_a_rotation_keeps_what_differs_by_layer_type(tiny_config: dict[str, Any]) -> None:
    config = tiny_config | GEMMA
    rotation = BlockRotation(LayerForm(config, DType.FLOAT32, "cpu"), 0, 3, 64)
    for count in (1, 3, 2):
        rotation.turn(count)
        assert torch.isfinite(rotation.run(rotation.step(2, 1, 20))).all()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "quantisation", [Quantisation.INT4, Quantisation.INT8_HEAD_INT4, Quantisation.INT4_HEAD_WHOLE]
)
def test_quantised_layers_are_measured_as_a_stage_holds_them(
    tiny_config: dict[str, Any], quantisation: Quantisation, tied: bool
) -> None:
    small = Grid((1, 16), (0,), (1, 2), (8,), Repeats(1, 1, 1, 0.0))
    config = tiny_config | {"tie_word_embeddings": tied}
    model = model_from_config("tiny", config)
    profile = Profiler(
        LayerForm(config, DType.BFLOAT16, "cpu", quantisation), 1, small, cache=1
    ).run()
    embedding, block, head = profile.layers
    assert profile.quantisation is quantisation
    assert block.rotated_bytes == model.blocks[0].weight_bytes(DType.BFLOAT16, quantisation)
    assert head.rotated_bytes == model.head_bytes(DType.BFLOAT16, quantisation)
    assert embedding.rotated_bytes == 2 * model.embedding_parameters, "rows of it are looked up"
    assert block.parameters == model.blocks[0].parameters


def test_what_cannot_run_quantised_is_not_measured_so(tiny_config: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        Profiler(LayerForm(tiny_config, DType.BFLOAT16, "meta", Quantisation.INT8), 1).run()
    assert refusal.value.field == "quantisation" and "CPU" in refusal.value.message


def test_little_memory_means_fewer_copies_and_too_little_is_an_error(
    tiny_config: dict[str, Any],
) -> None:
    small = Grid((1, 40), (0, 8), (1, 2), (40,), Repeats(1, 1, 1, 0.0))

    def rotated(limit: int | None) -> int:
        form = LayerForm(tiny_config | {"num_hidden_layers": 40}, DType.FLOAT32, "cpu")
        return (
            Profiler(form, 1, small, cache=CACHE, memory_limit_bytes=limit)
            .run()
            .layers[1]
            .rotated_bytes
        )

    layer = 4 * sorts_of(tiny_config)[0].parameters
    assert layer <= rotated(1 << 20) < 1 << 20 < rotated(None)
    with pytest.raises(ResourceExhaustedError) as refusal:
        rotated(layer)
    assert refusal.value.reason == "NO_MEMORY_TO_MEASURE"


def test_cache_sizes_are_read_and_guessed_when_they_are_not_there(tmp_path: Path) -> None:
    for index, text in enumerate(("32K", "1024K\n", "24M", "nonsense")):
        folder = tmp_path / f"cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(text)
    assert cache_bytes("cpu", tmp_path) == 24 << 20
    assert cache_bytes("cpu", tmp_path / "nothing") == CACHE_FALLBACK_BYTES


def sorts_of(config: dict[str, Any]) -> tuple[BlockSort, ...]:
    return block_sorts(model_from_config("sorts", config))


def test_sorts_of_blocks_are_told_apart(tiny_config: dict[str, Any]) -> None:
    dense, sparse = sorts_of(tiny_config | MOE)
    assert (dense.kind, dense.layers, sparse.kind, sparse.layers) == (
        LayerKind.BLOCK,
        2,
        LayerKind.MOE_BLOCK,
        4,
    )
    blocks = model_from_config("moe", tiny_config | MOE).blocks
    assert {dense.parameters, sparse.parameters} == {block.parameters for block in blocks}
    sliding, full = sorts_of(tiny_config | GEMMA)
    assert (sliding.window, sliding.layers, full.window, full.layers) == (32, 5, 0, 1)


@pytest.mark.parametrize(
    "family",
    [
        {"model_type": "mistral"},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mixtral", "sliding_window": 64, "num_local_experts": 2},
        {"model_type": "qwen2", "sliding_window": 64},
        {
            "model_type": "qwen2",
            "sliding_window": 64,
            "use_sliding_window": True,
            "max_window_layers": 2,
        },
        {"model_type": "qwen3", "sliding_window": 64, "use_sliding_window": True},
        MOE | {"use_sliding_window": True},
        GEMMA,
        {"model_type": "gemma3_text", "sliding_window_pattern": 3, "tie_word_embeddings": True},
    ],
    ids=str,
)
def test_the_windows_are_those_that_transformers_reads(
    tiny_config: dict[str, Any], family: dict[str, Any]
) -> None:
    config = tiny_config | {"head_dim": 16} | family
    library = library_config(read_config(config))
    window = int(getattr(library, "sliding_window", None) or 0)
    types = (
        getattr(library, "layer_types", None) or ["sliding_attention"] * library.num_hidden_layers
    )
    blocks = model_from_config("windows", config).blocks
    assert [block.window for block in blocks] == [
        window if kind == "sliding_attention" else 0 for kind in types
    ]
    for sort in sorts_of(config):
        assert blocks[sort.first].window == sort.window
        assert (
            sum((b.window, b.parameters) == (sort.window, sort.parameters) for b in blocks)
            == sort.layers
        )


PLUGGED = MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 32}


@pytest.mark.parametrize("family", [MOE, GEMMA, PLUGGED], ids=["moe", "gemma3", "plugged"])
def test_every_sort_is_measured(tiny_config: dict[str, Any], family: dict[str, Any]) -> None:
    small = Grid((1, 40), (0, 8), (1, 2), (40,), Repeats(1, 1, 1, 0.0))
    config = tiny_config | family
    profile = Profiler(LayerForm(config, DType.BFLOAT16, "cpu"), 1, small, cache=1 << 10).run()
    middle = profile.layers[1:-1]
    assert [layer.kind for layer in middle] == [sort.kind for sort in sorts_of(config)]
    sizes = dict.fromkeys(Part, 0)
    for tensor in expected_tensors(config).values():
        if isinstance(tensor.unit, Part):
            sizes[tensor.unit] += math.prod(tensor.shape)
    embedding, head = sizes[Part.EMBEDDING] + sizes[Part.TIED], sizes[Part.HEAD] + sizes[Part.TIED]
    assert (profile.layers[0].parameters, profile.layers[-1].parameters) == (embedding, head), (
        "a tied one is in both"
    )


def test_a_short_context_bounds_what_is_measured(tiny_config: dict[str, Any]) -> None:
    grid = Grid().within(100)
    assert max(grid.prefill_tokens) == 64 and grid.decode_contexts == (64,)
    assert all(tokens + context <= 100 for tokens, context in grid.prefill_points(100))
    assert Grid().within(20).decode_contexts == (19,)


@pytest.mark.parametrize(
    ("max_context", "deepest"), [(8192, 2048), (2304, 2048), (2000, 1744), (768, 512), (600, 64)]
)
def test_one_prefill_lies_deep_in_a_prompt_where_the_context_allows(
    max_context: int, deepest: int
) -> None:
    grid = FULL_GRID.within(max_context)
    points = grid.prefill_points(max_context)
    assert max(context for tokens, context in points if tokens == 256) == deepest
    assert all(tokens + context <= max_context for tokens, context in points)
    assert len(set(points)) == len(points)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("grid", [FIRST_GRID, QUICK_GRID, FULL_GRID])
def test_what_attention_takes_far_into_a_prompt_shows_through_noise(grid: Grid, seed: int) -> None:
    """As on a processor's core: without a prefill deep in a prompt, 4 % of a figure would be
    attention's."""
    chance = np.random.default_rng(seed)

    def true(tokens: int, context: int) -> float:
        return 1e-3 + 1.2e-4 * tokens + 2.7e-8 * attended_pairs(tokens, context)

    prefill = tuple(
        Sample(n, c, true(n, c) * (1 + chance.uniform(-0.03, 0.03)))
        for n, c in grid.prefill_points(8192)
    )
    layer = LayerProfile(LayerKind.BLOCK, 1, 1, 0, 1, prefill, (Sample(1, 64, 1e-3),))
    fit = fit_layer(layer)
    assert fit.prefill_s(256, 3840) == pytest.approx(true(256, 3840), rel=0.12)


def test_a_node_without_its_kernels_is_another_node(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native_available():
        pytest.skip("no native kernels were built here")
    facts = read_facts("cpu", None)
    assert len(facts.bits_fingerprint) == 16
    with_kernels = fingerprint(facts, 1)
    monkeypatch.setenv("EDGESHARD_NATIVE_OPS", "0")
    assert fingerprint(facts, 1) != with_kernels
    assert read_facts("cpu", None).bits_fingerprint == ""


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
@pytest.mark.parametrize("quantisation", [None, Quantisation.INT8])
@pytest.mark.parametrize("kernels", ["1", "0"])
def test_copies_of_a_layer_compute_the_same_in_memory_of_their_own(
    tiny_config: dict[str, Any],
    dtype: DType,
    quantisation: Quantisation | None,
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDGESHARD_NATIVE_OPS", kernels)
    if quantisation is not None and dtype is DType.FLOAT16:
        pytest.skip("float16 has no integers")
    form = LayerForm(tiny_config, dtype, "cpu", quantisation)
    rotation = BlockRotation(form, 0, 3, 64)
    assert rotation.rotated_bytes == 3 * weight_bytes(rotation._blocks[0])
    places, results = set(), []
    with torch.inference_mode():
        for _ in range(3):
            rotation.turn(1)
            modules: Any = rotation.modules
            (block,) = modules._ordered
            held = [
                part.packed
                for part in block.modules()
                if isinstance(part, Projection) and part.packed is not None
            ]
            memory = [one.packed_memory for one in held] if kernels == "1" else []
            tensors = [*(one for one in memory if one is not None), *block.parameters()]
            assert not any(tensor.is_meta for tensor in tensors)
            places |= {tensor.data_ptr() for tensor in tensors}
            count = len(tensors)
            results.append(rotation.run(rotation.step(1, 8, 0)))
    assert len(places) == 3 * count
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_a_first_measurement_makes_few_copies_and_a_short_embedding(
    tiny_config: dict[str, Any],
) -> None:
    config = tiny_config | {"vocab_size": 50_000}
    model = model_from_config("words", config)
    found = Profiler(LayerForm(config, DType.BFLOAT16, "cpu"), 1, FIRST_GRID, cache=1 << 10).run()
    embedding, block, head = found.layers
    assert (found.effort, found.energy, found.overhead.seconds_per_byte) == (
        Effort.FIRST,
        None,
        0.0,
    )
    assert (embedding.parameters, head.parameters) == (
        model.embedding_parameters,
        model.head_parameters,
    )
    assert embedding.rotated_bytes < head.rotated_bytes
    limit = model.shape.max_context
    assert [(s.count, s.context) for s in block.prefill] == FIRST_GRID.prefill_points(limit)
    assert [(s.count, s.context) for s in block.decode] == FIRST_GRID.decode_points(limit)


@pytest.mark.timing
def test_the_overhead_of_a_step_is_small_and_leaves_the_layer_out(config: dict[str, Any]) -> None:
    big = config | {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
    form = LayerForm(big, DType.FLOAT32, "cpu")
    rotation = BlockRotation(form, 0, 1, 600)
    # Other work of the machine may double either of them, but not each time.
    for _ in range(8):
        overhead = measure_overhead(form, 0, CpuQuota())
        with torch.inference_mode():
            step = rotation.step(1, 1, 0)
            layer = min(Stopwatch("cpu").once(partial(rotation.run, step)) for _ in range(3))
        if overhead.seconds < layer:
            break
    assert 0 < overhead.seconds < layer
    assert overhead.seconds_per_byte >= 0


def test_repeats_end_when_the_median_is_known() -> None:
    assert summarise([1.0, 1.1, 0.9, 1.0, 5.0]).seconds == 1.0
    assert summarise([1.0, 1.1, 0.9, 1.0, 5.0]).spread == pytest.approx(0.1)
    assert not is_steady([1.0] * 4) and is_steady([1.0] * 5)
    assert not is_steady([1.0, 2.0, 3.0, 4.0, 5.0])
    calls: list[int] = []
    Stopwatch("cpu").collect(lambda: calls.append(1), Repeats(1, 3, 7, 0.0))
    assert len(calls) == 3


def test_time_without_a_core_is_noticed() -> None:
    waiting, busy = Stopwatch("cpu"), [Stopwatch("cpu") for _ in range(20)]
    waiting.once(lambda: threading.Event().wait(0.1))
    for each in busy:  # a busy machine takes the core from some of them
        each.once(lambda: sum(range(200_000)))
    assert max(each.processor_share for each in busy) > 2 * waiting.processor_share
    assert waiting.processor_share < 0.5


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "edgeshard_agent.measuring", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.long
def test_the_command_measures_once_and_then_remembers(
    tiny_config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config))
    options = (
        "--config",
        str(tmp_path),
        "--threads",
        "1",
        "--quick",
        "--state-dir",
        str(tmp_path),
        "--json",
    )
    first, second = command(*options), command(*options)
    assert first.returncode == second.returncode == 0, first.stderr
    assert parse_profile(ComputeProfile, first.stdout) == parse_profile(
        ComputeProfile, second.stdout
    )
    assert len(list((tmp_path / "profiles").iterdir())) == 1


def test_the_command_names_what_is_wrong(tiny_config: dict[str, Any], tmp_path: Path) -> None:
    missing = command("--config", str(tmp_path / "nothing.json"))
    assert (
        missing.returncode == 2
        and "nothing.json" in missing.stderr
        and "Traceback" not in missing.stderr
    )
    (tmp_path / "config.json").write_text(json.dumps(tiny_config | {"hidden_size": -1}))
    wrong = command("--config", str(tmp_path))
    assert wrong.returncode == 2 and "hidden_size" in wrong.stderr


def test_a_quota_makes_short_calls_as_long_as_many_in_a_row_are() -> None:
    half = CpuQuota(0.5, 1)
    assert half.share == 0.5
    assert half.sustained_s(0.001, 0.001) == 0.002
    assert half.sustained_s(0.2, 0.1) == 0.2, "the kernel stopped it meanwhile"
    assert half.sustained_s(0.2, 0.001) == 0.2, "it waited"
    assert CpuQuota(1.5, 2).share == 0.75
    assert CpuQuota(4.0, 2).share == 1.0
    assert (CpuQuota(0.0, 4).share, CpuQuota(0.0, 4).sustained_s(0.001, 0.004)) == (1.0, 0.001)


@pytest.mark.timing
def test_a_stopwatch_under_a_quota_counts_all_of_the_processor() -> None:
    def spin() -> None:
        ends = time.process_time() + 0.02
        while time.process_time() < ends:
            pass

    watch = Stopwatch("cpu", quota=CpuQuota(0.1, 1))
    assert watch.once(spin) >= 0.2
    assert Stopwatch("cpu", quota=CpuQuota(0.1, 1)).once(lambda: time.sleep(0.01)) < 0.2
