"""A request under way, as the head's scheduler keeps it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgeshard.domain.deployments.guesses import NO_GUESSES, GuessCounts
from edgeshard.domain.ids import RequestId
from edgeshard.domain.requests.generation import Generation
from edgeshard.domain.requests.step import KvGrant
from edgeshard_agent.scheduler.guessing import Guessed
from edgeshard_agent.scheduler.text import TextStream


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is prompt and emitted; positions below `scheduled` were handed to the stages.

    `number` identifies the request on the stages, a new one after each preemption. `arrival` orders
    requests by when they came. `client` is charged for its use of the pipeline, and only this
    client may use its cached KV.
    """

    number: int
    arrival: int
    request_id: RequestId
    client: str
    generation: Generation
    tokens: list[int]
    prompt_count: int
    text: TextStream
    scheduled: int = 0
    certain: int = 0
    """The scheduled positions that the stages know to be no guesses."""
    assumed: int = 0
    """Guesses after these that the stages have, until they receive its next span."""
    introduced: bool = False
    """Whether a step has introduced it to the stages, so that they hold data of it."""
    decoding: bool = False
    """Whether all it began with is scheduled: from here on it goes token by token."""
    keys: list[bytes] = field(default_factory=list)
    """Prefix keys of its full blocks, as far as they were needed."""
    scored: int = 1
    """The position after the last one whose prompt log-probability has arrived, if they were
    requested."""
    guessed: Guessed | None = None
    forced: tuple[int, ...] = ()
    """The tokens that its guide forces after its newest token."""
    shared: KvGrant | None = None
    """Cached blocks it starts from; the stages get them with its first span."""

    @property
    def ready(self) -> bool:
        """Whether its newest token is back and the next can be decoded."""
        return self.decoding and self.scheduled < len(self.tokens)

    @property
    def guess_counts(self) -> GuessCounts:
        """Counts of its steps while no other request decoded."""
        return NO_GUESSES if self.guessed is None else GuessCounts.of(self.guessed.counted)

    @property
    def longest(self) -> int:
        return self.prompt_count + self.generation.max_new_tokens

    @property
    def priority(self) -> int:
        return self.generation.priority

    @property
    def standing(self) -> tuple[int, int]:
        """Smaller keeps its memory longer: by priority, then by when it came."""
        return (-self.priority, self.arrival)

    def restart(self, number: int) -> None:
        """Begin again from the first position, with the emitted tokens as part of the prompt."""
        self.number = number
        self.scheduled = self.certain = self.assumed = 0
        self.introduced = self.decoding = False
        self.shared = None
