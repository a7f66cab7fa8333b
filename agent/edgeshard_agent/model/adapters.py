"""The modules of one stage: our own blocks for the Llama kind, transformers' decoder layers for the others.

transformers' layers are called with no cache and no mask: the attention plug finds the step in their keyword arguments.
Their module paths equal the canonical tensor names of `edgeshard.architectures`, blocks keyed by their global index.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from edgeshard.architectures import ModelShape
from edgeshard.architectures.fields import decoder_fields
from edgeshard.dtypes import DType, Quantisation
from edgeshard.errors import UnsupportedModelError
from edgeshard.model import LayerRange
from edgeshard_agent.model import attention
from edgeshard_agent.model.attention import StepAttention
from edgeshard_agent.model.llama_family import Gemma3Modules, LlamaFamilyModules
from edgeshard_agent.model.modules import StageContext, StageModules

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


class LibraryModules(StageModules):
    """Base of the families whose blocks are transformers' own."""

    def _blocks(self, block_class: Any) -> nn.ModuleDict:
        with torch.device("meta"):
            layers = range(self.context.layers.first, self.context.layers.end)
            return nn.ModuleDict({str(index): block_class(self.context.config, layer_idx=index) for index in layers})


class Gpt2Modules(LibraryModules):
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

    def accept(self, name: str, value: torch.Tensor) -> None:
        self._assign(self._embedding_places(name) if name == "wte.weight" else (name,), value)


class OptModules(LibraryModules):
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

    def accept(self, name: str, value: torch.Tensor) -> None:
        self._assign(self._embedding_places(name) if name == "embed_tokens.weight" else (name,), value)


_OWN_BLOCKS = frozenset(_CLASS_PREFIX) - {"gpt2", "opt"}


def build_modules(
    config: Mapping[str, Any],
    shape: ModelShape,
    layers: LayerRange,
    dtype: DType,
    device: str,
    quantisation: Quantisation | None = None,
) -> StageModules:
    """This stage's modules in evaluation mode, parameters still on the meta device.

    `shape` must be that of `config`. Raises UnsupportedModelError when transformers refuses the configuration.
    """
    attention.register()
    name = shape.architecture
    prefix = _CLASS_PREFIX[name]
    library = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    context = StageContext(shape, _library_config(config, shape), layers, dtype, device, quantisation)
    modules: StageModules
    if name in _OWN_BLOCKS:
        modules = (Gemma3Modules if name == "gemma3" else LlamaFamilyModules)(context, library, prefix, config)
    else:
        modules = (Gpt2Modules if name == "gpt2" else OptModules)(context, library, prefix)
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
