"""A box that pretends to be another: the lab's emulated device. Pure but for reading its file.

The box runs a small model's real mathematics and then waits until the emulated device would have finished the same
step of the emulated model. What it sends is padded to the emulated model's size and shaped to the emulated link. The
emulator is told of devices and links only, never of a plan: it charges each step as it comes.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeshard.device import DeviceFacts
from edgeshard.dtypes import DType
from edgeshard.errors import InvalidArgumentError
from edgeshard.model import LayerRange
from edgeshard.planning.devices import Cluster, Link
from edgeshard.planning.lab import parse_lab
from edgeshard.planning.problem import ComputeTimes, Phase
from edgeshard.planning.shapes import ModelSpec
from edgeshard.step import Span, StepPlan


@dataclass(frozen=True, slots=True)
class Emulation:
    """What box `name` of `cluster` would take for steps of `model`, and how its links behave."""

    name: str
    cluster: Cluster
    model: ModelSpec
    times: ComputeTimes
    dtype: DType

    @property
    def memory_bytes(self) -> int:
        """What the emulated device can give to stages."""
        return int(self.cluster.boxes[self.cluster.index(self.name, "name")].device.usable_bytes)

    def step_s(self, layers: LayerRange, plan: StepPlan) -> float:
        """Seconds the emulated device takes for a step of these layers; a step without spans costs nothing."""
        if not plan.spans:
            return 0.0
        phases = _phases(plan.spans)
        first, last = layers.first == 0, layers.end == self.model.layer_count
        total = self.times.step_s()
        for phase in phases:
            total += sum(self.times.block_s(self.model.blocks[i], phase) for i in range(layers.first, layers.end))
            total += self.times.embedding_s(phase) if first else 0.0
        sampled = sum(span.sample for span in plan.spans)
        if last and sampled:
            total += self.times.head_s(Phase(sampled, 1, 0.0, 0.0))
        return total

    def activation_bytes(self, tokens: int) -> int:
        """Bytes of the hidden states of `tokens` positions of the emulated model."""
        return tokens * self.model.shape.frame_width * self.dtype.itemsize

    def link(self, receiver: str) -> Link:
        """The link from this box to another, within what both ends can do."""
        boxes = self.cluster.boxes
        sender, target = (boxes[self.cluster.index(name, "emulate")] for name in (self.name, receiver))
        return self.cluster.link(sender, target)


def _phases(spans: tuple[Span, ...]) -> list[Phase]:
    """Decodes together as one batch, each piece of a prompt by itself."""
    decodes = [span for span in spans if span.token_count == 1]
    phases = []
    if decodes:
        context = sum(span.end_position for span in decodes) / len(decodes)
        phases.append(Phase(len(decodes), 1, context, context))
    for span in spans:
        if span.token_count > 1:
            context = span.first_position + (span.token_count + 1) / 2
            phases.append(Phase(1, span.token_count, context, span.end_position))
    return phases


def emulated_facts(real: DeviceFacts, emulation: Emulation) -> DeviceFacts:
    """What the box says of itself: the emulated device's memory, and that it only pretends."""
    device = emulation.cluster.boxes[emulation.cluster.index(emulation.name, "name")].device
    return replace(
        real,
        model=f"{device.kind} (emulated)",
        memory_total_bytes=int(device.memory_bytes),
        memory_budget_bytes=emulation.memory_bytes,
        unified_memory=device.unified,
    )


def load_emulation(path: Path, name: str) -> Emulation:
    """The emulation of box `name` from a lab file. Raises InvalidArgumentError naming the key at fault."""

    def read_config(file: str) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((path.parent / file).read_text(encoding="utf-8"))
        return config

    try:
        lab = parse_lab(tomllib.loads(path.read_text(encoding="utf-8")), read_config)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"--emulate {path}: {error}", field="emulate") from None
    return Emulation(name, lab.cluster, lab.model, lab.times(name), lab.dtype)
