"""Which step the head forms next. Pure: requests and results in, steps and events out; no clock, no I/O.

Each step carries one span, and requests take turns step by step. A prompt is cut into chunks that follow each other
through the pipeline without waiting; a decode waits for its own token. Requests join and leave between steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from edgeshard.errors import AlreadyExistsError, InternalError, InvalidArgumentError, ResourceExhaustedError
from edgeshard.generation import FinishReason, Generation, Token
from edgeshard.ids import RequestId
from edgeshard.step import Span, StepPlan, StepResult
from edgeshard_agent.engine.blocks import BlockAllocator
from edgeshard_agent.engine.text import TextStream


@dataclass(frozen=True, slots=True)
class HeadStep:
    """A step to run: what the stages do, and the token ids [T] that the first stage embeds."""

    number: int
    plan: StepPlan
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenOut:
    request_id: RequestId
    token: Token


@dataclass(frozen=True, slots=True)
class RequestEnd:
    request_id: RequestId
    reason: FinishReason
    text: str


HeadEvent = TokenOut | RequestEnd


@dataclass(slots=True)
class _Sequence:
    """A request under way. `tokens` is prompt and emitted; positions below `scheduled` were handed to the stages."""

    number: int
    request_id: RequestId
    generation: Generation
    tokens: list[int]
    prompt_count: int
    text: TextStream
    scheduled: int = 0
    introduced: bool = field(default=False)

    @property
    def runnable(self) -> bool:
        """Whether there are positions to hand out; false while its own newest token is on its way."""
        return self.scheduled < len(self.tokens)

    @property
    def longest(self) -> int:
        return self.prompt_count + self.generation.max_new_tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """`window` steps in flight, `chunk_tokens` per step, `max_context` positions per request, `waiting` requests."""

    window: int
    chunk_tokens: int
    max_context: int
    waiting: int


class Scheduler:
    """Step by step interleaving over one paged KV pool. `eos_tokens` end a request unless it ignores them."""

    def __init__(self, allocator: BlockAllocator, limits: Limits, eos_tokens: frozenset[int]) -> None:
        self._allocator = allocator
        self._limits = limits
        self._eos_tokens = eos_tokens
        self._sequences: dict[int, _Sequence] = {}
        self._numbers: dict[RequestId, int] = {}
        self._waiting: deque[_Sequence] = deque()
        self._turns: deque[int] = deque()
        self._frees: list[int] = []
        self._next_number = 0
        self._next_step = 0
        self._returned = 0

    @property
    def active(self) -> int:
        return len(self._sequences)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """No request, nothing to free and no step in flight."""
        return not (self._sequences or self._waiting or self._frees) and self._next_step == self._returned

    def submit(
        self,
        request_id: RequestId,
        generation: Generation,
        prompt: list[int],
        text: TextStream,
        emitted: tuple[int, ...] = (),
    ) -> None:
        """Take a request; `emitted` are tokens a former head already streamed.

        Raises InvalidArgumentError, ResourceExhaustedError or AlreadyExistsError, changing nothing.
        """
        if request_id in self._numbers:
            raise AlreadyExistsError(f"request {request_id} is already running", field="request_id")
        longest = len(prompt) + generation.max_new_tokens
        if longest > self._limits.max_context:
            raise InvalidArgumentError(
                f"max_new_tokens: the prompt's {len(prompt)} tokens and {generation.max_new_tokens} new ones exceed "
                f"the deployment's context of {self._limits.max_context}; shorten the prompt or ask for fewer",
                field="max_new_tokens",
                reason="CONTEXT_EXCEEDED",
            )
        if self._allocator.blocks_for(longest) > self._allocator.count:
            raise ResourceExhaustedError(
                f"max_new_tokens: {longest} tokens exceed the KV pool of "
                f"{self._allocator.count * self._allocator.block_tokens}",
                field="max_new_tokens",
                reason="KV_POOL_EXHAUSTED",
            )
        if len(self._waiting) >= self._limits.waiting:
            raise ResourceExhaustedError(
                f"{len(self._waiting)} requests are waiting already", reason="QUEUE_FULL", retry_after_s=1.0
            )
        number = self._next_number
        self._next_number += 1
        sequence = _Sequence(number, request_id, generation, [*prompt, *emitted], len(prompt), text)
        self._numbers[request_id] = number
        self._waiting.append(sequence)
        self._admit()  # at once, so that only those who must wait count as waiting

    def cancel(self, request_id: RequestId) -> list[HeadEvent]:
        """End a request now; its KV goes with the next step. An unknown id is a request that has ended: no event."""
        number = self._numbers.get(request_id)
        if number is None:
            return []
        sequence = self._sequences.get(number)
        if sequence is None:
            self._waiting = deque(s for s in self._waiting if s.number != number)
            del self._numbers[request_id]
        else:
            self._remove(sequence)
        return [RequestEnd(request_id, FinishReason.CANCELLED, "")]

    def cancel_all(self) -> list[HeadEvent]:
        return [event for request_id in list(self._numbers) for event in self.cancel(request_id)]

    def next_step(self) -> HeadStep | None:
        """The step to run now; None when nothing is runnable or the window is full."""
        if self._next_step - self._returned >= self._limits.window:
            return None
        self._admit()
        sequence = self._next_runnable()
        if sequence is None and not self._frees:
            return None
        frees, self._frees = tuple(self._frees), []
        number = self._next_step
        self._next_step += 1
        if sequence is None:
            return HeadStep(number, StepPlan(frees=frees), ())
        first = sequence.scheduled
        end = min(len(sequence.tokens), first + self._limits.chunk_tokens)
        grant = self._allocator.extend(sequence.number, end)
        span = Span(
            request=sequence.number,
            first_position=first,
            token_count=end - first,
            sample=end == len(sequence.tokens),
            sampling=None if sequence.introduced else sequence.generation.sampling,
            seen_tokens=() if sequence.introduced else self._seen_tokens(sequence),
        )
        sequence.introduced = True
        sequence.scheduled = end
        plan = StepPlan(frees, (grant,) if grant else (), (span,))
        return HeadStep(number, plan, tuple(sequence.tokens[first:end]))

    def on_result(self, step: int, result: StepResult) -> list[HeadEvent]:
        """Take a step's result; results come in the order of their steps."""
        if step != self._returned or step >= self._next_step:
            raise InternalError(f"result of step {step} came, step {self._returned} was due")
        self._returned += 1
        events: list[HeadEvent] = []
        for sampled in result.tokens:
            sequence = self._sequences.get(sampled.request)
            if sequence is None:
                continue  # cancelled while the step was under way
            if sampled.position != len(sequence.tokens):
                raise InternalError(f"token for position {sampled.position} came, {len(sequence.tokens)} was due")
            sequence.tokens.append(sampled.token)
            is_end = sampled.token in self._eos_tokens and not sequence.generation.ignore_eos
            text = "" if is_end else sequence.text.push(sampled.token)
            events.append(
                TokenOut(
                    sequence.request_id,
                    Token(sampled.position, sampled.token, text, sampled.logprob, sampled.top, result.timings),
                )
            )
            reason = self._finish_reason(sequence, sampled.token, is_end)
            if reason is not None:
                events.append(RequestEnd(sequence.request_id, reason, sequence.text.finish()))
                self._remove(sequence)
        return events

    def _finish_reason(self, sequence: _Sequence, token: int, is_end: bool) -> FinishReason | None:
        if is_end or token in sequence.generation.stop_tokens or sequence.text.stopped:
            return FinishReason.STOP
        if len(sequence.tokens) >= sequence.longest:
            return FinishReason.LENGTH
        return None

    def _seen_tokens(self, sequence: _Sequence) -> tuple[int, ...]:
        """What a repetition penalty looks at; the last stage adds the tokens it samples itself."""
        if sequence.generation.sampling.repetition_penalty == 1.0:
            return ()
        return tuple(sorted(set(sequence.tokens)))

    def _admit(self) -> None:
        """Let waiting requests in, in their order, while the pool can promise each its worst case."""
        while self._waiting and self._allocator.reserve(self._waiting[0].number, self._waiting[0].longest):
            sequence = self._waiting.popleft()
            self._sequences[sequence.number] = sequence
            self._turns.append(sequence.number)

    def _next_runnable(self) -> _Sequence | None:
        for _ in range(len(self._turns)):
            number = self._turns.popleft()
            sequence = self._sequences.get(number)
            if sequence is None:
                continue
            self._turns.append(number)
            if sequence.runnable:
                return sequence
        return None

    def _remove(self, sequence: _Sequence) -> None:
        del self._sequences[sequence.number]
        del self._numbers[sequence.request_id]
        self._allocator.release(sequence.number)
        if sequence.introduced:
            self._frees.append(sequence.number)
