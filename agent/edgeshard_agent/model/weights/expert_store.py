"""Experts of a mixture on the disk, with a cache in memory: EdgeMoE's run time.

A layer's router determines the experts that a step needs. Missing ones are read while present ones
compute. Between two routers one thread reads ahead the experts that the cache considers likely.
When the next router has chosen, an unconfirmed read is abandoned.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from edgeshard.domain.errors import EdgeShardError, InternalError
from edgeshard.domain.models.residency import in_disk_blocks
from edgeshard.domain.nodes.device import StageExperts
from edgeshard_agent.experts import Expert, ExpertCache, Use
from edgeshard_agent.model.weights.packed_modules import AdoptedUnit, unit_checksum, unit_memory
from edgeshard_agent.model.weights.weight_store import ReadObserver
from edgeshard_agent.store.direct import ChunkReader, ReadAbandonedError


@dataclass(slots=True)
class _Read:
    """An expert that is being read into memory. `is_wanted` may be taken back while it is read
    ahead."""

    expert: Expert
    memory: torch.Tensor
    is_wanted: bool = True
    is_done: bool = False


@dataclass(slots=True)
class ExpertStoreCounts:
    """Bytes read from the disk, seconds that steps waited for them, and experts read ahead that
    were needed, or not."""

    bytes_read: int = 0
    waited_s: float = 0.0
    ahead_used: int = 0
    ahead_wasted: int = 0


@dataclass(slots=True)
class _State:
    """The state that the computing thread and the reading one share."""

    resident: dict[Expert, torch.Tensor] = field(default_factory=dict)
    reads: deque[_Read] = field(default_factory=deque)
    ahead: deque[Expert] = field(default_factory=deque)
    in_flight: _Read | None = None
    ahead_done: dict[Expert, torch.Tensor] = field(default_factory=dict)
    free: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    failure: EdgeShardError | None = None
    closed: bool = False


@dataclass(eq=False)
class ExpertStore:
    """Experts that a cache keeps in memory, as far as it has room.

    One thread computes. In addition to the cache's memory it needs one expert's: for the expert
    that is being read ahead.
    """

    units: Sequence[Sequence[AdoptedUnit]]
    """[mixtures][experts], in the order their layers run."""
    layers: Sequence[int]
    """The layers of the mixtures."""
    cache: ExpertCache
    """Decides which of the experts are in memory."""
    reader: ChunkReader = field(default_factory=lambda: ChunkReader(unit_checksum))
    observer: ReadObserver | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.counts = ExpertStoreCounts()
        self._total = sum(unit.large_bytes for group in self.units for unit in group)
        self._state = _State()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="experts", daemon=True)
        self._thread.start()

    def use(self, layer: int, choices: torch.Tensor) -> Iterator[int]:
        """The chosen experts of a layer, each once; one stays in memory until the next is
        requested.

        `layer` is its number among the mixtures; `choices` is [tokens, per token].
        Raises DataLossError if a file is damaged.
        """
        uses = self._choose(layer, choices)
        pending = {use.expert for use in uses}
        loads = deque(use for use in uses if use.load)
        looked_ahead = False
        try:
            for use in uses:
                self._request(loads, pending)
                # the disk would stand still while the last ones compute
                if not loads and not looked_ahead:
                    self._look_ahead(layer, len(choices))
                    looked_ahead = True
                self._wait(use.expert)
                yield use.expert[1]
                pending.discard(use.expert)
        finally:
            if self._state.failure is None:
                self._request(loads, set())  # of a step that failed: the cache counts on them

    @property
    def memory_bytes(self) -> int:
        """Bytes taken for experts now: for present ones, and for one that is read ahead."""
        with self._changed:
            state = self._state
            buffers = [
                *state.resident.values(),
                *state.ahead_done.values(),
                *(read.memory for read in state.reads),
            ]
            flying = [state.in_flight.memory] if state.in_flight is not None else []
            return sum(
                memory.nbytes
                for memory in (
                    *buffers,
                    *flying,
                    *(m for some in state.free.values() for m in some),
                )
            )

    @property
    def status(self) -> StageExperts:
        """The contents of the cache, and its counts since the store began."""
        cache, counts = self.cache, self.counts
        with self._changed:
            cached = sum(memory.nbytes for memory in self._state.resident.values())
            hits, misses = cache.counts.hits, cache.counts.needed - cache.counts.hits
        return StageExperts(
            cached, cache.room, self._total, hits, misses, counts.bytes_read, counts.waited_s
        )

    @property
    def failure(self) -> EdgeShardError | None:
        """Why nothing can be read any more."""
        return self._state.failure

    def close(self) -> None:
        """Free the memory once the current read has ended."""
        with self._changed:
            self._state.closed = True
            if self._state.in_flight is not None:
                self._state.in_flight.is_wanted = False
            self._changed.notify_all()
        self._thread.join()
        self.reader.close()
        for layer, expert in self._state.resident:
            self.units[layer][expert].place(None)
        self._state = _State(closed=True)

    def _choose(self, layer: int, choices: torch.Tensor) -> Sequence[Use]:
        """The cache's uses, after reads ahead are settled: kept if they are needed, otherwise
        abandoned."""
        numbers = choices.numpy()
        needed_experts = {(layer, expert) for expert in set(choices.flatten().tolist())}
        state = self._state
        with self._changed:
            state.ahead.clear()
            for expert in list(state.ahead_done):
                memory = state.ahead_done.pop(expert)
                self.counts.ahead_used += expert in needed_experts
                self.counts.ahead_wasted += expert not in needed_experts
                if expert in needed_experts:
                    self._let_go(self.cache.bring(*expert))
                    self._place(expert, memory)
                else:
                    state.free.setdefault(len(memory), []).append(memory)
                    self.cache.counts.bytes_read += self.units[layer][expert[1]].large_bytes
            flying = state.in_flight
            if flying is not None and flying.expert not in needed_experts:
                flying.is_wanted = False
                self.counts.ahead_wasted += 1
            return self.cache.choose(layer, numbers)

    def _look_ahead(self, layer: int, tokens: int) -> None:
        """Read the likely experts of the next layer, once nothing is left to read for this one."""
        with self._changed:
            following = (layer + 1) % len(self.units)
            self._state.ahead.extend(
                (following, expert) for expert in self.cache.likely(following, tokens)
            )
            self._changed.notify_all()

    def _request(self, loads: deque[Use], pending: set[Expert]) -> None:
        """Queue the reads that fit: none replaces an expert that this step still needs."""
        state = self._state
        with self._changed:
            while loads and not any(expert in pending for expert in loads[0].victims):
                use = loads.popleft()
                self._let_go(use.victims)
                flying = state.in_flight
                if use.expert in state.ahead_done or (
                    flying is not None and flying.expert == use.expert
                ):
                    self.counts.ahead_used += 1  # it was being read when the router chose it
                else:
                    state.reads.append(_Read(use.expert, self._memory(use.expert)))
            self._changed.notify_all()

    def _wait(self, expert: Expert) -> None:
        state, began = self._state, time.monotonic()
        with self._changed:
            while expert not in state.resident:
                if expert in state.ahead_done:
                    self._place(expert, state.ahead_done.pop(expert))
                    break
                if state.failure is not None:
                    raise state.failure
                if state.closed:
                    raise InternalError("experts were used after they were given back")
                self._changed.wait()
        self.counts.waited_s += time.monotonic() - began

    def _place(self, expert: Expert, memory: torch.Tensor) -> None:
        self._state.resident[expert] = memory
        self.units[expert[0]][expert[1]].place(memory)

    def _let_go(self, victims: Sequence[Expert]) -> None:
        for expert in victims:
            memory = self._state.resident.pop(expert)
            self.units[expert[0]][expert[1]].place(None)
            self._state.free.setdefault(len(memory), []).append(memory)

    def _memory(self, expert: Expert) -> torch.Tensor:
        size = in_disk_blocks(self.units[expert[0]][expert[1]].large_bytes)
        free = self._state.free.get(size)
        if free:
            return free.pop()
        self._state.free.clear()  # of other sizes: the system has them back
        return unit_memory(size)

    def _run(self) -> None:
        """The reading thread: first the experts that steps wait for, then the likely ones."""
        while (read := self._next()) is not None:
            try:
                self._read(read)
            except ReadAbandonedError:
                pass
            except EdgeShardError as error:
                self._fail(error)
            except Exception as error:
                self._fail(
                    InternalError(f"reading experts failed: {type(error).__name__}: {error}")
                )
            with self._changed:
                self._state.in_flight = None
                if not read.is_done:
                    self._state.free.setdefault(len(read.memory), []).append(read.memory)
                self._changed.notify_all()

    def _next(self) -> _Read | None:
        state = self._state
        with self._changed:
            while not state.closed:
                if state.reads:
                    return state.reads.popleft()
                if state.ahead and not state.ahead_done:  # the one spare place
                    expert = state.ahead.popleft()
                    state.in_flight = _Read(expert, self._memory(expert))
                    return state.in_flight
                self._changed.wait()
            return None

    def _read(self, read: _Read) -> None:
        layer, expert = read.expert
        unit, began = self.units[layer][expert], time.monotonic()
        is_wanted = (lambda: read.is_wanted) if self._state.in_flight is read else None
        unit.file.read_large(
            self.reader, read.memory.numpy().data, cached=False, is_wanted=is_wanted
        )
        if (observer := self.observer) is not None:
            observer.read(self.layers[layer], unit.large_bytes, began, time.monotonic(), expert)
        with self._changed:
            if not read.is_wanted:
                return
            read.is_done = True
            self.counts.bytes_read += unit.large_bytes
            if self._state.in_flight is read:
                self._state.ahead_done[read.expert] = read.memory
            else:
                self._place(read.expert, read.memory)

    def _fail(self, error: EdgeShardError) -> None:
        with self._changed:
            self._state.failure = error
