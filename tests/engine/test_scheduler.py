"""The head's scheduler against a model of the stages that checks every rule of the data plane."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from edgeshard_agent.engine.blocks import BlockAllocator
from edgeshard_agent.engine.scheduler import HeadEvent, HeadStep, Limits, RequestEnd, Scheduler, TokenOut
from edgeshard_agent.engine.text import TextStream
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeshard.errors import AlreadyExistsError, InvalidArgumentError, ResourceExhaustedError
from edgeshard.generation import FinishReason, Generation
from edgeshard.ids import RequestId
from edgeshard.step import SampledToken, StepResult

EOS = 99


def next_token(history: tuple[int, ...]) -> int:
    """The pretended model: a function of everything before, so that a lost or swapped position shows."""
    value = 17
    for token in history:
        value = (value * 31 + token + 1) % 97
    return value


@dataclass
class Stages:
    """What every stage keeps, and the rules it holds the head to. One stands for all, as they all do the same."""

    block_tokens: int = 4
    blocks: int = 12
    owner: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    next_step: int = 0

    def run(self, step: HeadStep) -> StepResult:
        assert step.number == self.next_step
        self.next_step += 1
        for request in step.plan.frees:
            for block in self.tables.pop(request):
                del self.owner[block]
            del self.tokens[request]
        for grant in step.plan.grants:
            table = self.tables.setdefault(grant.request, [])
            assert grant.first_index == len(table)
            for block in grant.blocks:
                assert 0 <= block < self.blocks and block not in self.owner, "a block in use was granted"
                self.owner[block] = grant.request
                table.append(block)
        sampled = []
        given = deque(step.tokens)
        for span in step.plan.spans:
            known = self.tokens.setdefault(span.request, [])
            assert (span.sampling is not None) == (not known), "sampling travels on the first span only"
            assert span.first_position == len(known)
            known += [given.popleft() for _ in range(span.token_count)]
            assert len(known) <= len(self.tables[span.request]) * self.block_tokens, "positions without KV"
            if span.sample:
                sampled.append(SampledToken(span.request, len(known), next_token(tuple(known))))
        assert not given
        return StepResult(tuple(sampled))


def make(
    window: int = 3, chunk: int = 5, waiting: int = 100, blocks: int = 12, eos: frozenset[int] = frozenset()
) -> Scheduler:
    return Scheduler(BlockAllocator(blocks, 4), Limits(window, chunk, 48, waiting), eos)


def submit(scheduler: Scheduler, name: str, prompt: list[int], new: int, **options: object) -> None:
    text = TextStream(lambda ids: "".join(f"<{i}>" for i in ids), prompt)
    scheduler.submit(RequestId(name), Generation(tuple(prompt), new, **options), prompt, text)  # type: ignore[arg-type]


def run_all(scheduler: Scheduler, stages: Stages) -> list[HeadEvent]:
    events: list[HeadEvent] = []
    while (step := scheduler.next_step()) is not None:
        events += scheduler.on_result(step.number, stages.run(step))
    return events


def expected(prompt: list[int], new: int) -> list[int]:
    history = list(prompt)
    for _ in range(new):
        history.append(next_token(tuple(history)))
    return history[len(prompt) :]


def tokens_of(events: list[HeadEvent], name: str) -> list[int]:
    return [e.token.token for e in events if isinstance(e, TokenOut) and e.request_id == name]


def test_one_request_gets_its_tokens_in_order_and_its_kv_back() -> None:
    scheduler, stages = make(), Stages()
    submit(scheduler, "r", [1, 2, 3, 4, 5, 6, 7], 4)
    events = run_all(scheduler, stages)
    assert tokens_of(events, "r") == expected([1, 2, 3, 4, 5, 6, 7], 4)
    assert events[-1] == RequestEnd(RequestId("r"), FinishReason.LENGTH, "")
    assert not stages.owner and scheduler.idle


def test_a_prompts_chunks_do_not_wait_for_each_other() -> None:
    scheduler = make(window=3, chunk=5)
    submit(scheduler, "r", list(range(13)), 1)
    steps = [scheduler.next_step() for _ in range(4)]
    assert [s and [span.sample for span in s.plan.spans] for s in steps] == [[False], [False], [True], None]


def test_requests_take_turns() -> None:
    scheduler = make(window=1)
    stages = Stages()
    for name in ("a", "b"):
        submit(scheduler, name, [1], 3)
    order = [e.request_id for e in run_all(scheduler, stages) if isinstance(e, TokenOut)]
    assert order == ["a", "b", "a", "b", "a", "b"]


def test_the_window_is_never_exceeded() -> None:
    scheduler = make(window=2)
    for name in "abcd":
        submit(scheduler, name, [1], 2)
    assert scheduler.next_step() and scheduler.next_step()
    assert scheduler.next_step() is None


def test_a_cancel_is_a_step_without_tokens() -> None:
    scheduler, stages = make(window=2, chunk=2), Stages()
    submit(scheduler, "r", [1, 2, 3, 4, 5, 6], 4)
    step = scheduler.next_step()
    assert step is not None
    assert scheduler.cancel(RequestId("r")) == [RequestEnd(RequestId("r"), FinishReason.CANCELLED, "")]
    assert scheduler.cancel(RequestId("r")) == []
    scheduler.on_result(step.number, stages.run(step))
    free = scheduler.next_step()
    assert free is not None and free.plan.spans == () and free.tokens == ()
    scheduler.on_result(free.number, stages.run(free))
    assert not stages.owner and scheduler.idle


def test_a_waiting_request_enters_when_the_pool_can_promise_its_worst_case() -> None:
    scheduler, stages = make(blocks=3), Stages(blocks=3)
    submit(scheduler, "a", [1], 7)
    submit(scheduler, "b", [2], 7)
    assert scheduler.active == 1 and scheduler.waiting == 1
    events = run_all(scheduler, stages)
    assert tokens_of(events, "a") == expected([1], 7) and tokens_of(events, "b") == expected([2], 7)


def test_end_of_sequence_ends_unless_ignored() -> None:
    prompt = [1, 2]
    eos = frozenset({expected(prompt, 3)[2]})
    scheduler, stages = make(eos=eos), Stages()
    submit(scheduler, "r", prompt, 8)
    submit(scheduler, "i", prompt, 8, ignore_eos=True)
    events = run_all(scheduler, stages)
    assert len(tokens_of(events, "r")) == 3 and len(tokens_of(events, "i")) == 8
    assert RequestEnd(RequestId("r"), FinishReason.STOP, "") in events


def test_a_taken_over_request_goes_on_where_it_was() -> None:
    prompt, all_tokens = [5, 6, 7], expected([5, 6, 7], 6)
    scheduler, stages = make(), Stages()
    text = TextStream(lambda ids: "", prompt)
    scheduler.submit(RequestId("r"), Generation(tuple(prompt), 6), prompt, text, tuple(all_tokens[:4]))
    assert tokens_of(run_all(scheduler, stages), "r") == all_tokens[4:]


def test_refusals_are_typed_and_change_nothing() -> None:
    scheduler = make(waiting=1, blocks=6)
    with pytest.raises(InvalidArgumentError) as too_long:
        submit(scheduler, "x", [1] * 40, 9)
    assert too_long.value.reason == "CONTEXT_EXCEEDED" and too_long.value.field == "max_new_tokens"
    with pytest.raises(ResourceExhaustedError) as too_big:
        submit(scheduler, "x", [1] * 20, 8)
    assert too_big.value.reason == "KV_POOL_EXHAUSTED"
    submit(scheduler, "a", [1] * 20, 4)  # the whole pool
    with pytest.raises(AlreadyExistsError):
        submit(scheduler, "a", [1], 2)
    submit(scheduler, "b", [1], 2)
    with pytest.raises(ResourceExhaustedError) as full:
        submit(scheduler, "c", [1], 2)
    assert full.value.reason == "QUEUE_FULL" and full.value.retry_after_s
    events = run_all(scheduler, Stages(blocks=6))
    assert tokens_of(events, "a") == expected([1] * 20, 4) and tokens_of(events, "b") == expected([1], 2)


REQUESTS = st.lists(st.tuples(st.integers(1, 18), st.integers(1, 12)), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(1, 7), REQUESTS, st.data())
def test_any_schedule_gives_every_request_its_own_tokens(  # noqa: C901 (a dice-driven script reads best in one piece)
    window: int, chunk: int, requests: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Random arrivals, cancels and delays of results: whoever is not cancelled gets exactly the reference's tokens."""
    scheduler, stages = make(window, chunk), Stages()
    waiting = [(f"r{i}", [(7 * i + j) % 50 for j in range(n)], new) for i, (n, new) in enumerate(requests)]
    prompts = {name: (prompt, new) for name, prompt, new in waiting}
    pipe: deque[HeadStep] = deque()
    events: list[HeadEvent] = []
    cancelled: set[str] = set()
    for _ in range(2000):
        choice = data.draw(st.sampled_from(["arrive", "step", "return", "step", "return", "cancel"]))
        if choice == "arrive" and waiting:
            name, prompt, new = waiting.pop()
            submit(scheduler, name, prompt, new)
        elif choice == "step" and (step := scheduler.next_step()) is not None:
            pipe.append(step)
            assert len(pipe) <= window
        elif choice == "return" and pipe:
            step = pipe.popleft()
            events += scheduler.on_result(step.number, stages.run(step))
        elif choice == "cancel" and data.draw(st.integers(0, 9)) == 0:
            name = data.draw(st.sampled_from(sorted(prompts)))
            ended = scheduler.cancel(RequestId(name))
            events += ended
            cancelled |= {name} if ended else set()
        elif not waiting and not pipe and scheduler.idle:
            break
        elif not waiting:
            while (step := scheduler.next_step()) is not None:
                pipe.append(step)
    while waiting or pipe or not scheduler.idle:
        for name, prompt, new in waiting:
            submit(scheduler, name, prompt, new)
        waiting = []
        while (step := scheduler.next_step()) is not None:
            pipe.append(step)
        step = pipe.popleft()
        events += scheduler.on_result(step.number, stages.run(step))
    for name, (prompt, new) in prompts.items():
        got = tokens_of(events, name)
        assert got == expected(prompt, new)[: len(got)]
        assert len(got) == new or name in cancelled
        assert sum(isinstance(e, RequestEnd) and e.request_id == name for e in events) == 1
    assert not stages.owner and not stages.tables
