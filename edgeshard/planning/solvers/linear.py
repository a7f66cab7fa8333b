"""Questions about all cuts whose goal and limits are linear, with conditions on the nodes that hold
stages. Pure.

A *side* is a weighted sum of rounds R and busiest stations B, each of one instance
(`planning.solvers.instance`); the goal is the largest of its sides. So one question holds both
phases of a batch:

    R_pre + (m - 1) B_pre + (G - 1) max(R_dec, m B_dec)

has the sides with R_dec and with m B_dec. A search takes the solver as a `Prover`;
`edgeshard.cpsat` is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from edgeshard.planning.solvers.instance import Cut, Instance
from edgeshard.planning.solvers.scoring import score

ROUNDING = 1e-6
"""Largest part by which a `Prover` may take a value for less than it is: it counts in whole units
of time."""


@dataclass(frozen=True, slots=True)
class GoalTerm:
    """`weight` times the round of an instance, or times its busiest station."""

    instance: Instance
    weight: float = 1.0
    busiest: bool = False

    def seconds(self, cut: Cut) -> float:
        """What it is of a cut."""
        cut_score = score(self.instance, cut)
        return self.weight * (cut_score.bottleneck_s if self.busiest else cut_score.round_s)


Side = tuple[GoalTerm, ...]


@dataclass(frozen=True, slots=True)
class Linear:
    """`least` <= the sum of `weights` over the nodes that hold stages <= `most`; None if an end is
    open."""

    weights: tuple[float, ...]
    """One for each node."""
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """Which cut has the least goal, of all that keep the limits and conditions."""

    memory: Instance
    """Limits of memory, layers, links and stages."""
    sides: tuple[Side, ...] = ()
    """The goal is the largest of these; empty if any cut will do."""
    limits: tuple[tuple[GoalTerm, float], ...] = ()
    """Most seconds that a part may be."""
    conditions: tuple[Linear, ...] = ()
    without: tuple[Cut, ...] = ()
    """Known cuts that the query excludes."""
    below: float = float("inf")
    """Only a cut whose goal is below this is of use, in seconds."""
    any_will_do: bool = False
    """Whether the first cut found is the answer."""

    def seconds(self, cut: Cut) -> float:
        """The goal of a cut."""
        return max((sum(part.seconds(cut) for part in side) for side in self.sides), default=0.0)


@dataclass(frozen=True, slots=True)
class LinearAnswer:
    """The best cut found, None if there is none, and a proven lower bound, in seconds, of the goal
    of all cuts below `below`. The bound is infinite if no such cut exists."""

    cut: Cut | None
    bound_s: float
    is_out_of_time: bool = False
    """Whether the time for all queries is over: another one gets only a bound."""

    @property
    def impossible(self) -> bool:
        """Whether it is proven that no cut is below `below`."""
        return self.cut is None and self.bound_s == float("inf")


class Prover(Protocol):
    """Answers queries in bounded time; its bound covers what it has not proven by then."""

    def ask(self, question: Question) -> LinearAnswer: ...


def ones(nodes: Sequence[int], count: int, weight: float = 1.0) -> tuple[float, ...]:
    """Weights of `count` nodes that count only these."""
    node_set = set(nodes)
    return tuple(weight if node in node_set else 0.0 for node in range(count))
