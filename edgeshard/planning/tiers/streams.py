"""What stages cost where boxes may stream weights: which layers stay, memory, and seconds of a sweep. Pure.

A box whose memory holds its stage keeps it. One whose memory does not reads the layers that do not stay from its disk
in every step, through slots (`domain.residency`). In one sweep it computes a step of each of `sweep` micro-batches,
layer by layer, so that a layer is read once for all of them:

    seconds = max( streamed bytes / disk rate, sweep * seconds of one step ) + largest layer / disk rate

of which the last is the first slot's filling. A prompt goes in steps of `STEP_TOKENS`, each of which reads once more.
(docs/papers.md#boxes-that-stream)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from edgeshard.domain.residency import PREFETCHED_LAYERS
from edgeshard.domain.step import STEP_TOKENS
from edgeshard.planning.costs import Costs, Load
from edgeshard.planning.instance import Cut, Floats, Instance
from edgeshard.planning.scoring import SLACK, stages

SLOTS = 1 + PREFETCHED_LAYERS


@dataclass(frozen=True, slots=True)
class Streaming:
    """A stage that streams, in bytes. `budget_bytes` are for its weights: those that stay, embedding, head and slots.

    `streamed_bytes` of `weight_bytes` are read in each step, at `disk_bytes_per_s`. `layer_bytes` are those
    of its largest layer.
    """

    weight_bytes: int
    streamed_bytes: int
    layer_bytes: int
    budget_bytes: int
    disk_bytes_per_s: float


class StreamTables:
    """The instances of one problem whose boxes may stream. Tables are kept by load and sweep."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        problem = costs.problem
        self.weights = np.array(
            [float(block.weight_bytes(problem.dtype, problem.quantisation)) for block in problem.model.blocks]
        )
        devices = [node.device for node in costs.nodes]
        self.disk_s = np.array(
            [1.0 / device.disk_bytes_per_s if device.disk_bytes_per_s else np.inf for device in devices]
        )
        self._disk_bytes = np.array([np.inf if device.disk_bytes is None else device.disk_bytes for device in devices])
        self._held = _held_by_count(self.weights)
        self._known: dict[tuple[Load, int, bool, Load], Instance] = {}
        self._streamed: dict[Load, tuple[Floats, Floats]] = {}

    @property
    def any_disk(self) -> bool:
        return bool(np.isfinite(self.disk_s).any())

    def instance(self, load: Load, sweep: int, prefill: bool, pool: Load | None = None) -> Instance:
        """A sweep's prompts, or one token of each of its requests; R and B of it are seconds of a sweep.

        `pool` is the load that memory was given to, where it is more than what runs.
        """
        key = load, sweep, prefill, pool or load
        if key not in self._known:
            plain = self.costs.prefill(load) if prefill else self.costs.decode(load)
            reads = -(-load.batch * self.costs.problem.prompt_tokens // STEP_TOKENS) if prefill else 1
            self._known[key] = replace(
                plain,
                stage_s=self._stage_s(plain, pool or load, sweep, reads),
                hop_s=plain.hop_s * sweep,
                return_s=plain.return_s * sweep,
            )
        return self._known[key]

    def streamed(self, load: Load) -> tuple[Floats, Floats]:
        """[M, N+1, N+1] bytes that a stage reads in each step, 0 where it stays, infinite where it has no place; and
        [M, N+1, N+1] the room for its layers, slots included."""
        if load not in self._streamed:
            self._streamed[load] = self._bytes(self.costs.decode(load))
        return self._streamed[load]

    def streaming(self, load: Load, cut: Cut) -> tuple[Streaming | None, ...]:
        """How each stage of a cut streams; None for one that stays in memory."""
        streamed, room = self.streamed(load)
        found: list[Streaming | None] = []
        for index, (node, first, end) in enumerate(stages(cut)):
            size = streamed[node, first, end]
            if not size:
                found.append(None)
                continue
            ends = self._ends_bytes(index == 0, self.costs.has_head(cut, index))
            found.append(
                Streaming(
                    weight_bytes=int(self.weights[first:end].sum()) + ends,
                    streamed_bytes=int(size),
                    layer_bytes=int(self.weights[first:end].max()),
                    budget_bytes=int(room[node, first, end]) + ends,
                    disk_bytes_per_s=float(1.0 / self.disk_s[node]),
                )
            )
        return tuple(found)

    def _ends_bytes(self, first: bool, head: bool) -> int:
        """Weights of embedding and head, which stay."""
        problem = self.costs.problem
        model, ways = problem.model, (problem.dtype, problem.quantisation)
        size = problem.dtype.itemsize * model.embedding_parameters * first + model.head_bytes(*ways) * head
        return size - model.shared_bytes(*ways) * (first and head)

    def _bytes(self, plain: Instance) -> tuple[Floats, Floats]:
        nodes, layers = plain.nodes, plain.layers
        streamed = np.full((nodes, layers + 1, layers + 1), np.inf)
        rooms = np.zeros_like(streamed)
        kv = float(plain.layer_bytes[0] - self.weights[0])
        capacity = plain.capacity_bytes * (1 + SLACK) - plain.stage_bytes
        for count in range(layers + 1):
            starts = np.arange(layers + 1 - count)
            room = np.repeat(capacity[:, None] - kv * count, len(starts), axis=1)  # [M, starts], for weights
            room[:, 0] -= plain.embed_bytes
            head = 0 if plain.head_on_source else len(starts) - 1
            room[:, head] -= plain.head_bytes
            if head == 0:
                room[:, 0] += plain.tied_bytes
            ends = starts + count
            rooms[:, starts, ends] = room
            if not count:
                streamed[:, starts, ends] = np.where(room >= 0, 0.0, np.inf)
                continue
            held = self._held[count]  # [kept, starts], its last row is the whole range
            whole = held[-1]
            widest = np.array([self.weights[first : first + count].max() for first in starts])
            kept = held[None, :-1] <= (room - SLOTS * widest)[:, None]  # [M, kept, starts]
            most = count - 1 - np.argmax(kept[:, ::-1], axis=1)
            read = whole - np.take_along_axis(held[:-1][None], most[:, None], axis=1)[:, 0]
            can = kept.any(axis=1) & np.isfinite(self.disk_s)[:, None] & (read <= self._disk_bytes[:, None])
            streamed[:, starts, ends] = np.where(room >= whole, 0.0, np.where(can, read, np.inf))
        return streamed, rooms

    def _stage_s(self, plain: Instance, pool: Load, sweep: int, reads: int) -> Floats:
        layers = plain.layers
        streamed, _ = self.streamed(pool)
        done = np.zeros((plain.nodes, layers + 1))
        np.cumsum(plain.compute_s, axis=1, out=done[:, 1:])
        step = plain.overhead_s[:, None, None] + done[:, None, :] - done[:, :, None]
        step[:, 0, :] += plain.embed_s[:, None]
        if plain.head_on_source:
            step[:, 0, :] += plain.head_s[:, None]
        else:
            step[:, :, layers] += plain.head_s[:, None]
        computing = sweep * step
        widest = _widest(self.weights)
        with np.errstate(invalid="ignore"):  # of boxes without a disk, which cannot stream
            disk_s = self.disk_s[:, None, None]
            streams = np.maximum(reads * streamed * disk_s, computing) + widest[None] * disk_s
        seconds = np.where(streamed == 0, computing, streams)
        return np.where(np.isfinite(streamed), seconds, np.inf)


def _held_by_count(weights: Floats) -> list[Floats]:
    """For each length of a stage, [kept, starts] bytes of the layers that stay, spread as `choose_residency` does.

    The last row has all of them.
    """
    layers = len(weights)
    found = [np.zeros((1, layers + 1))]
    for count in range(1, layers + 1):
        starts = np.arange(layers + 1 - count)
        rows = [np.zeros(len(starts))]
        for kept in range(1, count):
            places = (2 * np.arange(kept) + 1) * count // (2 * kept)
            rows.append(weights[starts[:, None] + places[None]].sum(axis=1))
        rows.append(weights[starts[:, None] + np.arange(count)[None]].sum(axis=1))
        found.append(np.array(rows))
    return found


def _widest(weights: Floats) -> Floats:
    """[N+1, N+1] the largest layer from n to e; 0 where there is none."""
    layers = len(weights)
    table = np.zeros((layers + 1, layers + 1))
    for first in range(layers):
        table[first, first + 1 :] = np.maximum.accumulate(weights[first:])
    return table
