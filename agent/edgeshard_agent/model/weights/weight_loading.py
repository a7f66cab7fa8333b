"""Filling a stage: each unit from its packed file or from the checkpoint's tensors, as was chosen
before.

Units from the checkpoint are packed while they load, if there is room. A stage whose weights exceed
its budget keeps some layers on the disk. A meter reports the progress, and the time that the rest
will take.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from edgeshard.architectures.tensors import ExpectedTensor
from edgeshard.architectures.units import (
    EMBEDDING_UNIT,
    HEAD_UNIT,
    expert_unit,
    layer_unit,
    tensors_of_units,
)
from edgeshard.domain.errors import FailedPreconditionError, ResourceExhaustedError
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.models.residency import (
    PREFETCHED_LAYERS,
    Residency,
    choose_residency,
    in_disk_blocks,
    room_for_experts,
)
from edgeshard.domain.nodes.device import StageFilling, WeightLoadingWork
from edgeshard_agent.experts import MOST_AHEAD, ExpertTable, ForecastCache, Sizes
from edgeshard_agent.model.blocks import experts_of
from edgeshard_agent.model.decoder import DecoderModules
from edgeshard_agent.model.modules import StageModules
from edgeshard_agent.model.projection import Projection
from edgeshard_agent.model.weights.expert_store import ExpertStore
from edgeshard_agent.model.weights.loader import ParameterLoader, TensorSource, check_filled
from edgeshard_agent.model.weights.packed_modules import (
    AdoptedUnit,
    ModelUnit,
    unit_bytes,
    unit_checksum,
    unit_memory,
)
from edgeshard_agent.model.weights.weight_store import WeightStore
from edgeshard_agent.ops.huge_pages import WEIGHTS
from edgeshard_agent.ops.native import native_available
from edgeshard_agent.store.blob_cache import CACHE_LIMIT
from edgeshard_agent.store.direct import ChunkReader
from edgeshard_agent.store.packed_files import PackedFile
from edgeshard_agent.store.unit_sources import UnitSources


@dataclass(slots=True)
class Share:
    """Bytes of one sort of work, and the seconds that those done have taken."""

    done_bytes: int = 0
    total_bytes: int = 0
    seconds: float = 0.0


def seconds_left(shares: Iterable[Share]) -> float | None:
    """Seconds that the rest takes if each kind continues at its rate so far; None while one has no
    rate yet."""
    left = 0.0
    for share in shares:
        rest = max(0, share.total_bytes - share.done_bytes)
        if rest and not share.done_bytes:
            return None
        left += rest * share.seconds / share.done_bytes if rest else 0.0
    return left


class WeightLoadingMeter:
    """Tells `tell` how far it is. Reads from packed files have a rate of their own: they are many
    times as fast."""

    def __init__(
        self, tell: Callable[[StageFilling], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell = tell
        self._now = now
        self._since = now()
        self._work = WeightLoadingWork.CONVERTING
        self._read, self._made = Share(), Share()

    def expect(self, size: int, *, read: bool) -> None:
        """Add `size` bytes of work, to be read from a packed file or not."""
        (self._read if read else self._made).total_bytes += size

    def begin(self, work: WeightLoadingWork) -> None:
        """This is done from now on."""
        self._work = work
        self.say()

    def done(self, size: int) -> None:
        """Count `size` bytes of the present work as done."""
        share = self._read if self._work is WeightLoadingWork.READING else self._made
        now = self._now()
        share.done_bytes += size
        share.seconds += now - self._since
        self._since = now
        self.say()

    def say(self) -> None:
        shares = (self._read, self._made)
        done = sum(share.done_bytes for share in shares)
        total = sum(share.total_bytes for share in shares)
        self._tell(StageFilling(self._work, done, total, seconds_left(shares) or 0.0))


@dataclass(frozen=True, slots=True)
class Packing:
    """The sources of a stage's units, and the memory that it may keep them in.

    `budget` is in bytes of weights, None if all of them may stay. `writes`: whether units from the
    checkpoint are packed; streamed ones always are. `prefetched` layers are read ahead of the one
    that computes. `expert_table` has the values of the table that forecasts the experts of all the
    model's mixtures, if there is one.
    """

    sources: UnitSources
    budget: int | None = None
    writes: bool = True
    prefetched: int = PREFETCHED_LAYERS
    expert_table: Mapping[str, list[Any]] | None = None


@dataclass(slots=True)
class Filled:
    """The outcome of a load."""

    store: WeightStore | None = None
    """Through which some layers pass; None if all stay in memory."""
    experts: ExpertStore | None = None
    """Which experts are in memory; None if all are, or if whole layers pass."""
    residency: Residency | None = None
    """Which layers stay in memory; None if no residency was requested."""

    @property
    def stores(self) -> list[WeightStore | ExpertStore]:
        """Those that read from the disk."""
        candidates: tuple[WeightStore | ExpertStore | None, ...] = (self.store, self.experts)
        return [store for store in candidates if store is not None]


def fill(
    modules: StageModules,
    config: Mapping[str, Any],
    source: TensorSource,
    missing_tensors: Mapping[str, ExpectedTensor],
    packing: Packing | None,
    progress: Callable[[StageFilling], None] = lambda filling: None,
) -> Filled:
    """Give every parameter of `modules`, made from `config`, its numbers; `missing_tensors` are the
    tensors that no other stage shares.

    `progress` is called after every tensor and every unit, by this thread. Raises as
    `ParameterLoader.load` does; ResourceExhaustedError (WEIGHT_BUDGET) for a budget that is too
    small, and DataLossError (PACKED_DAMAGED) for a packed file that must be made again.
    """
    meter = WeightLoadingMeter(progress)
    if (
        packing is None
        or not isinstance(modules, DecoderModules)
        or not reads_packed(modules.context.device)
    ):
        if packing is not None and packing.budget is not None:
            _refuse_streaming(modules)
        loader = ParameterLoader(modules, source, meter.done)
        meter.expect(loader.total_bytes(missing_tensors), read=False)
        loader.load(missing_tensors)
        check_filled(modules)
        return Filled()
    # A unit counts once it is packed: its tensors in memory do not show when it will be packed.
    loader = ParameterLoader(modules, source, lambda size: meter.say())
    loading = _WeightLoading(modules, config, loader, missing_tensors, packing, meter)
    try:
        return loading.run()
    finally:
        loading.close()


def reads_packed(device: str) -> bool:
    """Whether packed files serve stages on this device, of families that can be packed."""
    return device == "cpu" and native_available()


def _refuse_streaming(modules: StageModules) -> None:
    context = modules.context
    if context.device != "cpu":
        why = f"weights stream from the disk to the CPU only, not to {context.device}"
    elif not native_available():
        why = "weights stream from the disk to native kernels only, which are missing here"
    else:
        why = f"layers of {context.shape.architecture} cannot be streamed"
    raise FailedPreconditionError(
        f"weight_budget: {why}; give all of them memory", field="weight_budget"
    )


class _UnitRead(NamedTuple):
    """A unit that is being read into memory."""

    unit: ModelUnit
    file: PackedFile
    memory: torch.Tensor
    done: Future[None]


@dataclass(eq=False)
class _WeightLoading:
    """One load with packed files: units with a file are read, the rest is loaded by `loader` and
    packed."""

    modules: DecoderModules
    config: Mapping[str, Any]
    loader: ParameterLoader
    missing_tensors: Mapping[str, ExpectedTensor]
    packing: Packing
    meter: WeightLoadingMeter

    def __post_init__(self) -> None:
        modules, missing_tensors = self.modules, self.missing_tensors
        self.reader = ChunkReader(unit_checksum)
        self._sizes: dict[str, int] = {}
        self._sources = sources = self.packing.sources
        # Others have memory that another stage shares.
        self._lacking = {
            unit
            for unit, names in sources.tensors.items()
            if unit not in modules.ends_there and not names.isdisjoint(missing_tensors)
        }
        read = self._lacking & sources.sizes.keys()
        loaded = frozenset[str]().union(*(sources.tensors[unit] for unit in self._lacking - read))
        self._left = {name: tensor for name, tensor in missing_tensors.items() if name in loaded}
        # A tensor of both ends goes into the other one only.
        modules.ends_there |= read & {EMBEDDING_UNIT, HEAD_UNIT}
        self._filled = Filled()
        self._reads = ThreadPoolExecutor(2, thread_name_prefix="fill")
        self._reading: deque[_UnitRead] = deque()

    def close(self) -> None:
        """End the threads of this load, once the reads that are on their way have ended."""
        self._reads.shutdown(cancel_futures=True)
        self.reader.close()

    def run(self) -> Filled:
        units = {unit.name: unit for unit in units_of(self.modules)}
        layers = self._layers_of(units)
        inside = {unit.name for group in layers for unit in group}
        ends = [unit for name, unit in units.items() if name not in inside]
        itemsize = self.modules.context.dtype.itemsize
        sizes = [sum(_held_bytes(unit, itemsize) for unit in group) for group in layers]
        others = sum(_held_bytes(unit, itemsize) for unit in ends)
        self._expect(units.values())
        if (room := self._room_for_experts(layers, others)) is not None:
            self._fill_with_cache(ends, layers, room)
            return self._filled
        residency = choose_residency(sizes, others, self.packing.budget, self.packing.prefetched)
        for unit in ends:
            self._fill_unit(unit)
        streamed = []
        # Units that leave memory again come first, and leave nothing of theirs in the chunks of
        # units that stay.
        WEIGHTS.part()
        for place, group in enumerate(layers):
            if not residency.resident[place]:
                adopted = [self._stream_unit(unit) for unit in group]
                streamed.append((self.modules.context.layers.first + place, adopted))
        WEIGHTS.part()
        for place, group in enumerate(layers):
            if residency.resident[place]:
                for unit in group:
                    self._fill_unit(unit)
        self._settle(0)
        self.loader.load(self._left)
        self._filled.residency = residency
        if streamed:
            self._filled.store = WeightStore(streamed, residency.slots)
        else:
            check_filled(self.modules)
        return self._filled

    def _expect(self, units: Iterable[ModelUnit]) -> None:
        """Tell the meter the total work."""
        itemsize = self.modules.context.dtype.itemsize
        for unit in units:
            if unit.name in self._lacking:
                self._sizes[unit.name] = size = _held_bytes(unit, itemsize)
                self.meter.expect(size, read=unit.name in self._sources.sizes)

    def _done(self, unit: ModelUnit) -> None:
        self.meter.done(self._sizes[unit.name])

    def _room_for_experts(self, layers: Sequence[Sequence[ModelUnit]], others: int) -> int | None:
        """Bytes for experts if everything else stays in memory; None if everything fits, or if
        layers must pass whole.
        """
        budget, itemsize = self.packing.budget, self.modules.context.dtype.itemsize
        experts = [_held_bytes(unit, itemsize) for group in layers for unit in group[1:]]
        others += sum(_held_bytes(group[0], itemsize) for group in layers)
        return room_for_experts(others, experts, budget)

    def _fill_with_cache(
        self, ends: Sequence[ModelUnit], layers: Sequence[Sequence[ModelUnit]], room: int
    ) -> None:
        for unit in (*ends, *(group[0] for group in layers)):
            self._fill_unit(unit)
        WEIGHTS.part()
        adopted = [
            [self._stream_unit(unit) for unit in group[1:]] for group in layers if len(group) > 1
        ]
        WEIGHTS.part()
        self._settle(0)
        self.loader.load(self._left)
        sizes = np.array(
            [[in_disk_blocks(unit.large_bytes) for unit in group] for group in adopted], np.int64
        )
        mixtures = [
            self.modules.context.layers.first + place
            for place, group in enumerate(layers)
            if len(group) > 1
        ]
        cache = ForecastCache(room, sizes, *self._forecasts(sizes))
        store = self._filled.experts = ExpertStore(adopted, mixtures, cache)
        self.modules.has_all = False
        block_experts = (experts_of(block) for block in self.modules.layers.values())
        for number, (_, experts) in enumerate(each for each in block_experts if each is not None):
            experts.source = partial(store.use, number)

    def _forecasts(self, sizes: Sizes) -> tuple[ExpertTable, int]:
        """The table of this stage's mixtures, and how many experts of a layer are read ahead by
        it."""
        values, context = self.packing.expert_table, self.modules.context
        if values is None:
            return ExpertTable.even(*sizes.shape), 0
        every = LayerRange(0, context.shape.layer_count)
        units = tensors_of_units(self.config, every, context.quantisation)
        mixtures = [layer for layer in range(every.end) if expert_unit(layer, 0) in units]
        table = ExpertTable.of_values(values, len(mixtures), sizes.shape[1])
        first = sum(layer < context.layers.first for layer in mixtures)
        return table.part(first, first + len(sizes)), MOST_AHEAD

    def _layers_of(self, units: Mapping[str, ModelUnit]) -> list[list[ModelUnit]]:
        """The units of each layer, in order."""
        layers = range(self.modules.context.layers.first, self.modules.context.layers.end)
        return [
            [unit for name, unit in units.items() if f"{name}-".startswith(f"layer-{layer}-")]
            for layer in layers
        ]

    def _fill_unit(self, unit: ModelUnit) -> None:
        if unit.name not in self._lacking:
            return
        if (file := self._sources.find(unit.name)) is not None:
            self._read(unit, file)
            return
        self._settle(0)
        self.meter.begin(
            WeightLoadingWork.PACKING if self.packing.writes else WeightLoadingWork.CONVERTING
        )
        self._load(unit)
        if self.packing.writes:
            self._write(unit)
        self._done(unit)

    def _stream_unit(self, unit: ModelUnit) -> AdoptedUnit:
        file = self._sources.find(unit.name)
        self._settle(0)
        self.meter.begin(WeightLoadingWork.PACKING if file is None else WeightLoadingWork.READING)
        if file is None:
            self._load(unit)
            file = self._write(unit)
            if file is None:
                raise ResourceExhaustedError(
                    f"cache-limit: the disk has no room to pack {unit.name}, which this node must "
                    "stream; raise "
                    "--cache-limit, or free disk space",
                    field="cache-limit",
                    reason=CACHE_LIMIT,
                )
        else:
            # Damage is found now, not in the middle of an answer; it takes as long as one step's
            # reads.
            file.read_large(self.reader, unit_memory(file.header.large_bytes).numpy().data)
        self._done(unit)
        small = unit_memory(file.header.small_bytes)
        file.read_small(self.reader, small.numpy().data)
        return AdoptedUnit(unit, file, small)

    def _load(self, unit: ModelUnit) -> None:
        """Load its tensors that are left; one that is in two units is loaded into both at once."""
        names = self._sources.tensors[unit.name]
        self.loader.load({name: self._left.pop(name) for name in list(self._left) if name in names})

    def _write(self, unit: ModelUnit) -> PackedFile | None:
        data = unit_bytes(unit)
        return None if data is None else self._sources.write(unit.name, data)

    def _read(self, unit: ModelUnit, file: PackedFile) -> None:
        """Begin to read a unit; it is placed after the next read has begun, so that the disk is
        never idle."""
        self.meter.begin(WeightLoadingWork.READING)
        memory = unit_memory(file.header.data_bytes)
        done = self._reads.submit(file.read_whole, self.reader, memory.numpy().data)
        self._reading.append(_UnitRead(unit, file, memory, done))
        self._settle(1)

    def _settle(self, left: int) -> None:
        """Place units that were read, until only `left` reads are running."""
        while len(self._reading) > left:
            read = self._reading.popleft()
            read.done.result()
            AdoptedUnit(read.unit, read.file, read.memory).place(
                read.memory[read.file.header.small_bytes :]
            )
            self._done(read.unit)


def _held_bytes(unit: ModelUnit, itemsize: int) -> int:
    """Bytes that a unit's tensors take once they are packed, without their padding."""
    total = sum(projection.matrix_bytes(itemsize) for _, projection in unit.projections())
    for _, owner, leaf, tensor in unit.tensors():
        if not (isinstance(owner, Projection) and leaf == "weight"):
            total += tensor.numel() * itemsize
    return total


def units_of(modules: DecoderModules) -> list[ModelUnit]:
    """The units of a stage in the order they run."""
    units = []
    if hasattr(modules, "embed_tokens"):
        units.append(ModelUnit(EMBEDDING_UNIT, (("embed_tokens", modules.embed_tokens),)))
    for index, block in modules.layers.items():
        units.extend(_units_of_block(int(index), block))
    if modules.context.is_last:
        units.append(ModelUnit(HEAD_UNIT, (("norm", modules.norm), ("lm_head", modules.lm_head))))
    return units


def _units_of_block(index: int, block: nn.Module) -> Iterator[ModelUnit]:
    block_experts = experts_of(block)
    if block_experts is None:
        yield ModelUnit(layer_unit(index), (("", block),))
        return
    path, experts = block_experts
    yield ModelUnit(layer_unit(index), (("", block),), without=f"{path}.")
    for number, expert in enumerate(experts):
        yield ModelUnit(expert_unit(index, number), (("", expert),))
