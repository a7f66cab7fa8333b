"""Costs of stages if nodes may stream weights: layers that stay, memory, and seconds of a sweep.
Pure.

A node whose memory holds its stage keeps it. One whose memory does not reads the layers that do not
stay from its disk in every step, through slots (`domain.models.residency`). In one sweep it
computes a step of each of `sweep` micro-batches, layer by layer, so that a layer is read once for
all of them:

    seconds = max( streamed bytes / disk rate, sweep * seconds of one step )
              + largest layer / disk rate

of which the last is the first slot's filling. A prompt goes in steps of `STEP_TOKENS`, each of
which reads once more. (docs/papers.md#nodes-that-stream)

A mixture whose other weights fit caches experts instead, if `domain.models.residency` decides so. C
is the seconds of one step, and A the experts' part of it. A layer's b tokens need the share q = 1 -
(1 - k / E)^b of its experts if routing is even. With L mixtures in a stage,

    seconds = sweep * ( C - A + max( A, q * bytes on the disk * L / (L - q) / disk rate ) )

Routing that prefers some experts needs fewer of them, and finds more of these in memory: it reads
less. (docs/papers/agent.md#experts-on-the-disk)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from edgeshard.domain.models.residency import (
    PREFETCHED_LAYERS,
    cache_bytes,
    caches_experts,
    in_disk_blocks,
)
from edgeshard.domain.requests.step import STEP_TOKENS
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.solvers.instance import Cut, Floats, Instance
from edgeshard.planning.solvers.scoring import SLACK, stages

SLOTS = 1 + PREFETCHED_LAYERS


@dataclass(frozen=True, slots=True)
class Streaming:
    """A stage that streams, in bytes."""

    weight_bytes: int
    streamed_bytes: int
    """The part of `weight_bytes` that does not stay in memory; if layers pass, each step reads all
    of it."""
    layer_bytes: int
    """Most bytes of a layer that passes."""
    budget_bytes: int
    """Memory for its weights: those that stay, embedding, head and slots."""
    disk_bytes_per_s: float
    expert_bytes: int = 0
    """Bytes of all experts if they are cached, 0 if layers pass; a step reads the experts that its
    tokens choose."""
    mixtures: int = 0
    """Layers with experts."""
    chosen_share: float = 1.0
    """Share of a layer's experts that one token chooses."""
    expert_share: float = 0.0
    """The experts' part of a step's computing."""

    @property
    def caches(self) -> bool:
        """Whether it caches experts; else layers pass."""
        return self.expert_bytes > 0

    def step_bytes(self, tokens: int) -> float:
        """Most bytes that a step of `tokens` tokens is expected to read."""
        if not self.caches:
            return float(self.streamed_bytes)
        return float(
            expert_reads(
                self.streamed_bytes, self.expert_bytes, self.mixtures, tokens, self.chosen_share
            )
        )


def expert_reads(on_disk: Any, total: Any, mixtures: Any, tokens: int, chosen_share: float) -> Any:
    """Bytes that a step of `tokens` tokens is expected to read if routing is even; numbers, or
    arrays of them.

    `on_disk` of the `total` bytes of all experts, of this many layers (`mixtures`), do not fit in
    memory. With even routing a token misses an expert with probability 1 - k / E, and all tokens of
    a step with its power. A layer's own experts occupy memory while they compute. Others lack this
    memory, so more is read.
    """
    share = 1.0 - (1.0 - chosen_share) ** tokens
    return share * np.minimum(total, on_disk * mixtures / np.maximum(mixtures - share, 1e-9))


@dataclass(frozen=True, slots=True)
class StreamedBytes:
    """Tables of any stage, [M, N+1, N+1].

    These are the bytes that do not stay (0 if all stay, infinite if the stage does not fit) and the
    memory for its layers, slots included. The third is whether it caches experts instead of passing
    layers."""

    streamed: Floats
    room: Floats
    caches: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Experts:
    """[N] for each layer: the bytes of its experts, the bytes in whole blocks, the largest of
    these, and their part of the layer's computing. `chosen_share` of a mixture's experts are a
    token's."""

    whole: Floats
    total: Floats
    largest: Floats
    shares: Floats
    chosen_share: float


class StreamTables:
    """The instances of one problem whose nodes may stream. Tables are kept by load and sweep."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.weights = np.array(costs.block_bytes(), dtype=np.float64)
        blocks = costs.problem.model.blocks
        alone = [block.expert_bytes(*costs.problem.formats) for block in blocks]
        sizes = [[in_disk_blocks(size) for size in each] for each in alone]
        self._experts = _Experts(
            whole=np.array([float(sum(each)) for each in alone]),
            total=np.array([float(sum(each)) for each in sizes]),
            largest=np.array([float(max(each, default=0)) for each in sizes]),
            shares=np.array(
                [
                    block.expert_share if each else 0.0
                    for block, each in zip(blocks, sizes, strict=True)
                ]
            ),
            chosen_share=next(
                (block.experts_per_token / block.experts for block in blocks if block.expert_kinds),
                1.0,
            ),
        )
        devices = [node.device for node in costs.nodes]
        self.disk_s = np.array(
            [
                1.0 / device.disk_bytes_per_s if device.disk_bytes_per_s else np.inf
                for device in devices
            ]
        )
        self._disk_bytes = np.array(
            [np.inf if device.disk_bytes is None else device.disk_bytes for device in devices]
        )
        self._held = _held_by_count(self.weights)
        self._known: dict[tuple[Load, int, bool, Load], Instance] = {}
        self._streamed: dict[Load, StreamedBytes] = {}

    @property
    def any_disk(self) -> bool:
        return bool(np.isfinite(self.disk_s).any())

    def instance(self, load: Load, sweep: int, prefill: bool, pool: Load | None = None) -> Instance:
        """A sweep's prompts, or one token of each of its requests; R and B of it are seconds of a
        sweep.

        `pool` is the load that memory was allotted to, if it is more than what runs.
        """
        key = load, sweep, prefill, pool or load
        if key not in self._known:
            plain = self.costs.prefill(load) if prefill else self.costs.decode(load)
            tokens = load.batch * (self.costs.problem.prompt_tokens if prefill else 1)
            self._known[key] = replace(
                plain,
                stage_s=self._stage_s(plain, pool or load, sweep, tokens),
                hop_s=plain.hop_s * sweep,
                return_s=plain.return_s * sweep,
            )
        return self._known[key]

    def streamed(self, load: Load) -> StreamedBytes:
        if load not in self._streamed:
            self._streamed[load] = self._bytes(self.costs.decode(load))
        return self._streamed[load]

    def streaming(self, load: Load, cut: Cut) -> tuple[Streaming | None, ...]:
        """How each stage of a cut streams; None if it stays in memory."""
        bytes_of, experts = self.streamed(load), self._experts
        stage_streamings: list[Streaming | None] = []
        for index, (node, first, end) in enumerate(stages(cut)):
            size = bytes_of.streamed[node, first, end]
            if not size:
                stage_streamings.append(None)
                continue
            ends = self.costs.ends_bytes(index == 0, self.costs.has_head(cut, index))
            caches = bool(bytes_of.caches[node, first, end])
            stage_streamings.append(
                Streaming(
                    weight_bytes=int(self.weights[first:end].sum()) + ends,
                    streamed_bytes=int(size),
                    layer_bytes=int(self.weights[first:end].max()),
                    budget_bytes=int(bytes_of.room[node, first, end]) + ends,
                    disk_bytes_per_s=float(1.0 / self.disk_s[node]),
                    expert_bytes=int(experts.total[first:end].sum()) if caches else 0,
                    mixtures=int((experts.total[first:end] > 0).sum()) if caches else 0,
                    chosen_share=experts.chosen_share if caches else 1.0,
                    expert_share=self._expert_share(first, end) if caches else 0.0,
                )
            )
        return tuple(stage_streamings)

    def _expert_share(self, first: int, end: int) -> float:
        """The experts' part of what these layers compute for a token."""
        active = np.array(
            [block.active_parameters for block in self.costs.problem.model.blocks[first:end]]
        )
        return float((self._experts.shares[first:end] * active).sum() / active.sum())

    def _bytes(self, plain: Instance) -> StreamedBytes:
        nodes = plain.nodes
        layers = plain.layers
        experts = self._experts
        streamed = np.full((nodes, layers + 1, layers + 1), np.inf)
        rooms, caching = np.zeros_like(streamed), np.zeros(streamed.shape, bool)
        kv = np.concatenate([[0.0], np.cumsum(plain.layer_bytes - self.weights)])
        capacity = plain.capacity_bytes * (1 + SLACK) - plain.stage_bytes
        for count in range(layers + 1):
            starts = np.arange(layers + 1 - count)
            room = capacity[:, None] - (kv[starts + count] - kv[starts])  # [M, starts], for weights
            room[:, 0] -= plain.embed_bytes
            head = 0 if plain.head_on_source else len(starts) - 1
            room[:, head] -= plain.head_bytes
            if head == 0:
                room[:, 0] += plain.tied_bytes
            ends, room = starts + count, np.floor(room)
            rooms[:, starts, ends] = room
            if not count:
                streamed[:, starts, ends] = np.where(room >= 0, 0.0, np.inf)
                continue
            resident_bytes = self._held[count]  # [kept, starts], its last row is the whole range
            whole = resident_bytes[-1]
            widest = np.array([self.weights[first : first + count].max() for first in starts])
            # [M, kept, starts]
            fits = resident_bytes[None, :-1] <= (room - SLOTS * widest)[:, None]
            most = count - 1 - np.argmax(fits[:, ::-1], axis=1)
            read = (
                whole - np.take_along_axis(resident_bytes[:-1][None], most[:, None], axis=1)[:, 0]
            )
            written, can = read, fits.any(axis=1)
            if (largest := sliding_window_view(experts.largest, count).max(axis=1)).any():
                alone, every = (
                    sliding_window_view(one, count).sum(axis=1)
                    for one in (experts.whole, experts.total)
                )
                spare = room - (whole - alone)
                caches = (largest > 0) & caches_experts(spare, largest, every)
                read = np.where(caches, every - cache_bytes(spare, largest), read)
                # each expert has its file
                written = np.where(caches, every, written)
                can = can | caches
                caching[:, starts, ends] = caches & (room < whole)
            can &= np.isfinite(self.disk_s)[:, None] & (written <= self._disk_bytes[:, None])
            streamed[:, starts, ends] = np.where(room >= whole, 0.0, np.where(can, read, np.inf))
        return StreamedBytes(streamed, rooms, caching)

    def _stage_s(self, plain: Instance, pool: Load, sweep: int, tokens: int) -> Floats:
        """[M, N+1, N+1] seconds of a sweep whose micro-batches have this many tokens."""
        layers = plain.layers
        streamed = self.streamed(pool).streamed
        caches = self.streamed(pool).caches
        steps = [STEP_TOKENS] * (tokens // STEP_TOKENS) + [tokens % STEP_TOKENS] * (
            tokens % STEP_TOKENS > 0
        )
        step = plain.overhead_s[:, None, None] + _ranges(plain.compute_s)
        step[:, 0, :] += plain.embed_s[:, None]
        if plain.head_on_source:
            step[:, 0, :] += plain.head_s[:, None]
        else:
            step[:, :, layers] += plain.head_s[:, None]
        computing = sweep * step
        widest = _widest(self.weights)
        with np.errstate(invalid="ignore"):  # of nodes without a disk, which cannot stream
            disk_s = self.disk_s[:, None, None]
            streams = np.maximum(len(steps) * streamed * disk_s, computing) + widest[None] * disk_s
            if caches.any():
                hidden = _ranges(plain.compute_s * self._experts.shares)
                total, mixtures = _ranges(self._experts.total), _ranges(self._experts.total > 0)
                of_steps = Counter(steps).items()
                reading = sum(
                    count
                    * expert_reads(streamed, total, mixtures, each, self._experts.chosen_share)
                    for each, count in of_steps
                )
                streams = np.where(
                    caches, computing + sweep * np.maximum(0.0, reading * disk_s - hidden), streams
                )
        seconds = np.where(streamed == 0, computing, streams)
        return np.where(np.isfinite(streamed), seconds, np.inf)


def _held_by_count(weights: Floats) -> list[Floats]:
    """For each length of a stage, [kept, starts] bytes of the layers that stay, spread as
    `choose_residency` does.

    The last row has all of them.
    """
    layers = len(weights)
    tables = [np.zeros((1, layers + 1))]
    for count in range(1, layers + 1):
        starts = np.arange(layers + 1 - count)
        rows = [np.zeros(len(starts))]
        for resident_count in range(1, count):
            places = (2 * np.arange(resident_count) + 1) * count // (2 * resident_count)
            rows.append(weights[starts[:, None] + places[None]].sum(axis=1))
        rows.append(weights[starts[:, None] + np.arange(count)[None]].sum(axis=1))
        tables.append(np.array(rows))
    return tables


def _ranges(values: Floats | NDArray[np.bool_]) -> Floats:
    """[..., N+1, N+1] sums from n to e of [..., N]."""
    done = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=done[..., 1:])
    return done[..., None, :] - done[..., :, None]


def _widest(weights: Floats) -> Floats:
    """[N+1, N+1] the largest layer from n to e; 0 if there is none."""
    layers = len(weights)
    table = np.zeros((layers + 1, layers + 1))
    for first in range(layers):
        table[first, first + 1 :] = np.maximum.accumulate(weights[first:])
    return table
