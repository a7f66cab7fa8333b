"""The modules of one stage, built from transformers' decoder layers without the rest of the model.

Parameters are made on the meta device and filled by the loader; what is computed instead of stored (rotary
frequencies) is made on the real device, in float32. Layers are called with no cache and no mask: the attention plug
finds the step in their keyword arguments.

Module paths equal the canonical tensor names of `edgeshard.architectures`, blocks keyed by their global index, except
for the experts of a mixture, which `target_of` fuses.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from edgeshard.architectures import ModelShape
from edgeshard.architectures.fields import decoder_fields
from edgeshard.dtypes import DType
from edgeshard.errors import UnsupportedModelError
from edgeshard.model import LayerRange
from edgeshard_agent.model import attention
from edgeshard_agent.model.attention import StepAttention
from edgeshard_agent.model.tensors import TORCH_DTYPES

_CLASS_PREFIX = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "mixtral": "Mixtral",
    "gemma3": "Gemma3",
    "phi3": "Phi3",
    "gpt2": "GPT2",
    "opt": "OPT",
}


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint's tensor goes: a parameter, or rows [first, end) of one expert of a fused parameter."""

    parameter: str
    expert: int | None = None
    first: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class StageContext:
    """What every family's modules are built from. `config` is the stage's own copy of the transformers config."""

    shape: ModelShape
    config: Any
    layers: LayerRange
    dtype: DType
    device: str

    @property
    def is_first(self) -> bool:
        return self.layers.first == 0

    @property
    def is_last(self) -> bool:
        return self.layers.end == self.shape.layer_count


class StageModules(nn.Module):
    """Base of the families: token ids or hidden states in, hidden states out; `head` turns those into logits."""

    def __init__(self, context: StageContext) -> None:
        super().__init__()
        self.context = context

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[1, T, width] from token ids [1, T]; on the first stage only."""
        raise NotImplementedError

    def run(self, hidden: torch.Tensor, positions: torch.Tensor, step: StepAttention) -> torch.Tensor:
        """[1, T, width] through this stage's blocks."""
        raise NotImplementedError

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab] of hidden states [R, width]; on the last stage only."""
        raise NotImplementedError

    def target_of(self, name: str) -> tuple[Target, ...]:
        """Where the tensor of this canonical name goes on this stage."""
        return (Target(name),)

    def _blocks(self, block_class: Any) -> nn.ModuleDict:
        with torch.device("meta"):
            layers = range(self.context.layers.first, self.context.layers.end)
            return nn.ModuleDict({str(index): block_class(self.context.config, layer_idx=index) for index in layers})

    def _weight(self, rows: int, columns: int) -> nn.Linear:
        """A bare matrix, for embeddings and heads whose arithmetic is written out here."""
        with torch.device("meta"):
            return nn.Linear(columns, rows, bias=False)


class RotaryModules(StageModules):
    """llama, mistral, qwen2, qwen3, qwen3_moe, mixtral, phi3: RMS norms and one rotary embedding."""

    def __init__(self, context: StageContext, library: Any, prefix: str) -> None:
        super().__init__(context)
        shape, config = context.shape, context.config
        self.layers = self._blocks(getattr(library, f"{prefix}DecoderLayer"))
        self.rotary_emb = getattr(library, f"{prefix}RotaryEmbedding")(config).to(context.device)
        if context.is_first:
            self.embed_tokens = self._weight(shape.vocab_size, shape.hidden_size)
        if context.is_last:
            with torch.device("meta"):
                self.norm = getattr(library, f"{prefix}RMSNorm")(shape.hidden_size, eps=config.rms_norm_eps)
            self.lm_head = self._weight(shape.vocab_size, shape.hidden_size)
        self._ordered = list(self.layers.values())

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self.embed_tokens.weight)

    def run(self, hidden: torch.Tensor, positions: torch.Tensor, step: StepAttention) -> torch.Tensor:
        rotary = self.rotary_emb(hidden, positions)
        for block in self._ordered:
            hidden = block(hidden, position_ids=positions, position_embeddings=rotary, step=step)
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.norm(hidden))
        return logits

    def target_of(self, name: str) -> tuple[Target, ...]:
        if name == "embed_tokens.weight":
            return _embedding_targets(self.context, name)
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            return (self._expert_target(f"{expert['block']}.mlp.experts", int(expert["index"]), expert["part"]),)
        return (Target(name.replace(".block_sparse_moe.", ".mlp.")),)

    def _expert_target(self, experts: str, index: int, part: str) -> Target:
        hidden = self.context.shape.hidden_size
        if part in ("w2", "down_proj"):
            return Target(f"{experts}.down_proj", index, 0, hidden)
        inner: int = self.get_parameter(f"{experts}.gate_up_proj").shape[1] // 2
        first = 0 if part in ("w1", "gate_proj") else inner
        return Target(f"{experts}.gate_up_proj", index, first, first + inner)


_EXPERT = re.compile(
    r"(?P<block>layers\.\d+)\.(?:block_sparse_moe|mlp)\.experts\.(?P<index>\d+)\.(?P<part>\w+)\.weight"
)


class Gemma3Modules(RotaryModules):
    """gemma3 (text): a scaled embedding, and a rotary base and a window by layer type."""

    def __init__(self, context: StageContext, library: Any, prefix: str) -> None:
        super().__init__(context, library, prefix)
        layers = range(context.layers.first, context.layers.end)
        self._types = [context.config.layer_types[index] for index in layers]
        # Rounded to the model's dtype as transformers does it: sqrt(3072) = 55.43 is 55.5 in bfloat16.
        self._embed_scale = torch.tensor(context.shape.hidden_size**0.5).to(TORCH_DTYPES[context.dtype]).item()

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self.embed_tokens.weight) * self._embed_scale

    def run(self, hidden: torch.Tensor, positions: torch.Tensor, step: StepAttention) -> torch.Tensor:
        rotary = {kind: self.rotary_emb(hidden, positions, kind) for kind in set(self._types)}
        for block, kind in zip(self._ordered, self._types, strict=True):
            hidden = block(hidden, position_ids=positions, position_embeddings=rotary[kind], step=step)
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().head(hidden)
        cap = self.context.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap


class Gpt2Modules(StageModules):
    """gpt2: learned positions, LayerNorm, transposed weights."""

    def __init__(self, context: StageContext, library: Any, prefix: str) -> None:
        super().__init__(context)
        shape, config = context.shape, context.config
        self.h = self._blocks(getattr(library, f"{prefix}Block"))
        if context.is_first:
            self.wte = self._weight(shape.vocab_size, shape.hidden_size)
            self.wpe = self._weight(shape.max_context, shape.hidden_size)
        if context.is_last:
            self.ln_f = nn.LayerNorm(shape.hidden_size, eps=config.layer_norm_epsilon, device="meta")
            self.lm_head = self._weight(shape.vocab_size, shape.hidden_size)
        self._ordered = list(self.h.values())

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self.wte.weight) + functional.embedding(positions, self.wpe.weight)

    def run(self, hidden: torch.Tensor, positions: torch.Tensor, step: StepAttention) -> torch.Tensor:
        for block in self._ordered:
            hidden = block(hidden, step=step)
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.ln_f(hidden))
        return logits

    def target_of(self, name: str) -> tuple[Target, ...]:
        return _embedding_targets(self.context, name) if name == "wte.weight" else (Target(name),)


class OptModules(StageModules):
    """opt: learned positions offset by 2; the 350m variant projects in and out and normalises after each part."""

    POSITION_OFFSET = 2

    def __init__(self, context: StageContext, library: Any, prefix: str) -> None:
        super().__init__(context)
        shape, config = context.shape, context.config
        hidden, token_width = shape.hidden_size, config.word_embed_proj_dim
        self.layers = self._blocks(getattr(library, f"{prefix}DecoderLayer"))
        self.project_in: nn.Module | None = None
        self.project_out: nn.Module | None = None
        self.final_layer_norm: nn.Module | None = None
        if context.is_first:
            self.embed_tokens = self._weight(shape.vocab_size, token_width)
            self.embed_positions = self._weight(shape.max_context + self.POSITION_OFFSET, hidden)
            if token_width != hidden:
                self.project_in = self._weight(hidden, token_width)
        if context.is_last:
            if config.do_layer_norm_before and not config._remove_final_layer_norm:
                affine = config.layer_norm_elementwise_affine
                self.final_layer_norm = nn.LayerNorm(hidden, elementwise_affine=affine, device="meta")
            if token_width != hidden:
                self.project_out = self._weight(token_width, hidden)
            self.lm_head = self._weight(shape.vocab_size, token_width)
        self._ordered = list(self.layers.values())

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        embedded = functional.embedding(tokens, self.embed_tokens.weight)
        if self.project_in is not None:
            embedded = self.project_in(embedded)
        return embedded + functional.embedding(positions + self.POSITION_OFFSET, self.embed_positions.weight)

    def run(self, hidden: torch.Tensor, positions: torch.Tensor, step: StepAttention) -> torch.Tensor:
        for block in self._ordered:
            hidden = block(hidden, step=step)
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        for module in (self.final_layer_norm, self.project_out):
            if module is not None:
                hidden = module(hidden)
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def target_of(self, name: str) -> tuple[Target, ...]:
        return _embedding_targets(self.context, name) if name == "embed_tokens.weight" else (Target(name),)


_FAMILIES: dict[str, type[Any]] = {"gemma3": Gemma3Modules, "gpt2": Gpt2Modules, "opt": OptModules}


def _embedding_targets(context: StageContext, name: str) -> tuple[Target, ...]:
    """The token embedding's places: its own, and the LM head's where the two are tied."""
    targets: tuple[Target, ...] = (Target(name),) if context.is_first else ()
    if context.shape.tied and context.is_last:
        targets += (Target("lm_head.weight"),)
    return targets


def build_modules(
    config: Mapping[str, Any], shape: ModelShape, layers: LayerRange, dtype: DType, device: str
) -> StageModules:
    """This stage's modules in evaluation mode, parameters still on the meta device.

    `shape` must be that of `config`. Raises UnsupportedModelError when transformers refuses the configuration.
    """
    attention.register()
    name = shape.architecture
    prefix = _CLASS_PREFIX[name]
    library = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    context = StageContext(shape, _library_config(config, shape), layers, dtype, device)
    modules: StageModules = _FAMILIES.get(name, RotaryModules)(context, library, prefix)
    return modules.eval().requires_grad_(False)


def _library_config(config: Mapping[str, Any], shape: ModelShape) -> Any:
    """The transformers configuration object of the decoder, set to call our attention."""
    name = shape.architecture
    library = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    class_name = "Gemma3TextConfig" if name == "gemma3" else f"{_CLASS_PREFIX[name]}Config"
    values = copy.deepcopy(dict(decoder_fields(config).values))
    if values.get("head_dim", 0) is None:
        # Some layers read head_dim with a default that a null would defeat.
        del values["head_dim"]
    try:
        result = getattr(library, class_name).from_dict(values)
    except Exception as error:
        raise UnsupportedModelError(
            f"config.json: transformers refuses it: {error}", field="config.json", reason="CONFIG_REFUSED"
        ) from error
    result._attn_implementation = attention.IMPLEMENTATION
    return result
