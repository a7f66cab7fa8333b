"""A pipeline without a network for the head's scheduler: real block tables, and a pretended model
that reads them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

from edgeshard_agent.model.attention.kv import KvMemory, KvPool, slots_behind
from edgeshard_agent.model.attention.states import States
from edgeshard_agent.model.attention.swap import SwapSpace
from edgeshard_agent.scheduler.batching import Batching
from edgeshard_agent.scheduler.chunking import Chunking
from edgeshard_agent.scheduler.drafting import DraftAsk
from edgeshard_agent.scheduler.guessing import Guessing
from edgeshard_agent.scheduler.kv_blocks import BlockAllocator
from edgeshard_agent.scheduler.scheduler import HeadStep, Limits, Scheduler
from edgeshard_agent.scheduler.swapping import Swapping
from edgeshard_agent.scheduler.text import TextStream

from edgeshard.architectures import KvHeads, StateSize
from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.ids import RequestId
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Generation, PromptLogprobs, StageTiming, Token
from edgeshard.domain.requests.head import HeadEvent, RequestEnd
from edgeshard.domain.requests.step import SampledToken, Span, SpanLogprobs, StepResult, Targets

FRESH = 17
"""The first state of the pretended model. Its states hold the difference, so that zeros are a
beginning."""


def after(value: int, token: int) -> int:
    """The pretended model: a function of everything before, so that a lost or swapped position
    shows."""
    return (value * 31 + token + 1) % 9973


def next_token(history: Iterable[int]) -> int:
    return reduce(after, history, FRESH) % 97


def expected(prompt: list[int], new: int) -> list[int]:
    """The tokens of a request that runs by itself."""
    history = list(prompt)
    for _ in range(new):
        history.append(next_token(history))
    return history[len(prompt) :]


Alone = Callable[[list[int], int], list[int]]
"""(prompt, new tokens) -> the tokens of a request that runs by itself."""


class Stage:
    """One stage: the real tables, and in place of keys and values the token at each slot.

    The slots are never cleared: a request that reads another's slot reads the other's token. With
    `states` of requests, real ones of one number, tokens come of them.
    """

    def __init__(
        self,
        blocks: int,
        block_tokens: int,
        swap_blocks: int = 0,
        states: int = 0,
        guess_slots: int = 0,
    ) -> None:
        memory = KvMemory(DType.FLOAT32, blocks, block_tokens)
        kept = States(states, [[StateSize((1,), float32=True)]], "cpu", guess_slots=guess_slots)
        self.pool = KvPool(LayerRange(0, 1), memory, [KvHeads(1, 1)], "cpu", states=kept)
        self.pool.swap = SwapSpace(swap_blocks)
        self.kept: dict[int, list[int]] = {}
        self.slots = [0] * (blocks * block_tokens)
        self.known: set[int] = set()
        self.next_step = 0
        self.is_late: Callable[[], bool] = lambda: False
        """Whether a token is not chosen yet, or still not, as the guide of a request may have
        it."""
        self.late: list[SampledToken] = []

    def run(self, step: HeadStep) -> StepResult:
        assert step.number == self.next_step
        self.next_step += 1
        assert set(step.plan.frees) <= self.known, "a request the stages never heard of was freed"
        self.known -= set(step.plan.frees)
        draft = self.pool.check(step.plan)
        for request, table in draft.swap_outs.items():
            self.kept[request] = [self.slots[slot] for slot in self._slots(request, table.certain)]
        self.pool.commit(draft)
        for request in draft.swap_ins:
            for slot, token in zip(
                self._slots(request, 1 << 30), self.kept.pop(request), strict=False
            ):
                self.slots[slot] = token
        self.late = [token for token in self.late if token.request not in step.plan.frees]
        sampled = [token for token in self.late if not self.is_late()]
        self.late = [token for token in self.late if token not in sampled]
        given = deque(step.tokens)
        pending = list[int]()
        scored = list[SpanLogprobs]()
        for span in step.plan.spans:
            assert (span.sampling is not None) == (span.request not in self.known), (
                "once, on the first span"
            )
            self.known.add(span.request)
            slots = self._slots(span.request, span.end_position)
            for slot in slots[span.first_position :]:
                self.slots[slot] = given.popleft()
            scored += self._scores(span)
            history = [self.slots[slot] for slot in slots]
            by_states = (
                self._by_states(span, history[span.first_position :])
                if self.pool.states.slots
                else None
            )
            following = [
                next_token(history[:end])
                for end in range(span.certain_position, span.end_position + 1)
            ]
            if by_states is not None:
                following = by_states[-len(following) :]
            token = following[0]
            if span.guesses:
                sampled += self._behind_guesses(span, history, following)
            elif span.sample:
                is_late = self.is_late()
                (self.late if is_late else sampled).append(
                    SampledToken(span.request, span.end_position, token)
                )
                pending += [span.request] if is_late else []
        assert not given
        return StepResult(tuple(sampled), prompt_logprobs=tuple(scored), pending=tuple(pending))

    def _behind_guesses(
        self, span: Span, history: list[int], following: list[int]
    ) -> Iterator[SampledToken]:
        for position, token in enumerate(following, span.certain_position):
            yield SampledToken(span.request, position, token)
            if history[position : position + 1] != [token]:
                return

    def _by_states(self, span: Span, tokens: list[int]) -> list[int]:
        """The token after each of the span's tokens by the states of its request, which it
        changes."""
        table = self.pool.table(span.request)
        (state,) = self.pool.states.of(table.source)
        value, following = int(state) + FRESH, list[int]()
        for token, slot in zip(tokens, slots_behind(table, span), strict=True):
            value = after(value, token)
            (state,) = self.pool.states.of(slot)
            state.fill_(value - FRESH)
            following.append(value % 97)
        return following

    @staticmethod
    def _scores(span: Span) -> Iterator[SpanLogprobs]:
        """The pretended log-probability of a target: minus itself. In slices of three."""
        targets = span.targets or Targets(0, ())
        for begin in range(0, len(targets.tokens), 3):
            logprobs = tuple(-float(token) for token in targets.tokens[begin : begin + 3])
            scores = PromptLogprobs(targets.position + begin, logprobs, ((),) * len(logprobs))
            yield SpanLogprobs(span.request, scores)

    def _slots(self, request: int, end: int) -> list[int]:
        size = self.pool.block_tokens
        return [block * size + i for block in self.pool.table(request).blocks for i in range(size)][
            :end
        ]


class Rig:
    """A scheduler and its stages. `run_all` brings each step through at once; `Ring` takes its
    time."""

    def __init__(
        self,
        *,
        blocks: int = 12,
        block_tokens: int = 4,
        stages: int = 1,
        batching: Batching | None = None,
        chunking: Chunking | None = None,
        limits: Limits | None = None,
        eos: frozenset[int] = frozenset(),
        swapping: Swapping | None = None,
        states: int = 0,
        guessing: Guessing | None = None,
        draft: Callable[[DraftAsk], Sequence[int]] = lambda ask: (),
    ) -> None:
        self.batching = batching or Batching(Mode.NO_BUBBLES, 3, 8, 2)
        self.chunking = chunking or Chunking(5, least_tokens=2)
        self.allocator = BlockAllocator(blocks, block_tokens, states)
        self.scheduler = Scheduler(
            self.allocator,
            limits or Limits(48, 100),
            self.batching,
            self.chunking,
            eos,
            swapping,
            guessing,
        )
        self.draft = draft
        """The guesses that a query of the draft returns."""
        self.now_s = 0.0
        swap_blocks = swapping.blocks if swapping is not None else 0
        guess_slots = (guessing.slots if guessing is not None else None) or 0
        self.stages = [
            Stage(blocks, block_tokens, swap_blocks, states, guess_slots) for _ in range(stages)
        ]
        self.steps: list[HeadStep] = []
        self.events: list[HeadEvent] = []

    def submit(
        self, name: str, prompt: list[int], new: int, client: str = "", **options: Any
    ) -> None:
        text = TextStream(
            lambda ids: "".join(f"<{i}>" for i in ids), prompt, options.get("stop_strings", ())
        )
        generation = Generation(tuple(prompt), new, **options)
        self.scheduler.submit(RequestId(name), generation, prompt, text, client=client)

    def cancel(self, name: str) -> bool:
        ended = self.scheduler.cancel(RequestId(name))
        self.events += ended
        return bool(ended)

    def next_step(self) -> HeadStep | None:
        step = self.scheduler.next_step()
        if step is not None:
            self.steps.append(step)
        return step

    def next_sweep(self) -> tuple[HeadStep, ...]:
        steps = self.scheduler.next_sweep()
        self.steps.extend(steps)
        return steps

    def formed_step(self) -> HeadStep:
        """The next step, which there must be."""
        step = self.next_step()
        assert step is not None, "there was nothing to run"
        return step

    def take(self, step: HeadStep | None, timings: tuple[StageTiming, ...] = ()) -> None:
        """Run a step on every stage and give the result to the head, with the given timings of the
        stages."""
        assert step is not None, "there was nothing to run"
        step = self.drafted(step)
        results = [stage.run(step) for stage in self.stages]
        taken = self.scheduler.on_result(
            step.number, replace(results[-1], timings=timings), self.now_s
        )
        self.events += self.scheduler.events(taken)

    def drafted(self, step: HeadStep) -> HeadStep:
        """The step as it runs."""
        if step.asks:
            step = step.with_drafted({ask.request: tuple(self.draft(ask)) for ask in step.asks})
            self.scheduler.drafted(step)
        return step

    def run_all(self) -> None:
        """Whatever is runnable, as many steps in flight as there may be."""
        pipe: deque[HeadStep] = deque()
        while True:
            while steps := self.next_sweep():
                pipe.extend(steps)
            if not pipe and self.scheduler.must_ask:
                self.scheduler.ask()
                continue
            if not pipe:
                return
            self.take(pipe.popleft())

    def tokens(self, name: str) -> list[int]:
        return [
            e.event.token
            for e in self.events
            if isinstance(e.event, Token) and e.request_id == name
        ]

    def ends(self, name: str) -> list[RequestEnd]:
        return [
            e.event for e in self.events if isinstance(e.event, RequestEnd) and e.request_id == name
        ]

    def check_empty(self) -> None:
        """Nothing is left of any request anywhere."""
        assert self.scheduler.idle
        stats = self.scheduler.stats
        assert (stats.running, stats.waiting, stats.steps_in_flight, stats.kv_blocks_used) == (
            0,
            0,
            0,
            0,
        )
        assert stats.kv_blocks_swapped == 0
        assert stats.kv_blocks_cached + stats.kv_blocks_free == self.allocator.count
        assert self.allocator.unpromised == self.allocator.count
        assert len(self.allocator._free_slots) + len(self.allocator._saved) == self.allocator.slots
        assert not self.scheduler._saves
        for stage in self.stages:
            assert (
                stage.pool.bytes_in_use == 0
                and not stage.pool.requests
                and not stage.known
                and not stage.late
            )


class Ring:
    """The stages of a rig as machines of their own: inboxes that hold a window, and a step
    computing at each.

    One thing happens at a time, chosen by dice. A stage takes a step from its inbox, or passes on
    the one it finished if the next inbox has room, or the head takes a result. `stalled` stages do
    nothing.
    """

    def __init__(self, rig: Rig, dice: random.Random) -> None:
        self.rig = rig
        self.dice = dice
        self.window = rig.batching.window
        self.inboxes: list[deque[HeadStep]] = [deque() for _ in rig.stages]
        self.hands: list[HeadStep | None] = [None] * len(rig.stages)
        self.results: dict[int, StepResult] = {}
        self.returned: deque[HeadStep] = deque()
        self.stalled: set[int] = set()

    @property
    def in_flight(self) -> int:
        return (
            sum(map(len, self.inboxes))
            + sum(hand is not None for hand in self.hands)
            + len(self.returned)
        )

    def pump(self) -> None:
        """The head offers its own stage all it may; the inbox has to have room, for the head never
        waits."""
        while (step := self.rig.next_step()) is not None:
            assert len(self.inboxes[0]) < self.window
            self.inboxes[0].append(step)
            assert self.in_flight <= self.window

    def enabled(self) -> list[Callable[[], None]]:
        """All that can happen now."""
        actions: list[Callable[[], None]] = [self._take_back] if self.returned else []
        actions += [self._ask] if self.rig.scheduler.must_ask else []
        for index, hand in enumerate(self.hands):
            if index in self.stalled:
                continue
            if hand is None and self.inboxes[index]:
                actions.append(partial(self._compute, index))
            last = index == len(self.hands) - 1
            if hand is not None and (last or len(self.inboxes[index + 1]) < self.window):
                actions.append(partial(self._pass_on, index))
        return actions

    def happen(self) -> bool:
        """One thing; False when nothing can."""
        actions = self.enabled()
        if actions:
            self.dice.choice(actions)()
        return bool(actions)

    def _compute(self, index: int) -> None:
        step = self.rig.drafted(self.inboxes[index].popleft())
        result = self.rig.stages[index].run(step)
        self.results[step.number] = replace(result)
        self.hands[index] = step

    def _pass_on(self, index: int) -> None:
        step, self.hands[index] = self.hands[index], None
        assert step is not None
        (self.returned if index == len(self.hands) - 1 else self.inboxes[index + 1]).append(step)

    def _ask(self) -> None:
        self.rig.scheduler.ask()
        self.pump()

    def _take_back(self) -> None:
        step = self.returned.popleft()
        self.rig.now_s += self.dice.random() * 0.2
        taken = self.rig.scheduler.on_result(
            step.number, self.results.pop(step.number), self.rig.now_s
        )
        self.rig.events += self.rig.scheduler.events(taken)
        self.pump()
