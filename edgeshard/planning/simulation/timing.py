"""The simulator's input: seconds of the stages and hops of one ring, and the requests to generate
for. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edgeshard.domain.errors import invalid
from edgeshard.planning.inputs.table_fields import check_count, check_number

PrefillSeconds = Callable[[int, int], float]
"""(tokens of the step, all sequences together; tokens of each sequence already in the KV cache) ->
seconds."""
DecodeSeconds = Callable[[int, int], float]
"""(sequences; tokens of each already in the KV cache) -> seconds."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """A stage's compute. `overhead_s` is added to each step whatever its tokens."""

    prefill_s: PrefillSeconds
    decode_s: DecodeSeconds
    overhead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HopTimes:
    """A hop: `station_s(tokens)` seconds on the link, one frame after the other, then `latency_s`
    of pure delay."""

    station_s: Callable[[int], float]
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A ring of stages."""

    stages: tuple[StageTimes, ...]
    hops: tuple[HopTimes, ...] = ()
    """Hop s leads from stage s to s+1, the last one back to the first; empty for a single stage."""
    asynchronous: bool = True
    """Whether sending overlaps computing; otherwise a node's compute and its sends are one
    station."""
    head_s: Callable[[int], float] | None = None
    """(sequences) -> seconds of norm, head and sampling if the first stage's node does them once
    hidden states have returned (`head_on_source`); None if the last stage's times include them."""
    names: tuple[str, ...] = ()
    """Names of the nodes, for the timeline; "stage 0" and so on if empty."""

    def check(self) -> None:
        """Raise InvalidArgumentError naming the field at fault."""
        count = len(self.stages)
        check_hops(count, self.hops)
        if self.names and len(self.names) != count:
            raise invalid("names", f"are {len(self.names)} for {count} stages")
        for index, stage in enumerate(self.stages):
            check_number(stage.overhead_s, f"stages[{index}].overhead_s", 0.0)

    @property
    def node_names(self) -> tuple[str, ...]:
        return self.names or tuple(f"stage {index}" for index in range(len(self.stages)))

    @property
    def link_names(self) -> tuple[str, ...]:
        nodes = self.node_names
        return tuple(
            f"{nodes[index]} -> {nodes[(index + 1) % len(nodes)]}"
            for index in range(len(self.hops))
        )


@dataclass(frozen=True, slots=True)
class SimulatedTraffic:
    """`micro_batches` groups of `batch` sequences that are all there at the start, each I tokens in
    and G tokens out.

    slices       lengths of the pieces a prompt is prefilled in, in order; one piece if empty
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
            raise invalid(
                "slices",
                f"sum to {sum(self.slices)}, not to the prompt's {self.prompt_tokens} tokens",
            )

    @property
    def pieces(self) -> tuple[int, ...]:
        return self.slices or (self.prompt_tokens,)

    @property
    def tokens(self) -> int:
        """All tokens generated."""
        return self.batch * self.micro_batches * self.new_tokens


def check_hops(stages: int, hops: Sequence[HopTimes]) -> None:
    """Raise InvalidArgumentError unless `hops` close a ring of `stages` stages."""
    if not stages:
        raise invalid("stages", "is empty; a pipeline has at least one stage")
    hop_count = 0 if stages == 1 else stages
    if len(hops) != hop_count:
        raise invalid(
            "hops",
            f"are {len(hops)} for {stages} stages; there must be {hop_count}, the return included",
        )
    for index, hop in enumerate(hops):
        check_number(hop.latency_s, f"hops[{index}].latency_s", 0.0)


def checked_seconds(value: float, what: str) -> float:
    """`value` if it can be a duration. A table or a profile gone wrong must not become a plausible
    prediction."""
    if not math.isfinite(value) or value < 0:
        raise invalid(what, f"gave {value} seconds; it must be finite and not negative")
    return value


class Visit(NamedTuple):
    """One service. `kind` is "prefill", "decode", "head", "send" or "return"; `piece` is the
    prompt's slice."""

    station: str
    micro_batch: int
    kind: str
    token: int
    start_s: float
    end_s: float
    piece: int = 0
