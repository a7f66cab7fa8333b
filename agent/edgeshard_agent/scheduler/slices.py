"""Slices of long prompts, computed once for each length. (docs/papers.md#slices-of-long-prompts)"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from edgeshard.domain.deployments.step_cost import StageCost
from edgeshard.planning.costs.step_budget import prompt_slices, rounded_prompt, with_rest

_KEPT = 256


class PromptSlices:
    """`prepare` searches, which takes some tens of milliseconds and is safe in a thread; calling it
    answers at once."""

    def __init__(self, stages: Sequence[StageCost]) -> None:
        self._stages = tuple(stages)
        self._known: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def prepare(self, tokens: int) -> None:
        whole = rounded_prompt(tokens)
        if whole not in self._known:
            self._known[whole] = prompt_slices(self._stages, whole)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)

    def __call__(self, tokens: int) -> tuple[int, ...]:
        """Lengths that sum to `tokens`; the whole prompt if nothing was prepared."""
        lengths = self._known.get(rounded_prompt(tokens))
        if lengths is None:
            return (tokens,)
        return with_rest(lengths, tokens)
