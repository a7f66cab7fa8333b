"""The head of a pipeline: takes requests, forms steps, turns returned tokens into text.

One head serves a deployment on its node while the node has the first stage. When an epoch ends, its
scheduler and its links end too; the next epoch continues with the head's requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import structlog

from edgeshard.domain import errors
from edgeshard.domain.ids import RequestId
from edgeshard.domain.requests.generation import (
    PROMPT_LOGPROBS_LIMIT,
    FinishReason,
    Generation,
    Guide,
    Token,
)
from edgeshard.domain.requests.head import (
    HeadEvent,
    HeldRequest,
    RequestAccepted,
    RequestAdmitted,
    RequestEnd,
    StartRequest,
)
from edgeshard.domain.requests.step import ReturnedStep
from edgeshard_agent.engine.journal import Journal, JournalEntry
from edgeshard_agent.engine.long_texts import LEAST_BYTES, LongTexts
from edgeshard_agent.engine.tokenising import Decoding, Tokenising
from edgeshard_agent.engine.tokenizer import Tokenizer
from edgeshard_agent.guides.guides import Guides
from edgeshard_agent.scheduler.scheduler import HeadStep, Scheduler, SchedulerStats
from edgeshard_agent.scheduler.slices import PromptSlices
from edgeshard_agent.scheduler.text import TextStream

log = structlog.get_logger()

ASK_S, MOST_ASK_S = 0.001, 0.032
"""Time between two steps that only fetch late tokens: doubled each time that no token arrived."""


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """Limits of a request. `max_context` limits the positions of its prompt and its new tokens,
    `text_memory_bytes` the memory of a long prompt in the tokenizer process."""

    vocab_size: int
    max_new_tokens: int
    max_context: int
    text_memory_bytes: int = LEAST_BYTES


@dataclass(frozen=True, slots=True)
class Epoch:
    """The scheduler of one epoch, and the ways out of a head.

    `offer` hands a step to this node's own stage, and `emit` sends an event towards the
    coordinator. Neither may block, so taking a result never waits for anything and the ring cannot
    deadlock. `on_failed` is called once with a failure.
    """

    scheduler: Scheduler
    offer: Callable[[HeadStep], None]
    emit: Callable[[HeadEvent], None]
    slices: PromptSlices | None = None
    on_failed: Callable[[errors.EdgeShardError], None] = lambda error: None


class Head:
    """Tokenizer, journal, and the way in and out of a scheduler. `now` is a steady clock in
    seconds."""

    def __init__(
        self,
        epoch: Epoch,
        tokenizer: Tokenizer | None,
        limits: HeadLimits,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._epoch = epoch
        self._tokenizer = tokenizer
        long_texts = (
            LongTexts(tokenizer.file, limits.text_memory_bytes) if tokenizer is not None else None
        )
        self._prompts = Tokenising(tokenizer, limits.max_context, long_texts)
        self._limits = limits
        self._now = now
        self._since = now()
        self._journal = Journal()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = True
        self._failure: errors.EdgeShardError | None = None
        self._guides: Guides | None = None
        self._asking: asyncio.TimerHandle | None = None
        self._ask_s = ASK_S

    @property
    def _scheduler(self) -> Scheduler:
        return self._epoch.scheduler

    @property
    def is_idle(self) -> bool:
        """No request, nothing to free and no step in flight."""
        return self._scheduler.idle

    @property
    def stats(self) -> SchedulerStats:
        return self._scheduler.stats

    # Epochs

    def pause(self) -> None:
        """End the epoch. Requests stay, and nothing is computed or sent before the next one."""
        self._is_open = False
        # Its callbacks belong to the stage that ends, whose weights must not stay in memory.
        self._epoch = Epoch(self._scheduler, _nowhere, _nowhere, on_failed=_nowhere)
        self._journal.stream_lost()

    def begin(self, epoch: Epoch) -> None:
        """Continue with a new pipeline, whose memory is empty. Each request starts again from the
        tokens emitted so far, in the old order, which gives the same tokens. Nothing runs before
        `open`."""
        former = self._epoch
        self._epoch = epoch
        self._failure = None
        self._is_open = False
        for entry in self._journal.unfinished():
            assert entry.accepted is not None
            prompt, emitted = list(entry.accepted.prompt_tokens), entry.token_ids
            try:
                # A token that was taken but never emitted is missing here, and so is its text.
                text = former.scheduler.text_of(entry.request_id, [*prompt, *emitted])
                if text is None:
                    text = self._text(entry.start, prompt)
                    self._read(entry.start, emitted, len(prompt), text)
                end = self._submit(entry, prompt, emitted, text, resumed=True)
            except Exception as error:
                self._refuse(entry.request_id, error)
            else:
                if end is not None:
                    self._say(HeadEvent(entry.request_id, end))

    async def prepare(self) -> None:
        """Find the slices of the prompts that will run again, off the event loop."""
        if (slices := self._epoch.slices) is None:
            return
        for entry in self._journal.unfinished():
            assert entry.accepted is not None
            await asyncio.to_thread(
                slices.prepare, len(entry.accepted.prompt_tokens) + len(entry.tokens)
            )

    def open(self) -> None:
        """Begin to compute: the pipeline is linked."""
        self._is_open = True
        self._pump()

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._prompts.close()
        if self._guides is not None:
            self._guides.close()

    # The coordinator's stream

    def held(self) -> tuple[HeldRequest, ...]:
        """Requests that a coordinator which attaches may not know, or may have lost outputs of."""
        return self._journal.held(self._now())

    @property
    def head_for_s(self) -> float:
        """Seconds since it became the deployment's head: it knows of no end before that."""
        return self._now() - self._since

    def stream_lost(self) -> None:
        """Keep the outputs of requests while the coordinator is away; the requests continue."""
        self._journal.stream_lost()

    def start(self, start: StartRequest) -> None:
        """Begin a request, or continue one that is here, and answer on the current stream."""
        entry = self._journal.find(start.request_id)
        if entry is not None:
            # An id is no secret between clients: naming it must not reveal what another one asked.
            if entry.start.client == start.client and entry.has_all(
                start.emitted_tokens, start.scored
            ):
                entry.start = replace(entry.start, instance=start.instance, digest=start.digest)
                self._follow(entry, start)
                return
            # It is another client's, or another head had it meanwhile; then the coordinator's
            # version counts.
            self._scheduler.cancel(start.request_id)
            self._journal.forget(start.request_id, self._now())
        # It is registered from now on: the next message may concern it.
        task = asyncio.create_task(self._admit(self._journal.open(start, self._now())))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget(self, request_id: RequestId) -> None:
        """Drop a request that no client waits for any more."""
        self._journal.forget(request_id, self._now())
        self.cancel(request_id)

    def _follow(self, entry: JournalEntry, start: StartRequest) -> None:
        for head_event in entry.events_behind(len(start.emitted_tokens), start.scored):
            self._epoch.emit(head_event)
        entry.followed = True

    # Requests

    async def start_request(self, start: StartRequest) -> None:
        """Admit a request or emit its refusal."""
        await self._admit(self._journal.open(start, self._now()))

    async def _admit(self, entry: JournalEntry) -> None:
        start = entry.start
        request_id, generation = start.request_id, start.generation
        try:
            generation.validate()
            if generation.guide is not None:
                await self._check_guide(generation.guide, start.client)
            prompt = await self._prompts.prompt_tokens(
                start, lambda: entry.cancelled or self._journal.find(request_id) is not entry
            )
            generation = self._ending(self._clipped(generation, len(prompt)))
            self._check(generation, prompt)
            self._check_emitted(start.emitted_tokens)
            entry.start = start = replace(entry.start, generation=generation)
            if (slices := self._epoch.slices) is not None:
                await asyncio.to_thread(slices.prepare, len(prompt) + len(start.emitted_tokens))
            if self._journal.find(request_id) is not entry:
                return  # forgotten, or started again
            text = self._text(start, prompt)
            entry.tokens = self._read(start, start.emitted_tokens, len(prompt), text)
            end = self._submit(entry, prompt, start.emitted_tokens, text, resumed=start.resumed)
        except Exception as error:
            if self._journal.find(request_id) is not entry:
                return
            # No one awaits this task: without an answer the client would wait forever.
            if isinstance(error, errors.CancelledRequestError):
                self._say(HeadEvent(request_id, RequestEnd(FinishReason.CANCELLED, "")))
            else:
                self._refuse(request_id, error)
            return
        self._say(HeadEvent(request_id, RequestAccepted(tuple(prompt))))
        if end is not None:
            self._say(HeadEvent(request_id, end))
        if entry.cancelled:
            self._say(*self._scheduler.cancel(request_id))
        self._pump()

    def _submit(
        self,
        entry: JournalEntry,
        prompt: list[int],
        emitted: tuple[int, ...],
        text: TextStream,
        *,
        resumed: bool,
    ) -> RequestEnd | None:
        start = entry.start
        return self._scheduler.submit(
            entry.request_id,
            start.generation,
            prompt,
            text,
            emitted,
            start.client,
            arrival=entry.arrival,
            resumed=resumed,
            scored=entry.scored,
        )

    def _refuse(self, request_id: RequestId, error: Exception) -> None:
        if not isinstance(error, errors.EdgeShardError):
            log.error("request_crashed", request=request_id, error=type(error).__name__)
            error = errors.InternalError(f"the head failed: {type(error).__name__}")
        self._say(HeadEvent(request_id, error))

    def cancel(self, request_id: RequestId) -> None:
        """End a request; its KV is freed on every stage by the next step. Unknown ids are
        ignored."""
        if (entry := self._journal.find(request_id)) is not None and entry.accepted is None:
            entry.cancelled = True
        self._say(*self._scheduler.cancel(request_id))
        self._pump()

    def drafted(self, step: HeadStep) -> None:
        """A step that asked the draft for guesses runs like this; before it returns."""
        self._scheduler.drafted(step)

    def on_return(self, step: ReturnedStep) -> None:
        """Take a step that has been through every stage."""
        try:
            now = self._now()
            items = self._scheduler.on_result(step.number, step.result, now)
            if step.result.tokens:
                self._ask_s = ASK_S
            # The stages first: texts are made and messages are written while they compute.
            self._pump()
            self._say(*self._scheduler.events(items, now))
        except errors.InternalError as error:
            self.fail(error)
        except Exception as error:
            # The link has delivered the step and will not bring it again: without it the pipeline
            # stands still.
            log.error("result_crashed", step=step.number, error=type(error).__name__)
            self.fail(
                errors.InternalError(f"the head failed to take a token: {type(error).__name__}")
            )

    def fail(self, error: errors.EdgeShardError) -> None:
        """Compute nothing until the next epoch: the pipeline is broken. Requests stay."""
        if self._failure is None:
            self._failure = error
            self._epoch.on_failed(error)

    def _pump(self) -> None:
        try:
            while (
                self._is_open and self._failure is None and (steps := self._scheduler.next_sweep())
            ):
                for step in steps:
                    self._epoch.offer(step)
        except Exception as error:
            # Stages run steps in order: if a formed step were never offered, every later one would
            # wait for it.
            log.error("step_crashed", error=type(error).__name__)
            self.fail(
                errors.InternalError(f"the head failed to form a step: {type(error).__name__}")
            )
        for request_id in self._scheduler.newly_admitted():
            self._say(HeadEvent(request_id, RequestAdmitted()))
        if (
            self._asking is None
            and self._is_open
            and self._failure is None
            and self._scheduler.must_ask
        ):
            self._asking = asyncio.get_running_loop().call_later(self._ask_s, self._ask)

    def _ask(self) -> None:
        """Form a step for late tokens: nothing else runs, and they come with a step only."""
        self._asking = None
        self._ask_s = min(2 * self._ask_s, MOST_ASK_S)
        self._scheduler.ask()
        self._pump()

    def _say(self, *events: HeadEvent) -> None:
        for head_event in events:
            if self._journal.record(head_event, self._now()):
                self._epoch.emit(head_event)
            if isinstance(head_event.event, RequestEnd):
                log.info(
                    "request_ended",
                    request=head_event.request_id,
                    reason=head_event.event.reason.value,
                )

    def _read(
        self, start: StartRequest, emitted: tuple[int, ...], prompt_count: int, text: TextStream
    ) -> list[Token]:
        """The request's tokens that were emitted before, with the texts that `text` gave them
        then."""
        tokens = []
        for index, token in enumerate(emitted):
            piece = "" if self._scheduler.is_end(start.generation, token) else text.push(token)
            tokens.append(Token(prompt_count + index, token, piece))
        return tokens

    def _clipped(self, generation: Generation, prompt_count: int) -> Generation:
        """The generation, limited to the new tokens that fit if the request allows that, but to at
        least one."""
        if not generation.clip_new_tokens:
            return generation
        most = max(1, min(self._limits.max_new_tokens, self._limits.max_context - prompt_count))
        return replace(generation, max_new_tokens=min(generation.max_new_tokens, most))

    def _ending(self, generation: Generation) -> Generation:
        """The generation with stop strings that are special tokens among its stop tokens: no text
        contains them."""
        special = {} if self._tokenizer is None else self._tokenizer.special_tokens
        ends = tuple(special[text] for text in generation.stop_strings if text in special)
        return (
            replace(generation, stop_tokens=(*generation.stop_tokens, *ends))
            if ends
            else generation
        )

    def _check(self, generation: Generation, prompt: list[int]) -> None:
        if not 0 <= min(prompt) <= max(prompt) < self._limits.vocab_size:
            raise errors.InvalidArgumentError(
                f"prompt holds a token id outside 0 to {self._limits.vocab_size - 1}",
                field="prompt",
                reason="TOKEN_OUT_OF_RANGE",
            )
        biased = [token for token, _ in generation.sampling.logit_bias]
        if biased and max(biased) >= self._limits.vocab_size:
            raise errors.InvalidArgumentError(
                f"logit_bias has token {max(biased)}; the model's tokens are 0 to "
                f"{self._limits.vocab_size - 1}",
                field="logit_bias",
                reason="TOKEN_OUT_OF_RANGE",
            )
        figures = len(prompt) * (1 + generation.sampling.top_logprobs)
        if generation.prompt_logprobs and figures > PROMPT_LOGPROBS_LIMIT:
            raise errors.InvalidArgumentError(
                f"prompt_logprobs: {len(prompt)} tokens with {generation.sampling.top_logprobs} "
                "top_logprobs "
                f"each are {figures} values; the limit is {PROMPT_LOGPROBS_LIMIT}: request fewer "
                "top_logprobs",
                field="prompt_logprobs",
                reason="TOO_MANY_LOGPROBS",
            )
        if generation.max_new_tokens > self._limits.max_new_tokens:
            raise errors.InvalidArgumentError(
                f"max_new_tokens {generation.max_new_tokens} is above the deployment's limit of "
                f"{self._limits.max_new_tokens}",
                field="max_new_tokens",
            )

    def _check_emitted(self, emitted: tuple[int, ...]) -> None:
        """Raises InvalidArgumentError for a token outside the vocabulary: a client or an earlier
        head sent them, and the first stage fails with a step that has one."""
        if emitted and max(emitted) >= self._limits.vocab_size:
            raise errors.InvalidArgumentError(
                f"resume.tokens has token {max(emitted)}; the model's tokens are 0 to "
                f"{self._limits.vocab_size - 1}: "
                "send the request again without the tokens of its answer",
                field="resume.tokens",
                reason="TOKEN_OUT_OF_RANGE",
            )

    async def _check_guide(self, guide: Guide, client: str) -> None:
        """Raises InvalidArgumentError if the library refuses it, FailedPreconditionError if the
        model has nothing to guide."""
        if self._tokenizer is None:
            raise errors.FailedPreconditionError(
                "guide: the model was added without a tokenizer.json; add it with one",
                field="guide",
                reason="NO_TOKENIZER",
            )
        if not self._scheduler.has_end:
            raise errors.FailedPreconditionError(
                "guide: the model names no token that ends a text, so a guided answer could not "
                "end; name it as "
                "eos_token_id in its generation_config.json",
                field="guide",
                reason="NO_END",
            )
        self._guides = self._guides or Guides()
        await asyncio.wrap_future(self._guides.check(guide, client))

    def _text(self, start: StartRequest, prompt: list[int]) -> TextStream:
        decode = Decoding(self._tokenizer, partial(self._lose_text, start.request_id))
        return TextStream(decode, prompt, start.generation.stop_strings)

    def _lose_text(self, request_id: RequestId, error: Exception) -> None:
        """End a request of whose tokens no text can be made, and no other."""
        self._refuse(request_id, error)
        # Later, since the scheduler may be taking a result now.
        asyncio.get_running_loop().call_soon(self.cancel, request_id)


def _nowhere(thing: object) -> None:
    """The way out of a head without a pipeline."""
