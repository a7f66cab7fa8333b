"""Whether the head of a placement drafts tokens, and what they are worth. Pure.

It does so only if that changes no answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from edgeshard.architectures import ModelShape, architecture_named
from edgeshard.architectures.record import Fused
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.guesses import MOST_GUESSES, ExpectedGuesses, GuessCounts
from edgeshard.domain.deployments.placement import Placement, Speculation
from edgeshard.domain.models.dtypes import KV_VECTOR, DType, KvFormat
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard.planning.costs.costs import Costs
from edgeshard.planning.costs.guesses import expected_guesses
from edgeshard.planning.inputs.shapes import ModelSpec
from edgeshard.planning.search.plan import PlanResult
from edgeshard.planning.search.tier_steps import streaming_costs


def speculation_of(
    spec: DeploymentSpec, model: ModelSpec, nodes: Sequence[DeviceFacts], guess_slots: int
) -> Speculation:
    """The speculation of a model under this spec on these nodes, one for each stage. There are
    `guess_slots` states for draft tokens, if requests have any states."""
    if spec.speculation == "off":
        return Speculation.OFF
    if not (keeps_bits(spec, model.shape) and all(facts.takes_guesses for facts in nodes)):
        return Speculation.BITS
    if spec.max_time_per_token_s is not None or spec.max_inter_token_latency_s is not None:
        return Speculation.PROMISE
    if model.shape.states and not (
        guess_slots and all(facts.keeps_states_of_guesses for facts in nodes)
    ):
        return Speculation.STATES
    return (
        Speculation.EXPERTS if any(block.experts for block in model.blocks) else Speculation.GUESSES
    )


def keeps_bits(spec: DeploymentSpec, shape: ModelShape) -> bool:
    """Return whether the native kernels compute the same bits for a token in a prompt and by itself
    (docs/kernels.md).

    That needs our own blocks, and attention over the kernels' order of keys and values
    (`make_arena` of the agent): no float16, and heads of whole vectors.
    """
    if not isinstance(architecture_named(shape.architecture).runs, Fused):
        return False
    if spec.dtype is DType.FLOAT16 or spec.effective_kv_dtype is KvFormat.FLOAT16:
        return False
    return all(width % KV_VECTOR == 0 for width in shape.kv_widths)


def with_expected(placement: Placement, counts: GuessCounts) -> Placement:
    """The same placement with the expected worth of draft tokens to a single request of the planned
    length, from the counted steps of the model's requests."""
    if placement.speculation is not Speculation.GUESSES:
        return placement
    predicted = placement.predicted
    position = 0 if predicted is None else predicted.prompt_tokens + predicted.new_tokens // 2
    return replace(placement, guesses=expected_guesses(counts, placement.costs, position))


def weighed(placement: Placement) -> Placement:
    """The same placement, with draft tokens for a mixture in memory whose rows were measured: the
    head weighs each."""
    if placement.speculation is not Speculation.EXPERTS or not placement.costs or placement.streams:
        return placement
    return replace(placement, speculation=Speculation.GUESSES)


@dataclass(frozen=True, slots=True)
class SiteGuesses:
    """A site's data on draft tokens for one model: the facts of nodes by name, and the counts of
    its requests."""

    facts: Mapping[str, DeviceFacts]
    counts: GuessCounts

    def of(self, result: PlanResult) -> tuple[Speculation, ExpectedGuesses | None]:
        """Whether a feasible plan would draft tokens, and their worth: as in a deployment of it."""
        assert result.prediction is not None
        problem = result.problem
        spec = DeploymentSpec(
            "plan",
            problem.model.name,
            dtype=problem.dtype,
            kv_dtype=problem.kv_dtype,
            max_time_per_token_s=problem.max_time_per_token_s,
        )
        facts = [self.facts[stage.node] for stage in result.stages]
        # as if memory is left over
        speculation = speculation_of(spec, problem.model, facts, MOST_GUESSES)
        if speculation is Speculation.EXPERTS and not result.streams:
            speculation = Speculation.GUESSES
        if speculation is not Speculation.GUESSES:
            return speculation, None
        position = problem.prompt_tokens + problem.new_tokens // 2
        return speculation, expected_guesses(
            self.counts, streaming_costs(Costs(problem), result), position
        )
