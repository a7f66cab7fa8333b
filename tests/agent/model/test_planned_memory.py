"""The memory that a plan counts for a layer, from config.json only, equals the memory of a process
for it at its real widths.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights

from edgeshard.architectures import expected_tensors
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.importing.quantised import without_quantisation
from edgeshard.planning.inputs.shapes import BlockSpec, ModelSpec, model_from_config

PUBLISHED = Path(__file__).resolve().parents[2] / "architectures" / "published"
MODELS = {
    "gemma-4-31b": (2, None),
    "minimax-m2.7": (1, 24),
    "nemotron-3-nano-30b-a3b": (3, 48),
    "qwen3-next-80b-a3b": (2, 96),
    "qwen3.5-35b-a3b": (2, 96),
}
"""How many kinds of layers a model has, and how many experts of each fit this test; theirs are all
alike."""
CASES = [(name, kind) for name, (kinds, _) in MODELS.items() for kind in range(kinds)]
KEPT_BYTES = 256 << 20
"""About this size of keys and values, and of states; the 2 MiB that any stage takes are little
compared with it."""
BLOCK_TOKENS = 16
MOST_OFF = 0.02


class RandomTensors:
    """Tensors of a model, made when they are read; all rows of one are alike, which takes less
    time."""

    def __init__(self, config: dict[str, Any], layers: LayerRange) -> None:
        self._tensors = expected_tensors(config, layers)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def read(self, name: str) -> torch.Tensor:
        shape = self._tensors[name].shape
        return (
            torch.randn(shape[-1:])
            .bfloat16()
            .expand(shape)
            .clone(memory_format=torch.contiguous_format)
        )


def published(name: str, experts: int | None) -> dict[str, Any]:
    """The config.json of a model, with fewer experts."""
    config = without_quantisation(
        json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8"))
    )
    decoder = config.get("text_config", config)
    if experts is not None:
        key = next(
            key
            for key in ("num_experts", "num_local_experts", "n_routed_experts")
            if decoder.get(key)
        )
        decoder[key] = experts
    return config


def inner_kinds(model: ModelSpec) -> list[int]:
    """The first layer of each kind, without those that come with the embedding or the head."""
    first: dict[object, int] = {}
    for layer in range(1, model.layer_count - 1):
        first.setdefault(model.blocks[layer], layer)
    return list(first.values())


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = re.search(
        r"^Anonymous: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE
    )
    assert found is not None
    return int(found[1]) * 1024


def memory_of(block: BlockSpec) -> KvMemory:
    per_block = BLOCK_TOKENS * block.kv.bytes_per_token(DType.BFLOAT16)
    per_request = block.state_bytes(DType.BFLOAT16)
    blocks = KEPT_BYTES // per_block if per_block else 1
    return KvMemory(
        DType.BFLOAT16, blocks, BLOCK_TOKENS, slots=KEPT_BYTES // per_request if per_request else 0
    )


def stage_of(config: dict[str, Any], layer: int, kept: KvMemory) -> StageModel:
    layers = LayerRange(layer, layer + 1)
    weights = StageWeights.load(
        RandomTensors(config, layers), config, layers, dtype=DType.BFLOAT16, device="cpu"
    )
    return StageModel.with_kv(weights, kept)


def taken(config: dict[str, Any], layer: int, kept: KvMemory) -> int:
    """Bytes that one layer takes in this process, with keys and values and with states."""
    stage_of(config, layer, kept)  # memory that is taken only once, such as code
    before = anonymous_bytes()
    stage = stage_of(config, layer, kept)
    size = anonymous_bytes() - before
    assert stage.layers.first == layer
    return size


def planned(block: BlockSpec, kept: KvMemory) -> int:
    """The same by a plan."""
    kv = kept.blocks * kept.block_tokens * block.kv.bytes_per_token(DType.BFLOAT16)
    return block.weight_bytes(DType.BFLOAT16) + kv + kept.slots * block.state_bytes(DType.BFLOAT16)


@pytest.mark.long
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_layer_takes_what_a_plan_says(name: str, kind: int) -> None:
    kinds, experts = MODELS[name]
    if not (PUBLISHED / f"{name}.json").exists():
        pytest.skip("there is no config.json of it yet")
    config = published(name, experts)
    model = model_from_config(name, config)
    layers = inner_kinds(model)
    assert len(layers) == kinds
    block = model.blocks[layers[kind]]
    kept = memory_of(block)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        size = pool.apply(taken, (config, layers[kind], kept))
    said = planned(block, kept)
    sys.stdout.write(
        f"{name}, layer {layers[kind]}: {size} bytes, planned {said}: {size / said - 1:+.2%}\n"
    )
    assert size == pytest.approx(said, rel=MOST_OFF)
