"""A request's events collected into one value, with the times a user of a stream cares about."""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.errors import InternalError
from edgeshard.domain.ids import DeploymentName, RequestId
from edgeshard.domain.requests.generation import (
    Finished,
    FinishReason,
    GenerationEvent,
    PromptLogprobs,
    Started,
    Token,
    TokenLogprob,
)

_SHORT = 60


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """Everything a request brought back.

    `text` is the generated text without the prompt. `ttft_s` is seconds from the call to the first
    token, and `total_s` seconds from the call to the end. `inter_token_latency_s` is the mean
    seconds between tokens by the head's clock (0 with fewer than two). `stage_compute_ms` is each
    stage's mean milliseconds of computing per decoded token. The first token, whose step is the
    prefill, is left out if there are others. `logprobs` and `top_logprobs` are empty unless
    requested. So are `prompt_logprobs` and `prompt_top_logprobs`, which begin with the prompt's
    second token. `str` of it is the text; its `repr` is one line, however long it is.
    """

    request_id: RequestId
    deployment: DeploymentName
    placement: Placement
    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    ttft_s: float
    inter_token_latency_s: float
    total_s: float
    stage_compute_ms: tuple[float, ...]
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    prompt_logprobs: tuple[float, ...] = ()
    prompt_top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return (
            f"Completion(request_id={self.request_id!r}, deployment={self.deployment!r}, "
            f"tokens={len(self.token_ids)}, finish_reason={self.finish_reason.value!r}, "
            f"text={shortened(self.text)!r})"
        )

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens per second, from the first token on; 0 with fewer than two tokens."""
        return 1 / self.inter_token_latency_s if self.inter_token_latency_s > 0 else 0.0


def shortened(text: str) -> str:
    """The beginning of a text, for a line about it."""
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."


class CompletionBuilder:
    """Collects events as they arrive; the times are passed in as values (monotonic seconds)."""

    def __init__(self, called_at_s: float, *, logprobs: bool = False) -> None:
        self._called_at_s = called_at_s
        self._logprobs = logprobs
        self._started: Started | None = None
        self._tokens: list[Token] = []
        self._token_times_s: list[float] = []
        self._prompt: list[PromptLogprobs] = []
        self._finished: Finished | None = None
        self._finished_at_s = called_at_s

    @property
    def begun(self) -> bool:
        """Whether the request was admitted."""
        return self._started is not None

    @property
    def text(self) -> str:
        """So far."""
        return "".join(token.text for token in self._tokens)

    def add(self, event: GenerationEvent, now_s: float) -> None:
        match event:
            case Started():
                self._started = event
            case PromptLogprobs():
                self._prompt.append(event)
            case Token():
                self._tokens.append(event)
                self._token_times_s.append(now_s)
            case Finished():
                self._finished = event
                self._finished_at_s = now_s

    def build(self) -> Completion:
        """The completion, once the stream ended. Raises InternalError when it ended without its
        last event."""
        started, finished = self._started, self._finished
        if started is None or finished is None:
            raise InternalError("the coordinator ended the stream before the request was finished")
        times = self._token_times_s
        return Completion(
            request_id=started.request_id,
            deployment=started.deployment,
            placement=started.placement,
            text=self.text + finished.text,
            token_ids=tuple(token.token for token in self._tokens),
            prompt_token_ids=started.prompt_tokens,
            finish_reason=finished.reason,
            ttft_s=times[0] - self._called_at_s if times else 0.0,
            inter_token_latency_s=self._inter_token_latency_s(),
            total_s=self._finished_at_s - self._called_at_s,
            stage_compute_ms=self._stage_compute_ms(len(started.placement.stages)),
            logprobs=tuple(token.logprob for token in self._tokens) if self._logprobs else (),
            top_logprobs=tuple(token.top for token in self._tokens) if self._logprobs else (),
            prompt_logprobs=tuple(logprob for part in self._prompt for logprob in part.logprobs),
            prompt_top_logprobs=tuple(top for part in self._prompt for top in part.top),
        )

    def _inter_token_latency_s(self) -> float:
        """By the head's clock: in transit tokens gather, and several arrive at once.

        Between tokens of two heads, after a recovery, only the times of arrival are comparable.
        """
        times, total_s = self._token_times_s, 0.0
        for index in range(1, len(times)):
            earlier_s, later_s = self._tokens[index - 1].at_s, self._tokens[index].at_s
            # No two tokens of one head can be further apart than the whole request took until then.
            one_head = 0 < earlier_s <= later_s <= earlier_s + times[index] - self._called_at_s
            total_s += later_s - earlier_s if one_head else times[index] - times[index - 1]
        return total_s / (len(times) - 1) if len(times) > 1 else 0.0

    def _stage_compute_ms(self, stage_count: int) -> tuple[float, ...]:
        steps = [token.timings for token in (self._tokens[1:] or self._tokens) if token.timings]
        totals_s = [0.0] * stage_count
        for timings in steps:
            for timing in timings:
                if timing.stage < stage_count:
                    totals_s[timing.stage] += timing.compute_s
        return tuple(1000 * total_s / len(steps) if steps else 0.0 for total_s in totals_s)
