"""Whether the head of a placement guesses tokens: only where that changes no answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgeshard.architectures import architecture_named
from edgeshard.architectures.record import Fused
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.placement import Placement, Speculation
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard.planning.inputs.shapes import ModelSpec


def speculation_of(
    spec: DeploymentSpec, model: ModelSpec, nodes: Sequence[DeviceFacts], guess_slots: int
) -> Speculation:
    """What goes for a model under this spec on these nodes, one for each stage. There is room for `guess_slots` states
    behind guesses, where requests have any."""
    if spec.speculation == "off":
        return Speculation.OFF
    own_blocks = isinstance(architecture_named(model.shape.architecture).runs, Fused)
    if not (own_blocks and all(facts.takes_guesses for facts in nodes)):
        return Speculation.BITS
    if spec.max_time_per_token_s is not None or spec.max_inter_token_latency_s is not None:
        return Speculation.PROMISE
    if model.shape.states and not (guess_slots and all(facts.keeps_states_of_guesses for facts in nodes)):
        return Speculation.STATES
    return Speculation.EXPERTS if any(block.experts for block in model.blocks) else Speculation.GUESSES


def weighed(placement: Placement) -> Placement:
    """The same, with guesses for a mixture in memory whose rows were measured: the head weighs each guess."""
    if placement.speculation is not Speculation.EXPERTS or not placement.costs or placement.streams:
        return placement
    return replace(placement, speculation=Speculation.GUESSES)
