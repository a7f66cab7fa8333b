"""FlexGen's placement of weights, KV cache and activations over accelerator, host memory and disk.
Pure.

A block of `batch` x `batches` sequences goes through the model layer by layer: a layer's weights
are read once for all of its batches (zig-zag). For fixed batch and batches every time and every
memory is linear in nine fractions, so the best fractions are a linear program; batch and batches
are enumerated. Source: Sheng et al., *FlexGen: High-Throughput Generative Inference of Large
Language Models with a Single GPU*, ICML 2023, section 4.3 and its released cost model.
(docs/papers.md#tensors-over-three-tiers)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from bench.flexgen_paper.linear import minimise
from bench.flexgen_paper.machine import TierMachine, TierModel, TierWorkload
from edgeshard.planning.solvers.instance import Floats

FRACTIONS = (
    "weights_gpu",
    "weights_host",
    "weights_disk",
    "cache_gpu",
    "cache_host",
    "cache_disk",
    "hidden_gpu",
    "hidden_host",
    "hidden_disk",
)
"""The part of weights, KV cache and activations in each tier; each three add up to 1."""
COMPRESSED = (4 + 2 * 16 / 64) / 16
"""Bytes left of 16-bit numbers in groups of 64 with 4 bits each, a least value and a scale in 16
bits."""
_DISK_WEIGHTS = 0.95
"""Part of the disk's rate that weights reach while tokens are generated, as fitted by the
authors."""
_KEPT = 1e-9


@dataclass(frozen=True, slots=True)
class Runtime:
    """The abilities of a system.

    * `compressed`: weights and cache in 4 bits. The cache is then attended to on the accelerator,
      and packing and unpacking count as nothing.
    * `overlap`: whether reading, writing and computing run at the same time.
    * `host_attention`: whether attention is computed in host memory if the cache is there.
    * `fixed`: fractions that are not chosen.
    * `one_batch`: whether a layer's weights serve one batch only, as in systems that work row by
      row.
    """

    compressed: bool = False
    overlap: bool = True
    host_attention: bool = True
    fixed: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType({"hidden_disk": 0.0})
    )
    one_batch: bool = False


FLEXGEN = Runtime()
"""As released: activations never go to disk."""


@dataclass(frozen=True, slots=True)
class TierCosts:
    """Linear costs of one (batch, batches). A row has ten entries: a factor of each fraction, and a
    constant.

    A layer takes the largest of `prompt` seconds for all sequences' prompts, the largest of `token`
    for one token each. `memory` rows must not exceed `limits`, bytes.
    """

    prompt: Floats
    token: Floats
    memory: Floats
    limits: Floats

    def seconds(self, fractions: Floats, layers: int, new: int) -> Floats:
        """[...] seconds from the prompts to the last token; `fractions` are [..., 9]."""
        prompt, token = (
            _values(rows, fractions).max(axis=-1) for rows in (self.prompt, self.token)
        )
        return np.asarray(layers * (prompt + (new - 1) * token))

    def fits(self, fractions: Floats) -> Floats:
        """[...] whether the fractions keep all limits of memory."""
        return np.asarray(
            (_values(self.memory, fractions) <= self.limits * (1 + _KEPT)).all(axis=-1)
        )


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """`batches` batches of `batch` sequences share each read of a layer; `fractions` in the order
    of `FRACTIONS`.

    `seconds` is the time of the whole block, to its last token.
    """

    batch: int
    batches: int
    fractions: tuple[float, ...]
    seconds: float
    new: int

    @property
    def sequences(self) -> int:
        return self.batch * self.batches

    @property
    def tokens_per_s(self) -> float:
        return self.sequences * self.new / self.seconds


def tier_costs(
    machine: TierMachine,
    model: TierModel,
    work: TierWorkload,
    runtime: Runtime,
    batch: int,
    batches: int,
) -> TierCosts:
    """The linear costs of a block; memory is that of 16-bit numbers, or of compressed ones."""
    every = batch * batches
    wg, wc, wn, cg, cc, cn, hg, hc, hn = np.eye(10)[:9]
    one = np.eye(10)[9]
    s = work.prompt
    n = work.new
    layers = model.layers
    h = model.hidden
    inner = model.inner
    heads = model.heads
    packed = COMPRESSED if runtime.compressed else 1.0
    on_host = runtime.host_attention and not runtime.compressed
    weights = packed * model.layer_bytes
    token_kv = 4 * h * packed  # a token's keys and values in a layer
    read_kv = every * (s + n / 2) * token_kv
    hidden = 2 * h * every  # a token's activations, of all sequences

    # Seconds of one layer, all sequences' prompts.
    up = (weights * (wc + wn) + s * hidden * (hc + hn)) / machine.host_to_gpu
    from_disk = (weights * wn + s * hidden * hn) / machine.disk_to_host
    down = every * (s + 1) * token_kv * (cc + cn) / machine.gpu_to_host_cache
    down = down + s * hidden * (hc + hn) / machine.gpu_to_host_hidden
    to_disk = (
        every * (s + 1) * token_kv * cn / machine.host_to_disk_cache
        + s * hidden * hn / machine.host_to_disk_hidden
    )
    # operations of one token of each sequence in the matrices
    dense = every * (8 * h**2 + 4 * h * inner)
    compute = (
        s * dense / machine.prompt_dense + 4 * every * s**2 * h / machine.prompt_attention
    ) * one
    prompt = [up + from_disk, down + to_disk, compute]

    # Seconds of one layer, one token of each sequence.
    scores = 4 * every * (s + n / 2) * h  # operations of attention
    up = (weights * (wc + wn) + hidden * (hc + hn)) / machine.host_to_gpu
    if on_host:
        attention = scores * (
            cg / machine.token_attention + (cc + cn) / machine.host_attention_at(batch, h)
        )
    else:  # the cache moves to the accelerator
        up = up + read_kv * (cc + cn) / machine.host_to_gpu
        attention = scores / machine.token_attention * one
    from_disk = (read_kv * cn + hidden * hn + weights * wn / _DISK_WEIGHTS) / machine.disk_to_host
    down = hidden * (hc + hn) / machine.gpu_to_host_hidden
    if not on_host:
        down = down + every * token_kv * (cc + cn) / machine.gpu_to_host_cache
    to_disk = (every * token_kv * cn + hidden * hn) / machine.host_to_disk_token
    compute = dense / machine.token_dense * one + attention
    token = [up + term for term in (down, from_disk, to_disk, compute)]
    if not runtime.overlap:
        prompt, token = [sum(prompt, 0 * one)], [up + down + from_disk + to_disk + compute]

    # Bytes, in prompts and while tokens are generated.
    held = layers * weights
    cache = layers * every * token_kv
    # activations of one batch in a layer
    inside = batch * (s * (20 * h + 2 * inner) + 2 * heads * s**2) * one
    gpu_prompt = held * wg + s * hidden * hg + (s + n) * cache * cg
    gpu_prompt = gpu_prompt + 2 * weights * (one - wg) + 2 * s * h * batch * (one - hg) + inside
    there = cg if on_host else one  # the part of the cache that is attended to on the accelerator
    inside = batch * ((16 * h + 2 * inner) * one + ((s + n) * (4 * h + 2 * heads) + 4 * h) * there)
    gpu_token = (
        held * wg
        + hidden * hg
        + (s + n) * cache * cg
        + 2 * weights * (one - wg)
        + 2 * h * batch * (one - hg)
    )
    gpu_token = gpu_token + 4 * batch * (s + n) * h * there + inside
    host_prompt = (
        held * wc
        + s * hidden * hc
        + s * cache * cc
        + weights * (one - wg)
        + 2 * s * h * batch * (one - hg)
    )
    host_token = held * wc + hidden * hc + (s + n) * cache * cc + weights * wn + 4 * h * batch * hn
    host_token = (
        host_token + 8 * (s + n) * h * batch * cn + batch * (2 * heads * (s + n) + 2 * h) * one
    )
    disk = held * wn + s * hidden * hn + (s + n) * cache * cn
    limits = [machine.gpu_bytes] * 2 + [machine.host_bytes] * 2 + [machine.disk_bytes]
    return TierCosts(
        np.array(prompt),
        np.array(token),
        np.array([gpu_prompt, gpu_token, host_prompt, host_token, disk]),
        np.array(limits) * machine.usable,
    )


def best_fractions(
    costs: TierCosts, layers: int, new: int, fixed: Mapping[str, float]
) -> Floats | None:
    """The nine fractions of least seconds by the linear program; None if no tier's memory can hold
    them."""
    rows, limits = [], []
    # so that both times are of the size of 1
    units = [float(terms.max()) for terms in (costs.prompt, costs.token)]
    for index, terms in enumerate((costs.prompt, costs.token)):
        for term in terms:  # a phase takes at least each of its terms
            rows.append(
                [*term[:9], *(-units[phase] if phase == index else 0.0 for phase in range(2))]
            )
            limits.append(-term[9])
    for row, limit in zip(costs.memory, costs.limits, strict=True):
        rows.append([*row[:9], 0.0, 0.0])
        limits.append(limit - row[9])
    equal, values = [], []
    for kind in range(3):
        equal.append([1.0 if column // 3 == kind and column < 9 else 0.0 for column in range(11)])
        values.append(1.0)
    for name, value in fixed.items():
        equal.append([1.0 if column == FRACTIONS.index(name) else 0.0 for column in range(11)])
        values.append(value)
    cost = np.array([0.0] * 9 + [layers * units[0], layers * (new - 1) * units[1]])
    found = minimise(cost, np.array(rows), np.array(limits), np.array(equal), np.array(values))
    return None if found is None else found[:9]


def best_at(
    machine: TierMachine,
    model: TierModel,
    work: TierWorkload,
    runtime: Runtime,
    batch: int,
    batches: int,
) -> TierPolicy | None:
    """The best policy with this batch and this many batches; None if memory can hold none."""
    costs = tier_costs(machine, model, work, runtime, batch, batches)
    found = best_fractions(costs, model.layers, work.new, runtime.fixed)
    if found is None:
        return None
    seconds = float(costs.seconds(found, model.layers, work.new))
    return TierPolicy(batch, batches, tuple(found.tolist()), seconds, work.new)


def policies(
    machine: TierMachine,
    model: TierModel,
    work: TierWorkload,
    runtime: Runtime = FLEXGEN,
    batches: Sequence[int] = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20),
    sizes: Sequence[int] = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128),
) -> Iterator[TierPolicy]:
    """The best policy of each batch and number of batches that memory holds, the smaller ones
    first."""
    for count in (1,) if runtime.one_batch else batches:
        for batch in sizes:
            found = best_at(machine, model, work, runtime, batch, count)
            if found is None:
                break  # a larger batch needs more of every tier
            yield found


def best_policy(found: Sequence[TierPolicy], longest_s: float | None = None) -> TierPolicy | None:
    """The policy of most tokens a second whose block takes at most `longest_s`; of equals the
    quickest."""
    kept = [policy for policy in found if longest_s is None or policy.seconds <= longest_s]
    return max(kept, key=lambda policy: (policy.tokens_per_s, -policy.seconds), default=None)


def frontier(found: Sequence[TierPolicy]) -> tuple[TierPolicy, ...]:
    """Those that no other policy beats in both seconds and tokens a second, the quickest first."""
    kept: list[TierPolicy] = []
    for policy in sorted(found, key=lambda policy: (policy.seconds, -policy.tokens_per_s)):
        if not kept or policy.tokens_per_s > kept[-1].tokens_per_s:
            kept.append(policy)
    return tuple(kept)


def _values(rows: Floats, fractions: Floats) -> Floats:
    """[..., rows] of fractions [..., 9]."""
    return np.asarray(fractions @ rows[:, :9].T + rows[:, 9])
