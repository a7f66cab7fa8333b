"""The problem of a placement, the typical request that it is planned for, and the placers that
solve it: the seam between placing and the services. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from edgeshard.domain.deployments.deployment import (
    AUTO_STANDBY,
    DEFAULT_TOKENS,
    EVERY_NODE,
    DeploymentSpec,
    check_typical,
)
from edgeshard.domain.deployments.placement import LengthsFrom, PlacedDraft, Placement
from edgeshard.domain.deployments.traffic import NO_TRAFFIC, Outlook, Traffic
from edgeshard.domain.ids import NodeId
from edgeshard.domain.models.model import ModelManifest
from edgeshard_coordinator.core.placement.repair import Lost
from edgeshard_coordinator.core.values.candidate import Candidate
from edgeshard_coordinator.core.values.measurements import Measurements


@dataclass(frozen=True, slots=True)
class Typical:
    """Tokens of a prompt and of an answer, and their origin; `GIVEN` only if both were."""

    prompt_tokens: int
    new_tokens: int
    source: LengthsFrom


def typical_request(spec: DeploymentSpec, max_context: int, traffic: Traffic) -> Typical:
    """The lengths of the spec, else the means of the traffic, else `DEFAULT_TOKENS`; never more
    than the deployment takes.

    Memory is reserved by the spec's limits, whatever is typical. Raises InvalidArgumentError naming
    the length for one that does not fit in `max_context` tokens.
    """
    check_typical(spec, max_context)
    if spec.prompt_tokens is not None and spec.new_tokens is not None:
        return Typical(spec.prompt_tokens, spec.new_tokens, LengthsFrom.GIVEN)
    prompt = new = min(DEFAULT_TOKENS, max(1, max_context // 2))
    if traffic.requests:
        prompt, new = math.floor(traffic.prompts.mean), math.floor(traffic.answers.mean)
    if spec.new_tokens is None:
        new = max(
            1, min(new, spec.most_new_tokens(max_context), max_context - (spec.prompt_tokens or 1))
        )
    else:
        new = spec.new_tokens
    prompt = spec.prompt_tokens or max(1, min(prompt, max_context - new))
    return Typical(prompt, new, LengthsFrom.SEEN if traffic.requests else LengthsFrom.DEFAULT)


def of_nodes_there(spec: DeploymentSpec, candidates: Collection[Candidate]) -> DeploymentSpec:
    """A spec that was deployed, without its settings for nodes that are no longer in the site.

    A rule continues for the nodes that it still names; `together` and `apart` need two.
    """
    names = {str(node.name) for node in candidates}
    return replace(
        spec,
        exclude=tuple(name for name in spec.exclude if name in names),
        standby=tuple(name for name in spec.standby if name in (*names, AUTO_STANDBY)),
        reserve={name: size for name, size in spec.reserve.items() if name in names},
        quantisation={
            name: form for name, form in spec.quantisation.items() if name in (*names, EVERY_NODE)
        },
        rule=tuple(left for rule in spec.rule if (left := rule.among(names)) is not None),
    )


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """A deployment to be placed on the nodes there are, with the measurements of these.

    `traffic` is an earlier deployment's of this name and model. If there is a placement already,
    `candidates` count the memory that it holds as free. A `draft` is to be held with the first
    layer.
    """

    spec: DeploymentSpec
    manifest: ModelManifest
    candidates: Sequence[Candidate]
    measured: Mapping[NodeId, Measurements]
    traffic: Traffic = NO_TRAFFIC
    draft: PlacedDraft | None = None

    def with_spec(self, **changes: Any) -> PlacementProblem:
        """The same with these fields of the spec changed, unchecked."""
        return replace(self, spec=replace(self.spec, **changes))


class Placer(Protocol):
    """Finds placements. Pure: the same problem has the same answer."""

    def place(self, problem: PlacementProblem) -> Placement:
        """A placement that fits, or a typed error that names the field at fault."""

    def outlook(self, problem: PlacementProblem, placement: Placement) -> Outlook:
        """The figures of a placement for the problem's traffic, and whether another would do
        better."""

    def repair(self, problem: PlacementProblem, broken: Placement, losses: Lost) -> Placement:
        """A placement to continue with if `broken` cannot: the remaining nodes keep their layers
        and KV pool if that is possible."""
