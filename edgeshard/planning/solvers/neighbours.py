"""Cuts one step away from a cut, for a search that climbs. They may break limits of memory, layers
or links. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations

import numpy as np

from edgeshard.planning.solvers.instance import Cut
from edgeshard.planning.solvers.walks import Kinds

_ALL_PAIRS = 12
"""Stages up to which any two nodes are swapped or share layers, not only neighbours."""
_MOVED = (1, 2, 4, 8)
"""Layers moved at once."""

_Stages = tuple[list[int], list[int]]
"""Nodes, and the layers of each."""


def neighbours(cut: Cut, kinds: Kinds) -> list[Cut]:
    """Layers moved; a node dropped, added, swapped with another, or replaced by an unused one of
    each kind."""
    nodes = list(cut.nodes)
    shares = [end - start for start, end in zip((0, *cut.ends), cut.ends, strict=False)]
    spare = [
        next((node for node in members if node not in cut.nodes), None)
        for members in kinds.members[1:]
    ]
    unused = [node for node in spare if node is not None]
    variants = [
        *_moved(nodes, shares),
        *_dropped(nodes, shares),
        *_swapped(nodes, shares),
        *_replaced(nodes, shares, unused),
        *_added(nodes, shares, unused),
    ]
    whole = [(nodes, counts) for nodes, counts in variants if counts[0] > 0 and counts[-1] > 0]
    return [Cut(tuple(nodes), tuple(np.cumsum(counts).tolist())) for nodes, counts in whole]


def _moved(nodes: list[int], shares: list[int]) -> Iterator[_Stages]:
    """Layers from one stage to another; those between shift along."""
    for giver, taker in permutations(range(len(nodes)), 2):
        if len(nodes) <= _ALL_PAIRS or abs(giver - taker) == 1:
            for moved in _MOVED:
                if shares[giver] > moved:
                    changed = list(shares)
                    changed[giver] -= moved
                    changed[taker] += moved
                    yield nodes, changed


def _dropped(nodes: list[int], shares: list[int]) -> Iterator[_Stages]:
    """Its layers go to the stage before, to the one after, or half to each."""
    for at in range(1, len(nodes)):
        fewer, rest = nodes[:at] + nodes[at + 1 :], shares[:at] + shares[at + 1 :]
        for part in {0, shares[at] // 2, shares[at]} if at < len(nodes) - 1 else {shares[at]}:
            changed = list(rest)
            changed[at - 1] += part
            if part < shares[at]:
                changed[at] += shares[at] - part
            yield fewer, changed


def _swapped(nodes: list[int], shares: list[int]) -> Iterator[_Stages]:
    """Swap only the nodes, or only their layers."""
    for one, other in combinations(range(1, len(nodes)), 2):
        if len(nodes) <= _ALL_PAIRS or other == one + 1:
            swapped, counts = list(nodes), list(shares)
            swapped[one], swapped[other] = nodes[other], nodes[one]
            counts[one], counts[other] = shares[other], shares[one]
            yield swapped, shares
            yield nodes, counts


def _replaced(nodes: list[int], shares: list[int], unused: list[int]) -> Iterator[_Stages]:
    for at in range(1, len(nodes)):
        for node in unused:
            yield [*nodes[:at], node, *nodes[at + 1 :]], shares


def _added(nodes: list[int], shares: list[int], unused: list[int]) -> Iterator[_Stages]:
    """After each stage, with one of its layers or half of them."""
    for at, share in enumerate(shares):
        for portion in {1, share // 2}:
            if 0 < portion < share:
                counts = [*shares[:at], share - portion, portion, *shares[at + 1 :]]
                for node in unused:
                    yield [*nodes[: at + 1], node, *nodes[at + 1 :]], counts
