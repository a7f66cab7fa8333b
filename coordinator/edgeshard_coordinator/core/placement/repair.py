"""Placements to continue with when nodes are lost: the others keep their layers if that is
possible. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from edgeshard.domain.deployments.placement import ExplicitStage, PlacedStage, Placement
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import NodeId, NodeName
from edgeshard.domain.models.model import LayerRange
from edgeshard_coordinator.core.values.candidate import Candidate

Link = tuple[NodeId, NodeId]
"""Sender and receiver."""
MOST_SPARES = 8
"""Spare nodes that are tried for lost stages, standbys and those with the most free memory."""
MOST_WAYS = 256


@dataclass(frozen=True, slots=True)
class Lost:
    """The losses that a placement must do without: nodes, and links from one node to another."""

    nodes: frozenset[NodeId] = frozenset()
    links: frozenset[Link] = frozenset()

    @property
    def ends(self) -> list[NodeId]:
        """The nodes of lost links: nodes with the most links first, and a receiver before a
        sender."""
        ends = [end for sender, receiver in sorted(self.links) for end in (receiver, sender)]
        return sorted(dict.fromkeys(ends), key=lambda end: -ends.count(end))

    def crosses(self, placement: Placement) -> bool:
        """Whether the ring of a placement has a stage on a lost node, or needs a lost link."""
        stages = [stage.node_id for stage in placement.stages]
        ring = zip(stages, (*stages[1:], stages[0]), strict=True)
        return bool(self.nodes & set(stages)) or any(
            a != b and (a, b) in self.links for a, b in ring
        )


@dataclass(frozen=True, slots=True)
class Survivors:
    """A placement with holes: `stages` in order, None if the node is lost."""

    stages: tuple[ExplicitStage, ...]
    is_kept: tuple[bool, ...]
    spares: tuple[NodeName, ...] = field(default=())


def survivors(
    placement: Placement, candidates: Sequence[Candidate], losses: Lost, exclude: Collection[str]
) -> Survivors:
    """The stages that stay, and the nodes that could take the others."""
    nodes: Mapping[NodeId, Candidate] = {node.node_id: node for node in candidates}
    is_kept = tuple(
        stage.node_id in nodes
        and nodes[stage.node_id].placeable
        and stage.node_id not in losses.nodes
        for stage in placement.stages
    )
    used = {stage.node_id for stage, stays in zip(placement.stages, is_kept, strict=True) if stays}
    spare = [
        node
        for node in candidates
        if node.placeable and node.node_id not in used | losses.nodes and node.name not in exclude
    ]
    spare.sort(key=lambda node: (node.warm is None, -node.free_bytes, node.name))
    return Survivors(
        layers_of(placement), is_kept, tuple(node.name for node in spare[:MOST_SPARES])
    )


def layers_of(placement: Placement) -> tuple[ExplicitStage, ...]:
    """The layers of each node, as an operator would list them."""
    return tuple(ExplicitStage(stage.node_name, stage.layers) for stage in placement.stages)


def without_most(
    without: Callable[[Sequence[Link]], Placement], bad_links: Mapping[Link, float]
) -> Placement:
    """The placement without all bad links or, if there is none, without the links that were bad
    last.

    A link may have recovered unnoticed, and the one that was bad longest ago is the likeliest.
    Raises the error of `without` if there is no bad link, or if even that does not help.
    """
    links = sorted(bad_links, key=lambda pair: bad_links[pair])
    try:
        return without(links)
    except EdgeShardError as error:
        refused = error
    with suppress(EdgeShardError):
        without(())
        for count in range(1, len(links)):
            with suppress(EdgeShardError):
                return without(links[count:])
    raise refused


def cold_layers(
    placement: Placement, former: Placement, candidates: Sequence[Candidate]
) -> list[tuple[PlacedStage, frozenset[int]]]:
    """The stages of a placement that are not of the former one, each with the layers that its node
    has to load."""
    former_layers = {stage.node_id: stage.layers for stage in former.stages}
    warm = {node.node_id: node.warm for node in candidates}
    changed = [
        stage for stage in placement.stages if former_layers.get(stage.node_id) != stage.layers
    ]
    return [
        (
            stage,
            _indices(stage.layers)
            - _indices(former_layers.get(stage.node_id))
            - _indices(warm.get(stage.node_id)),
        )
        for stage in changed
    ]


def moved_bits(former: Placement, new_placement: Placement, candidates: Sequence[Candidate]) -> str:
    """A note whether the nodes of a placement compute the bits of the one before."""
    prints = {node.node_id: node.facts.bits_fingerprint for node in candidates}
    before, after = (
        {stage.node_id for stage in placement.stages} for placement in (former, new_placement)
    )
    fingerprints = {prints.get(node_id, "") for node_id in before | after}
    if len(fingerprints) == 1 and "" not in fingerprints:
        return "Answers continue with the same bits."
    return (
        "Other nodes compute other bits: an answer may continue with another token when two tokens "
        "are nearly equally likely."
    )


def _indices(layers: LayerRange | None) -> frozenset[int]:
    return frozenset() if layers is None else frozenset(range(layers.first, layers.end))


def ways(
    left: Survivors, allows: Callable[[Collection[str]], bool] = lambda _: True
) -> Iterator[tuple[ExplicitStage, ...]]:
    """Complete placements that leave every surviving stage its layers: each hole goes to a spare
    node, or to a neighbour in addition to its own layers. Placements that touch no survivor are
    first. At most `MOST_WAYS`, on sets of nodes that rules allow."""
    holes = [index for index, stays in enumerate(left.is_kept) if not stays]
    with_spares = _filled(left, holes, itertools.permutations(left.spares, len(holes)))
    every = itertools.chain(with_spares, _merged(left, holes))
    allowed = (stages for stages in every if allows([stage.node for stage in stages]))
    yield from itertools.islice(allowed, MOST_WAYS)


def _filled(
    left: Survivors, holes: Sequence[int], choices: Iterator[tuple[NodeName, ...]]
) -> Iterator[tuple[ExplicitStage, ...]]:
    for names in choices:
        stages = list(left.stages)
        for index, name in zip(holes, names, strict=True):
            stages[index] = ExplicitStage(name, stages[index].layers)
        yield tuple(stages)


def _merged(left: Survivors, holes: Sequence[int]) -> Iterator[tuple[ExplicitStage, ...]]:
    """The ways in which each hole is divided between the neighbouring survivors."""
    runs = [
        list(run)
        for _, run in itertools.groupby(holes, key=lambda index: index - holes.index(index))
    ]
    cuts = []
    for run in runs:
        first, end = left.stages[run[0]].layers.first, left.stages[run[-1]].layers.end
        before, behind = run[0] > 0, run[-1] + 1 < len(left.stages)
        if not before and not behind:
            return  # nobody is left
        bounds = range(first, end + 1)
        cuts.append(
            [end]
            if not behind
            else [first]
            if not before
            else sorted(bounds, key=lambda at: -abs(at - first))
        )
    for choice in itertools.product(*cuts):
        stages = list(left.stages)
        for run, cut in zip(runs, choice, strict=True):
            if run[0] > 0:
                before_it = stages[run[0] - 1]
                stages[run[0] - 1] = ExplicitStage(
                    before_it.node, LayerRange(before_it.layers.first, cut)
                )
            if run[-1] + 1 < len(stages):
                behind_it = stages[run[-1] + 1]
                stages[run[-1] + 1] = ExplicitStage(
                    behind_it.node, LayerRange(cut, behind_it.layers.end)
                )
        yield tuple(stage for index, stage in enumerate(stages) if index not in holes)
