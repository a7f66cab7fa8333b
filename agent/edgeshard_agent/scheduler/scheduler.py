"""The choice of the head's next step. Pure: requests and results in, steps and events out; no
clock, no I/O.

Batching is per iteration: requests join and leave between steps. A step is one micro-batch: the
decodes of the requests whose tokens returned (`batching`), then chunks of prompts within the budget
(`chunking`), in the order of `fairness`. A prompt's chunks follow each other through the pipeline
without waiting; a decode waits for its own token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import takewhile

from edgeshard.architectures.limits import MAX_VOCABULARY
from edgeshard.domain import errors
from edgeshard.domain.deployments.deployment import DEFAULT_TOKENS
from edgeshard.domain.ids import RequestId
from edgeshard.domain.requests.generation import FinishReason, Generation, StageTiming, Token
from edgeshard.domain.requests.head import HeadEvent, RequestAdmitted, RequestEnd
from edgeshard.domain.requests.step import (
    GuessedTokens,
    KvGrant,
    SampledToken,
    Span,
    StateCopy,
    StepPlan,
    StepResult,
    guessed_tokens,
)
from edgeshard_agent.scheduler.batching import Batching, Flight, Owed, check_owed
from edgeshard_agent.scheduler.chunking import Chunking, ChunkSizer
from edgeshard_agent.scheduler.drafting import DraftAsk
from edgeshard_agent.scheduler.fairness import FairQueue, ServedTokens
from edgeshard_agent.scheduler.forming import FormingStep
from edgeshard_agent.scheduler.guessing import MOST_ROWS, Guessed, Guessing
from edgeshard_agent.scheduler.kv_blocks import BlockAllocator, Reservation, extend_keys, next_save
from edgeshard_agent.scheduler.micro_batch_tuner import MicroBatchTuner
from edgeshard_agent.scheduler.scoring import is_unscored
from edgeshard_agent.scheduler.sequence import Sequence
from edgeshard_agent.scheduler.swapping import SwappedOut, Swapping
from edgeshard_agent.scheduler.text import TextStream

GIVES_WAY_S = 0.15
"""After this time a request that waits for its guide yields its place to another client's request,
and returns later.
"""


@dataclass(frozen=True, slots=True)
class HeadStep:
    """A step to run: the stages' plan, and the token ids [T] that the first stage embeds.

    If guesses are requested from the draft, their rows are there but their tokens are not: it runs
    as `with_drafted`.
    """

    number: int
    plan: StepPlan
    tokens: tuple[int, ...]
    asks: tuple[DraftAsk, ...] = ()
    is_drafted: bool = False
    """Whether it asked, and these are the answers."""

    @property
    def guessed(self) -> GuessedTokens:
        return guessed_tokens(self.plan.spans, self.tokens)

    def with_drafted(self, drafted: GuessedTokens) -> HeadStep:
        """The step with the draft's guesses, by request, without the rows of guesses that it did
        not make."""
        ask_limits = {ask.request: ask.most for ask in self.asks}
        spans: list[Span] = []
        tokens: list[int] = []
        end = 0
        for span in self.plan.spans:
            begin, end = end, end + span.token_count
            if span.request not in ask_limits:
                spans.append(span)
                tokens += self.tokens[begin:end]
                continue
            certain = self.tokens[begin : end - span.guesses]
            guesses = drafted.get(span.request, ())[: span.guesses]
            spans.append(
                replace(span, token_count=len(certain) + len(guesses), guesses=len(guesses))
            )
            tokens += (*certain, *guesses)
        return HeadStep(
            self.number, replace(self.plan, spans=tuple(spans)), tuple(tokens), is_drafted=True
        )


@dataclass(frozen=True, slots=True)
class Taken:
    """A token that a result brought. `text` is None until it is requested; `reason` is None while
    the request continues.
    """

    sequence: Sequence
    sampled: SampledToken
    timings: tuple[StageTiming, ...]
    text: str | None
    reason: FinishReason | None


TakenItem = HeadEvent | Taken


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_context` positions per request, at most `waiting` requests that are not admitted yet.

    * `vocab_size`: tokens are below it.
    * `answer_tokens`: the likely length of an answer, before any has ended.
    * `overcommit`: reserve memory for prompts only.
    * `prefix_cache`: share the KV of equal beginnings among the requests of a client.
    * `save_every`: positions between two saves of a request's states, in whole KV blocks, with the
      prefix cache; 0 if they have no states.
    """

    max_context: int
    waiting: int
    vocab_size: int = MAX_VOCABULARY
    answer_tokens: int = DEFAULT_TOKENS
    overcommit: bool = False
    prefix_cache: bool = False
    save_every: int = 0


@dataclass(slots=True)
class SchedulerCounts:
    """Counts of a scheduler since it began."""

    steps: int = 0
    prompt_tokens: int = 0
    """Positions of prompts that were run, again after a preemption."""
    prefix_hit_tokens: int = 0
    """Positions of prompts that were found in the prefix cache instead."""
    new_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    """Preemptions after which the stages kept the request's KV."""
    guesses: int = 0
    """Draft tokens, each a row of a step."""
    right_guesses: int = 0
    """Guesses that equalled the drawn token: each saved a step."""


@dataclass(slots=True, kw_only=True)
class SchedulerStats(SchedulerCounts):
    """The counts, and the present numbers of requests and blocks. Blocks used, cached and free make
    the pool."""

    running: int
    waiting: int
    steps_in_flight: int
    micro_batches: int
    """Into which the decoding requests go now; 0 before there were any."""
    kv_blocks_used: int
    kv_blocks_cached: int
    kv_blocks_free: int
    kv_blocks_swapped: int
    """Swapped out now, outside the pool."""


@dataclass(slots=True)
class _Late:
    """A token that is late, and since when."""

    position: int
    since_s: float


@dataclass(eq=False)
class Scheduler:
    """Steps over one paged KV pool."""

    allocator: BlockAllocator
    limits: Limits
    batching: Batching
    chunking: Chunking
    eos_tokens: frozenset[int]
    """Tokens that end a request unless it ignores them."""
    swapping: Swapping | None = None
    guessing: Guessing | None = None
    """None if no token is guessed: its stages could not take guesses back, or would compute other
    bits for more rows.
    """

    def __post_init__(self) -> None:
        self._places = self.batching.places
        self._flight = Flight(self.batching)
        self._tuner = MicroBatchTuner(self.batching, self.chunking.inter_token_s)
        self._chunks = ChunkSizer(self.chunking, self._flight.window)
        self._reservation = Reservation(
            self.limits.answer_tokens, overcommit=self.limits.overcommit
        )
        self._served_tokens = ServedTokens()
        self._waiting = FairQueue(self._served_tokens)
        self._requests: dict[RequestId, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self._prefilling: dict[int, Sequence] = {}
        self._known: dict[int, Sequence] = {}
        """Requests that run, or whose KV is kept aside, by the number that the stages know."""
        self._ready: dict[int, Sequence] = {}
        """Decoding requests whose newest token is back, the longest ready first."""
        self._late: dict[int, _Late] = {}
        """Tokens that the last stage still has to choose, by the number of their requests."""
        self._now_s = 0.0
        """When the last result came."""
        self._asks = False
        self._frees: list[int] = []
        self._swapped = SwappedOut(self.swapping or Swapping(), self.chunking.step_tokens)
        self._swap_outs: list[int] = []
        self._swap_ins: dict[int, KvGrant] = {}
        """For requests that were admitted again: the stages get them with the next step."""
        self._saves: list[StateCopy] = []
        """Copies of the states that the newest step leaves: the next step saves them first."""
        self._next_number = 0
        self._next_step = 0
        self._returned = 0
        self._counts = SchedulerCounts()
        self._admitted: list[RequestId] = []

    @property
    def idle(self) -> bool:
        """No request, nothing to free and no step in flight."""
        return not (self._requests or self._frees or len(self._flight))

    @property
    def stats(self) -> SchedulerStats:
        allocator = self.allocator
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            steps_in_flight=len(self._flight),
            micro_batches=self._tuner.parts,
            kv_blocks_used=allocator.used,
            kv_blocks_cached=allocator.cached,
            kv_blocks_free=allocator.count - allocator.used - allocator.cached,
            kv_blocks_swapped=self._swapped.used,
            **asdict(self._counts),
        )

    # -- requests ----------------------------------------------------------------------------------

    def submit(  # noqa: PLR0913 (all there is to say of a request)
        self,
        request_id: RequestId,
        generation: Generation,
        prompt: list[int],
        text: TextStream,
        emitted: tuple[int, ...] = (),
        client: str = "",
        *,
        arrival: int | None = None,
        resumed: bool = False,
        scored: int = 1,
    ) -> RequestEnd | None:
        """Take a request. If `emitted` has finished it already, return its end and do not take it.

        `emitted` are tokens that it has already and that `text` has received; `client` is who it is
        for; `arrival` orders it among the others, if it is not the newest. A `resumed` request was
        admitted before: the limit of waiting requests does not count for it. `scored` is the
        position after the last one whose prompt log-probability is known. Raises
        InvalidArgumentError, ResourceExhaustedError or AlreadyExistsError, changing nothing.
        """
        number, tokens = self._take_number(), [*prompt, *emitted]
        arrival = number if arrival is None else arrival
        sequence = Sequence(
            number,
            arrival,
            request_id,
            client,
            generation,
            tokens,
            len(prompt),
            text,
            scored=scored,
        )
        if generation.max_new_tokens == 0 and not is_unscored(sequence):
            return RequestEnd(FinishReason.LENGTH, "")
        if emitted and (reason := self._finish_reason(sequence)) is not None:
            return RequestEnd(reason, text.finish())
        self._check(sequence, resumed)
        self._requests[request_id] = sequence
        self._served_tokens.open(client)
        self._waiting.put(sequence)
        self._admit()  # at once, so that only requests that must wait count as waiting
        return None

    def text_of(self, request_id: RequestId, tokens: list[int]) -> TextStream | None:
        """The text of a request that has just these tokens, prompt and emitted; None if there is no
        such request."""
        sequence = self._requests.get(request_id)
        return sequence.text if sequence is not None and sequence.tokens == tokens else None

    def _check(self, sequence: Sequence, resumed: bool) -> None:
        longest, new_tokens = sequence.longest, sequence.generation.max_new_tokens
        if sequence.request_id in self._requests:
            raise errors.AlreadyExistsError(
                f"request {sequence.request_id} is already running", field="request_id"
            )
        if sequence.prompt_count + min(1, new_tokens) > self.limits.max_context:
            raise errors.InvalidArgumentError(
                f"prompt: its {sequence.prompt_count} tokens leave no room in the deployment's "
                "context of "
                f"{self.limits.max_context}; shorten it",
                field="prompt",
                reason="CONTEXT_EXCEEDED",
            )
        if longest > self.limits.max_context:
            raise errors.InvalidArgumentError(
                f"max_new_tokens: the prompt's {sequence.prompt_count} tokens and {new_tokens} new "
                "ones "
                f"exceed the deployment's context of {self.limits.max_context}; shorten the prompt "
                "or request "
                "fewer",
                field="max_new_tokens",
                reason="CONTEXT_EXCEEDED",
            )
        if self.allocator.blocks_for(longest) > self.allocator.count:
            raise errors.ResourceExhaustedError(
                f"max_new_tokens: {longest} tokens exceed the KV pool of "
                f"{self.allocator.count * self.allocator.block_tokens}",
                field="max_new_tokens",
                reason="KV_POOL_EXHAUSTED",
            )
        if len(self._waiting) >= self.limits.waiting and not resumed:
            raise errors.ResourceExhaustedError(
                f"{len(self._waiting)} requests are waiting already",
                reason="QUEUE_FULL",
                retry_after_s=1.0,
            )

    def cancel(self, request_id: RequestId) -> list[HeadEvent]:
        """End a request now; its KV goes with the next step. An unknown id is a request that has
        ended: no event."""
        sequence = self._requests.get(request_id)
        if sequence is None:
            return []
        self._end(sequence)
        return [
            HeadEvent(request_id, RequestEnd(FinishReason.CANCELLED, "", sequence.guess_counts))
        ]

    # -- steps out ---------------------------------------------------------------------------------

    def next_sweep(self) -> tuple[HeadStep, ...]:
        """The steps to run now: one, or all steps of a sweep; empty when nothing is runnable or
        enough is in flight."""
        steps: list[HeadStep] = []
        for _ in range(self._flight.sweep):
            step = self.next_step()
            if step is None:
                break
            steps.append(step)
        if not steps:
            return ()
        self._flight.swept(len(steps))
        last = len(steps) - 1
        return tuple(
            replace(step, plan=replace(step.plan, following=last - index)) if index < last else step
            for index, step in enumerate(steps)
        )

    def next_step(self) -> HeadStep | None:
        """The step to run now; None when nothing is runnable or the window is full."""
        if not self._flight.has_room:
            return None
        self._admit()
        forming = FormingStep(tuple(self._saves))
        decodes = self._add_decodes(forming)
        self._add_chunks(forming, decodes)
        if not (forming.spans or self._frees or self._swap_outs or self._swap_ins or self._asks):
            return None
        self._asks = False
        del self._saves[: len(forming.saves)]
        frees, self._frees = tuple(self._frees), []
        swap_outs, self._swap_outs = tuple(self._swap_outs), []
        swap_ins, self._swap_ins = tuple(self._swap_ins.values()), {}
        for grant in swap_ins:
            self._swapped.remove(grant.request)
        number = self._next_step
        self._next_step += 1
        self._counts.steps += 1
        requests = {ask.request for ask in forming.asks}
        guesses = {
            of: got
            for of, got in guessed_tokens(forming.spans, forming.tokens).items()
            if of not in requests
        }
        self._flight.begin(
            decodes > 0, Owed.of(forming.spans, guesses, frees, is_alone=forming.is_alone)
        )
        prompt_tokens = len(forming.tokens) - decodes
        self._tuner.formed(decodes, prompt_tokens)
        self._chunks.formed(forming.pieces if prompt_tokens else (), prompt_tokens)
        return HeadStep(
            number,
            forming.plan(frees, swap_outs, swap_ins),
            tuple(forming.tokens),
            tuple(forming.asks),
        )

    def drafted(self, step: HeadStep) -> None:
        """Report that the draft's guesses for a step were added and it runs like this; call it
        before its result arrives.
        """
        self._flight.guessed(step.number - self._returned, step.guessed)
        for span in step.plan.spans:
            if (sequence := self._known.get(span.request)) is not None:
                sequence.scheduled = min(sequence.scheduled, sequence.certain + span.guesses)

    def _add_decodes(self, forming: FormingStep) -> int:
        """Add one micro-batch of requests whose tokens are back, unless all micro-batches are in
        flight; how many."""
        if not self._ready:
            return 0
        decoding = [s for s in self._running.values() if s.decoding and s.number not in self._late]
        parts = self._tuner.micro_batches([(s.scheduled, 1) for s in decoding])
        if self._flight.decode_steps >= parts:
            return 0
        size = -(-len(decoding) // parts)
        batch = list(self._ready.values())[:size]
        # In the order of their standing: a request that may have to be preempted for another is
        # then not in the step yet.
        most = self._most_guesses(len(decoding), len(batch))
        forming.is_alone = most > 0 and len(decoding) == 1
        held_slots = {s.number: s.assumed for s in self._running.values()} if most else {}
        for sequence in sorted(batch, key=lambda s: s.standing):
            if sequence.number in self._ready and self._make_room(sequence):
                guesses = self._guesses(sequence, min(most, self._free_slots(sequence, held_slots)))
                self._add_span(forming, sequence, len(sequence.tokens), *guesses)
                held_slots[sequence.number] = max(
                    held_slots.get(sequence.number, 0), sequence.assumed
                )
                del self._ready[sequence.number]
        return len(forming.spans)

    def _most_guesses(self, decoding: int, batch_size: int) -> int:
        """For each of the `batch_size` requests of a step, while `decoding` requests decode: 0 if
        others need its rows."""
        if self.guessing is None or self._prefilling or self._waiting:
            return 0
        return max(0, min(MOST_ROWS // decoding, self.chunking.step_tokens // batch_size) - 1)

    def _free_slots(self, sequence: Sequence, held_slots: Mapping[int, int]) -> int:
        """The most guesses of a request after which the stages can keep states, if they have any.
        Other requests hold the slots in `held_slots`; slots of their previous guesses stay taken
        until the step is over."""
        if self.guessing is None or self.guessing.slots is None:
            return MOST_ROWS
        return self.guessing.slots - sum(
            count for number, count in held_slots.items() if number != sequence.number
        )

    def _guesses(self, sequence: Sequence, most: int) -> tuple[tuple[int, ...], DraftAsk | None]:
        """The draft tokens of a request, or the request for them to the draft model; never beyond
        its last token, nor in blocks that others have or were promised."""
        if self.guessing is None or most < 1:
            if sequence.guessed is not None:
                sequence.guessed.are_forced = sequence.guessed.are_drafted = False
            return (), None
        length, generation = len(sequence.tokens), sequence.generation
        most = min(
            most, sequence.longest - 1 - length, self.allocator.reach(sequence.number) - length
        )
        due = self._next_save(sequence)  # a span has to end there
        most = min(most, (due if due > length else due + self.limits.save_every) - 1 - length)
        guessed = sequence.guessed = sequence.guessed or Guessed(self.guessing.proposer())
        guesses = self.guessing.guesses(guessed, sequence.tokens, most, sequence.forced)
        if ask_count := self.guessing.asked(guessed, guesses, most):
            tokens, ends = tuple(sequence.tokens), self.guessing.ends.union(generation.stop_tokens)
            return (), DraftAsk(
                sequence.number, tokens, sequence.prompt_count, generation.sampling, ask_count, ends
            )
        return tuple(takewhile(lambda token: token not in generation.stop_tokens, guesses)), None

    def _add_chunks(self, forming: FormingStep, decodes: int) -> None:
        """Add chunks of prompts after the step's decodes, as many as fit."""
        decoding = len(self._running) > len(self._prefilling)
        prompts = dict(self._prefilling)
        while (sequence := self._served_tokens.first(prompts.values())) is not None:
            del prompts[sequence.number]
            first, end = sequence.scheduled, len(sequence.tokens)
            length = self._chunks.length(forming.pieces, decodes, first, end, decoding)
            if not length or not forming.has_room_for_seen(sequence):
                return
            length = min(length, self._next_save(sequence) - first)
            self._add_span(forming, sequence, first + length)
            self._counts.prompt_tokens += length
            if sequence.scheduled == end:
                sequence.decoding = True
                del self._prefilling[sequence.number]

    def _add_span(
        self,
        forming: FormingStep,
        sequence: Sequence,
        end: int,
        guesses: tuple[int, ...] = (),
        ask: DraftAsk | None = None,
    ) -> None:
        """Schedule a request's positions up to `end`, then its guesses, or the number of guesses
        requested from the draft.
        """
        first = sequence.scheduled
        certain_count = sequence.certain
        number = sequence.number
        last = end + (len(guesses) if ask is None else ask.most)
        is_saved = end == self._next_save(sequence)
        restore = self.allocator.restore(number)
        forming.add(sequence, end, self.allocator.extend(number, last), restore, guesses, ask)
        self._served_tokens.charge(sequence.client, last - first)
        if self.limits.prefix_cache:
            self._publish(sequence, certain_count, end)
        if is_saved:
            save = self.allocator.save(
                number, end, sequence.keys[end // self.allocator.block_tokens - 1]
            )
            self._saves += [] if save is None else [save]

    def _next_save(self, sequence: Sequence) -> int:
        """The end that its next span has at most, because its states are saved there."""
        size, distance = self.allocator.block_tokens, self.limits.save_every
        if not (self.limits.prefix_cache and distance):
            return self.limits.max_context + 1
        return next_save(sequence.scheduled, len(sequence.tokens), size, distance)

    def _publish(self, sequence: Sequence, first: int, end: int) -> None:
        """Publish the blocks that these positions complete. Steps run in order, so a later request
        finds them full."""
        size = self.allocator.block_tokens
        extend_keys(sequence, size, end)
        for index in range(first // size, end // size):
            self.allocator.publish(sequence.number, index, sequence.keys[index])

    # -- results in --------------------------------------------------------------------------------

    def on_result(self, step: int, result: StepResult, now_s: float) -> list[TakenItem]:
        """Take a step's result, which came at `now_s` of any steady clock; results come in the
        order of their steps.

        Its outputs for clients are the `events` of the returned items: they can wait until the next
        step has been sent.
        """
        if step != self._returned or step >= self._next_step:
            raise errors.InternalError(
                f"received the result of step {step}, expected step {self._returned}"
            )
        self._returned += 1
        self._now_s = now_s
        expectation = self._flight.end()
        late_positions = {number: late.position for number, late in self._late.items()}
        check_owed(step, expectation, result, self._known, late_positions, self.limits.vocab_size)
        self._note_late(expectation, result)
        self._note_guesses(expectation, result)
        self._chunks.returned(sum(timing.compute_s for timing in result.timings))
        self._tuner.returned(result.timings, now_s)
        items: list[TakenItem] = [
            *self._take_scores(result),
            *self._take_failures(result),
            *self._take_read(expectation),
        ]
        for sampled in result.tokens:
            sequence = self._known.get(sampled.request)
            # otherwise cancelled or preempted while the step was under way
            if sequence is not None:
                items.append(self._take_token(sequence, sampled, result))
        return items

    def _note_late(self, expectation: Owed, result: StepResult) -> None:
        came = [token.request for token in result.tokens] + [
            failed.request for failed in result.guide_failures
        ]
        for number in (*came, *expectation.frees):
            self._late.pop(number, None)
        self._late.update(
            (number, _Late(expectation.tokens[number], self._now_s)) for number in result.pending
        )

    def _note_guesses(self, expectation: Owed, result: StepResult) -> None:
        """Continue after the guesses that were right. The stages learn it with the next span, which
        cuts the others.
        """
        drawn = Counter(token.request for token in result.tokens)
        for number in expectation.tokens.keys() & drawn.keys():
            proposed, accepted = len(expectation.guesses.get(number, ())), drawn[number] - 1
            self._counts.guesses += proposed
            self._counts.right_guesses += accepted
            if (sequence := self._known.get(number)) is not None:
                if sequence.guessed is not None:
                    sequence.guessed.noted(proposed, accepted, is_alone=expectation.is_alone)
                sequence.scheduled = min(sequence.scheduled, sequence.certain + accepted)
        for number in expectation.guesses.keys() - drawn.keys():
            if (sequence := self._known.get(number)) is not None:
                sequence.scheduled = sequence.certain

    @property
    def must_ask(self) -> bool:
        """Whether a token that the last stage still has to choose comes only with a step that
        somebody `ask`s for."""
        return bool(self._late) and not len(self._flight)

    def ask(self) -> None:
        """Have the next step formed though there is nothing to compute: it brings late tokens."""
        self._asks = self.must_ask

    @staticmethod
    def events(items: Iterable[TakenItem], now: float = 0.0) -> list[HeadEvent]:
        """Tokens with their text, and ends. Call it once for all items of a result, before the next
        result.

        `now` is when it came, in seconds of a steady clock.
        """
        events: list[HeadEvent] = []
        for item in items:
            if not isinstance(item, Taken):
                events.append(item)
                continue
            sequence, sampled = item.sequence, item.sampled
            text = item.text if item.text is not None else sequence.text.push(sampled.token)
            token = Token(
                sampled.position,
                sampled.token,
                text,
                sampled.logprob,
                sampled.top,
                item.timings,
                now,
            )
            events.append(HeadEvent(sequence.request_id, token))
            if item.reason is not None:
                end = RequestEnd(item.reason, sequence.text.finish(), sequence.guess_counts)
                events.append(HeadEvent(sequence.request_id, end))
        return events

    def _take_scores(self, result: StepResult) -> Iterator[TakenItem]:
        for item in result.prompt_logprobs:
            sequence = self._known.get(item.request)
            if sequence is None:
                continue
            sequence.scored = item.prompt_logprobs.end
            yield HeadEvent(sequence.request_id, item.prompt_logprobs)
            if sequence.generation.max_new_tokens == 0 and not is_unscored(sequence):
                self._end(sequence)
                yield HeadEvent(sequence.request_id, RequestEnd(FinishReason.LENGTH, ""))

    def _take_read(self, expectation: Owed) -> Iterator[TakenItem]:
        for number, position in expectation.read.items():
            sequence = self._known.get(number)
            if sequence is not None:
                yield HeadEvent(sequence.request_id, RequestAdmitted(position))

    def _take_failures(self, result: StepResult) -> Iterator[TakenItem]:
        for failed in result.guide_failures:
            sequence = self._known.get(failed.request)
            if sequence is not None:
                self._end(sequence)
                error = errors.InvalidArgumentError(
                    f"guide: {failed.message}", field="guide", reason="GUIDE_FAILED"
                )
                yield HeadEvent(sequence.request_id, error)

    def _take_token(self, sequence: Sequence, sampled: SampledToken, result: StepResult) -> Taken:
        sequence.tokens.append(sampled.token)
        sequence.forced = result.forced.get(sequence.number, ())
        self._counts.new_tokens += 1
        is_end = self.is_end(sequence.generation, sampled.token)
        text = "" if is_end else None
        # only then the text decides whether it continues
        if not is_end and sequence.generation.stop_strings:
            text = sequence.text.push(sampled.token)
        reason = self._finish_reason(sequence)
        if reason is not None:
            self._reservation.ended(sequence)
            self._end(sequence)
        elif sequence.number in self._running:
            self._ready[sequence.number] = sequence
        return Taken(sequence, sampled, result.timings, text, reason)

    @property
    def has_end(self) -> bool:
        """Whether there is a token that ends a sequence."""
        return bool(self.eos_tokens)

    def is_end(self, generation: Generation, token: int) -> bool:
        """Whether a token ends the sequence; its text is none."""
        return token in self.eos_tokens and not generation.ignore_eos

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """The reason why it ends with its newest token, which its text has received; None if it
        continues."""
        token, generation = sequence.tokens[-1], sequence.generation
        if (
            self.is_end(generation, token)
            or token in generation.stop_tokens
            or sequence.text.stopped
        ):
            return FinishReason.STOP
        if len(sequence.tokens) >= sequence.longest:
            return FinishReason.LENGTH
        return None

    # -- memory ------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admit waiting requests, in their turn, while there are places and the pool can promise
        their blocks."""
        while (sequence := self._waiting.first(self._held_up())) is not None:
            while not self._let_in(sequence):
                if not self._give_way(sequence):
                    return

    def _held_up(self) -> set[str]:
        """Clients whose own guides hold up requests that run: more places would be of no use to
        them."""
        return {self._running[number].client for number in self._late if number in self._running}

    def _give_way(self, sequence: Sequence) -> bool:
        """Take the place of another client's request that its guide holds up, for one that waits;
        False if no request was held up for long enough."""
        for number, late in self._late.items():
            victim = self._running.get(number)
            if (
                victim is None
                or victim.client == sequence.client
                or victim.priority > sequence.priority
            ):
                continue
            if self._now_s - late.since_s >= GIVES_WAY_S:
                late.since_s = self._now_s  # if its KV is kept, it may come back with this number
                self._preempt(victim)
                return True
        return False

    def _let_in(self, sequence: Sequence) -> bool:
        """Let a waiting request in; False while there is no place for it, or no memory."""
        allocator, size = self.allocator, self.allocator.block_tokens
        if len(self._running) >= self._places:
            return False
        if sequence.number in self._swapped:
            return self._swap_in(sequence)
        length = len(sequence.tokens)
        keys: list[bytes] = []
        if self.limits.prefix_cache and not is_unscored(sequence):  # its whole prompt has to be run
            extend_keys(sequence, size, length - 1)
            # the last position has to be run for its token
            keys = sequence.keys[: (length - 1) // size]
        shared = allocator.admit(sequence.number, self._reservation.positions(sequence), keys)
        if shared is None:
            return False
        self._waiting.remove(sequence)
        number = sequence.number
        self._running[number] = self._known[number] = self._prefilling[number] = sequence
        self._admitted.append(sequence.request_id)
        if shared.blocks:
            sequence.shared = shared
            sequence.scheduled = shared.filled
            sequence.certain = shared.filled
            self._counts.prefix_hit_tokens += shared.filled
        return True

    def _swap_in(self, sequence: Sequence) -> bool:
        """Let a request in whose KV is kept aside; False while the pool has no room."""
        allocator, number = self.allocator, sequence.number
        if allocator.admit(number, self._reservation.positions(sequence)) is None:
            return False
        grant = allocator.extend(number, sequence.scheduled)
        assert grant is not None
        self._swap_ins[number] = replace(grant, swapped=True)
        self._waiting.remove(sequence)
        self._running[number] = sequence
        if not sequence.decoding:
            self._prefilling[number] = sequence
        elif sequence.ready:
            self._ready[number] = sequence
        self._admitted.append(sequence.request_id)
        return True

    def newly_admitted(self) -> list[RequestId]:
        """The requests admitted since the last call; again after a preemption."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def _make_room(self, sequence: Sequence) -> bool:
        """See to it that a decode has KV, by preemption of the newest if need be; False when it was
        preempted itself.

        The oldest request of the highest priority is never preempted here while another one runs,
        and the pool holds the longest text of any one request: so it always finishes.
        """
        while not self.allocator.can_extend(sequence.number, len(sequence.tokens)):
            lowest = max(self._running.values(), key=lambda s: s.standing)
            self._preempt(lowest)
            if lowest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take a request's KV. It waits at its old place.

        Then it continues from there if the stages keep its KV. Otherwise it runs its tokens again,
        which gives the same result. They keep no guesses, nor positions that they do not yet know
        to be right.
        """
        sequence.scheduled, sequence.assumed = sequence.certain, 0
        number, blocks = sequence.number, self.allocator.blocks_for(sequence.scheduled)
        if self._swap_ins.pop(number, None) is not None:  # the stages have it aside still
            self._stop(sequence)
        elif sequence.introduced and self._swapped.takes(blocks, sequence.scheduled):
            self._stop(sequence)
            self._swapped.add(number, blocks)
            self._swap_outs.append(number)
            self._counts.swaps += 1
        else:
            self._leave(sequence)
            sequence.restart(self._take_number())
        self._waiting.put(sequence)
        self._counts.preemptions += 1

    def _end(self, sequence: Sequence) -> None:
        if not self._waiting.remove(sequence):
            self._leave(sequence)
        elif self._swapped.remove(sequence.number):
            del self._known[sequence.number]
            self._frees.append(sequence.number)
            if sequence.number in self._swap_outs:  # no step has reported it yet
                self._swap_outs.remove(sequence.number)
        del self._requests[sequence.request_id]
        self._served_tokens.close(sequence.client)

    def _leave(self, sequence: Sequence) -> None:
        self._stop(sequence)
        del self._known[sequence.number]
        if sequence.introduced:
            self._frees.append(sequence.number)
        if self._swap_ins.pop(sequence.number, None) is not None:
            self._swapped.remove(sequence.number)

    def _stop(self, sequence: Sequence) -> None:
        """Take a request out of the running ones; its blocks may be granted to others."""
        number = sequence.number
        del self._running[number]
        self._prefilling.pop(number, None)
        self._ready.pop(number, None)
        self.allocator.release(number)

    def _take_number(self) -> int:
        self._next_number += 1
        return self._next_number - 1
