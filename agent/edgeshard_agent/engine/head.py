"""The head of a pipeline: takes requests, forms steps, turns returned tokens into text. One per epoch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from edgeshard.domain.errors import CancelledRequestError, EdgeShardError, InternalError, InvalidArgumentError
from edgeshard.domain.generation import FinishReason, Generation
from edgeshard.domain.head import StartRequest
from edgeshard.domain.ids import RequestId
from edgeshard.domain.step import ReturnedStep
from edgeshard_agent.engine.tokenising import Decoding, Tokenising
from edgeshard_agent.engine.tokenizer import Tokenizer
from edgeshard_agent.scheduler.scheduler import HeadEvent, HeadStep, RequestEnd, Scheduler, SchedulerStats
from edgeshard_agent.scheduler.slices import PromptSlices
from edgeshard_agent.scheduler.text import TextStream

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RequestAccepted:
    request_id: RequestId
    prompt_tokens: list[int]


@dataclass(frozen=True, slots=True)
class RequestRefused:
    request_id: RequestId
    error: EdgeShardError


HeadOutput = HeadEvent | RequestAccepted | RequestRefused


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """What a request may ask for. `max_context` are the positions of its prompt and its new tokens."""

    vocab_size: int
    max_new_tokens: int
    max_context: int


class Head:
    """Scheduler, tokenizer and the way in and out.

    `offer` hands a step to this box's own stage and `emit` an output towards the coordinator; neither may block, so
    taking a result never waits for anything and the ring cannot deadlock. `now` is a steady clock in seconds.
    `on_failed` is told, once, that the head takes no more requests in this epoch.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        limits: HeadLimits,
        offer: Callable[[HeadStep], None],
        emit: Callable[[HeadOutput], None],
        slices: PromptSlices | None = None,
        now: Callable[[], float] = time.monotonic,
        on_failed: Callable[[EdgeShardError], None] = lambda error: None,
    ) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._prompts = Tokenising(tokenizer, limits.max_context)
        self._limits = limits
        self._offer = offer
        self._emit = emit
        self._slices = slices
        self._now = now
        self._on_failed = on_failed
        self._cancelled_early: set[RequestId] = set()
        self._tokenising: set[RequestId] = set()
        self._failure: EdgeShardError | None = None

    @property
    def is_idle(self) -> bool:
        """No request, nothing to free and no step in flight."""
        return self._scheduler.idle

    @property
    def stats(self) -> SchedulerStats:
        return self._scheduler.stats

    async def start_request(self, start: StartRequest) -> None:
        """Admit a request or emit its refusal."""
        request_id, generation, emitted = start.request_id, start.generation, start.emitted_tokens
        self._tokenising.add(request_id)
        try:
            if self._failure is not None:
                raise self._failure
            generation.validate()
            prompt = await self._prompts.prompt_tokens(start, lambda: request_id in self._cancelled_early)
            self._check(generation, prompt)
            if self._slices is not None:
                await asyncio.to_thread(self._slices.prepare, len(prompt) + len(emitted))
            if self._failure is not None:
                raise self._failure  # meanwhile
            decode = Decoding(self._tokenizer, partial(self._fail_request, request_id))
            text = TextStream(decode, [*prompt, *emitted], generation.stop_strings)
            self._scheduler.submit(request_id, generation, prompt, text, emitted, start.client)
        except CancelledRequestError:
            self._emit_all([RequestEnd(request_id, FinishReason.CANCELLED, "")])
            return
        except EdgeShardError as error:
            self._emit(RequestRefused(request_id, error))
            return
        except Exception as error:
            # No one awaits this task: without an answer the client would wait forever.
            log.error("request_crashed", request=request_id, error=type(error).__name__)
            self._emit(RequestRefused(request_id, InternalError(f"the head failed: {type(error).__name__}")))
            return
        finally:
            cancelled = request_id in self._cancelled_early
            self._tokenising.discard(request_id)
            self._cancelled_early.discard(request_id)
        self._emit(RequestAccepted(request_id, prompt))
        if cancelled:
            self._emit_all(self._scheduler.cancel(request_id))
        self._pump()

    def cancel(self, request_id: RequestId) -> None:
        """End a request; its KV is freed on every stage by the next step. Unknown ids are ignored."""
        if request_id in self._tokenising:
            self._cancelled_early.add(request_id)
        self._emit_all(self._scheduler.cancel(request_id))
        self._pump()

    def cancel_all(self) -> None:
        self._cancelled_early |= self._tokenising
        self._scheduler.cancel_all()
        self._pump()

    def on_return(self, step: ReturnedStep) -> None:
        """Take a step that has been through every stage."""
        try:
            taken = self._scheduler.on_result(step.number, step.result, self._now())
            # The stages first: texts are made and messages are written while they compute.
            self._pump()
            self._emit_all(self._scheduler.events(taken))
        except InternalError as error:
            self.fail(error)
        except Exception as error:
            # The link has delivered the step and will not bring it again: without it the pipeline stands still.
            log.error("result_crashed", step=step.number, error=type(error).__name__)
            self.fail(InternalError(f"the head failed to take a token: {type(error).__name__}"))

    def fail(self, error: EdgeShardError) -> None:
        """The pipeline is broken: end every request with the error, and refuse new ones until the next epoch."""
        if self._failure is None:
            self._failure = error
            for event in self._scheduler.cancel_all():
                self._emit(RequestRefused(event.request_id, error))
            self._on_failed(error)

    def _pump(self) -> None:
        try:
            while self._failure is None and (step := self._scheduler.next_step()) is not None:
                self._offer(step)
        except Exception as error:
            # Stages run steps in order: if a formed step were never offered, every later one would wait for it.
            log.error("step_crashed", error=type(error).__name__)
            self.fail(InternalError(f"the head failed to form a step: {type(error).__name__}"))

    def _emit_all(self, events: Sequence[HeadEvent]) -> None:
        for event in events:
            self._emit(event)
            if isinstance(event, RequestEnd):
                log.info("request_end", request=event.request_id, reason=event.reason.value)

    def _check(self, generation: Generation, prompt: list[int]) -> None:
        if not 0 <= min(prompt) <= max(prompt) < self._limits.vocab_size:
            raise InvalidArgumentError(
                f"prompt holds a token id outside 0 to {self._limits.vocab_size - 1}",
                field="prompt",
                reason="TOKEN_OUT_OF_RANGE",
            )
        if generation.max_new_tokens > self._limits.max_new_tokens:
            raise InvalidArgumentError(
                f"max_new_tokens {generation.max_new_tokens} is above the deployment's limit of "
                f"{self._limits.max_new_tokens}",
                field="max_new_tokens",
            )

    def _fail_request(self, request_id: RequestId, error: EdgeShardError) -> None:
        """No text can be made of its tokens: it ends, and no other."""
        self._emit(RequestRefused(request_id, error))
        # Later, since the scheduler is taking a result now. What it makes of the request until then is ignored.
        asyncio.get_running_loop().call_soon(self.cancel, request_id)
