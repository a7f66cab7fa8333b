"""Decoder blocks of the Llama kind: RMS norms, rotary grouped-query attention, a gated MLP or a mixture of them.

Some have a gate on attention's output, or the gated delta rule in place of attention. What a block is made of is read
off the tensors its checkpoint must hold (`edgeshard.architectures`), so that biases, gates, norms of queries and keys,
and experts need no switches; what the tensors do not tell comes in `BlockOptions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from edgeshard.architectures import StateSize
from edgeshard.architectures.record import BlockStyle
from edgeshard_agent.model.attention.attention import Rotary, StepAttention
from edgeshard_agent.model.delta import DeltaMixer
from edgeshard_agent.model.projection import Integers, Piece, Projection
from edgeshard_agent.ops.attention import Scoring
from edgeshard_agent.ops.elementwise import rms_norm, rotary_, sigmoid_gate, swiglu
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
    states: tuple[StateSize, ...] = ()
    integers: Integers | None = None
    expert_integers: tuple[Integers, ...] = ()


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; with a `unit_offset` by 1 + weight, rounded last (gemma)."""

    def __init__(self, width: int, eps: float, unit_offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, device="meta"), requires_grad=False)
        self.eps, self._unit_offset = eps, unit_offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.add(x, None)[0]

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, the sum) of x [T, width] and the residual, if there is one."""
        return rms_norm(x, self.weight, self.eps, residual, unit_offset=self._unit_offset)


class GatedMlp(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, gate: int, hidden: int, bias: bool, options: BlockOptions) -> None:
        super().__init__()
        self.gate_up = Projection((gate, gate), hidden, bias=bias, integers=options.integers)
        self.down = Projection((hidden,), gate, bias=bias, integers=options.integers)
        activation = options.style.activation
        self._activation = None if activation in ("silu", "swish") else _ACTIVATIONS[activation]

    @property
    def is_silu(self) -> bool:
        return self._activation is None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] from [T, hidden]."""
        gate_up = self.gate_up(x)
        if self._activation is None:
            inner = swiglu(gate_up)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            inner = self._activation(gate) * up
        result: torch.Tensor = self.down(inner)
        return result


ExpertSource = Callable[[torch.Tensor], Iterator[int]]
"""The experts in `chosen` [tokens, per token], each once; one is in memory until the next is asked for."""


class MixtureMlp(nn.Module):
    """A router chooses a few experts for each token; their outputs are summed by their shares."""

    def __init__(self, experts: int, inner: int, hidden: int, options: BlockOptions) -> None:
        super().__init__()
        self.router = Projection((experts,), hidden)
        kinds = options.expert_integers or (options.integers,) * experts
        self.experts = nn.ModuleList(GatedMlp(inner, hidden, False, replace(options, integers=kind)) for kind in kinds)
        self.source: ExpertSource | None = None
        """Brings the layer's experts into memory; None where all of them are there."""
        self._per_token = options.style.experts_per_token
        self._normalised = options.style.normalised_experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] from [T, hidden]. A token's experts are added in order of their index, whoever shares them.

        So bits do not depend on the order in which a source has them in memory.
        """
        shares = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        best, chosen = shares.topk(self._per_token, dim=-1)
        if self._normalised:
            best /= best.sum(dim=-1, keepdim=True)
        best = best.to(x.dtype)
        result = torch.zeros_like(x)
        if self.source is None:
            for index in sorted(set(chosen.flatten().tolist())):
                result.index_add_(0, *self._part(index, x, best, chosen))
            return result
        parts = {index: self._part(index, x, best, chosen) for index in self.source(chosen)}
        for index in sorted(parts):
            result.index_add_(0, *parts[index])
        return result

    def _part(
        self, index: int, x: torch.Tensor, best: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that one expert computes, all at once, and what it adds to them."""
        rows, rank = (chosen == index).nonzero(as_tuple=True)
        return rows, self.experts[index](x[rows]) * best[rows, rank, None]


class Block(nn.Module):
    """One decoder block. `layer_idx` is its global index, by which attention finds its keys and values."""

    def __init__(self, shapes: Shapes, options: BlockOptions, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.options = options
        hidden, heads = options.hidden_size, options.heads
        self.linear_attn: DeltaMixer | None = None
        self.q_norm = self.k_norm = None
        self.gate_row = 0
        """The first row of `qkv` that is of gates; 0 without gates."""
        if "linear_attn.A_log" in shapes:
            self.linear_attn = DeltaMixer(shapes, hidden, options.style.eps, options.states, options.integers)
        else:
            self._make_attention(shapes)
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

    def _make_attention(self, shapes: Shapes) -> None:
        """The parts of attention; gates come behind keys and values where queries have them."""
        options = self.options
        hidden, integers = options.hidden_size, options.integers
        query, key_value = options.heads * options.head_dim, options.kv_heads * options.head_dim
        parts = [query, key_value, key_value]
        if shapes.get("self_attn.q_proj.weight", (query,))[0] == 2 * query:
            self.gate_row = sum(parts)
            parts.append(query)
        self.qkv = Projection(parts, hidden, bias="self_attn.q_proj.bias" in shapes, integers=integers)
        self.output = Projection((hidden,), query, bias="self_attn.o_proj.bias" in shapes, integers=integers)
        if "self_attn.q_norm.weight" in shapes:
            self.q_norm, self.k_norm = _norm(options.head_dim, options), _norm(options.head_dim, options)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rotary: Rotary | None, step: StepAttention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(this block's last addend, the sum before it), both [T, hidden]: the next block's norm does the addition."""
        normed, residual = self.input_layernorm.add(hidden, residual)
        if self.linear_attn is not None:
            assert step.span_states is not None
            attended = self.linear_attn(normed, step.states(self.layer_idx), step.span_states)
        else:
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
        if self.linear_attn is not None or self.gate_row:
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
        rows = self.qkv(normed)
        qkv = rows.view(len(normed), -1, self.options.head_dim)
        query, key, value = qkv[:, self._query_rows], qkv[:, self._key_rows], qkv[:, self._value_rows]
        if self.q_norm is not None and self.k_norm is not None:
            # Back into their places: the kernels want keys and values alike in memory.
            query.copy_(_by_head(self.q_norm, query))
            key.copy_(_by_head(self.k_norm, key))
        if rotary is not None:
            rotary_(query, key, *rotary)
        attended = step.attend(self.layer_idx, query, key, value, self._scoring).view(len(normed), -1)
        if self.gate_row:
            attended = sigmoid_gate(attended, rows[:, self.gate_row :])
        result: torch.Tensor = self.output(attended)
        return result


def _norm(width: int, options: BlockOptions) -> RmsNorm:
    return RmsNorm(width, options.style.eps, options.style.unit_offset)


def _by_head(norm: RmsNorm, heads: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = norm(heads.reshape(-1, heads.shape[-1]))
    return normed.view(heads.shape)


def _mlp(shapes: Shapes, options: BlockOptions) -> nn.Module:
    hidden = options.hidden_size
    expert = next((shape for name, shape in shapes.items() if ".experts.0." in name and shape[1] == hidden), None)
    if expert is not None:
        count = next(shape[0] for name, shape in shapes.items() if name.endswith(".gate.weight"))
        return MixtureMlp(count, expert[0], hidden, options)
    inner = shapes["mlp.down_proj.weight"][1]
    return GatedMlp(inner, hidden, "mlp.down_proj.bias" in shapes, options)


def pieces_of(name: str, block: Block) -> list[Piece]:
    """The places of the tensor of this name, without `.weight` or `.bias`, in projections below `block`.

    Empty for a tensor that is a parameter of its own.
    """
    if name.startswith("linear_attn."):
        assert block.linear_attn is not None
        return [replace(piece, path=f"linear_attn.{piece.path}") for piece in block.linear_attn.pieces_of(name)]
    options = block.options
    query, key_value = options.heads * options.head_dim, options.kv_heads * options.head_dim
    if name == "self_attn.q_proj" and block.gate_row:
        return _with_gates(block)
    attention: dict[str, tuple[str, int]] = {
        "self_attn.q_proj": ("qkv", 0),
        "self_attn.qkv_proj": ("qkv", 0),
        "self_attn.k_proj": ("qkv", query),
        "self_attn.v_proj": ("qkv", query + key_value),
        "self_attn.o_proj": ("output", 0),
    }
    if name in attention:
        return [Piece(*attention[name])]
    path, _, part = name.rpartition(".")
    if not path.startswith("mlp"):  # a norm
        return []
    if part in ("gate_proj", "gate_up_proj"):
        return [Piece(f"{path}.gate_up")]
    if part == "up_proj":
        mlp: Any = block.get_submodule(path)
        return [Piece(f"{path}.gate_up", mlp.gate_up.rows // 2)]
    return [Piece(f"{path}.down" if part == "down_proj" else "mlp.router")]


def _with_gates(block: Block) -> list[Piece]:
    """The pieces of queries and their gates, which a checkpoint has head by head beside one another."""
    width, pieces = block.options.head_dim, []
    for head in range(block.options.heads):
        for first_row, of_head in ((0, 2 * head), (block.gate_row, 2 * head + 1)):
            pieces.append(Piece("qkv", first_row + head * width, of_head * width, (of_head + 1) * width))
    return pieces
