"""A site cut into disjoint pipelines that serve one name together. Pure.

Rates of pipelines add up, since each takes its next request when it has a free place, and no node
is in two of them. For at most `MOST_EXACT` nodes every set of nodes is planned once, and a DP over
the sets finds the best choice of disjoint ones. For more nodes only some choices are tried: each of
the first nodes as its own pipeline with one pipeline of the rest, and the nodes dealt out evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

MOST_EXACT = 5
"""Nodes for which all choices are compared: 31 sets of nodes are planned then."""
MOST_DEALT = 8
"""Pipelines of about equal size that are tried for more nodes."""
FoundT = TypeVar("FoundT")
Group = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Worth(Generic[FoundT]):
    """A pipeline on some nodes: its `rate` in tokens/s, 0 if unknown, and its number of stages."""

    pipeline: FoundT
    rate: float
    stages: int


@dataclass(frozen=True, slots=True)
class Choice(Generic[FoundT]):
    """Disjoint pipelines, those with the first nodes first."""

    pipelines: tuple[Worth[FoundT], ...] = ()

    @property
    def rank(self) -> tuple[float, int]:
        """More is better: the rate of all together, then fewer stages."""
        return sum(one.rate for one in self.pipelines), -sum(one.stages for one in self.pipelines)

    def beside(self, one: Worth[FoundT]) -> Choice[FoundT]:
        return Choice((one, *self.pipelines))


def partition(
    nodes: Sequence[str], worth: Callable[[Group], Worth[FoundT] | None], count: int | None = None
) -> Choice[FoundT] | None:
    """The disjoint pipelines with the highest rate together; `count` of them, or the best number if
    it is None.

    `nodes` are in the order in which they should be used if nothing else decides. `worth` plans a
    pipeline on some of these nodes, in that order, and returns None if there is none. Returns None
    if no choice is possible.
    """
    cached_worth = cache(worth)
    choose = _exact if len(nodes) <= MOST_EXACT else _some
    return choose(tuple(nodes), cached_worth, count)


def _exact(
    nodes: Group, worth: Callable[[Group], Worth[FoundT] | None], count: int | None
) -> Choice[FoundT] | None:
    @cache
    def best(left: Group, pipeline_count: int | None) -> Choice[FoundT] | None:
        """The best on the nodes that are left, with `pipeline_count` pipelines."""
        if pipeline_count == 0 or not left:
            return Choice() if not pipeline_count else None
        first, rest = left[0], left[1:]
        tried: list[Choice[FoundT] | None] = []
        for others in _subsets(rest):
            one = worth((first, *others))
            unused = tuple(node for node in rest if node not in others)
            behind = (
                None
                if one is None
                else best(unused, None if pipeline_count is None else pipeline_count - 1)
            )
            if one is not None and behind is not None:
                tried.append(behind.beside(one))
        tried.append(best(rest, pipeline_count))  # the first node serves nothing
        return max(
            (choice for choice in tried if choice is not None),
            key=lambda choice: choice.rank,
            default=None,
        )

    best_choice = best(nodes, count)
    return best_choice if best_choice is not None and best_choice.pipelines else None


def _subsets(nodes: Group) -> Iterator[Group]:
    for bits in range(1 << len(nodes)):
        yield tuple(node for index, node in enumerate(nodes) if bits >> index & 1)


def _some(
    nodes: Group, worth: Callable[[Group], Worth[FoundT] | None], count: int | None
) -> Choice[FoundT] | None:
    choices = []
    for groups in (*_alone_and_rest(nodes), *_dealt(nodes, count)):
        pipelines = tuple(one for group in groups if (one := worth(group)) is not None)
        if pipelines and (count is None or len(pipelines) >= count):
            best = sorted(pipelines, key=lambda one: (-one.rate, one.stages))[:count]
            choices.append(Choice(tuple(one for one in pipelines if one in best)))
    return max(choices, key=lambda choice: choice.rank, default=None)


def _alone_and_rest(nodes: Group) -> Iterator[tuple[Group, ...]]:
    """Each of the first nodes as its own pipeline, and one pipeline of all others."""
    for alone in range(len(nodes) + 1):
        rest = nodes[alone:]
        yield (*((node,) for node in nodes[:alone]), *([rest] if rest else []))


def _dealt(nodes: Group, count: int | None) -> Iterator[tuple[Group, ...]]:
    """The nodes dealt out, so that each pipeline has about as much as the others."""
    for pipelines in range(2, min(MOST_DEALT, len(nodes)) + 1) if count is None else [count]:
        if pipelines <= len(nodes):
            order = [*range(pipelines), *reversed(range(pipelines))]
            hands: list[list[str]] = [[] for _ in range(pipelines)]
            for place, node in enumerate(nodes):
                hands[order[place % len(order)]].append(node)
            yield tuple(tuple(hand) for hand in hands)
