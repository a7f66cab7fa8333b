"""What the simulator is given: how long the stages and hops of one ring take, and what it has to generate. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from edgeshard.planning.fields import check_count, check_number, invalid

PrefillSeconds = Callable[[int, int], float]
"""(tokens of the step, all sequences together; tokens of each sequence already in the KV cache) -> seconds."""
DecodeSeconds = Callable[[int, int], float]
"""(sequences; tokens of each already in the KV cache) -> seconds."""


class Mode(StrEnum):
    """When a micro-batch may begin its next token."""

    SEQUENTIAL = "sequential"
    """One micro-batch at a time, from its prompt to its last token."""
    BUBBLES = "bubbles"
    """Once every micro-batch of the iteration is back."""
    NO_BUBBLES = "no-bubbles"
    """The moment its own token is back."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """A stage's compute. `overhead_s` is added to each step whatever its tokens."""

    prefill_s: PrefillSeconds
    decode_s: DecodeSeconds
    overhead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HopTimes:
    """A hop: `station_s(tokens)` seconds on the link, one frame after the other, then `latency_s` of pure delay."""

    station_s: Callable[[int], float]
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A ring of stages.

    hops          hop s leads from stage s to s+1, the last one back to the first; empty for a single stage
    asynchronous  sending overlaps computing; otherwise a box's compute and its sends are one station
    head_s        (sequences) -> seconds of norm, head and sampling when the first stage's box does them once hidden
                  states are back (`head_on_source`); None when the last stage's times hold them
    names         of the boxes, for the timeline; "stage 0", ... when empty
    """

    stages: tuple[StageTimes, ...]
    hops: tuple[HopTimes, ...] = ()
    asynchronous: bool = True
    head_s: Callable[[int], float] | None = None
    names: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise InvalidArgumentError naming the field at fault."""
        count = len(self.stages)
        check_hops(count, self.hops)
        if self.names and len(self.names) != count:
            raise invalid("names", f"are {len(self.names)} for {count} stages")
        for index, stage in enumerate(self.stages):
            check_number(stage.overhead_s, f"stages[{index}].overhead_s", 0.0)

    @property
    def box_names(self) -> tuple[str, ...]:
        return self.names or tuple(f"stage {index}" for index in range(len(self.stages)))

    @property
    def link_names(self) -> tuple[str, ...]:
        boxes = self.box_names
        return tuple(f"{boxes[index]} -> {boxes[(index + 1) % len(boxes)]}" for index in range(len(self.hops)))


@dataclass(frozen=True, slots=True)
class Traffic:
    """`micro_batches` groups of `batch` sequences that are all there at the start, each I tokens in and G tokens out.

    slices       lengths of the pieces a prompt is prefilled in, in order; one piece when empty
    decode_only  the prompts are in the KV cache already: all G tokens are decode steps
    """

    batch: int = 1
    micro_batches: int = 1
    prompt_tokens: int = 32
    new_tokens: int = 96
    slices: tuple[int, ...] = ()
    decode_only: bool = False

    def check(self) -> None:
        """Raise InvalidArgumentError naming the field at fault."""
        for name in ("batch", "micro_batches", "prompt_tokens", "new_tokens"):
            check_count(getattr(self, name), name)
        for index, length in enumerate(self.slices):
            check_count(length, f"slices[{index}]")
        if self.slices and sum(self.slices) != self.prompt_tokens:
            raise invalid("slices", f"sum to {sum(self.slices)}, not to the prompt's {self.prompt_tokens} tokens")

    @property
    def pieces(self) -> tuple[int, ...]:
        return self.slices or (self.prompt_tokens,)

    @property
    def tokens(self) -> int:
        """All tokens generated."""
        return self.batch * self.micro_batches * self.new_tokens


def check_hops(stages: int, hops: Sequence[HopTimes]) -> None:
    """Raise InvalidArgumentError unless `hops` close a ring of so many stages."""
    if not stages:
        raise invalid("stages", "is empty; a pipeline has at least one stage")
    wanted = 0 if stages == 1 else stages
    if len(hops) != wanted:
        raise invalid("hops", f"are {len(hops)} for {stages} stages; there must be {wanted}, the return included")
    for index, hop in enumerate(hops):
        check_number(hop.latency_s, f"hops[{index}].latency_s", 0.0)


def steady_stage(prefill_s: float, decode_s: float, overhead_s: float = 0.0) -> StageTimes:
    """A stage whose steps take the same time whatever their tokens and context; each slice of a prompt is one step."""
    return StageTimes(lambda tokens, context: prefill_s, lambda batch, context: decode_s, overhead_s)


def linear_hop(seconds_per_token: float, fixed_s: float = 0.0, latency_s: float = 0.0) -> HopTimes:
    return HopTimes(lambda tokens: fixed_s + seconds_per_token * tokens, latency_s)


@dataclass(frozen=True, slots=True)
class TimeTable:
    """Measured seconds over two rising axes (tokens or batch; context), read between points on a straight line.

    Beyond an axis's end the last two points' line goes on; nothing is below 0. An axis of one point is constant.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def check(self) -> None:
        """Raise InvalidArgumentError naming the field at fault."""
        for name in ("rows", "columns"):
            axis = getattr(self, name)
            if not axis or any(left >= right for left, right in pairwise(axis)):
                raise invalid(name, f"{axis} must rise and hold at least one point")
        if len(self.seconds) != len(self.rows) or any(len(row) != len(self.columns) for row in self.seconds):
            raise invalid("seconds", f"must be {len(self.rows)} rows of {len(self.columns)} numbers")
        for row, values in enumerate(self.seconds):
            for column, value in enumerate(values):
                check_number(value, f"seconds[{row}][{column}]", 0.0)

    def __call__(self, row: int, column: int) -> float:
        top, down = _place(self.rows, row)
        left, right = _place(self.columns, column)
        upper, lower = self.seconds[top], self.seconds[min(top + 1, len(self.rows) - 1)]
        last = min(left + 1, len(self.columns) - 1)
        first = upper[left] * (1 - right) + upper[last] * right
        second = lower[left] * (1 - right) + lower[last] * right
        return max(0.0, first * (1 - down) + second * down)


def _place(axis: Sequence[int], value: int) -> tuple[int, float]:
    """Index of the point before `value`, and how far `value` is towards the next one."""
    if len(axis) == 1:
        return 0, 0.0
    index = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return index, (value - axis[index]) / (axis[index + 1] - axis[index])


def checked_seconds(value: float, what: str) -> float:
    """`value` if it can be a duration. A table or a profile gone wrong must not become a plausible prediction."""
    if not math.isfinite(value) or value < 0:
        raise invalid(what, f"gave {value} seconds; it must be finite and not negative")
    return value
