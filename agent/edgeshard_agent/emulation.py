"""A node that pretends to be another: the lab's emulated device and links. Its decisions are pure.

The node computes a small model and then waits until the emulated device would have finished the
same step of the emulated model. Its frames are padded to the emulated model's size and delayed as
on the emulated link. The emulator knows devices and links only, never a plan: it charges each step
as it comes. The links are in user space: bandwidth and delay of one direction, with frames in
flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from edgeshard.domain.clock import Clock
from edgeshard.domain.errors import FailedPreconditionError, InvalidArgumentError
from edgeshard.domain.ids import NodeName
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard.domain.nodes.profile import (
    ComputeProfile,
    LayerKind,
    LayerProfile,
    MemoryProfile,
    Sample,
    StepOverhead,
    config_hash,
    device_fingerprint,
)
from edgeshard.domain.requests.link import LinkPadding
from edgeshard.domain.requests.step import ForwardStep, StepPlan, WireStep
from edgeshard.planning.inputs.catalogue import DeviceSpec
from edgeshard.planning.inputs.devices import Cluster, Link
from edgeshard.planning.inputs.problem import ComputeTimes, StepShape
from edgeshard.planning.inputs.shapes import BlockSpec, ModelSpec, model_from_config
from edgeshard.planning.simulation.lab import parse_lab
from edgeshard.profiles.grid import Grid
from edgeshard.storage.inputs import read_json, read_toml
from edgeshard.wire.frames import PART_BYTES, Frame, frame_bytes
from edgeshard_agent.engine.compute_thread import CallOnThread
from edgeshard_agent.measuring.probing import Way
from edgeshard_agent.net.link_sender import OpenStream

TIMER_S = 0.001
"""The most that timers of the event loop come late. The lab's links take milliseconds, so the rest
is slept in the loop: nothing that it keeps waiting is due sooner."""


class LinkShape:
    """The bandwidth and delay of a link: when bytes put on it now are all at the other end.

    The bytes occupy the link one frame after the other, at `bandwidth_bps` bits per second, and
    then travel for `latency_s` seconds without keeping the next frame waiting.
    """

    def __init__(self, bandwidth_bps: float, latency_s: float) -> None:
        if not 0 < bandwidth_bps < float("inf"):
            raise InvalidArgumentError(
                f"bandwidth_bps {bandwidth_bps} must be above 0", field="bandwidth_bps"
            )
        if not 0 <= latency_s < float("inf"):
            raise InvalidArgumentError(
                f"latency_s {latency_s} must be 0 or more", field="latency_s"
            )
        self.bandwidth_bps = bandwidth_bps
        self.latency_s = latency_s
        self._free_at = float("-inf")

    def arrival(self, now: float, size_bytes: int) -> float:
        """Time of arrival of a frame of `size_bytes` sent at `now`; takes its place on the link."""
        self._free_at = max(now, self._free_at) + 8 * size_bytes / self.bandwidth_bps
        return self._free_at + self.latency_s


@asynccontextmanager
async def shaped_way(
    there: LinkShape, back_latency_s: float, size_bytes: int
) -> AsyncIterator[None]:
    """The way of a probe's payload over a shaped link, and of its acknowledgement back."""
    now = time.perf_counter()
    await asyncio.sleep(there.arrival(now, size_bytes) - now)
    yield
    await asyncio.sleep(back_latency_s)


@dataclass(frozen=True, slots=True)
class _InFlight:
    step: int
    due: float
    frames: list[Frame]


class EmulatedLink(LinkShape):
    """A shaped link that pads steps to the size of the emulated model's, and holds each until it
    would have arrived.

    `activation_bytes` returns the bytes of the hidden states of a number of tokens; a returned step
    has none.
    """

    def __init__(
        self,
        bandwidth_bps: float,
        latency_s: float,
        activation_bytes: Callable[[int], int],
        window: int,
    ) -> None:
        super().__init__(bandwidth_bps, latency_s)
        self._activation_bytes = activation_bytes
        self._window = window
        self._tokens: dict[int, int] = {}

    def note(self, step: WireStep) -> None:
        self._tokens[step.number] = step.plan.token_count if isinstance(step, ForwardStep) else 0
        self._tokens.pop(step.number - 2 * self._window, None)

    async def carry(self, stream: OpenStream) -> None:
        loop, flight = asyncio.get_running_loop(), deque[_InFlight]()
        while not stream.ended():
            stream.wake.clear()
            while (item := stream.outbox.take()) is not None:
                await self._put(stream, flight, *item)
            while flight and flight[0].due <= loop.time() + TIMER_S:
                arrived = flight.popleft()
                time.sleep(max(0.0, arrived.due - loop.time()))  # noqa: ASYNC251 (see TIMER_S)
                await stream.write_step(arrived.step, arrived.frames)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(flight[0].due - TIMER_S if flight else None):
                    await stream.wake.wait()

    async def _put(
        self, stream: OpenStream, flight: deque[_InFlight], step: int, frames: list[Frame]
    ) -> None:
        """A step's padding is sent while the emulated link is busy with the step, so that none is
        left when it is due.
        """
        size = sum(frame_bytes(frame) for frame in frames)
        padding = max(0, self._activation_bytes(self._tokens.get(step, 0)) - size)
        flight.append(
            _InFlight(step, self.arrival(asyncio.get_running_loop().time(), size + padding), frames)
        )
        while padding:
            piece = min(padding, PART_BYTES)
            await stream.write(LinkPadding(piece))
            padding -= piece


class EmulatedPace:
    """Waits after each step until the emulated device would have finished; `step_s` gives its
    seconds."""

    def __init__(self, step_s: Callable[[StepPlan], float], clock: Clock) -> None:
        self._step_s = step_s
        self._clock = clock
        self._free_at = 0.0

    def hold(self, plan: StepPlan, arrived_s: float, on_thread: CallOnThread | None) -> None:
        # From the time the device could have begun, so that this machine's own overhead is not
        # added.
        could_begin = max(arrived_s, self._free_at)
        self._free_at = max(self._clock.now(), could_begin + self._step_s(plan))
        if on_thread is not None:
            on_thread.waits(self._clock.now())
        time.sleep(max(0.0, self._free_at - self._clock.now()))


# Close together, because an estimate has a kink at the change from memory to arithmetic, and a real
# node has no kink.
_GRID = Grid(
    prefill_tokens=(1, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 192, 256, 384, 512, 1024, 2048),
    prefill_contexts=(0, 64, 512, 2048),
    decode_batches=(1, 2, 4, 8, 16, 32, 48, 64),
    decode_contexts=(64, 512, 2048),
)
_Points = tuple[list[tuple[int, int]], list[tuple[int, int]]]
"""(tokens, context) of the prefills, and (sequences, context) of the decodes, that a profile
has."""


@dataclass(frozen=True, slots=True)
class Emulation:
    """The times that node `name` of `cluster` would take for steps of `model`, and the behaviour of
    its links."""

    name: str
    cluster: Cluster
    model: ModelSpec
    times: ComputeTimes
    dtype: DType

    @property
    def device(self) -> DeviceSpec:
        return self.cluster.nodes[self.cluster.index(self.name, "name")].device

    @property
    def memory_bytes(self) -> int:
        """Memory that the emulated device can give to stages."""
        return int(self.device.usable_bytes)

    def facts(self, real: DeviceFacts) -> DeviceFacts:
        """The node's facts: the emulated memory, marked as such. Steps with guesses have no times
        in the emulation."""
        return replace(
            real,
            model=f"{self.device.kind} (emulated)",
            memory_total_bytes=int(self.device.memory_bytes),
            memory_budget_bytes=self.memory_bytes,
            unified_memory=self.device.unified,
            takes_guesses=False,
            keeps_states_of_guesses=False,
        )

    def step_s(self, layers: LayerRange, plan: StepPlan) -> float:
        """Seconds the emulated device takes for a step of these layers; a step without spans costs
        nothing."""
        if not plan.spans:
            return 0.0
        phase = StepShape.of_spans([(span.token_count, span.first_position) for span in plan.spans])
        first, last = layers.first == 0, layers.end == self.model.layer_count
        total = self.times.step_s(self.activation_bytes(phase.step_tokens))
        total += sum(
            self.times.block_s(self.model.blocks[i], phase) for i in range(layers.first, layers.end)
        )
        total += self.times.embedding_s(phase) if first else 0.0
        sampled = sum(span.sample for span in plan.spans)
        if last and sampled:
            total += self.times.head_s(StepShape(sampled, 1, 0.0, 0.0))
        return total

    def activation_bytes(self, tokens: int) -> int:
        """Bytes of the hidden states of `tokens` positions of the emulated model."""
        return tokens * self.model.shape.frame_width * self.dtype.itemsize

    def profile(
        self,
        facts: DeviceFacts,
        config: Mapping[str, Any],
        dtype: DType,
        quantisation: Quantisation | None,
    ) -> ComputeProfile:
        """The profile that a measurement of the emulated device would give for the emulated model's
        stand-in.

        Layer for layer it has the stand-in's sizes and the emulated model's times. The emulator
        charges these times however the stand-in's weights are kept. If several emulated blocks map
        to one sort of block, it has their mean. Raises FailedPreconditionError for a model of
        another number of layers.
        """
        stand_in = model_from_config("the model", config)
        if stand_in.layer_count != self.model.layer_count:
            raise FailedPreconditionError(
                f"the node emulates {self.model.name} with {self.model.layer_count} layers, but "
                "the model has "
                f"{stand_in.layer_count}: use the lab's stand-in model",
                field="model",
                reason="NOT_THE_STAND_IN",
            )
        limit = stand_in.shape.max_context
        grid = _GRID.within(limit)
        points = grid.prefill_points(limit), grid.decode_points(limit)
        device, times = self.device, self.times
        embedding = _layer(
            LayerKind.EMBEDDING, stand_in.embedding_parameters, [times.embedding_s], points
        )
        head = _layer(LayerKind.HEAD, stand_in.head_parameters, [times.head_s], points)
        per_step, per_mib = times.step_s(0.0), times.step_s(2.0**20)
        details = {"emulates": device.kind, "model": self.model.name, "dtype": self.dtype}
        return ComputeProfile(
            fingerprint=device_fingerprint(facts, 1, details),
            model_hash=config_hash(config),
            dtype=dtype,
            device=facts.kind,
            threads=1,
            layers=(embedding, *_emulated_blocks(self, stand_in, points), head),
            overhead=StepOverhead(per_step, (per_mib - per_step) / 2**20),
            memory=MemoryProfile(int(device.memory_bytes), self.memory_bytes, 0, device.unified),
            quantisation=quantisation,
        )

    def pace(self, layers: LayerRange, clock: Clock) -> EmulatedPace:
        """The emulated device's pace at these layers."""
        return EmulatedPace(partial(self.step_s, layers), clock)

    def carrier(self, receiver: NodeName, window: int) -> EmulatedLink:
        """The link from this node to another, for its stage's steps."""
        link = self._link(self.name, receiver)
        return EmulatedLink(link.bandwidth_bps, link.latency_s, self.activation_bytes, window)

    def way(self, peer: NodeName) -> Way:
        """The links from this node to another and back, for probes."""
        there, back = self._link(self.name, peer), self._link(peer, self.name)
        return partial(shaped_way, LinkShape(there.bandwidth_bps, there.latency_s), back.latency_s)

    def _link(self, sender: str, receiver: str) -> Link:
        """The link from one node to another, within what both ends can do."""
        nodes = self.cluster.nodes
        ends = (nodes[self.cluster.index(name, "emulate")] for name in (sender, receiver))
        return self.cluster.link(*ends)


def _emulated_blocks(
    emulation: Emulation, stand_in: ModelSpec, points: _Points
) -> Iterable[LayerProfile]:
    behind: dict[BlockSpec, list[BlockSpec]] = {}
    for stand_in_block, emulated in zip(stand_in.blocks, emulation.model.blocks, strict=True):
        behind.setdefault(stand_in_block, []).append(emulated)
    for stand_in_block, group in behind.items():
        kind = LayerKind.MOE_BLOCK if stand_in_block.experts else LayerKind.BLOCK
        costs = [partial(emulation.times.block_s, block) for block in group]
        yield _layer(kind, stand_in_block.parameters, costs, points, stand_in_block.window)


def _layer(
    kind: LayerKind,
    parameters: int,
    costs: Sequence[Callable[[StepShape], float]],
    points: _Points,
    window: int = 0,
) -> LayerProfile:
    def sample(count: int, context: int, phase: StepShape) -> Sample:
        return Sample(count, context, sum(cost(phase) for cost in costs) / len(costs))

    # As in the engine: a query sees the positions before it and itself.
    prefill = [
        sample(tokens, context, StepShape(1, tokens, context + (tokens + 1) / 2, context + tokens))
        for tokens, context in points[0]
    ]
    decode = [
        sample(n, context, StepShape(n, 1, context + 1, context + 1)) for n, context in points[1]
    ]
    return LayerProfile(kind, parameters, len(costs), window, 0, tuple(prefill), tuple(decode))


def load_emulation(path: Path, name: str) -> Emulation:
    """The emulation of node `name` from a lab file. Raises InvalidArgumentError naming the key at
    fault."""

    def read_config(file: str) -> dict[str, Any]:
        config: dict[str, Any] = read_json(
            path.parent / file, f"--emulate {path}: lab.model {file}", "lab.model"
        )
        return config

    lab = parse_lab(read_toml(path, f"--emulate {path}", "emulate"), read_config)
    return Emulation(name, lab.cluster, lab.model, lab.times(name), lab.dtype)
