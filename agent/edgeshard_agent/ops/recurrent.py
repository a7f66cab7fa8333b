"""Operators whose past is a state of fixed size for each request: a short convolution, the gated
delta rule and the selective scan.

All take the packed rows of a step's spans, and the places of these spans' states. Tokens are
computed one after the other in spans of any length. So a token's bits do not depend on the chunks
of its prompt (docs/kernels.md).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard_agent.ops import layouts, native

_L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class SpanStates:
    """The states of a step's spans: row first_rows[s] up to first_rows[s + 1] - 1 are span s, the
    next tokens of the request whose state is in slot slots[s]. All are contiguous int32; each slot
    is of one span.

    If some of its tokens are guesses, a request may have to continue from any of them: `row_slots`
    [rows] are then the slots into which the state after each row is written. The state in slots[s]
    stays, unless a row's is written there.
    """

    slots: Tensor
    first_rows: Tensor
    row_slots: Tensor | None = None

    def check(self, rows: int) -> None:
        """Raise InvalidArgumentError unless each of the step's rows is in one span."""
        slots, first_rows = self.slots, self.first_rows
        tensors = (
            (slots, first_rows) if self.row_slots is None else (slots, first_rows, self.row_slots)
        )
        fits = slots.dim() == 1 and first_rows.shape == (len(slots) + 1,) and 0 < len(slots) <= rows
        fits = fits and (self.row_slots is None or self.row_slots.shape == (rows,))
        if not fits or any(x.dtype is not torch.int32 or not x.is_contiguous() for x in tensors):
            raise InvalidArgumentError(
                "slots, first_rows and row_slots must be contiguous int32, [spans], [spans + 1] "
                "and [rows]",
                field="slots",
            )
        # one token each; an accelerator is not asked
        if len(slots) == rows or not first_rows.is_cpu:
            return
        edges = first_rows.tolist()
        if (
            edges[0] != 0
            or edges[-1] != rows
            or any(end <= first for first, end in pairwise(edges))
        ):
            raise InvalidArgumentError(
                f"spans begin at {edges}; each of {rows} rows must be in one", field="first_rows"
            )

    def pointers(self) -> dict[str, int | None]:
        """For the native kernels."""
        row_slots = None if self.row_slots is None else self.row_slots.data_ptr()
        return {
            "slots": self.slots.data_ptr(),
            "first_rows": self.first_rows.data_ptr(),
            "row_slots": row_slots,
        }

    def pieces(self, rows: int, slot_count: int) -> Iterator[_Piece]:
        """All spans at once where each has one token, so that nothing is read back from an
        accelerator; one span after the other else. There are `slot_count` slots."""
        self._check_slots(slot_count)
        if len(self.slots) == rows:
            into = self.slots if self.row_slots is None else self.row_slots
            yield _Piece(self.slots.long(), slice(0, rows), 1, into.long().unsqueeze(1), [0])
            return
        for span, (first, end) in enumerate(pairwise(self.first_rows.tolist())):
            own, count = self.slots[span : span + 1].long(), end - first
            into, kept_tokens = own.expand(count), [count - 1]
            if self.row_slots is not None:
                into = self.row_slots[first:end].long()
                edges = pairwise([*into.tolist(), -1])
                kept_tokens = [
                    token for token, (slot, following) in enumerate(edges) if slot != following
                ]
            yield _Piece(own, slice(first, end), count, into.unsqueeze(0), kept_tokens)

    def _check_slots(self, slot_count: int) -> None:
        if not self.slots.is_cpu:
            return
        outside = ((self.slots < 0) | (self.slots >= slot_count)).nonzero()
        _check_slot(int(outside[0]) if len(outside) else -1)
        if self.row_slots is not None:
            outside = ((self.row_slots < 0) | (self.row_slots >= slot_count)).nonzero()
            _check_slot(int((self.first_rows <= outside[0]).sum()) - 1 if len(outside) else -1)


def short_convolution(
    x: Tensor,
    weight: Tensor,
    tails: Tensor,
    spans: SpanStates,
    bias: Tensor | None = None,
    activated: bool = True,
) -> Tensor:
    """A causal convolution of each channel by itself, and silu of it if `activated`: [T, channels]
    from x of that size.

    `weight` is [channels, taps], the token's own last; `tails` [slots, taps - 1, channels] are the
    inputs before each span, the oldest first, in x's dtype, and are brought up to date. Sums are
    float32, and rounded to the dtype before silu as in transformers. Raises InvalidArgumentError
    where shapes do not fit or there is no such slot.
    """
    channels, taps = weight.shape
    if (
        x.dim() != 2
        or x.shape[1] != channels
        or tails.shape[1:] != (taps - 1, channels)
        or tails.dtype != x.dtype
    ):
        raise InvalidArgumentError(
            f"x is {tuple(x.shape)}, weight {tuple(weight.shape)} and tails {tuple(tails.shape)} "
            f"{tails.dtype}; they "
            f"must be [T, C], [C, K] and [slots, K - 1, C] {x.dtype}",
            field="tails",
        )
    spans.check(len(x))
    parameters = (weight,) if bias is None else (weight, bias)
    library = _library(x, tails, *parameters) if taps <= native.MOST_TAPS else None
    if library is None:
        return _convolved(x, weight, tails, spans, bias, activated)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    call = layouts.ConvolutionStruct(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        tails=tails.data_ptr(),
        out=out.data_ptr(),
        x_stride=x.stride(0),
        spans=len(spans.slots),
        slot_count=len(tails),
        channels=channels,
        taps=taps,
        activated=activated,
        element=native.ELEMENTS[x.dtype],
        **spans.pointers(),
    )
    _check_slot(library.edgeshard_convolution(ctypes.addressof(call), torch.get_num_threads()))
    return out


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    spans: SpanStates,
) -> Tensor:
    """[T, value heads, Dv] from query and key [T, key heads, Dk] and value [T, value heads, Dv].

    Each token multiplies its request's state S, [Dk, Dv] in each value head, by exp(log_decay),
    then adds k (beta (v - k^T S))^T, and gives q^T S: docs/papers/agent.md#gated-delta-rule.
    Queries and keys are first divided by their lengths, queries by sqrt(Dk) too; value heads share
    key heads in groups. `log_decay` and `beta` [T, value heads] are float32, as `states` [slots,
    value heads, Dk, Dv], which are brought up to date. Where log_decay is [T, value heads, Dk],
    each row of S has a decay of its own: docs/papers/agent.md#kimi-delta-attention. Raises
    InvalidArgumentError where shapes do not fit or there is no such slot.
    """
    _check_rule(query, key, value, log_decay, beta, states)
    spans.check(len(key))
    _, key_heads, key_dim = key.shape
    _, heads, value_dim = value.shape
    library = _library(states, log_decay, beta) if key_dim <= native.MOST_KEY_DIM else None
    if library is None:
        return _advanced(query, key, value, log_decay, beta, states, spans)
    dtype = value.dtype
    if dtype not in native.ELEMENTS:
        return gated_delta_rule(
            query.float(), key.float(), value.float(), log_decay, beta, states, spans
        ).to(dtype)
    query, key, value = (x if x[0].is_contiguous() else x.contiguous() for x in (query, key, value))
    out = torch.empty(value.shape, dtype=dtype)
    call = layouts.DeltaRuleStruct(
        query=query.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        log_decay=log_decay.data_ptr(),
        beta=beta.data_ptr(),
        states=states.data_ptr(),
        out=out.data_ptr(),
        query_stride=query.stride(0),
        key_stride=key.stride(0),
        value_stride=value.stride(0),
        spans=len(spans.slots),
        slot_count=len(states),
        key_heads=key_heads,
        value_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        by_channel=log_decay.dim() == 3,
        element=native.ELEMENTS[dtype],
        **spans.pointers(),
    )
    _check_slot(library.edgeshard_delta_rule(ctypes.addressof(call), torch.get_num_threads()))
    return out


def _check_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor
) -> None:
    rows, key_heads, key_dim = key.shape
    _, heads, value_dim = value.shape
    fits = query.shape == key.shape and len(value) == rows and heads % key_heads == 0
    fits = fits and beta.shape == (rows, heads) and states.shape[1:] == (heads, key_dim, value_dim)
    fits = fits and log_decay.shape == (
        (rows, heads, key_dim) if log_decay.dim() == 3 else beta.shape
    )
    if not fits or any(x.dtype is not torch.float32 for x in (log_decay, beta, states)):
        raise InvalidArgumentError(
            f"query is {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}, "
            "states "
            f"{tuple(states.shape)}: key heads must divide value heads, and log_decay, beta and "
            "states be float32 "
            "of value heads",
            field="states",
        )


def delta_gates(
    beta: Tensor, step: Tensor, a_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """(log_decay, beta) of `gated_delta_rule`, [T, value heads] in float32, from what a layer
    projects, of that shape.

    They are -exp(a_log) * softplus(step + dt_bias), and sigmoid(beta) rounded to its dtype; `a_log`
    and `dt_bias` [value heads] are float32.
    """
    if beta.shape != step.shape or a_log.shape != dt_bias.shape or beta.shape[1:] != a_log.shape:
        raise InvalidArgumentError(
            f"beta is {tuple(beta.shape)}, step {tuple(step.shape)}, a_log {tuple(a_log.shape)}, "
            "dt_bias "
            f"{tuple(dt_bias.shape)}; they must be [T, heads] twice and [heads] twice",
            field="step",
        )
    fits = (
        beta.dtype is step.dtype
        and beta.dtype in native.ELEMENTS
        and beta.stride() == step.stride()
    )
    library = _library(a_log, dt_bias) if fits and beta.is_cpu and beta.stride(1) == 1 else None
    if library is None:
        return -a_log.exp() * softplus(step.float() + dt_bias), beta.sigmoid().float()
    log_decay, opened = torch.empty(beta.shape), torch.empty(beta.shape)
    library.edgeshard_delta_gates(
        beta.data_ptr(),
        step.data_ptr(),
        beta.stride(0),
        a_log.data_ptr(),
        dt_bias.data_ptr(),
        log_decay.data_ptr(),
        opened.data_ptr(),
        len(beta),
        beta.shape[1],
        native.ELEMENTS[beta.dtype],
    )
    return log_decay, opened


@dataclass(frozen=True, slots=True)
class ScanHeads:
    """The parameters of the heads of a selective scan, each [heads] in float32, and the smallest
    and the largest step of any."""

    step_bias: Tensor
    log_rate: Tensor
    skip: Tensor
    step_limits: tuple[float, float] = (0.0, math.inf)


def _check_scan(
    x: Tensor, b: Tensor, c: Tensor, step: Tensor, own: ScanHeads, states: Tensor
) -> None:
    """Raise InvalidArgumentError for arguments of `selective_scan` whose shapes or types do not
    fit."""
    rows, heads, head_dim = x.shape
    groups, state_dim = b.shape[1:]
    fits = (
        b.shape == c.shape
        and len(b) == rows
        and heads % groups == 0
        and step.shape == (rows, heads)
    )
    by_head = (own.step_bias, own.log_rate, own.skip)
    fits = (
        fits
        and all(one.shape == (heads,) for one in by_head)
        and states.shape[1:] == (heads, state_dim, head_dim)
    )
    if not fits or any(one.dtype is not torch.float32 for one in (*by_head, states)):
        raise InvalidArgumentError(
            f"x is {tuple(x.shape)}, b {tuple(b.shape)}, c {tuple(c.shape)}, step "
            f"{tuple(step.shape)}, states "
            f"{tuple(states.shape)}: groups must divide heads, and step_bias, log_rate, skip and "
            "states be float32 of "
            "heads",
            field="states",
        )


def selective_scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    step: Tensor,
    own: ScanHeads,
    states: Tensor,
    spans: SpanStates,
) -> Tensor:
    """[T, heads, P] in float32 from x [T, heads, P], b and c [T, groups, N] and step [T, heads].

    Each token's step d is softplus(step + step_bias), kept within the limits. It multiplies its
    request's state S, [N, P] in each head, by exp(-d exp(log_rate)), adds b (d x)^T, and gives c^T
    S + skip x: docs/papers/agent.md#selective-scan. Heads share b and c in groups. `states` [slots,
    heads, N, P] are float32 and are brought up to date. Raises InvalidArgumentError where shapes do
    not fit or there is no such slot.
    """
    _check_scan(x, b, c, step, own, states)
    heads, head_dim = x.shape[1:]
    groups, state_dim = b.shape[1:]
    spans.check(len(x))
    library = (
        _library(states, own.step_bias, own.log_rate, own.skip)
        if state_dim <= native.MOST_STATE_DIM
        else None
    )
    if library is None:
        return _scanned(x, b, c, step, own, states, spans)
    dtype = x.dtype if x.dtype in native.ELEMENTS else torch.float32
    x, b, c, step = (one.to(dtype) for one in (x, b, c, step))
    x, b, c, step = (one if one[0].is_contiguous() else one.contiguous() for one in (x, b, c, step))
    out = torch.empty(x.shape, dtype=torch.float32)
    call = layouts.SelectiveScanStruct(
        x=x.data_ptr(),
        b=b.data_ptr(),
        c=c.data_ptr(),
        step=step.data_ptr(),
        step_bias=own.step_bias.data_ptr(),
        log_rate=own.log_rate.data_ptr(),
        skip=own.skip.data_ptr(),
        states=states.data_ptr(),
        out=out.data_ptr(),
        x_stride=x.stride(0),
        b_stride=b.stride(0),
        c_stride=c.stride(0),
        step_stride=step.stride(0),
        least_step=own.step_limits[0],
        most_step=own.step_limits[1],
        spans=len(spans.slots),
        slot_count=len(states),
        groups=groups,
        heads=heads,
        head_dim=head_dim,
        state_dim=state_dim,
        element=native.ELEMENTS[dtype],
        **spans.pointers(),
    )
    _check_slot(library.edgeshard_selective_scan(ctypes.addressof(call), torch.get_num_threads()))
    return out


def _library(first: Tensor, *others: Tensor) -> ctypes.CDLL | None:
    """The native kernels where they take these: contiguous, on the CPU, of one dtype that they
    know."""
    if first.dtype not in native.ELEMENTS or not first.is_cpu:
        return None
    if any(x.dtype is not first.dtype or not x.is_contiguous() for x in others):
        return None
    return native.active()


def _check_slot(refused: int) -> None:
    if refused >= 0:
        raise InvalidArgumentError(
            f"the slot of span {refused} is outside the states", field="slots"
        )


@dataclass(frozen=True, slots=True)
class _Piece:
    """Spans of `count` tokens each, which are `rows` of the step. `sources` [spans] are the slots
    from which they go on, and `into` [spans, count] those for what is behind their tokens; of
    `kept_tokens` tokens it is not overwritten."""

    sources: Tensor
    rows: slice
    count: int
    into: Tensor
    kept_tokens: list[int]

    def put(self, states: Tensor, token: int, state: Tensor) -> None:
        """Keep the states [spans, ...] behind a token, if they are to be kept."""
        if token in self.kept_tokens:
            states[self.into[:, token]] = state


def _convolved(
    x: Tensor,
    weight: Tensor,
    tails: Tensor,
    spans: SpanStates,
    bias: Tensor | None,
    activated: bool,
) -> Tensor:
    out = torch.empty_like(x)
    by_tap, before = weight.float().t(), tails.shape[1]
    for piece in spans.pieces(len(x), len(tails)):
        rows, count = piece.rows, piece.count
        inputs = torch.cat(
            (tails[piece.sources], x[rows].reshape(len(piece.sources), count, -1)), dim=1
        )
        for token in piece.kept_tokens:
            piece.put(tails, token, inputs[:, token + 1 : token + 1 + before])
        summed = sum(inputs[:, tap : tap + count].float() * one for tap, one in enumerate(by_tap))
        assert isinstance(summed, Tensor)
        if bias is not None:
            summed = summed + bias.float()
        summed = summed.to(x.dtype)
        out[rows] = (silu(summed) if activated else summed).view(-1, x.shape[1])
    return out


def _advanced(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    spans: SpanStates,
) -> Tensor:
    group = value.shape[1] // key.shape[1]
    queries = _unit(query).repeat_interleave(group, dim=1) * key.shape[-1] ** -0.5
    keys = _unit(key).repeat_interleave(group, dim=1)
    values, decays = value.float(), log_decay.exp().view(*value.shape[:2], -1, 1)
    out = torch.empty_like(values)
    for piece in spans.pieces(len(value), len(states)):
        state = states[piece.sources]
        for token in range(piece.count):
            # a row of each state
            at = slice(piece.rows.start + token, piece.rows.stop, piece.count)
            k = keys[at].unsqueeze(-1)
            state *= decays[at]
            change = (values[at] - (state * k).sum(-2)) * beta[at].unsqueeze(-1)
            state += k * change.unsqueeze(-2)
            out[at] = (state * queries[at].unsqueeze(-1)).sum(-2)
            piece.put(states, token, state)
    return out.to(value.dtype)


def _scanned(
    x: Tensor, b: Tensor, c: Tensor, step: Tensor, own: ScanHeads, states: Tensor, spans: SpanStates
) -> Tensor:
    group, values = x.shape[1] // b.shape[1], x.float()
    raw = step.float() + own.step_bias
    steps = torch.where(raw > 20, raw, raw.exp().log1p()).clamp(*own.step_limits)
    decays = (-steps * own.log_rate.exp())[..., None, None].exp()
    scaled_inputs, out = values * steps.unsqueeze(-1), values * own.skip.unsqueeze(-1)
    into, outof = (one.float().repeat_interleave(group, dim=1).unsqueeze(-1) for one in (b, c))
    for piece in spans.pieces(len(x), len(states)):
        state = states[piece.sources]
        for token in range(piece.count):
            # a row of each state
            at = slice(piece.rows.start + token, piece.rows.stop, piece.count)
            state = state * decays[at] + into[at] * scaled_inputs[at].unsqueeze(-2)
            out[at] += (state * outof[at]).sum(-2)
            piece.put(states, token, state)
    return out


def _unit(x: Tensor) -> Tensor:
    """Vectors divided by their lengths, in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _L2_EPS)
