"""llama, mistral, qwen2, qwen3, qwen3_moe, mixtral, gemma3 and phi3: our own blocks and one rotary embedding.

transformers gives the frequencies of the rotary embedding and the configuration's defaults; no layer of its runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from edgeshard.architectures import expected_tensors
from edgeshard.model import LayerRange, Part
from edgeshard_agent.model.attention import Rotary, StepAttention
from edgeshard_agent.model.blocks import Block, BlockOptions, MixtureMlp, Shapes, make_norm, place_of
from edgeshard_agent.model.modules import StageContext, StageModules
from edgeshard_agent.model.projection import Projection
from edgeshard_agent.ops import NativeBlock

_IN_BLOCK = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
_WINDOW_BY_LAYER_TYPE = frozenset({"qwen2", "qwen3", "gemma3"})


class LlamaFamilyModules(StageModules):
    """RMS norms, rotary grouped-query attention and gated MLPs, all in blocks of one kind."""

    def __init__(self, context: StageContext, library: Any, prefix: str, config: Mapping[str, Any]) -> None:
        super().__init__(context)
        shape = context.shape
        self._tensors = block_tensors(config, context.layers)
        self.layers = nn.ModuleDict({str(index): self._block(index) for index in self._tensors})
        self.rotary_emb = getattr(library, f"{prefix}RotaryEmbedding")(context.config).to(context.device)
        if context.is_first:
            self._embeds_with_head = shape.tied and context.is_last
            if not self._embeds_with_head:
                self.embed_tokens = self._weight(shape.vocab_size, shape.hidden_size)
        if context.is_last:
            self.norm = make_norm(shape.hidden_size, self._options(shape.layer_count - 1))
            # One that is the embedding too stays as it is: rows of integers would not do for looking tokens up.
            quantisation = None if shape.tied else context.quantisation
            self.lm_head = Projection((shape.vocab_size,), shape.hidden_size, quantisation=quantisation)
        self._ordered: list[Any] = list(self.layers.values())
        self._native: dict[nn.Module, NativeBlock | None] = {}

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self._embeds_with_head:
            return self.lm_head.row_vectors(tokens[0]).unsqueeze(0)
        return functional.embedding(tokens, self.embed_tokens.weight)

    def run(self, hidden: torch.Tensor, positions: torch.Tensor, step: StepAttention) -> torch.Tensor:
        rotary = self._rotary(positions[0])
        if step.is_native and (native := self._native_blocks()):
            layers = [block.layer_idx for block in self._ordered]
            return step.run_native(native, layers, hidden[0], rotary).unsqueeze(0)
        addend, residual = hidden[0], None
        for block in self._ordered:
            addend, residual = block(addend, residual, rotary, step)
        return (addend if residual is None else addend + residual).unsqueeze(0)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.norm(hidden))
        return logits

    @property
    def is_static(self) -> bool:
        # Which experts a token goes to is known to the host only when it has read it.
        return not any(isinstance(block.mlp, MixtureMlp) for block in self._ordered)

    def accept(self, name: str, value: torch.Tensor) -> None:
        if name == "lm_head.weight":
            self._fill(self.lm_head, "weight", 0, value)
        elif name == "embed_tokens.weight":
            if hasattr(self, "embed_tokens"):
                self._assign((name,), value)
            if self.context.shape.tied and self.context.is_last:
                self._fill(self.lm_head, "weight", 0, value)
        elif (parts := _IN_BLOCK.fullmatch(name)) is not None and (place := self._place(parts)) is not None:
            projection, first_row = place
            self._fill(projection, parts[3], first_row, value)
        else:  # a norm
            self._assign((name.replace("self_attn.", ""),), value)

    def _place(self, name: re.Match[str]) -> tuple[Projection, int] | None:
        """The projection that a block's tensor is rows of, and the first of them."""
        block: Any = self.layers[name[1]]
        place = place_of(name[2], block)
        return None if place is None else (block.get_submodule(place[0]), place[1])

    def _fill(self, projection: Projection, kind: str, first_row: int, value: torch.Tensor) -> None:
        projection.fill(kind, first_row, value, self.context.torch_dtype, self.context.device)

    def _native_blocks(self) -> list[NativeBlock]:
        """The blocks for a single native call; none where any of them has no such form."""
        native = []
        for block in self._ordered:
            if block not in self._native:
                self._native[block] = block.native()
            if (compiled := self._native[block]) is None:
                return []
            native.append(compiled)
        return native

    def _block(self, index: int) -> Block:
        return Block(self._tensors[index], self._options(index), index)

    def _options(self, layer: int) -> BlockOptions:
        shape, config = self.context.shape, self.context.config
        gemma = shape.architecture == "gemma3"
        return BlockOptions(
            heads=shape.attention_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            hidden_size=shape.hidden_size,
            eps=config.rms_norm_eps,
            scaling=(config.query_pre_attn_scalar if gemma else shape.head_dim) ** -0.5,
            activation=config.hidden_activation if gemma else config.hidden_act,
            window=self._window(layer),
            unit_offset=gemma,
            experts_per_token=getattr(config, "num_experts_per_tok", 0),
            normalised_experts=getattr(config, "norm_topk_prob", True),
            quantisation=self.context.quantisation,
        )

    def _window(self, layer: int) -> int | None:
        config = self.context.config
        window: int | None = getattr(config, "sliding_window", None)
        if self.context.shape.architecture in _WINDOW_BY_LAYER_TYPE:
            return window if config.layer_types[layer] == "sliding_attention" else None
        return window

    def _rotary(self, positions: torch.Tensor, layer_type: str = "") -> Rotary:
        """Of the positions [T]; `layer_type` where the frequencies differ by it."""
        prefix = f"{layer_type}_" if layer_type else ""
        frequencies = getattr(self.rotary_emb, f"{prefix}inv_freq")
        scaling = getattr(self.rotary_emb, f"{prefix}attention_scaling")
        half = torch.outer(positions.to(torch.float32), frequencies)
        angles = torch.cat((half, half), dim=-1)
        dtype = self.context.torch_dtype
        return angles.cos().mul_(scaling).to(dtype), angles.sin().mul_(scaling).to(dtype)


class Gemma3Modules(LlamaFamilyModules):
    """gemma3 (text): a scaled embedding, and a rotary base and a window by layer type."""

    def __init__(self, context: StageContext, library: Any, prefix: str, config: Mapping[str, Any]) -> None:
        super().__init__(context, library, prefix, config)
        layers = range(context.layers.first, context.layers.end)
        self._types = [context.config.layer_types[index] for index in layers]
        # Rounded to the model's dtype as transformers does it: sqrt(3072) = 55.43 is 55.5 in bfloat16.
        self._embed_scale = torch.tensor(context.shape.hidden_size**0.5).to(context.torch_dtype).item()

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return super().embed(tokens, positions) * self._embed_scale

    def run(self, hidden: torch.Tensor, positions: torch.Tensor, step: StepAttention) -> torch.Tensor:
        rotary = {kind: self._rotary(positions[0], kind) for kind in set(self._types)}
        addend, residual = hidden[0], None
        for block, kind in zip(self._ordered, self._types, strict=True):
            addend, residual = block(addend, residual, rotary[kind], step)
        return (addend if residual is None else addend + residual).unsqueeze(0)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().head(hidden)
        cap = self.context.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap


def block_tensors(config: Mapping[str, Any], layers: LayerRange) -> dict[int, Shapes]:
    """By global index, the shapes of each block's tensors, named without `layers.N.`."""
    found: dict[int, dict[str, tuple[int, ...]]] = {}
    for tensor in expected_tensors(config, layers).values():
        if not isinstance(tensor.unit, Part):
            found.setdefault(tensor.unit, {})[tensor.name.split(".", 2)[2]] = tensor.shape
    return dict(sorted(found.items()))
