"""Models whose tensors are stored in formats of their own: each matrix is packed in its own, and
nothing is rounded."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.blocks import Block
from edgeshard_agent.model.projection import JoinedProjection, Projection, whole
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.cached_source import from_blocks
from edgeshard_agent.model.weights.weight_loading import Packing
from edgeshard_agent.model.weights.weights import StageWeights
from edgeshard_agent.ops.block_formats import BlockWeight, Weight
from edgeshard_agent.ops.native import native_available
from edgeshard_agent.store.packed_units import PackedUnits

from edgeshard.architectures import (
    FORMATS,
    expected_tensors,
    held_bytes,
    name_of_experts,
    parse_config,
)
from edgeshard.architectures.weights import check_manifest
from edgeshard.domain.errors import (
    InvalidArgumentError,
    ResourceExhaustedError,
    UnsupportedModelError,
)
from edgeshard.domain.ids import Digest, ModelName
from edgeshard.domain.models.dtypes import DType, IntegerFormat, Quantisation
from edgeshard.domain.models.model import LayerRange, ModelManifest, TensorInfo
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan
from edgeshard.planning.inputs.shapes import model_from_config
from tests.support.packing import chosen_sources

LAYERS = 3
VOCAB = 160
WIDTH = 256
ALL = LayerRange(0, LAYERS)
MODEL = Digest("6" * 64)
PLAIN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": WIDTH,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
MIXTURE = {
    **PLAIN,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "tie_word_embeddings": False,
}
ENDS = {"embed_tokens.weight": IntegerFormat.Q6_K, "lm_head.weight": IntegerFormat.Q6_K}
TOKENS = np.random.default_rng(4).integers(0, VOCAB, 40)


def format_of(name: str) -> IntegerFormat | None:
    """A mix as llama.cpp makes it, with int4 and whole matrices besides."""
    if name in ENDS:
        return ENDS[name]
    if not name.endswith("proj.weight"):
        return None
    layer = int(name.split(".")[1])
    if name.endswith(("v_proj.weight", "down_proj.weight")):
        return (IntegerFormat.Q6_K, IntegerFormat.Q5_K, IntegerFormat.INT8)[layer]
    if name.endswith("up_proj.weight"):
        return (IntegerFormat.Q5_0, IntegerFormat.IQ3_S, IntegerFormat.INT4_ZEROS)[layer]
    if name.endswith("o_proj.weight"):
        return (None, IntegerFormat.INT4, IntegerFormat.Q4_K)[layer]
    return IntegerFormat.Q4_K


@cache
def stored(model_type: str) -> dict[str, Weight]:
    """A checkpoint's tensors as they are stored, by canonical name."""
    config = MIXTURE if model_type == "qwen3_moe" else PLAIN
    generator = torch.Generator().manual_seed(5)
    found: dict[str, Weight] = {}
    for name, tensor in expected_tensors(config).items():
        kind = format_of(name)
        if kind is None:
            values = torch.randn(tensor.shape, generator=generator) * 0.1
            found[name] = (values + 1 if len(tensor.shape) == 1 else values).bfloat16()
            continue
        rows, columns = tensor.shape
        size = (rows, columns // kind.stored_block, kind.stored_block_bytes)
        blocks = torch.randint(0, 256, size, generator=generator).to(torch.uint8)
        starts = {
            IntegerFormat.Q6_K: (208,),
            IntegerFormat.INT8: (0,),
            IntegerFormat.INT4: (0,),
        }.get(kind, (0, 2))
        scale = 2e-5 if kind.layout is not None else 1e-3 if kind is IntegerFormat.INT8 else 1e-2
        for first in starts:
            scales = torch.rand(blocks.shape[:2], generator=generator) * scale
            blocks[..., first : first + 2] = scales.half().unsqueeze(-1).view(torch.uint8)
        found[name] = from_blocks(blocks.view(-1), (rows, columns), kind)
    return found


class Stored:
    """The tensors as a source; `is_whole` gives their numbers in float32."""

    def __init__(self, config: dict[str, Any], *, is_whole: bool = False) -> None:
        self._tensors = stored(config["model_type"])
        self._is_whole = is_whole

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def read(self, name: str) -> Weight:
        found = self._tensors[name]
        return whole(found) if self._is_whole else found


def with_formats(config: dict[str, Any]) -> dict[str, Any]:
    names: dict[str, set[str]] = {}
    for name in expected_tensors(config):
        if (kind := format_of(name)) is not None:
            names.setdefault(kind, set()).add(name_of_experts(name))
    return {**config, FORMATS: {kind: sorted(of) for kind, of in names.items()}}


def load(
    config: dict[str, Any], layers: LayerRange = ALL, packing: Packing | None = None, **options: Any
) -> StageModel:
    defaults: dict[str, Any] = {
        "dtype": DType.FLOAT32,
        "quantisation": Quantisation.STORED,
        "source": Stored(config),
    }
    options = defaults | options
    source, dtype = options.pop("source"), options["dtype"]
    made = StageWeights.load(
        source, with_formats(config), layers, device="cpu", packing=packing, **options
    )
    return StageModel.with_kv(made, KvMemory(dtype, 8, 16))


def logits(stages: list[StageModel], tokens: np.ndarray = TOKENS) -> torch.Tensor:
    """Logits [T, vocab] of the tokens, by stages that follow one another."""
    plan = StepPlan(
        grants=(KvGrant(0, 0, (0, 1, 2)),), spans=(Span(0, 0, len(tokens), sampling=Sampling()),)
    )
    if len(stages) == 1:
        return stages[0].logits(plan, tokens)
    hidden: Any = tokens
    for stage in stages[:-1]:
        hidden = stage.execute(plan, hidden).hidden
    return stages[-1].logits(plan, hidden)


def infos(config: dict[str, Any]) -> list[TensorInfo]:
    found = []
    for name, tensor in expected_tensors(config).items():
        kind = format_of(name)
        dtype = DType.BFLOAT16 if kind is None else DType.FLOAT32
        found.append(TensorInfo(name, dtype, tensor.shape, MODEL, kind))
    return found


@pytest.mark.parametrize("config", [PLAIN, MIXTURE], ids=["dense", "mixture"])
def test_each_matrix_has_its_own_format(config: dict[str, Any]) -> None:
    modules = load(config).weights.modules
    blocks = [module for module in modules.modules() if isinstance(module, Block)]
    for layer, block in enumerate(blocks):
        assert isinstance(block.qkv, JoinedProjection)
        parts: list[Any] = list(block.qkv.parts)
        assert [part.packed.scheme for part in parts] == ["q4_k", ("q6_k", "q5_k", "int8")[layer]]
        assert (
            block.output.packed is not None
            and block.output.packed.scheme == ("fp32", "int4", "q4_k")[layer]
        )
    head: Any = modules.lm_head
    assert isinstance(head, Projection) and head.packed is not None and head.packed.scheme == "q6_k"
    assert hasattr(modules, "embed_tokens") != config["tie_word_embeddings"], (
        "a tied one is there once"
    )


@pytest.mark.parametrize("config", [PLAIN, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_bytes_held_are_those_that_are_counted_and_planned(
    config: dict[str, Any], dtype: DType
) -> None:
    held = load(config, dtype=dtype).weights.parameter_bytes
    assert held == held_bytes(with_formats(config), infos(config), ALL, dtype, Quantisation.STORED)
    model = model_from_config("m", with_formats(config))
    planned = sum(block.weight_bytes(dtype, Quantisation.STORED) for block in model.blocks)
    planned += model.head_bytes(dtype, Quantisation.STORED) + model.embedding_bytes(
        dtype, Quantisation.STORED
    )
    assert held == planned - model.shared_bytes(dtype, Quantisation.STORED)


@pytest.mark.parametrize("config", [PLAIN, MIXTURE], ids=["dense", "mixture"])
def test_it_computes_with_the_numbers_that_are_stored(config: dict[str, Any]) -> None:
    found = logits([load(config)])
    numbers = logits([load(config, source=Stored(config, is_whole=True), quantisation=None)])
    assert (found - numbers).norm() < 0.02 * numbers.norm(), (
        "activations are rounded, weights are not"
    )


@pytest.mark.skipif(not native_available(), reason="torch's own products depend on the batch")
def test_a_row_has_the_same_bits_however_the_model_is_cut_and_batched() -> None:
    alone = logits([load(PLAIN)])
    cuts = ((0, 1, 3), (0, 2, 3), (0, 1, 2, 3))
    for cut in cuts:
        stages = [load(PLAIN, LayerRange(first, end)) for first, end in pairwise(cut)]
        assert torch.equal(logits(stages), alone)
    stage = load(PLAIN)
    for count in (24, 1, 15):  # in three parts, one of a single token
        first = sum((24, 1, 15)[: (24, 1, 15).index(count)])
        grants = (KvGrant(0, 0, (0, 1, 2)),) if first == 0 else ()
        plan = StepPlan(grants=grants, spans=(Span(0, first, count, sampling=Sampling()),))
        found = stage.logits(plan, TOKENS[first : first + count])
    assert torch.equal(found, alone[25:])


@pytest.mark.skipif(not native_available(), reason="packed files are for native kernels")
@pytest.mark.parametrize("config", [PLAIN, MIXTURE], ids=["dense", "mixture"])
def test_packed_files_and_streaming_keep_the_formats(
    config: dict[str, Any], tmp_path: Path
) -> None:
    plain, units = load(config), PackedUnits(tmp_path / "packed")

    def packing(budget: int | None) -> Packing:
        chosen = chosen_sources(
            units, MODEL, with_formats(config), ALL, DType.FLOAT32, Quantisation.STORED
        )
        return Packing(chosen, budget, prefetched=1)

    expected = logits([plain])
    assert torch.equal(logits([load(config, packing=packing(None))]), expected)
    again = load(config, packing=packing(None), source=NothingLeft(config))
    assert (
        torch.equal(logits([again]), expected)
        and again.weights.parameter_bytes == plain.weights.parameter_bytes
    )
    with pytest.raises(ResourceExhaustedError) as refused:
        load(config, packing=packing(1), source=NothingLeft(config))
    budget = 1 + int(refused.value.message.split("too few by ")[1].split(":")[0])
    streamed = load(config, packing=packing(budget), source=NothingLeft(config))
    assert streamed.weights.filled.stores
    assert torch.equal(logits([streamed]), expected)
    streamed.weights.close()


class NothingLeft(Stored):
    """A checkpoint that must not be read any more."""

    def read(self, name: str) -> Weight:
        raise AssertionError(f"{name} was read from the checkpoint")


def manifests(config: dict[str, Any]) -> Iterator[tuple[str, ModelManifest]]:
    tensors = tuple(infos(config))
    yield (
        "good",
        ModelManifest(
            ModelName("m"), config["model_type"], json.dumps(with_formats(config)), tensors, ()
        ),
    )
    yield (
        "no formats",
        ModelManifest(ModelName("m"), config["model_type"], json.dumps(config), tensors, ()),
    )
    other = tuple(
        replace(tensor, integers=None) if "q_proj" in tensor.name else tensor for tensor in tensors
    )
    yield (
        "others",
        ModelManifest(
            ModelName("m"), config["model_type"], json.dumps(with_formats(config)), other, ()
        ),
    )


@pytest.mark.parametrize("config", [PLAIN, MIXTURE], ids=["dense", "mixture"])
def test_a_manifest_and_its_config_agree(config: dict[str, Any]) -> None:
    made = dict(manifests(config))
    check_manifest(made["good"])
    for name in ("no formats", "others"):
        with pytest.raises(InvalidArgumentError, match=FORMATS):
            check_manifest(made[name])


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([], "must be an object"),
        ({"q9": []}, "has the format 'q9'"),
        ({"int2": []}, "has the format 'int2'"),
        ({"q4_k": "a"}, "must be a list of names"),
        ({"q4_k": ["a"], "q6_k": ["a"]}, "two formats"),
    ],
)
def test_formats_that_cannot_be_are_refused(value: Any, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=why):
        parse_config({**PLAIN, FORMATS: value})


def test_other_words_for_the_weights_round_them() -> None:
    """`int8`, or whole weights, of a model that is stored in formats of its own."""
    whole_numbers = Stored(PLAIN, is_whole=True)
    found, numbers = (
        logits([load(PLAIN, quantisation=None, source=s)]) for s in (Stored(PLAIN), whole_numbers)
    )
    assert torch.equal(found, numbers)
    rounded = logits([load(PLAIN, quantisation=Quantisation.INT8)])
    assert 0 < (rounded - numbers).norm() < 0.05 * numbers.norm()


def test_random_blocks_are_finite() -> None:
    for kind in (IntegerFormat.Q4_K, IntegerFormat.Q5_K, IntegerFormat.Q6_K):
        numbers = BlockWeight.random(8, 512, kind).dequantize()
        assert bool(numbers.isfinite().all()) and 0 < float(numbers.abs().max()) < 1
