"""Lengths of a deployment's prompts and answers, its draft tokens, and nothing of their content.
Pure.

Also the cost of losing a node: how long requests would pause, and which nodes take its layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from edgeshard.domain.deployments.guesses import NO_GUESSES, GuessCounts
from edgeshard.domain.deployments.placement import ExplicitStage, Prediction
from edgeshard.domain.ids import NodeName


@dataclass(frozen=True, slots=True)
class Pause:
    """The parts of a pause, in seconds: until the loss is detected, until another placement is
    found, until its nodes have the weights, and until the next token. Before that token the earlier
    positions are computed again."""

    detect_s: float
    plan_s: float
    load_s: float
    rebuild_s: float

    @property
    def total_s(self) -> float:
        return self.detect_s + self.plan_s + self.load_s + self.rebuild_s


@dataclass(frozen=True, slots=True)
class Loss:
    """The consequences if this node fails now.

    `taken_by` are the stages that would be new. `warm` is whether their nodes have the weights in
    memory already. `pause` is None if the deployment could not continue, or if its length is
    unknown; `note` has the reason.
    """

    node: NodeName
    pause: Pause | None = None
    taken_by: tuple[ExplicitStage, ...] = ()
    warm: bool = False
    note: str = ""


LATEST = 64
"""A request weighs 1 - 1/LATEST times its successor's weight, so that about this many of the latest
count."""
WORTH_SAYING = 0.05
"""A smaller gain is within what predictions are off."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A small histogram of tokens: `counts[k]` weighs lengths above 2^(k-1) and up to 2^k; `mean`
    is exact."""

    mean: float = 0.0
    counts: tuple[float, ...] = ()

    @property
    def weight(self) -> float:
        return sum(self.counts)

    def after(self, tokens: int, decay: float) -> Lengths:
        """With one more length, earlier ones weighing `decay` of what they did."""
        place = max(0, tokens - 1).bit_length()
        counts = [decay * count for count in self.counts] + [0.0] * (place + 1 - len(self.counts))
        counts[place] += 1.0
        return Lengths(self.mean + (tokens - self.mean) / sum(counts), tuple(counts))

    def up_to(self, share: float) -> int:
        """The power of two that this share of the lengths, in (0, 1], do not exceed. 0 if there are
        none."""
        reached, target = 0.0, share * self.weight
        for place, count in enumerate(self.counts):
            reached += count
            if count and reached >= target * (1 - 1e-9):
                return 1 << place
        return 0

    @classmethod
    def of_all(cls, all_lengths: Iterable[Lengths]) -> Lengths:
        """The lengths of several deployments together."""
        items = [lengths for lengths in all_lengths if lengths.counts]
        if not items:
            return cls()
        counts = [
            sum(place) for place in zip_longest(*(item.counts for item in items), fillvalue=0.0)
        ]
        return cls(sum(item.mean * item.weight for item in items) / sum(counts), tuple(counts))


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests a deployment served: their total number, and lengths and draft tokens of the
    latest.

    `at_once` is the mean number of running requests, itself included, when one of them ended.
    """

    requests: int = 0
    prompts: Lengths = Lengths()
    answers: Lengths = Lengths()
    at_once: float = 0.0
    guesses: GuessCounts = NO_GUESSES

    def after(
        self,
        prompt_tokens: int,
        new_tokens: int,
        at_once: int = 1,
        guesses: GuessCounts = NO_GUESSES,
    ) -> Traffic:
        """With one more request."""
        decay = 1.0 - 1.0 / LATEST
        prompts = self.prompts.after(prompt_tokens, decay)
        return Traffic(
            requests=self.requests + 1,
            prompts=prompts,
            answers=self.answers.after(new_tokens, decay),
            at_once=self.at_once + (at_once - self.at_once) / prompts.weight,
            guesses=self.guesses.after(guesses, decay),
        )

    @classmethod
    def of_all(cls, items: Iterable[Traffic]) -> Traffic:
        parts = [item for item in items if item.requests]
        weight = sum(item.prompts.weight for item in parts)
        return cls(
            requests=sum(item.requests for item in parts),
            prompts=Lengths.of_all(item.prompts for item in parts),
            answers=Lengths.of_all(item.answers for item in parts),
            at_once=sum(item.at_once * item.prompts.weight for item in parts) / weight
            if weight
            else 0.0,
            guesses=GuessCounts.of_all(item.guesses for item in parts),
        )


NO_TRAFFIC = Traffic()


@dataclass(frozen=True, slots=True)
class Outlook:
    """The planner's prediction of a deployment for the traffic that it has seen.

    `expected` is the prediction for its placement, None if it is impossible; `note` has the reason.
    If another placement is better by `WORTH_SAYING` or more, `better` is its prediction and
    `layers` its layers. `gain` is the share of the cost that it saves or, for a rate, the share by
    which it is higher.
    """

    expected: Prediction | None = None
    better: Prediction | None = None
    layers: tuple[ExplicitStage, ...] = ()
    gain: float = 0.0
    note: str = ""
    losses: tuple[Loss, ...] = ()
    """Costs of the death of each of its nodes."""
