"""Decoder blocks of the Llama kind: RMS norms, rotary grouped-query attention, a gated MLP or a
mixture of them.

Some have a gate on attention's output, or the gated delta rule in place of attention. The parts of
a block follow from the tensors that its checkpoint must hold (`edgeshard.architectures`). So
biases, gates, norms of queries and keys, and experts need no switches. `BlockOptions` holds the
rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from edgeshard.architectures import StateSize
from edgeshard.architectures.record import BlockStyle, Routing
from edgeshard_agent.model.attention.attention import Rotary, StepAttention
from edgeshard_agent.model.delta import DeltaMixer
from edgeshard_agent.model.projection import Forms, Piece, Projection, mlp_forms, projection
from edgeshard_agent.ops.attention import Scoring
from edgeshard_agent.ops.elementwise import (
    clamped_swiglu,
    geglu,
    gelu,
    quick_gelu,
    rms_norm,
    rotary_,
    sigmoid_gate,
    swiglu,
)
from edgeshard_agent.ops.fused_blocks import NativeBlock
from edgeshard_agent.ops.routing import route

Shapes = Mapping[str, tuple[int, ...]]


Gating = Callable[[torch.Tensor], torch.Tensor]
"""[T, width] from the results [T, 2 * width] of gate and up or, if there is no gate, from the
results [T, width] of up.
"""


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": gelu,
    "quick_gelu": quick_gelu,
    "relu": functional.relu,
}
_GATINGS: dict[str, Gating] = {
    **dict.fromkeys(("silu", "swish"), swiglu),
    **dict.fromkeys(("gelu_fast", "gelu_new", "gelu_pytorch_tanh"), geglu),
}
"""Those that the kernels have in one pass. With `_ACTIVATIONS` they are all that a record lets
through."""


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """Options that a block's tensors do not tell: the family's style, and the sizes. `window` is
    None if attention is full; `forms` holds the forms of the block's matrices by their tensors'
    names.
    """

    style: BlockStyle
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    window: int | None = None
    states: tuple[StateSize, ...] = ()
    forms: Forms = field(default_factory=dict)


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in the forms of `rms_norm`."""

    def __init__(
        self, width: int, eps: float, unit_offset: bool = False, rounded_last: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, device="meta"), requires_grad=False)
        self.width, self.eps = width, eps
        self._unit_offset, self._rounded_last = unit_offset, rounded_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.add(x, None)[0]

    def add(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, the sum) of x [T, width] and the residual, if there is one."""
        form = {"unit_offset": self._unit_offset, "rounded_last": self._rounded_last}
        return rms_norm(x, self.weight, self.eps, residual, **form)


def gating_of(activation: str) -> Gating:
    """activation(gate) * up, for a name that a record lets through."""
    return _GATINGS.get(activation) or partial(_gated, _ACTIVATIONS[activation])


def _gating(style: BlockStyle) -> Gating:
    clamp = style.clamp
    return (
        gating_of(style.activation) if clamp is None else partial(clamped_swiglu, **asdict(clamp))
    )


def _gated(activation: Gating, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate) * up


class GatedMlp(nn.Module):
    """down(gating(gate(x), up(x))), or without a gate down(gating(up(x))); `forms` by the parts
    that `place` takes."""

    def __init__(
        self,
        inner: int,
        hidden: int,
        gating: Gating,
        *,
        bias: bool = False,
        gated: bool = True,
        forms: Forms | None = None,
    ) -> None:
        super().__init__()
        forms = forms or {}
        parts = ("gate_proj", "up_proj") if gated else ("up_proj",)
        joined = [forms.get(part, forms.get("gate_up_proj")) for part in parts]
        self.gate_up = projection((inner,) * len(parts), hidden, bias=bias, integers=joined)
        self.down = Projection((hidden,), inner, bias=bias, integers=forms.get("down_proj"))
        self._gating = gating

    @property
    def is_silu(self) -> bool:
        return self._gating is swiglu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] from [T, hidden]."""
        result: torch.Tensor = self.down(self._gating(self.gate_up(x)))
        return result

    def place(self, part: str) -> tuple[str, int]:
        """The projection and the first row for a tensor: gate_proj, up_proj, gate_up_proj (both) or
        down_proj.

        Rows of both may be in any order that the gating understands.
        """
        if part == "down_proj":
            return "down", 0
        return "gate_up", self.gate_up.rows - self.down.columns if part == "up_proj" else 0


ExpertSource = Callable[[torch.Tensor], Iterator[int]]
"""The experts in `indices` [tokens, per token], each once; one stays in memory until the next is
requested."""


class ExpertModules(nn.ModuleList):
    """The experts of a mixture, gated MLPs: the outputs of a token's experts are summed, weighted
    by the router's shares.
    """

    def __init__(self, experts: Iterable[GatedMlp]) -> None:
        super().__init__(experts)
        self.source: ExpertSource | None = None
        """Brings the layer's experts into memory; None if all of them are in memory."""

    def forward(
        self, x: torch.Tensor, choices: torch.Tensor, shares: torch.Tensor, on_inputs: bool = False
    ) -> torch.Tensor:
        """[T, hidden] from [T, hidden], with the experts `choices` [T, per token] and their
        `shares`, of that shape.

        Shares multiply outputs or, with `on_inputs`, the inputs of the experts.

        A token's experts are added in order of their index, whichever other tokens use them. So
        bits do not depend on the order in which a source has them in memory.
        """
        result = torch.zeros_like(x)
        if self.source is None:
            for index in sorted(set(choices.flatten().tolist())):
                result.index_add_(0, *self._part(index, x, choices, shares, on_inputs))
            return result
        parts = {
            index: self._part(index, x, choices, shares, on_inputs)
            for index in self.source(choices)
        }
        for index in sorted(parts):
            result.index_add_(0, *parts[index])
        return result

    def _part(
        self,
        index: int,
        x: torch.Tensor,
        choices: torch.Tensor,
        shares: torch.Tensor,
        on_inputs: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that one expert computes, all at once, and the values it adds to them."""
        rows, rank = (choices == index).nonzero(as_tuple=True)
        share = shares[rows, rank, None]
        if on_inputs:
            return rows, self[index]((x[rows] * share).to(x.dtype))
        return rows, (self[index](x[rows]) * share).to(x.dtype)


class MixtureMlp(nn.Module):
    """A router chooses a few experts for each token. There may also be an expert that all tokens
    use, with or without a gate of its own."""

    def __init__(self, shapes: Shapes, options: BlockOptions) -> None:
        super().__init__()
        assert options.style.routing is not None
        self.routing = options.style.routing
        (count, hidden) = shapes["mlp.gate.weight"]
        inner = shapes["mlp.experts.0.down_proj.weight"][1]
        gating, forms = _gating(options.style), options.forms
        self.router = Projection((count,), hidden, bias="mlp.gate.bias" in shapes)
        bias = "mlp.experts.0.down_proj.bias" in shapes
        self.e_score_correction_bias: nn.Parameter | None = None
        if "mlp.e_score_correction_bias" in shapes:
            self.e_score_correction_bias = nn.Parameter(
                torch.empty(count, device="meta"), requires_grad=False
            )
        kinds = [mlp_forms(forms, f"mlp.experts.{index}") for index in range(count)]
        self.experts = ExpertModules(
            GatedMlp(inner, hidden, gating, bias=bias, forms=kind) for kind in kinds
        )
        self.shared_expert: GatedMlp | None = None
        self.shared_expert_gate: Projection | None = None
        if (down := shapes.get("mlp.shared_expert.down_proj.weight")) is not None:
            self.shared_expert = GatedMlp(
                down[1], hidden, gating, forms=mlp_forms(forms, "mlp.shared_expert")
            )
        if "mlp.shared_expert_gate.weight" in shapes:
            self.shared_expert_gate = Projection((1,), hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] from [T, hidden]."""
        logits = self.router(x.float() if self.routing.float32 else x)
        result: torch.Tensor = self.experts(
            x, *routed(logits, self.routing, self.e_score_correction_bias, x.dtype)
        )
        if self.shared_expert is None:
            return result
        shared: torch.Tensor = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            shared = _sigmoid(self.shared_expert_gate(x)) * shared
        return result + shared


class MixtureBeside(nn.Module):
    """A mixture whose experts are added to the output of the block's MLP, each of the two normed by
    itself.

    Router and experts see the sum before the MLP's norm; the router's own norm has no weight, and
    its inputs and each expert's share have factors.
    """

    def __init__(self, shapes: Shapes, options: BlockOptions) -> None:
        super().__init__()
        assert options.style.routing is not None
        self.routing = options.style.routing
        (count, hidden) = shapes["beside.router.weight"]
        inner = shapes["beside.experts.0.down_proj.weight"][1]
        self.router = Projection((count,), hidden)
        self.input_scale = nn.Parameter(torch.empty(hidden, device="meta"), requires_grad=False)
        self.expert_scale = nn.Parameter(torch.empty(count, device="meta"), requires_grad=False)
        self.input_norm, self.output_norm, self.mlp_norm = (
            _norm(hidden, options) for _ in range(3)
        )
        kinds = [mlp_forms(options.forms, f"beside.experts.{index}") for index in range(count)]
        gating = _gating(options.style)
        self.experts = ExpertModules(GatedMlp(inner, hidden, gating, forms=kind) for kind in kinds)
        self._eps, self._root = options.style.eps, hidden**-0.5

    def forward(self, x: torch.Tensor, by_mlp: torch.Tensor) -> torch.Tensor:
        """[T, hidden] from the sum before the MLP and from the MLP's output, both [T, hidden]."""
        logits = self.router(bare_norm(x, self._eps) * self.input_scale * self._root)
        choices, shares = routed(logits, self.routing, None, torch.float32)
        mixed = self.experts(self.input_norm(x), choices, shares * self.expert_scale[choices])
        result: torch.Tensor = self.mlp_norm(by_mlp) + self.output_norm(mixed)
        return result


def bare_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) over the last dimension."""
    rows = _rows(x, x.shape[-1])
    return rms_norm(rows, rows.new_ones(rows.shape[1]), eps)[0].view(x.shape)


def routed(
    logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts chosen for each token and their shares, both [T, chosen], from the router's
    logits [T, experts]."""
    choices, shares = route(
        logits,
        routing.top_k,
        correction,
        sigmoid=routing.sigmoid,
        normalised=routing.normalised,
        scale=routing.scale,
        groups=routing.groups,
        kept_groups=routing.kept_groups,
    )
    return choices, shares if routing.sigmoid else shares.to(dtype)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """The sigmoid of rows, whose bits do not depend on the number of rows."""
    return sigmoid_gate(torch.ones_like(x), x)


def experts_of(block: nn.Module) -> tuple[str, ExpertModules] | None:
    """The experts of a block that are modules of ours, with their path; None if it has none."""
    return next(
        ((path, part) for path, part in block.named_modules() if isinstance(part, ExpertModules)),
        None,
    )


class Block(nn.Module):
    """One decoder block. `layer_idx` is its global index, by which attention finds its keys and
    values."""

    def __init__(self, shapes: Shapes, options: BlockOptions, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.options = options
        hidden = options.hidden_size
        self.linear_attn: DeltaMixer | None = None
        self.q_norm: RmsNorm | None = None
        self.k_norm: RmsNorm | None = None
        self.sinks: nn.Parameter | None = None
        self.gate_row = 0
        """The first row of `qkv` that is of gates; 0 without gates."""
        if "linear_attn.A_log" in shapes:
            style = options.style
            self.linear_attn = DeltaMixer(
                shapes, hidden, style.eps, options.states, options.forms, style.tiled_heads
            )
        else:
            self._make_attention(shapes)
        self.mlp = _mlp(shapes, options)
        self.beside = MixtureBeside(shapes, options) if "beside.router.weight" in shapes else None
        self.layer_scalar: nn.Parameter | None = None
        """A factor [1] of the sum after the block."""
        if "layer_scalar" in shapes:
            self.layer_scalar = nn.Parameter(torch.empty(1, device="meta"), requires_grad=False)
        self.input_layernorm = (
            _norm(hidden, options) if "input_layernorm.weight" in shapes else None
        )
        self.post_attention_layernorm = _norm(hidden, options)
        self.pre_feedforward_layernorm: RmsNorm | None = None
        self.post_feedforward_layernorm: RmsNorm | None = None
        if "pre_feedforward_layernorm.weight" in shapes:
            self.pre_feedforward_layernorm = _norm(hidden, options)
        if "post_feedforward_layernorm.weight" in shapes:
            self.post_feedforward_layernorm = _norm(hidden, options)
        self._scoring = Scoring(
            options.style.scaling, options.window or 0, options.style.softcap or 0.0
        )

    def _make_attention(self, shapes: Shapes) -> None:
        """The parts of attention; gates follow keys and values if queries have gates."""
        options = self.options
        hidden, forms = options.hidden_size, options.forms
        query, key_value = options.heads * options.head_dim, options.kv_heads * options.head_dim
        heads = options.heads
        kv_heads = options.kv_heads
        parts = [query, key_value]
        names = ["q_proj", "k_proj"]
        self._query_rows, self._key_rows = slice(0, heads), slice(heads, heads + kv_heads)
        self._value_rows = self._key_rows
        if {"self_attn.v_proj.weight", "self_attn.qkv_proj.weight"} & shapes.keys():
            self._value_rows = slice(heads + kv_heads, heads + 2 * kv_heads)
            parts.append(key_value)
            names.append("v_proj")
        if shapes.get("self_attn.q_proj.weight", (query,))[0] == 2 * query:
            self.gate_row = sum(parts)
            parts.append(query)
            names.append("q_proj")
        joined = forms.get("self_attn.qkv_proj.weight")
        integers = [forms.get(f"self_attn.{name}.weight", joined) for name in names]
        self.qkv = projection(
            parts, hidden, bias="self_attn.q_proj.bias" in shapes, integers=integers
        )
        output = forms.get("self_attn.o_proj.weight")
        self.output = Projection(
            (hidden,), query, bias="self_attn.o_proj.bias" in shapes, integers=output
        )
        if "self_attn.sinks" in shapes:
            self.sinks = nn.Parameter(
                torch.empty(options.heads, device="meta"), requires_grad=False
            )
        if "self_attn.q_norm.weight" in shapes:
            # The widths of one head, or of a row's queries and of its keys.
            widths = [shapes[f"self_attn.{name}.weight"][0] for name in ("q_norm", "k_norm")]
            self.q_norm, self.k_norm = (_norm(width, options) for width in widths)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        rotary: Rotary | None,
        step: StepAttention,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(this block's last addend, the sum before it), both [T, hidden]: the next block's norm
        does the addition. If the sum has a factor, the sum is the addend and there is no other.

        A family has norms before attention and MLP, after them, or both.
        """
        normed, residual = _added(self.input_layernorm, hidden, residual)
        if self.linear_attn is not None:
            assert step.span_states is not None
            attended = self.linear_attn(normed, step.states(self.layer_idx), step.span_states)
        else:
            attended = self._attend(normed, rotary, step)
        before_mlp: RmsNorm | None = self.post_attention_layernorm
        if self.post_feedforward_layernorm is not None:
            attended = self.post_attention_layernorm(attended)
            before_mlp = self.pre_feedforward_layernorm
        normed, residual = _added(before_mlp, self._scaled(attended), residual)
        addend = self.mlp(normed)
        if self.beside is not None:
            addend = self.beside(residual, addend)
        if self.post_feedforward_layernorm is not None:
            addend = self.post_feedforward_layernorm(addend)
        addend = self._scaled(addend)
        if self.layer_scalar is not None:
            return (residual + addend) * self.layer_scalar, None
        return addend, residual

    def native(self) -> NativeBlock | None:
        """This block for `run_blocks`, once it is filled; None if some of its parts do not fit the
        native call."""
        options, mlp = self.options, self.mlp
        style = options.style
        if (
            style.unit_offset
            or style.rounded_last
            or style.softcap is not None
            or self.sinks is not None
        ):
            return None
        if style.values_normed or self.beside is not None or self.layer_scalar is not None:
            return None
        if not isinstance(mlp, GatedMlp) or not mlp.is_silu:
            return None
        if self.linear_attn is not None or self.gate_row or style.residual_scale != 1.0:
            return None
        if self.input_layernorm is None or self.post_feedforward_layernorm is not None:
            return None
        if self.q_norm is not None and self.q_norm.width != options.head_dim:
            return None
        qkv = self.qkv.packed
        output = self.output.packed
        gate_up = mlp.gate_up.packed
        down = mlp.down.packed
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

    def _scaled(self, addend: torch.Tensor) -> torch.Tensor:
        scale = self.options.style.residual_scale
        return addend if scale == 1.0 else addend * scale

    def _attend(
        self, normed: torch.Tensor, rotary: Rotary | None, step: StepAttention
    ) -> torch.Tensor:
        options, rows = self.options, self.qkv(normed)
        qkv = rows.view(len(normed), -1, options.head_dim)
        query = qkv[:, self._query_rows]
        key = qkv[:, self._key_rows]
        value = qkv[:, self._value_rows]
        if options.style.values_normed:
            # before the norm of keys, which the values may be
            value = bare_norm(value, options.style.eps)
        if self.q_norm is not None and self.k_norm is not None:
            # Back into their places: the kernels want keys and values alike in memory.
            query.copy_(_normed(self.q_norm, query))
            key.copy_(_normed(self.k_norm, key))
        if rotary is not None:
            rotary_(query, key, rotary.cos, rotary.sin)
            if rotary.query_factors is not None:
                query.mul_(rotary.query_factors)
        scoring = self._scoring if self.sinks is None else replace(self._scoring, sinks=self.sinks)
        attended = step.attend(self.layer_idx, query, key, value, scoring).view(len(normed), -1)
        if self.gate_row:
            attended = sigmoid_gate(attended, rows[:, self.gate_row :])
        result: torch.Tensor = self.output(attended)
        return result


def _norm(width: int, options: BlockOptions) -> RmsNorm:
    return RmsNorm(width, options.style.eps, options.style.unit_offset, options.style.rounded_last)


def _added(
    norm: RmsNorm | None, x: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of the sum, the sum); without a norm the sum is both."""
    if norm is not None:
        return norm.add(x, residual)
    total = x if residual is None else x + residual
    return total, total


def _normed(norm: RmsNorm, heads: torch.Tensor) -> torch.Tensor:
    """Heads [T, heads, head_dim], normed one by one or all heads of a row together, depending on
    the norm's width."""
    normed: torch.Tensor = norm(_rows(heads, norm.width))
    return normed.view(heads.shape)


def _rows(heads: torch.Tensor, width: int) -> torch.Tensor:
    """[T, heads, head_dim] as contiguous rows. With one head per token they would be a view of the
    packed rows, which kernels do not take. Torch would then norm prompts, and the last bits would
    differ from the kernels' results for steps of one token."""
    return heads.reshape(-1, width).contiguous()


def _mlp(shapes: Shapes, options: BlockOptions) -> nn.Module:
    hidden = options.hidden_size
    if "mlp.experts.0.down_proj.weight" in shapes:
        return MixtureMlp(shapes, options)
    inner, bias = shapes["mlp.down_proj.weight"][1], "mlp.down_proj.bias" in shapes
    forms = mlp_forms(options.forms, "mlp")
    return GatedMlp(inner, hidden, gating_of(options.style.activation), bias=bias, forms=forms)


def pieces_of(name: str, block: Block) -> list[Piece]:
    """The places of the tensor of this name, without `.weight` or `.bias`, in projections below
    `block`.

    Empty for a tensor that is a parameter of its own.
    """
    if name.startswith("linear_attn."):
        assert block.linear_attn is not None
        return [
            replace(piece, path=f"linear_attn.{piece.path}")
            for piece in block.linear_attn.pieces_of(name)
        ]
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
    if name == "mlp.gate":
        return [Piece("mlp.router")]
    if name in ("mlp.shared_expert_gate", "beside.router"):
        return [Piece(name)]
    if not path.startswith(("mlp", "beside.experts")):  # a norm, or a router's correction
        return []
    mlp: Any = block.get_submodule(path)
    projection, first_row = mlp.place(part)
    return [Piece(f"{path}.{projection}", first_row)]


def _with_gates(block: Block) -> list[Piece]:
    """The pieces of queries and their gates, which alternate head by head in a checkpoint."""
    width, pieces = block.options.head_dim, []
    for head in range(block.options.heads):
        for first_row, of_head in ((0, 2 * head), (block.gate_row, 2 * head + 1)):
            pieces.append(
                Piece("qkv", first_row + head * width, of_head * width, (of_head + 1) * width)
            )
    return pieces
