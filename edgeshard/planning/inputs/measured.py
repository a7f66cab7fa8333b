"""A node that was measured, as the planner asks it for times. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.nodes.profile import ComputeProfile, LayerKind
from edgeshard.planning.inputs.problem import PlanProblem, StepShape
from edgeshard.planning.inputs.shapes import BlockSpec
from edgeshard.profiles.fit import LayerFit, ProfileFit, fit_profile
from edgeshard.profiles.profile_quality import quality_warnings


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """ComputeTimes from a profile. Raises InvalidArgumentError for a block the profile was not made
    for."""

    fit: ProfileFit

    @classmethod
    def of(cls, profile: ComputeProfile) -> MeasuredTimes:
        return cls(fit_profile(profile))

    def block_s(self, block: BlockSpec, phase: StepShape) -> float:
        kind = LayerKind.MOE_BLOCK if block.experts else LayerKind.BLOCK
        measured, of = self.fit.of_kind(kind, block.parameters), self.fit.profile
        alike = [fit for fit in measured if fit.profile.window == block.window]
        if alike:
            size = block.weight_bytes(of.dtype, of.quantisation)
            return _seconds(min(alike, key=lambda fit: abs(fit.profile.weight_bytes - size)), phase)
        raise InvalidArgumentError(
            f"the profile has no {kind} with a window of {block.window} tokens; profile this model",
            field="profile",
        )

    def embedding_s(self, phase: StepShape) -> float:
        (fit,) = self.fit.of_kind(LayerKind.EMBEDDING)
        return fit.prefill.seconds(phase.step_tokens, 0.0)

    def head_s(self, phase: StepShape) -> float:
        (fit,) = self.fit.of_kind(LayerKind.HEAD)
        return fit.decode.seconds(phase.batch, 0.0)

    def step_s(self, hidden_bytes: float) -> float:
        overhead = self.fit.profile.overhead
        return overhead.seconds + overhead.seconds_per_byte * hidden_bytes


def power_measured(problem: PlanProblem, name: str) -> bool:
    """Whether a node's watts are measured by its sensor instead of taken from a data sheet or the
    cluster file."""
    times = problem.times.get(name)
    return isinstance(times, MeasuredTimes) and times.fit.profile.energy is not None


def doubtful(problem: PlanProblem) -> dict[str, tuple[str, ...]]:
    """Doubts about the profiles of a problem, in words, by node; nodes left out count too."""
    doubts = {
        name: quality_warnings(times.fit)
        for name, times in problem.times.items()
        if isinstance(times, MeasuredTimes)
        and name in problem.cluster.names
        and name not in problem.exclude
    }
    return {name: words for name, words in doubts.items() if words}


def doubts_line(doubts: Mapping[str, Sequence[str]]) -> str:
    """`doubtful` as one text: `b: busy while measured (...); c: ...`."""
    return "; ".join(f"{name}: {', '.join(words)}" for name, words in doubts.items())


def _seconds(fit: LayerFit, phase: StepShape) -> float:
    if phase.tokens == 1:
        return fit.decode_s(phase.batch, max(0.0, phase.kv_tokens - 1))
    # Of `context` keys that a query sees on average, half of the prompt are the prompt's own.
    before = max(0.0, phase.context - (phase.tokens + 1) / 2)
    return fit.prefill_s(phase.tokens, before, phase.batch)
