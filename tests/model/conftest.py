"""Tiny random checkpoints of every architecture, the unsplit model's logits for them, and a head that drives stages."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from edgeshard_agent.model.loader import SafetensorsDirectory
from edgeshard_agent.model.stage import StageModel
from safetensors.torch import load_file, save_file

from edgeshard.architectures import parse_config
from edgeshard.dtypes import DType
from edgeshard.generation import Sampling
from edgeshard.ids import Digest, ModelName
from edgeshard.model import LayerRange, ModelManifest, TensorInfo
from edgeshard.step import KvGrant, Span, StepPlan

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()

LAYERS = 4
WINDOW = 6
LENGTHS = (21, 17, 13)
BLOCK_TOKENS = 4
KV_BLOCKS = 40

_BASE = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 3,
    "pad_token_id": None,
}
_GPT2 = {"n_layer": LAYERS, "n_embd": 32, "n_head": 4, "vocab_size": 61, "n_positions": 64, "initializer_range": 0.15}
_OPT = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_dim": 40,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "init_std": 0.15,
    "bos_token_id": None,
}
_ROPE = {"rope_theta": 500.0, "rope_type": "default"}
_LLAMA3 = _ROPE | {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = _ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_experts": 4}
_GEMMA = {
    "head_dim": 12,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
    },
}
_ALTERNATING = ["full_attention", "sliding_attention"] * 2


@dataclass(frozen=True)
class Variant:
    """One configuration: the transformers config class and its options; how the checkpoint is saved."""

    config_class: str
    options: dict[str, Any]
    sharded: bool = False
    strip: str = ""
    """A prefix taken off every stored name, as checkpoints of the bare model have it."""


def _rotary(config_class: str, sharded: bool = False, **options: Any) -> Variant:
    return Variant(config_class, _BASE | {"rope_parameters": dict(_ROPE)} | options, sharded)


VARIANTS = {
    "llama-plain": _rotary("LlamaConfig", head_dim=16),
    "llama-options": _rotary(
        "LlamaConfig",
        sharded=True,
        rope_parameters=_LLAMA3,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        head_dim=10,
    ),
    "llama-linear": _rotary(
        "LlamaConfig", rope_parameters=_ROPE | {"rope_type": "linear", "factor": 2.0}, num_key_value_heads=4
    ),
    "llama-yarn": _rotary("LlamaConfig", rope_parameters=_YARN, hidden_act="gelu", num_key_value_heads=1),
    "mistral-window": _rotary("MistralConfig", sharded=True, sliding_window=WINDOW, head_dim=16),
    "mistral-full": _rotary("MistralConfig", sliding_window=None, tie_word_embeddings=True),
    "qwen2-windows": _rotary(
        "Qwen2Config", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2, head_dim=16
    ),
    "qwen2-tied": _rotary("Qwen2Config", sharded=True, tie_word_embeddings=True),
    "qwen3-windows": _rotary(
        "Qwen3Config",
        sharded=True,
        head_dim=12,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
    ),
    "qwen3-tied": _rotary("Qwen3Config", head_dim=16, tie_word_embeddings=True),
    "qwen3_moe-dense-layer": _rotary(
        "Qwen3MoeConfig",
        sharded=True,
        **_MOE,
        head_dim=12,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        use_sliding_window=True,
        sliding_window=WINDOW,
        attention_bias=True,
    ),
    "qwen3_moe-sparse-step": _rotary(
        "Qwen3MoeConfig", **_MOE, decoder_sparse_step=2, norm_topk_prob=False, tie_word_embeddings=True
    ),
    "mixtral-window": _rotary("MixtralConfig", sharded=True, num_local_experts=4, sliding_window=WINDOW),
    "mixtral-tied": _rotary("MixtralConfig", num_local_experts=3, tie_word_embeddings=True, head_dim=12),
    "gemma3-text": Variant("Gemma3TextConfig", _BASE | _GEMMA | {"final_logit_softcapping": 4.0}),
    "gemma3-untied": Variant(
        "Gemma3TextConfig", _BASE | _GEMMA | {"attention_bias": True, "tie_word_embeddings": False}, sharded=True
    ),
    "gemma3-nested": Variant("Gemma3Config", _BASE | _GEMMA, sharded=True),
    "phi3-partial": _rotary(
        "Phi3Config", sharded=True, sliding_window=WINDOW, rope_parameters=_ROPE | {"partial_rotary_factor": 0.5}
    ),
    "phi3-tied": _rotary("Phi3Config", num_key_value_heads=4, tie_word_embeddings=True),
    "gpt2-plain": Variant("GPT2Config", _GPT2, sharded=True),
    "gpt2-options": Variant(
        "GPT2Config",
        _GPT2 | {"n_inner": 40, "scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"},
        strip="transformer.",
    ),
    "gpt2-untied": Variant("GPT2Config", _GPT2 | {"tie_word_embeddings": False, "scale_attn_weights": False}),
    "opt-plain": Variant("OPTConfig", _OPT, sharded=True),
    "opt-350m": Variant("OPTConfig", _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "opt-bare": Variant(
        "OPTConfig",
        _OPT
        | {
            "_remove_final_layer_norm": True,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "word_embed_proj_dim": 24,
            "tie_word_embeddings": False,
        },
        strip="model.",
    ),
}


@dataclass(frozen=True)
class Checkpoint:
    """A saved model, its manifest, and for each of three sequences the unsplit model's logits [length, vocab]."""

    path: Path
    config: dict[str, Any]
    manifest: ModelManifest
    sequences: tuple[np.ndarray, ...]
    reference: tuple[torch.Tensor, ...]
    stages: dict[tuple[LayerRange, DType], StageModel] = field(default_factory=dict)

    def stage(self, layers: LayerRange, dtype: DType = DType.FLOAT32) -> StageModel:
        """A stage shared by tests, its pool emptied."""
        if (layers, dtype) not in self.stages:
            self.stages[layers, dtype] = self.load(layers, dtype)
        stage = self.stages[layers, dtype]
        stage.execute(StepPlan(frees=tuple(stage.pool.requests)))
        return stage

    def load(self, layers: LayerRange, dtype: DType = DType.FLOAT32, kv_dtype: DType | None = None) -> StageModel:
        return StageModel.load(
            SafetensorsDirectory(self.path),
            self.config,
            layers,
            dtype=dtype,
            kv_dtype=kv_dtype or dtype,
            kv_blocks=KV_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            device="cpu",
        )


def _build(variant: Variant, path: Path) -> Checkpoint:
    torch.manual_seed(7)
    config = _hf_config(variant)
    auto = "AutoModelForImageTextToText" if variant.config_class == "Gemma3Config" else "AutoModelForCausalLM"
    model = getattr(transformers, auto).from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path, max_shard_size="8KB" if variant.sharded else "1GB")
    assert variant.sharded == (path / "model.safetensors.index.json").exists()
    if variant.strip:
        tensors = load_file(path / "model.safetensors")
        save_file(
            {name.removeprefix(variant.strip): tensor for name, tensor in tensors.items()}, path / "model.safetensors"
        )
    saved = json.loads((path / "config.json").read_text())
    source = SafetensorsDirectory(path)
    tensors = tuple(_tensor_info(name, source.read(name)) for name in source.names())
    manifest = ModelManifest(ModelName("tiny"), parse_config(saved).architecture, json.dumps(saved), tensors, ())
    generator = np.random.default_rng(3)
    sequences = tuple(generator.integers(0, parse_config(saved).vocab_size, length) for length in LENGTHS)
    with torch.no_grad():
        reference = tuple(model(torch.from_numpy(ids)[None]).logits[0] for ids in sequences)
    return Checkpoint(path, saved, manifest, sequences, reference)


def _hf_config(variant: Variant) -> Any:
    options = json.loads(json.dumps(variant.options))
    if variant.config_class != "Gemma3Config":
        return getattr(transformers, variant.config_class)(**options)
    vision = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    text = transformers.Gemma3TextConfig(**options)
    return transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision.to_dict(), initializer_range=0.15)


def _tensor_info(name: str, tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(name, DType(str(tensor.dtype).removeprefix("torch.")), tuple(tensor.shape), Digest("0" * 64))


class TinyHead:
    """What the head does for a pipeline, with the sequences given in advance: blocks, lengths, steps.

    Blocks are handed out in a shuffled order unless `contiguous`. `step` returns the last stage's logits by request.
    """

    def __init__(self, stages: Sequence[StageModel], sequences: Sequence[np.ndarray], contiguous: bool = False) -> None:
        self.stages = stages
        self.sequences = sequences
        self.free_blocks = list(range(KV_BLOCKS))
        if not contiguous:
            random.Random(5).shuffle(self.free_blocks)
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def plan(self, spans: Sequence[tuple[int, int]], restart: dict[int, int] | None = None) -> StepPlan:
        grants, planned = [], []
        for request, count in spans:
            first = (restart or {}).get(request, self.lengths.get(request, 0))
            sampling = Sampling() if request not in self.tables or request in (restart or {}) else None
            table = self.tables.setdefault(request, [])
            needed = -(-(first + count) // BLOCK_TOKENS) - len(table)
            if needed > 0:
                blocks = tuple(self.free_blocks.pop(0) for _ in range(needed))
                grants.append(KvGrant(request, len(table), blocks))
                table.extend(blocks)
            planned.append(Span(request, first, count, sample=True, sampling=sampling))
            self.lengths[request] = first + count
        return StepPlan(grants=tuple(grants), spans=tuple(planned))

    def inputs(self, plan: StepPlan) -> np.ndarray:
        parts = [self.sequences[span.request][span.first_position : span.end_position] for span in plan.spans]
        return np.concatenate(parts)

    def step(self, spans: Sequence[tuple[int, int]], restart: dict[int, int] | None = None) -> dict[int, torch.Tensor]:
        plan = self.plan(spans, restart)
        value: Any = self.inputs(plan)
        for stage in self.stages[:-1]:
            value = stage.execute(plan, value).hidden
        logits = self.stages[-1].logits(plan, value)
        sizes = [span.token_count for span in plan.spans]
        return {span.request: part for span, part in zip(plan.spans, logits.split(sizes), strict=True)}


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """A variant's checkpoint by name, made on first use."""
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            made[name] = _build(VARIANTS[name], tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture
def checkpoint(variant: str, checkpoint_of: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoint_of(variant)


@pytest.fixture(scope="session")
def tiny_head() -> type[TinyHead]:
    return TinyHead


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `variant` runs for every variant, unless it names its own."""
    own = any(
        mark.name == "parametrize" and "variant" in str(mark.args[0]) for mark in metafunc.definition.iter_markers()
    )
    if "variant" in metafunc.fixturenames and not own:
        metafunc.parametrize("variant", list(VARIANTS))
