"""Operators with a state of fixed size: their definition, transformers' forms, the same bits in any
cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from edgeshard_agent.ops.elementwise import gated_norm
from edgeshard_agent.ops.recurrent import (
    ScanHeads,
    SpanStates,
    delta_gates,
    gated_delta_rule,
    selective_scan,
    short_convolution,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu, softplus
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from edgeshard.domain.errors import InvalidArgumentError
from tests.agent.ops.conftest import FALLBACK

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}
SIZES = [(2, 4, 16, 64), (1, 1, 8, 12), (2, 2, 24, 100), (1, 3, 128, 128)]
"""Key heads, value heads, and their widths."""


def made(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def edges_of(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


def slots_of(*slots: int) -> Tensor:
    return torch.tensor(slots, dtype=torch.int32)


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@dataclass(frozen=True)
class Rule:
    """What the delta rule takes of some tokens, and a state for each request."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor
    states: Tensor

    @classmethod
    def of(
        cls,
        rows: int,
        size: tuple[int, int, int, int],
        dtype: torch.dtype = torch.float32,
        slots: int = 3,
        by_channel: bool = False,
    ) -> Rule:
        key_heads, heads, key_dim, value_dim = size
        decays = (rows, heads, key_dim) if by_channel else (rows, heads)
        packed = made(rows, 2 * key_heads * key_dim + heads * value_dim, seed=1, dtype=dtype)
        query, key, value = packed.split(
            [key_heads * key_dim, key_heads * key_dim, heads * value_dim], dim=1
        )
        return cls(
            query.view(rows, key_heads, key_dim),
            key.view(rows, key_heads, key_dim),
            value.view(rows, heads, value_dim),
            -made(*decays, seed=2).exp() * 0.3,
            made(rows, heads, seed=3).sigmoid(),
            made(slots, heads, key_dim, value_dim, seed=4),
        )

    def rows(self, at: Any, states: Tensor) -> Rule:
        query, key, value, log_decay, beta = (
            x[at].contiguous()
            for x in (self.query, self.key, self.value, self.log_decay, self.beta)
        )
        return Rule(query, key, value, log_decay, beta, states)

    def run(self, slots: Tensor, first_rows: Tensor, row_slots: Tensor | None = None) -> Tensor:
        spans = SpanStates(slots, first_rows, row_slots)
        return gated_delta_rule(
            self.query, self.key, self.value, self.log_decay, self.beta, self.states, spans
        )

    def by_definition(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Of one request, token by token in float64: what comes out, and the state behind it."""
        key_dim, group = self.key.shape[-1], self.value.shape[1] // self.key.shape[1]
        state, out = state.double(), []
        for row in range(len(self.value)):
            q, k = (
                (x / (x @ x + 1e-6).sqrt() for x in vectors[row].double())
                for vectors in (self.query, self.key)
            )
            queries = [x / key_dim**0.5 for x in q for _ in range(group)]
            keys = [x for x in k for _ in range(group)]
            heads = []
            for head, (one, other) in enumerate(zip(queries, keys, strict=True)):
                decayed = state[head] * self.log_decay[row, head].double().exp().view(-1, 1)
                change = self.beta[row, head].double() * (
                    self.value[row, head].double() - other @ decayed
                )
                heads.append(decayed + torch.outer(other, change))
                out.append(one @ heads[-1])
            state = torch.stack(heads)
        return torch.stack(out).view(self.value.shape), state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_the_delta_rule_is_its_definition(
    size: tuple[int, int, int, int], by_channel: bool, dtype: torch.dtype, kernels: str
) -> None:
    rule = Rule.of(7, size, dtype, by_channel=by_channel)
    before = rule.states.clone()
    found = rule.run(slots_of(2, 0), edges_of((4, 3)))
    assert found.dtype is dtype
    for slot, rows in ((2, slice(0, 4)), (0, slice(4, 7))):
        expected, state = rule.rows(rows, before).by_definition(before[slot])
        close(found[rows], expected)
        close(rule.states[slot], state)
    assert torch.equal(rule.states[1], before[1]), "another request's"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "form",
    [theirs.torch_recurrent_gated_delta_rule, theirs.torch_chunk_gated_delta_rule],
    ids=["recurrent", "chunk"],
)
def test_the_delta_rule_is_transformers(
    form: Callable[..., tuple[Tensor, Tensor]], size: tuple[int, int, int, int], kernels: str
) -> None:
    rule = Rule.of(150, size, slots=1)
    whole = (x.unsqueeze(0) for x in (rule.query, rule.key, rule.value, rule.log_decay, rule.beta))
    expected, state = form(
        *whole,
        initial_state=rule.states.clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    close(rule.run(slots_of(0), edges_of((150,))), expected[0])
    close(rule.states, state)


SCANS = [(2, 4, 16, 64), (1, 1, 8, 12), (2, 2, 24, 100), (1, 3, 128, 128)]
"""Groups, heads, and the widths of a state's inputs and of a head."""


@dataclass(frozen=True)
class Scan:
    """What the selective scan takes of some tokens, and a state for each request."""

    x: Tensor
    b: Tensor
    c: Tensor
    step: Tensor
    step_bias: Tensor
    log_rate: Tensor
    skip: Tensor
    states: Tensor
    limits: tuple[float, float] = (0.0, math.inf)

    @classmethod
    def of(
        cls,
        rows: int,
        size: tuple[int, int, int, int],
        dtype: torch.dtype = torch.float32,
        slots: int = 3,
    ) -> Scan:
        groups, heads, state_dim, head_dim = size
        widths = [heads * head_dim, groups * state_dim, groups * state_dim, heads]
        x, b, c, step = made(rows, sum(widths), seed=1, dtype=dtype).split(widths, dim=1)
        return cls(
            x.view(rows, heads, head_dim),
            b.view(rows, groups, state_dim),
            c.view(rows, groups, state_dim),
            step,
            made(heads, seed=2),
            made(heads, seed=3),
            made(heads, seed=4),
            made(slots, heads, state_dim, head_dim, seed=5),
        )

    def rows(self, at: Any, states: Tensor) -> Scan:
        x, b, c, step = (own[at].contiguous() for own in (self.x, self.b, self.c, self.step))
        return replace(self, x=x, b=b, c=c, step=step, states=states)

    def run(self, slots: Tensor, first_rows: Tensor, row_slots: Tensor | None = None) -> Tensor:
        own = ScanHeads(self.step_bias, self.log_rate, self.skip, self.limits)
        spans = SpanStates(slots, first_rows, row_slots)
        return selective_scan(self.x, self.b, self.c, self.step, own, self.states, spans)

    def by_definition(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Of one request, token by token in float64: what comes out, and the state behind it."""
        state = state.double()
        out = []
        group = self.x.shape[1] // self.b.shape[1]
        for row in range(len(self.x)):
            heads = []
            for head, x in enumerate(self.x[row].double()):
                d = softplus(self.step[row, head].double() + self.step_bias[head].double()).clamp(
                    *self.limits
                )
                b, c = (own[row, head // group].double() for own in (self.b, self.c))
                kept = state[head] * (-d * self.log_rate[head].double().exp()).exp() + torch.outer(
                    b, d * x
                )
                heads.append(kept)
                out.append(c @ kept + self.skip[head].double() * x)
            state = torch.stack(heads)
        return torch.stack(out).view(self.x.shape), state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SCANS)
@pytest.mark.parametrize("limits", [(0.0, math.inf), (0.4, 1.5)], ids=str)
def test_the_scan_is_its_definition(
    size: tuple[int, int, int, int], limits: tuple[float, float], dtype: torch.dtype, kernels: str
) -> None:
    scan = replace(Scan.of(7, size, dtype), limits=limits)
    before = scan.states.clone()
    found = scan.run(slots_of(2, 0), edges_of((4, 3)))
    assert found.dtype is torch.float32
    for slot, rows in ((2, slice(0, 4)), (0, slice(4, 7))):
        expected, state = scan.rows(rows, before).by_definition(before[slot])
        close(found[rows], expected)
        close(scan.states[slot], state)
    assert torch.equal(scan.states[1], before[1]), "another request's"


@pytest.mark.parametrize("size", SCANS)
def test_the_scan_is_transformers(size: tuple[int, int, int, int], kernels: str) -> None:
    scan = replace(Scan.of(150, size, slots=1), limits=(0.1, 2.0))
    options = {
        "D": scan.skip,
        "dt_bias": scan.step_bias,
        "dt_softplus": True,
        "dt_limit": scan.limits,
    }
    expected, state = modeling_mamba2.mamba2_chunk_scan(
        *(own.unsqueeze(0) for own in (scan.x, scan.step)),
        -scan.log_rate.exp(),
        *(own.unsqueeze(0) for own in (scan.b, scan.c)),
        chunk_size=64,
        initial_states=scan.states.mT,
        return_final_states=True,
        **options,
    )
    found = scan.run(slots_of(0), edges_of((150,)))
    # Sums of 150 tokens: chunks add them in another order.
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scan.states, state.mT, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "groups"), [(64, 1), (60, 3), (136, 2), (5, 1)])
def test_a_gated_norm_is_transformers(
    width: int, groups: int, dtype: torch.dtype, kernels: str
) -> None:
    x, gate = made(9, width), made(9, width + 5, seed=1, dtype=dtype)[:, 2:-3]
    weight = made(width, seed=2, dtype=dtype)
    gated = BambaRMSNormGated(width, width // groups)
    normed = FalconH1RMSNormGated(width, n_groups=groups)
    for norm in (gated, normed):
        norm.weight.data.copy_(weight)
    wide = gate.float()
    for options, expected in (
        ((weight, 1e-6, groups, True), gated(x, wide)),
        ((weight, 1e-6, groups, False), normed(x, wide)),
        ((None,), x * silu(wide)),
    ):
        close(gated_norm(x.clone(), gate, *options), expected)
    with pytest.raises(InvalidArgumentError, match="groups"):
        gated_norm(x, gate, weight, 1e-6, width + 1)
    with pytest.raises(InvalidArgumentError, match="float32"):
        gated_norm(x.double(), gate, weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 6, 32])
def test_gates_are_transformers(heads: int, dtype: torch.dtype, kernels: str) -> None:
    beta, step = (made(9, 2 * heads, dtype=dtype) * 8).chunk(2, dim=1)
    a_log, dt_bias = made(heads, seed=1), made(heads, seed=2) * 5
    log_decay, opened = delta_gates(beta, step, a_log, dt_bias)
    assert log_decay.dtype is opened.dtype is torch.float32
    torch.testing.assert_close(
        log_decay, -a_log.exp() * softplus(step.float() + dt_bias), rtol=1e-5, atol=1e-7
    )
    close(opened.to(dtype), beta.sigmoid())
    with pytest.raises(InvalidArgumentError):
        delta_gates(beta, step, a_log, made(heads + 1))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "form",
    [kimi.recurrent_kimi_delta_attention, kimi.chunk_kimi_delta_attention],
    ids=["recurrent", "chunk"],
)
def test_the_delta_rule_with_a_decay_of_each_channel_is_transformers(
    form: Callable[..., tuple[Tensor, Tensor]], size: tuple[int, int, int, int], kernels: str
) -> None:
    _, heads, key_dim, value_dim = size
    rule = Rule.of(150, (heads, heads, key_dim, value_dim), slots=1, by_channel=True)
    whole = (x.unsqueeze(0) for x in (rule.query, rule.key, rule.value, rule.log_decay, rule.beta))
    expected, state = form(
        *whole,
        initial_state=rule.states.clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    close(rule.run(slots_of(0), edges_of((150,))), expected[0])
    close(rule.states, state)


def test_channels_that_decay_alike_are_a_head_that_does(kernels: str) -> None:
    rule = Rule.of(9, (2, 4, 24, 100))
    alike = replace(
        rule, log_decay=rule.log_decay.unsqueeze(-1).repeat(1, 1, 24), states=rule.states.clone()
    )
    assert torch.equal(
        alike.run(slots_of(1), edges_of((9,))), rule.run(slots_of(1), edges_of((9,)))
    )
    assert torch.equal(alike.states, rule.states)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("channels", "taps"), [(12, 4), (300, 4), (64, 2), (17, 3), (20, 9)])
@pytest.mark.one_in(3)
def test_the_convolution_is_transformers(
    channels: int, taps: int, bias: bool, activated: bool, dtype: torch.dtype, kernels: str
) -> None:
    x = made(9, channels + 3, dtype=dtype)[:, 2:-1]
    weight = made(channels, taps, seed=1, dtype=dtype)
    tails = made(3, taps - 1, channels, seed=2, dtype=dtype)
    own = made(channels, seed=3, dtype=dtype) if bias else None
    before = tails.clone()
    found = short_convolution(
        x, weight, tails, SpanStates(slots_of(2, 0), edges_of((2, 7))), own, activated
    )
    for slot, rows in ((2, slice(0, 2)), (0, slice(2, 9))):
        seen = torch.cat((before[slot], x[rows]))
        state = seen[: taps - 1].t().unsqueeze(0).contiguous()
        wide = (y.double() for y in (x[rows].t().unsqueeze(0), state, weight))
        summed = theirs.causal_conv1d_update(*wide, None if own is None else own.double())[0].t()
        close(found[rows], silu(summed.to(dtype)) if activated else summed.to(dtype))
        assert torch.equal(tails[slot], seen[len(seen) - taps + 1 :])
    assert torch.equal(tails[1], before[1]), "another request's"


@dataclass(frozen=True)
class Mix:
    """All operators over requests of given lengths, whose past may be cut anywhere and beside any
    other."""

    rule: Rule
    scan: Scan
    by_channel: Rule
    weight: Tensor
    x: Tensor
    tails: Tensor
    edges: list[int]

    @classmethod
    def of(cls, lengths: Sequence[int], dtype: torch.dtype) -> Mix:
        rows, size = sum(lengths), (1, 2, 16, 80)
        rule, by_channel = (Rule.of(rows, size, dtype, len(lengths), own) for own in (False, True))
        scan = Scan.of(rows, size, dtype, slots=len(lengths))
        x = made(rows, 40, seed=5, dtype=dtype)
        tails = made(len(lengths), 3, 40, seed=6, dtype=dtype)
        weight, edges = made(40, 4, seed=7, dtype=dtype), [0, *accumulate(lengths)]
        return cls(rule, scan, by_channel, weight, x, tails, edges)

    def run(self, steps: Sequence[Sequence[tuple[int, int, int]]]) -> list[Tensor]:
        """Outputs and states after steps of spans (request, first token, end)."""
        rules = [
            (rule, rule.states.clone(), torch.empty_like(rule.value))
            for rule in (self.rule, self.by_channel)
        ]
        convolutions = [
            (activated, self.tails.clone(), torch.empty_like(self.x)) for activated in (True, False)
        ]
        memory, scanned = self.scan.states.clone(), torch.empty_like(self.scan.x)
        for spans in steps:
            rows = torch.cat(
                [
                    torch.arange(self.edges[r] + first, self.edges[r] + end)
                    for r, first, end in spans
                ]
            )
            where = (
                slots_of(*(r for r, _, _ in spans)),
                edges_of([end - first for _, first, end in spans]),
            )
            for rule, states, out in rules:
                out[rows] = rule.rows(rows, states).run(*where)
            for activated, tails, out in convolutions:
                out[rows] = short_convolution(
                    self.x[rows], self.weight, tails, SpanStates(*where), activated=activated
                )
            found = self.scan.rows(rows, memory).run(*where).flatten(1)
            gates = self.scan.x[rows].flatten(1)
            weight = made(gates.shape[1], seed=8, dtype=gates.dtype)
            scanned[rows] = gated_norm(found, gates, weight, 1e-5, 2).view(
                len(rows), *scanned.shape[1:]
            )
        return [memory, scanned, *(kept for _, *both in (*rules, *convolutions) for kept in both)]


def schedules(lengths: Sequence[int]) -> st.SearchStrategy[list[list[tuple[int, int, int]]]]:
    """Any cuts of requests into chunks, in steps of any requests together."""
    cuts = st.tuples(*(st.sets(st.integers(1, length - 1)) for length in lengths))

    def in_steps(cut: tuple[set[int], ...]) -> st.SearchStrategy[list[list[tuple[int, int, int]]]]:
        left = [
            list(pairwise([0, *sorted(own), length]))
            for own, length in zip(cut, lengths, strict=True)
        ]
        turns = [request for request, chunks in enumerate(left) for _ in chunks]
        return st.tuples(
            st.permutations(turns),
            st.lists(st.booleans(), min_size=len(turns), max_size=len(turns)),
        ).map(lambda drawn: _steps(left, *drawn))

    return cuts.flatmap(in_steps)


def _steps(
    left: Sequence[Sequence[tuple[int, int]]], turns: Sequence[int], joins: Sequence[bool]
) -> list[list[tuple[int, int, int]]]:
    steps: list[list[tuple[int, int, int]]] = [[]]
    done = [0] * len(left)
    for request, joined in zip(turns, joins, strict=True):
        if not joined or any(request == other for other, _, _ in steps[-1]):
            steps.append([])
        steps[-1].append((request, *left[request][done[request]]))
        done[request] += 1
    return [step for step in steps if step]


LENGTHS = (17, 6, 9)


# The kernels in use are the same for all examples. In torch one takes a tenth of a second, and more
# beside others.
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=schedules(LENGTHS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    threads=st.integers(1, 4),
)
@pytest.mark.one_in(2)
def test_bits_do_not_depend_on_cuts_company_or_threads(
    kernels: str, steps: list[list[tuple[int, int, int]]], dtype: torch.dtype, threads: int
) -> None:
    mix = Mix.of(LENGTHS, dtype)
    whole = mix.run([[(request, 0, length)] for request, length in enumerate(LENGTHS)])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = mix.run(steps)
    finally:
        torch.set_num_threads(before)
    for one, other in zip(found, whole, strict=True):
        if kernels == FALLBACK:
            close(one, other)
        else:
            assert torch.equal(one, other)


Operator = Callable[[Tensor, Tensor, SpanStates], Tensor]
"""(rows of its tokens, states, where these are) -> what comes out."""


def operators(dtype: torch.dtype, slots: int) -> dict[str, tuple[Tensor, Operator]]:
    """Of nine tokens: the states before, and the operator."""
    rule, by_channel = (Rule.of(9, (1, 2, 16, 80), dtype, slots, own) for own in (False, True))
    scan = Scan.of(9, (1, 2, 16, 80), dtype, slots)
    x = made(9, 300, dtype=dtype)
    weight = made(300, 4, dtype=dtype)

    def run(kind: Rule | Scan) -> Operator:
        return lambda rows, states, where: kind.rows(rows, states).run(
            where.slots, where.first_rows, where.row_slots
        )

    return {
        "rule": (rule.states, run(rule)),
        "by channel": (by_channel.states, run(by_channel)),
        "scan": (scan.states, run(scan)),
        "convolution": (
            made(slots, 3, 300, seed=6, dtype=dtype),
            lambda rows, states, where: short_convolution(x[rows], weight, states, where),
        ),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "source", [0, 1, 2, 3], ids=["its own", "first guess", "second guess", "third guess"]
)
def test_the_states_behind_guesses_are_those_of_single_tokens(
    source: int, dtype: torch.dtype, kernels: str
) -> None:
    """Of a request in slot 0 with two certain tokens and three guesses, which goes on from any of
    its slots; beside a prompt in slot 4 and a single token in slot 5."""
    kept_in = (4, 4, 4, 0, 0, 1, 2, 3, 5)
    where = SpanStates(slots_of(4, source, 5), edges_of((3, 5, 1)), slots_of(*kept_in))
    for name, (before, operator) in operators(dtype, 7).items():
        states = before.clone()
        single = before.clone()
        wanted = before.clone()
        found = operator(torch.arange(9), states, where)
        single[0] = before[source]
        for row, (own, kept) in enumerate(zip((4, 4, 4, 0, 0, 0, 0, 0, 5), kept_in, strict=True)):
            out = operator(torch.tensor([row]), single, SpanStates(slots_of(own), edges_of((1,))))
            wanted[kept] = single[own]
            if kernels == FALLBACK:
                close(found[row], out[0])
            else:
                assert torch.equal(found[row], out[0]), (name, row)
        if kernels == FALLBACK:
            close(states, wanted)
        else:
            assert torch.equal(states, wanted), name
        assert torch.equal(states[6], before[6]), "another request's"


def test_single_tokens_may_go_on_from_other_slots(kernels: str) -> None:
    """Each from where its last right guess left its states."""
    where = SpanStates(slots_of(3, 2), edges_of((1, 1)), slots_of(0, 2))
    for before, operator in operators(torch.float32, 4).values():
        states, wanted = before.clone(), before.clone()
        found = operator(torch.arange(2), states, where)
        wanted[0] = before[3]
        assert torch.equal(
            found, operator(torch.arange(2), wanted, SpanStates(slots_of(0, 2), edges_of((1, 1))))
        )
        assert torch.equal(states, wanted)


def test_many_tokens_of_many_heads_have_the_same_bits_on_threads(kernels: str) -> None:
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        both = [kind.of(24, (4, 8, 64, 128), torch.bfloat16) for kind in (Rule, Scan)]
        found = [one.run(slots_of(1, 2), edges_of((16, 8))) for one in both]
        gated = gated_norm(found[1].clone().flatten(1), found[0].flatten(1), None)
        results.append([*found, gated, *(one.states for one in both)])
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


def test_extremes_stay_what_they_are(kernels: str) -> None:
    rule = Rule.of(2, SIZES[0])
    forgotten = replace(rule, log_decay=torch.full_like(rule.log_decay, -1e4))
    expected, _ = replace(forgotten, states=rule.states).by_definition(
        torch.zeros_like(rule.states[0])
    )
    close(forgotten.run(slots_of(0), edges_of((2,))), expected)
    nothing = replace(rule, query=torch.zeros_like(rule.query), key=torch.zeros_like(rule.key))
    assert not nothing.run(slots_of(1), edges_of((2,))).any()
    broken = replace(rule, value=rule.value.clone())
    broken.value[0, 1, 3] = torch.nan
    found = broken.run(slots_of(2), edges_of((2,)))
    assert found[:, 1, 3].isnan().all()
    assert found.isnan().sum() == 2, "in its column alone"


@pytest.mark.parametrize("extreme", [-1e4, -100.0, 19.5, 20.5, 1e4])
def test_a_scan_with_extreme_steps_is_its_definition(extreme: float, kernels: str) -> None:
    scan = Scan.of(2, SCANS[0])
    pushed = replace(scan, step=torch.full_like(scan.step, extreme))
    expected, state = pushed.by_definition(scan.states[0])
    found = pushed.run(slots_of(0), edges_of((2,)))
    scale = max(1.0, abs(extreme))
    close(found / scale, expected / scale)
    close(pushed.states[0] / scale, state / scale)


@pytest.mark.parametrize(
    ("slots", "first_rows", "row_slots", "field"),
    [
        (slots_of(0, 1), edges_of((1, 4)), slots_of(0, 1, 1, 3, 1), "slots"),
        (slots_of(0, 1), edges_of((1, 4)), slots_of(-1, 1, 1, 1, 1), "slots"),
        (slots_of(0, 1), edges_of((1, 4)), slots_of(0, 1, 1, 1), "slots"),
        (slots_of(0, 1), edges_of((1, 4)), slots_of(0, 1, 1, 1, 1).long(), "slots"),
        (slots_of(0, 3), edges_of((1, 4)), None, "slots"),
        (slots_of(0, -1), edges_of((1, 4)), None, "slots"),
        (slots_of(0), edges_of((1, 4)), None, "slots"),
        (slots_of(0, 1).long(), edges_of((1, 4)), None, "slots"),
        (slots_of(0, 1), edges_of((1, 3)), None, "first_rows"),
        (slots_of(0, 1), edges_of((0, 5)), None, "first_rows"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    slots: Tensor, first_rows: Tensor, row_slots: Tensor | None, field: str, kernels: str
) -> None:
    rule, mix = Rule.of(5, SIZES[0]), Mix.of((5, 1, 1), torch.float32)
    before, tails = rule.states.clone(), mix.tails.clone()
    scanned = Scan.of(5, SIZES[0]).states
    untouched = scanned.clone()
    with pytest.raises(InvalidArgumentError) as refused:
        rule.run(slots, first_rows, row_slots)
    assert refused.value.field == field
    with pytest.raises(InvalidArgumentError) as refused:
        replace(Scan.of(5, SIZES[0]), states=scanned).run(slots, first_rows, row_slots)
    assert refused.value.field == field
    with pytest.raises(InvalidArgumentError) as refused:
        short_convolution(
            mix.x[:5], mix.weight, mix.tails, SpanStates(slots, first_rows, row_slots)
        )
    assert refused.value.field == field
    assert torch.equal(rule.states, before)
    assert torch.equal(scanned, untouched)
    assert torch.equal(mix.tails, tails)


def test_shapes_that_do_not_fit_are_refused() -> None:
    rule, mix = Rule.of(5, SIZES[0]), Mix.of((5,), torch.float32)
    where = slots_of(0), edges_of((5,))
    for wrong in (
        replace(rule, query=rule.query[:, :1]),
        replace(rule, beta=rule.beta.bfloat16()),
        replace(rule, log_decay=rule.log_decay.unsqueeze(-1)),
        replace(rule, states=rule.states[:, :1]),
    ):
        with pytest.raises(InvalidArgumentError, match="states"):
            wrong.run(*where)
    scan = mix.scan
    for other in (
        replace(scan, b=scan.b[:, :, :3]),
        replace(scan, skip=scan.skip[:1]),
        replace(scan, log_rate=scan.log_rate.bfloat16()),
        replace(scan, states=scan.states.mT),
    ):
        with pytest.raises(InvalidArgumentError, match="states"):
            other.run(*where)
    for tails in (mix.tails[:, :2], mix.tails.bfloat16()):
        with pytest.raises(InvalidArgumentError, match="tails"):
            short_convolution(mix.x, mix.weight, tails, SpanStates(*where))
