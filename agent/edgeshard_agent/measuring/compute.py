"""Times of every sort of layer of a model, which need not fit this node.

One sort of layer is made at a time, with random weights, timed, and freed. Call it on the compute
thread, because torch's number of threads is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
import torch

from edgeshard.architectures import ModelShape
from edgeshard.domain.errors import ResourceExhaustedError
from edgeshard.domain.models.dtypes import Quantisation
from edgeshard.domain.nodes import profile
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard.domain.requests.generation import Sampling
from edgeshard.planning.inputs.shapes import ModelSpec, model_from_config
from edgeshard.process.control_groups import cpu_quota
from edgeshard.profiles.grid import FULL_GRID, Grid
from edgeshard_agent.measuring.facts import read_facts
from edgeshard_agent.measuring.machine_facts import available_bytes
from edgeshard_agent.measuring.others import CoreMeter
from edgeshard_agent.measuring.overhead import PROMPT_TOKENS, measure_overhead
from edgeshard_agent.measuring.power import PowerMeter, find_sensor
from edgeshard_agent.measuring.rotation import (
    BlockRotation,
    LayerForm,
    OuterRotation,
    cache_bytes,
    copies_needed,
    kv_bytes,
)
from edgeshard_agent.measuring.stops import Stops, no_stops
from edgeshard_agent.measuring.stopwatch import (
    CpuQuota,
    Measurement,
    Stopwatch,
    is_steady,
    summarise,
)
from edgeshard_agent.model.sampling import Sampler
from edgeshard_agent.model.tensors import TORCH_DTYPES
from edgeshard_agent.model.weights.weights import check_weights
from edgeshard_agent.ops.native import kernel_names, native_available

_REST_S = 2.0
"""Long enough for a sensor to read the power at rest."""

Progress = Callable[[str, int, int], None]
"""The layer being measured, figures done, figures in all."""


def fingerprint(facts: DeviceFacts, threads: int) -> str:
    """The fingerprint of this node with `threads` threads. On a processor it includes which native
    kernels there are, and the quota of its control group."""
    details = {"vector": torch.backends.cpu.get_cpu_capability(), "cuda": torch.version.cuda or ""}
    if facts.kind == "cpu":
        details["kernels"] = kernel_names()[0] if native_available() else "torch"
        if quota := cpu_quota():
            details["quota"] = f"{quota:g}"
    return profile.device_fingerprint(facts, threads, details)


@dataclass(frozen=True, slots=True)
class BlockSort:
    """Blocks that do the same work: `first` is one of them, `layers` how many there are,
    `parameters` of one."""

    kind: profile.LayerKind
    first: int
    layers: int
    parameters: int
    window: int
    stored_bytes: int = 0
    """Bytes of the matrices that have formats of their own."""


def block_sorts(
    model: ModelSpec, quantisation: Quantisation | None = None
) -> tuple[BlockSort, ...]:
    """The distinct blocks of a model: dense or of experts, and by their size, their window and
    their formats."""
    is_stored = quantisation is Quantisation.STORED
    members: dict[tuple[profile.LayerKind, int, int, int], list[int]] = {}
    for index, block in enumerate(model.blocks):
        kind = profile.LayerKind.MOE_BLOCK if block.experts else profile.LayerKind.BLOCK
        stored = block.matrices.stored_bytes * is_stored
        members.setdefault((kind, block.parameters, block.window, stored), []).append(index)
    return tuple(
        BlockSort(kind, indices[0], len(indices), parameters, window, stored)
        for (kind, parameters, window, stored), indices in members.items()
    )


@dataclass(slots=True)
class Point:
    """A sample in the making: `batch` sequences of `tokens` tokens, and the seconds of its repeats
    so far."""

    count: int
    context: int
    batch: int
    tokens: int
    seconds: list[float] = field(default_factory=list)


@dataclass(eq=False)
class Profiler:
    """Measures one model shape on one device. `run` may be called once.

    The copies of a layer exceed the caches, or equal the model in size. With little memory there
    are fewer, and a cache may then shorten the times (`rotated_bytes` is the size of all copies).
    """

    form: LayerForm
    threads: int
    grid: Grid = FULL_GRID
    cache: int | None = None
    """Bytes of the largest cache; None to use the system's value."""
    memory_limit_bytes: int | None = None
    """The most that layers may take; None if they may use all free memory."""
    progress: Progress = lambda what, done, total: None
    stops: Stops = no_stops
    """A timing during which the process was stopped is repeated."""

    def __post_init__(self) -> None:
        self._model = model_from_config("the model", self.form.config)
        self._shape: ModelShape = self._model.shape
        limit = self._shape.max_context
        self._grid = self.grid.within(limit)
        self._prefill = self._grid.prefill_points(limit)
        self._decode = self._grid.decode_points(limit)
        self._is_first = self._grid.effort is profile.Effort.FIRST
        self._room_bytes = 0
        self._quota = CpuQuota(cpu_quota(), self.threads)
        self._watch = Stopwatch(self.form.device, self.stops, self._quota)
        self._cores = CoreMeter(self.threads, self.stops)
        self._done = 0
        self._total = 0

    @torch.inference_mode()
    def run(self) -> profile.ComputeProfile:
        """Raises UnsupportedModelError for the config, InvalidArgumentError for the device,
        ResourceExhaustedError when not even one layer fits into memory."""
        form, device = self.form, self.form.device
        check_weights(self._shape, device, form.quantisation)
        facts = read_facts(device, self.memory_limit_bytes, known_bits="")
        own_bytes = psutil.Process().memory_info().rss
        memory = profile.MemoryProfile(
            facts.memory_total_bytes, _free_bytes(device), own_bytes, facts.unified_memory
        )
        self._room_bytes = min(facts.memory_budget_bytes, memory.free_bytes)
        cache = self.cache if self.cache is not None else cache_bytes(device)
        rotated = min(self._grid.caches * cache, self._model_bytes())
        meter = PowerMeter(None if self._is_first else find_sensor(device))
        sorts = block_sorts(self._model, form.quantisation)
        points = len(self._prefill) + len(self._decode)
        embedded = set(self._grid.prefill_tokens) | set(self._grid.decode_batches)
        outer = len(embedded) + len(self._grid.decode_batches)
        self._total = points * len(sorts) * self._grid.repeats.passes + outer + 1
        meter.rest(_REST_S)
        self._cores = CoreMeter(self.threads, self.stops)
        try:
            layers = [self._outer(profile.LayerKind.EMBEDDING, rotated)]
            with meter.busy():
                layers += [self._block(sort, rotated) for sort in sorts]
            layers.append(self._outer(profile.LayerKind.HEAD, rotated))
            self._tell("step overhead")
            prompt = 1 if self._is_first else PROMPT_TOKENS
            overhead = measure_overhead(form, sorts[0].first, self._quota, prompt, self.stops)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise _no_memory(f"{error}") from error
        return profile.ComputeProfile(
            fingerprint=fingerprint(facts, self.threads),
            model_hash=profile.config_hash(form.config),
            dtype=form.dtype,
            device=device,
            threads=self.threads,
            layers=tuple(layers),
            overhead=overhead,
            memory=memory,
            effort=self._grid.effort,
            processor_share=self._watch.processor_share,
            energy=meter.profile(),
            quantisation=form.quantisation,
            others_share=self._cores.share() if facts.kind == "cpu" else 0.0,
        )

    def _block(self, sort: BlockSort, rotated: int) -> profile.LayerProfile:
        block, requests = self._model.blocks[sort.first], max(self._grid.decode_batches)
        size = block.weight_bytes(self.form.dtype, self.form.quantisation)
        prefill, decode = self._prefill, self._decode
        # Whole KV blocks for each sequence, hence the roundings.
        room = max(*(n + c + 16 for n, c in prefill), *(n * (c + 17) for n, c in decode))
        kv = kv_bytes(block.kv, self.form.dtype, room) + requests * block.state_bytes(
            self.form.dtype
        )
        copies = self._copies(sort.kind, copies_needed(size, rotated), sort.parameters, size, kv)
        rotation = BlockRotation(self.form, sort.first, copies, room, requests)
        points = [Point(n, c, 1, n) for n, c in prefill] + [Point(n, c, n, 1) for n, c in decode]
        for number in range(self._grid.repeats.passes):
            for point in points:
                self._tell(
                    f"{sort.kind}: {point.batch} x {point.tokens} tokens behind {point.context}"
                )
                if not is_steady(point.seconds):
                    self._time(rotation, point, first=number == 0)
        samples = [
            _sample(point.count, point.context, summarise(point.seconds)) for point in points
        ]
        both = tuple(samples[: len(prefill)]), tuple(samples[len(prefill) :])
        own = size if sort.stored_bytes else 0
        rotated_bytes = rotation.rotated_bytes
        return profile.LayerProfile(
            sort.kind, sort.parameters, sort.layers, sort.window, rotated_bytes, *both, own
        )

    def _model_bytes(self) -> int:
        """No node has more weights to go through between two uses of a layer."""
        form, model = self.form, self._model
        blocks = sum(block.weight_bytes(form.dtype, form.quantisation) for block in model.blocks)
        return blocks + model.head_bytes(form.dtype, form.quantisation)

    def _copies(
        self, what: str, copies: int, parameters: int, weights_bytes: int, kv_bytes: int = 0
    ) -> int:
        """Copies that together exceed the caches, or as many as fit."""
        # Until they are packed, the weights of one copy exist in the dtype as well.
        whole_bytes = parameters * self.form.dtype.itemsize + kv_bytes
        if whole_bytes > self._room_bytes:
            raise _no_memory(
                f"{what} takes {whole_bytes >> 20} MiB, there is room for {self._room_bytes >> 20} "
                "MiB"
            )
        return min(copies, max(1, (self._room_bytes - whole_bytes) // (weights_bytes + kv_bytes)))

    def _time(self, rotation: BlockRotation, point: Point, first: bool) -> None:
        """One pass over one point."""
        step = rotation.step(point.batch, point.tokens, point.context)

        def lap() -> None:
            rotation.turn(copies)
            rotation.run(step)

        copies = 1
        once = self._watch.once(lap)  # also finds the kernels and their buffers
        # If it is cheap, one round through all copies; long layers are timed one copy after the
        # other.
        repeats = self._grid.repeats
        copies = max(
            1, min(rotation.copies, int(repeats.limit_s / (2 * repeats.least) / max(once, 1e-6)))
        )
        if first and copies == rotation.copies:
            lap()
        point.seconds += self._watch.collect(lap, repeats, copies)

    def _outer(self, kind: profile.LayerKind, rotated: int) -> profile.LayerProfile:
        head = kind is profile.LayerKind.HEAD
        form, model = self.form, self._model
        parameters = model.head_parameters if head else model.embedding_parameters
        size_of = model.head_bytes if head else model.embedding_bytes
        size = size_of(form.dtype, form.quantisation)
        # it takes microseconds, and its size many times as long to make
        if self._is_first and not head:
            form, copies = form.with_few_tokens(), 1
        else:
            copies = self._copies(kind, copies_needed(size, rotated), parameters, size)
        rotation = OuterRotation(form, head, copies)
        grid = self._grid
        time_one = self._head_rows if head else self._embedding_rows
        # The embedding computes a row for each token; the head one row for each sequence.
        counts = sorted(set(grid.decode_batches) | (set() if head else set(grid.prefill_tokens)))
        samples = {rows: _sample(rows, 0, time_one(rotation, rows)) for rows in counts}
        decode = tuple(samples[rows] for rows in grid.decode_batches)
        prefill = decode if head else tuple(samples[rows] for rows in grid.prefill_tokens)
        return profile.LayerProfile(kind, parameters, 1, 0, rotation.rotated_bytes, prefill, decode)

    def _embedding_rows(self, rotation: OuterRotation, rows: int) -> Measurement:
        self._tell(f"embedding: {rows} tokens")
        generator = torch.Generator().manual_seed(3)
        device = self._watch.device
        positions = (
            torch.arange(rows, device=device).remainder(self._shape.max_context).unsqueeze(0)
        )

        def work() -> None:
            tokens = torch.randint(rotation.vocab_size, (1, rows), generator=generator).to(device)
            rotation.take().embed(tokens, positions)

        return self._warm_measure(work, len(rotation))

    def _head_rows(self, rotation: OuterRotation, rows: int) -> Measurement:
        self._tell(f"head: {rows} sequences")
        generator = torch.Generator().manual_seed(5)
        hidden = torch.randn(rows, self._shape.frame_width, generator=generator)
        hidden = hidden.to(self._watch.device, TORCH_DTYPES[self.form.dtype])
        sampler = Sampler(self._shape.vocab_size)
        for request in range(rows):
            sampler.open(request, Sampling(), ())
        row_places = [(request, 1) for request in range(rows)]
        return self._warm_measure(
            lambda: sampler.draw(rotation.take().head(hidden), row_places), len(rotation)
        )

    def _warm_measure(self, work: Callable[[], object], copies: int) -> Measurement:
        for _ in range(copies + 1):
            work()
        durations: list[float] = []
        for _ in range(self._grid.repeats.passes):
            durations += self._watch.collect(work, self._grid.repeats)
        return summarise(durations)

    def _tell(self, what: str) -> None:
        self.progress(what, min(self._done, self._total), self._total)
        self._done += 1
        self._cores.lap()


def _sample(count: int, context: int, measured: Measurement) -> profile.Sample:
    return profile.Sample(count, context, measured.seconds, measured.spread, measured.repeats)


def _no_memory(why: str) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"no memory to measure one layer of this model: {why}; free some, or measure a smaller "
        "model",
        field="config",
        reason="NO_MEMORY_TO_MEASURE",
    )


def _free_bytes(device: str) -> int:
    if torch.device(device).type != "cuda":
        return available_bytes()
    return int(torch.cuda.mem_get_info(device)[0])
