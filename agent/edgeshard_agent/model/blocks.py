"""Decoder blocks of the Llama kind: RMS norms, rotary grouped-query attention, a gated MLP or a mixture of them.

What a block is made of is read off the tensors its checkpoint must hold (`edgeshard.architectures`), so that biases,
norms of queries and keys, and experts need no switches; what the tensors do not tell comes in `BlockOptions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from edgeshard.architectures.record import BlockStyle
from edgeshard_agent.model.attention.attention import Rotary, StepAttention
from edgeshard_agent.model.projection import Integers, Projection
from edgeshard_agent.ops.attention import Scoring
from edgeshard_agent.ops.elementwise import rms_norm, rotary_, swiglu
from edgeshard_agent.ops.fused_blocks import NativeBlock

Shapes = Mapping[str, tuple[int, ...]]


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


_gelu_tanh = partial(functional.gelu, approximate="tanh")
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_fast": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": functional.relu,
}
"""All that a record lets through but "silu", which the kernels have. Three are one function, written differently."""


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """Options that a block's tensors do not tell: the family's style, and the sizes. `window` is None for full
    attention.

    `integers` are for all matrices but those of experts that have a width of their own, in `expert_integers`.
    """

    style: BlockStyle
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    window: int | None = None
    integers: Integers | None = None
    expert_integers: tuple[Integers, ...] = ()


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, device="meta"), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.add(x, None)[0]

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, the sum) of x [T, width] and the residual, if there is one."""
        return rms_norm(x, self.weight, self.eps, residual)


class UnitOffsetRmsNorm(RmsNorm):
    """x / rms(x) * (1 + weight), multiplied in float32 and rounded last (gemma)."""

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else x + residual
        wide = total.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).to(x.dtype), total


def make_norm(width: int, eps: float, unit_offset: bool) -> RmsNorm:
    return (UnitOffsetRmsNorm if unit_offset else RmsNorm)(width, eps)


Gating = Callable[[torch.Tensor], torch.Tensor]
"""[T, width] from the results [T, 2 * width] of gate and up, or those of up, [T, width], where there is no gate."""


def gating_of(activation: str) -> Gating:
    """activation(gate) * up, for a name that a record lets through."""
    return swiglu if activation in ("silu", "swish") else partial(_gated, _ACTIVATIONS[activation])


def _gated(activation: Gating, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate) * up


class GatedMlp(nn.Module):
    """down(gating(gate(x), up(x))), or without a gate down(gating(up(x)))."""

    def __init__(
        self,
        inner: int,
        hidden: int,
        gating: Gating,
        *,
        bias: bool = False,
        gated: bool = True,
        integers: Integers | None = None,
    ) -> None:
        super().__init__()
        self.gate_up = Projection((inner, inner) if gated else (inner,), hidden, bias=bias, integers=integers)
        self.down = Projection((hidden,), inner, bias=bias, integers=integers)
        self._gating = gating

    @property
    def is_silu(self) -> bool:
        return self._gating is swiglu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] from [T, hidden]."""
        result: torch.Tensor = self.down(self._gating(self.gate_up(x)))
        return result

    def place(self, part: str) -> tuple[str, int]:
        """The projection and the first row where a tensor goes: gate_proj, up_proj, gate_up_proj (both) or down_proj.

        Rows of both may be in any order that the gating understands.
        """
        if part == "down_proj":
            return "down", 0
        return "gate_up", self.gate_up.rows - self.down.columns if part == "up_proj" else 0


ExpertSource = Callable[[torch.Tensor], Iterator[int]]
"""The experts in `chosen` [tokens, per token], each once; one is in memory until the next is asked for."""


class Experts(nn.ModuleList):
    """The experts of a mixture, gated MLPs: the outputs of those that a token's router chose are summed by shares."""

    def __init__(self, experts: Iterable[GatedMlp]) -> None:
        super().__init__(experts)
        self.source: ExpertSource | None = None
        """Brings the layer's experts into memory; None where all of them are there."""

    def forward(
        self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, on_inputs: bool = False
    ) -> torch.Tensor:
        """[T, hidden] from [T, hidden], with the experts `chosen` [T, per token] and their `shares`, of that shape.

        Shares multiply outputs, or `on_inputs` what goes into the experts.

        A token's experts are added in order of their index, whoever shares them. So bits do not depend on the order in
        which a source has them in memory.
        """
        result = torch.zeros_like(x)
        if self.source is None:
            for index in sorted(set(chosen.flatten().tolist())):
                result.index_add_(0, *self._part(index, x, chosen, shares, on_inputs))
            return result
        parts = {index: self._part(index, x, chosen, shares, on_inputs) for index in self.source(chosen)}
        for index in sorted(parts):
            result.index_add_(0, *parts[index])
        return result

    def _part(
        self, index: int, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, on_inputs: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that one expert computes, all at once, and what it adds to them."""
        rows, rank = (chosen == index).nonzero(as_tuple=True)
        share = shares[rows, rank, None]
        if on_inputs:
            return rows, self[index]((x[rows] * share).to(x.dtype))
        return rows, (self[index](x[rows]) * share).to(x.dtype)


class MixtureMlp(nn.Module):
    """A router chooses a few experts for each token."""

    def __init__(self, experts: int, inner: int, hidden: int, options: BlockOptions) -> None:
        super().__init__()
        self.router = Projection((experts,), hidden)
        kinds = options.expert_integers or (options.integers,) * experts
        gating = gating_of(options.style.activation)
        self.experts = Experts(GatedMlp(inner, hidden, gating, integers=kind) for kind in kinds)
        self._per_token = options.style.experts_per_token
        self._normalised = options.style.normalised_experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] from [T, hidden]."""
        shares = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        best, chosen = shares.topk(self._per_token, dim=-1)
        if self._normalised:
            best /= best.sum(dim=-1, keepdim=True)
        result: torch.Tensor = self.experts(x, chosen, best.to(x.dtype))
        return result


def experts_of(block: nn.Module) -> tuple[str, Experts] | None:
    """The experts of a block that are modules of ours, with their path; None where it has none."""
    return next(((path, part) for path, part in block.named_modules() if isinstance(part, Experts)), None)


class Block(nn.Module):
    """One decoder block. `layer_idx` is its global index, by which attention finds its keys and values."""

    def __init__(self, shapes: Shapes, options: BlockOptions, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.options = options
        hidden, heads, integers = options.hidden_size, options.heads, options.integers
        query, key_value = heads * options.head_dim, options.kv_heads * options.head_dim
        self.qkv = Projection(
            (query, key_value, key_value), hidden, bias="self_attn.q_proj.bias" in shapes, integers=integers
        )
        self.output = Projection((hidden,), query, bias="self_attn.o_proj.bias" in shapes, integers=integers)
        self.q_norm = self.k_norm = None
        if "self_attn.q_norm.weight" in shapes:
            self.q_norm, self.k_norm = _norm(options.head_dim, options), _norm(options.head_dim, options)
        self.mlp = _mlp(shapes, options)
        self.input_layernorm = _norm(hidden, options)
        self.post_attention_layernorm = _norm(hidden, options)
        self.pre_feedforward_layernorm = self.post_feedforward_layernorm = None
        if "pre_feedforward_layernorm.weight" in shapes:
            self.pre_feedforward_layernorm = _norm(hidden, options)
            self.post_feedforward_layernorm = _norm(hidden, options)
        self._scoring = Scoring(options.style.scaling, options.window or 0, options.style.softcap or 0.0)
        self._query_rows = slice(0, heads)
        self._key_rows = slice(heads, heads + options.kv_heads)
        self._value_rows = slice(heads + options.kv_heads, heads + 2 * options.kv_heads)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rotary: Rotary | None, step: StepAttention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(this block's last addend, the sum before it), both [T, hidden]: the next block's norm does the addition."""
        normed, residual = self.input_layernorm.add(hidden, residual)
        attended = self._attend(normed, rotary, step)
        if self.pre_feedforward_layernorm is None or self.post_feedforward_layernorm is None:
            normed, residual = self.post_attention_layernorm.add(attended, residual)
            return self.mlp(normed), residual
        attended = self.post_attention_layernorm(attended)
        normed, residual = self.pre_feedforward_layernorm.add(attended, residual)
        return self.post_feedforward_layernorm(self.mlp(normed)), residual

    def native(self) -> NativeBlock | None:
        """This block for `run_blocks`, once it is filled; None where it has parts that are not for the native call."""
        options, mlp = self.options, self.mlp
        style = options.style
        if style.unit_offset or style.softcap is not None or not isinstance(mlp, GatedMlp) or not mlp.is_silu:
            return None
        qkv, output, gate_up, down = self.qkv.packed, self.output.packed, mlp.gate_up.packed, mlp.down.packed
        if qkv is None or output is None or gate_up is None or down is None:
            return None
        norms = (self.input_layernorm, self.post_attention_layernorm, self.q_norm, self.k_norm)
        return NativeBlock.compile(
            (qkv, output, gate_up, down),
            [None if norm is None else norm.weight for norm in norms],
            heads=options.heads,
            kv_heads=options.kv_heads,
            head_dim=options.head_dim,
            window=options.window or 0,
            eps=style.eps,
            scale=style.scaling,
        )

    def _attend(self, normed: torch.Tensor, rotary: Rotary | None, step: StepAttention) -> torch.Tensor:
        qkv = self.qkv(normed).view(len(normed), -1, self.options.head_dim)
        query, key, value = qkv[:, self._query_rows], qkv[:, self._key_rows], qkv[:, self._value_rows]
        if self.q_norm is not None and self.k_norm is not None:
            # Back into their places: the kernels want keys and values alike in memory.
            query.copy_(_by_head(self.q_norm, query))
            key.copy_(_by_head(self.k_norm, key))
        if rotary is not None:
            rotary_(query, key, *rotary)
        attended = step.attend(self.layer_idx, query, key, value, self._scoring)
        result: torch.Tensor = self.output(attended.view(len(normed), -1))
        return result


def _norm(width: int, options: BlockOptions) -> RmsNorm:
    return make_norm(width, options.style.eps, options.style.unit_offset)


def _by_head(norm: RmsNorm, heads: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = norm(heads.reshape(-1, heads.shape[-1]))
    return normed.view(heads.shape)


def _mlp(shapes: Shapes, options: BlockOptions) -> nn.Module:
    hidden = options.hidden_size
    if (down := shapes.get("mlp.experts.0.down_proj.weight")) is not None:
        return MixtureMlp(shapes["mlp.gate.weight"][0], down[1], hidden, options)
    inner, bias = shapes["mlp.down_proj.weight"][1], "mlp.down_proj.bias" in shapes
    return GatedMlp(inner, hidden, gating_of(options.style.activation), bias=bias, integers=options.integers)


def place_of(name: str, block: Block) -> tuple[str, int] | None:
    """The projection below `block` and the first row where the tensor of this name goes, without `.weight` or `.bias`.

    None for a tensor that is a parameter of its own.
    """
    options = block.options
    query, key_value = options.heads * options.head_dim, options.kv_heads * options.head_dim
    attention: dict[str, tuple[str, int]] = {
        "self_attn.q_proj": ("qkv", 0),
        "self_attn.qkv_proj": ("qkv", 0),
        "self_attn.k_proj": ("qkv", query),
        "self_attn.v_proj": ("qkv", query + key_value),
        "self_attn.o_proj": ("output", 0),
    }
    if name in attention:
        return attention[name]
    path, _, part = name.rpartition(".")
    if not path.startswith("mlp"):  # a norm
        return None
    if part == "gate":
        return "mlp.router", 0
    mlp: Any = block.get_submodule(path)
    projection, first_row = mlp.place(part)
    return f"{path}.{projection}", first_row
