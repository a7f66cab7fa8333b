"""A request for text and what comes back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from edgeshard.errors import InvalidArgumentError
from edgeshard.ids import DeploymentName, RequestId
from edgeshard.placement import Placement

MAX_TOP_LOGPROBS = 20
MAX_PRIORITY = 10


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `repetition_penalty` 1 are off. The random draw at position p
    is a function of (seed, p) alone, so a replay on another box draws the same.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logprobs: bool = False
    top_logprobs: int = 0

    def validate(self) -> None:
        """Raise InvalidArgumentError naming the first field out of range."""
        _require(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "must be 0 or more")
        _require(self.temperature <= 100, "temperature", "must be at most 100")
        _require(self.top_k >= 0, "top_k", "must be 0 (off) or more")
        _require(0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1")
        penalty = self.repetition_penalty
        _require(math.isfinite(penalty) and penalty > 0, "repetition_penalty", "must be above 0")
        _require(0 <= self.seed < 2**64, "seed", "must be between 0 and 2^64 - 1")
        _require(0 <= self.top_logprobs <= MAX_TOP_LOGPROBS, "top_logprobs", f"must be 0 to {MAX_TOP_LOGPROBS}")


@dataclass(frozen=True, slots=True)
class Generation:
    """One request. `prompt` is text, or token ids already; `stop_tokens` and `stop_strings` end it early.

    Among those that wait for a place, memory or their turn, a higher `priority` goes first.
    """

    prompt: str | tuple[int, ...]
    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    priority: int = 0

    def validate(self) -> None:
        """Raise InvalidArgumentError naming the first field that is wrong whatever the model."""
        _require(len(self.prompt) > 0, "prompt", "is empty: give at least one character or token", "EMPTY_PROMPT")
        _require(self.max_new_tokens >= 1, "max_new_tokens", "must be 1 or more")
        _require(all(self.stop_strings), "stop_strings", "must not hold an empty string")
        _require(len(self.stop_strings) <= 16, "stop_strings", "holds more than 16 strings")
        _require(abs(self.priority) <= MAX_PRIORITY, "priority", f"must be {-MAX_PRIORITY} to {MAX_PRIORITY}")
        self.sampling.validate()


def _require(condition: bool, field_name: str, rule: str, reason: str = "") -> None:
    if not condition:
        raise InvalidArgumentError(f"{field_name} {rule}", field=field_name, reason=reason)


class FinishReason(StrEnum):
    STOP = "stop"
    """End of sequence, a stop token or a stop string."""
    LENGTH = "length"
    """max_new_tokens reached."""
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class StageTiming:
    """Where one box's time went in one step, in seconds."""

    stage: int
    wait_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted; `prompt_tokens` is the tokenised prompt."""

    request_id: RequestId
    deployment: DeploymentName
    prompt_tokens: tuple[int, ...]
    placement: Placement


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. `position` is absolute: the prompt's length for the first.

    `text` is what became certain with it: it may be empty while a character or a possible stop string is incomplete.
    `logprob` is 0 unless the request asked for it.
    """

    position: int
    token: int
    text: str
    logprob: float = 0.0
    top: tuple[TokenLogprob, ...] = ()
    timings: tuple[StageTiming, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request; `text` is what was held back until now."""

    reason: FinishReason
    text: str
    prompt_token_count: int
    new_token_count: int


GenerationEvent = Started | Token | Finished
