"""The head's scheduler: the content of each step, the waiting requests, and the outputs."""

from __future__ import annotations

import random
from typing import Any

import pytest
from edgeshard_agent.scheduler.batching import Batching
from edgeshard_agent.scheduler.chunking import Chunking
from edgeshard_agent.scheduler.scheduler import HeadStep, Limits
from edgeshard_agent.scheduler.text import TextStream

from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.errors import AlreadyExistsError, InvalidArgumentError, ResourceExhaustedError
from edgeshard.domain.ids import RequestId
from edgeshard.domain.requests.generation import FinishReason, Generation, Sampling
from edgeshard.domain.requests.head import HeadEvent, RequestEnd
from tests.support.rig import Alone, Rig

DECODE = 1


def sizes(step: HeadStep | None) -> list[int]:
    """Tokens of each span of a step."""
    assert step is not None
    return [span.token_count for span in step.plan.spans]


def decoding(make_rig: type[Rig], count: int, batching: Batching, **options: Any) -> Rig:
    """A rig whose `count` requests are all ready to decode, with no step in flight."""
    rig = make_rig(
        blocks=200,
        batching=batching,
        limits=Limits(200, 100),
        **{"chunking": Chunking(512), **options},
    )
    for number in range(count):
        rig.submit(f"r{number}", [number + 1], 50)
    rig.take(rig.next_step())
    return rig


def test_one_request_gets_its_tokens_in_order_and_its_kv_back(
    make_rig: type[Rig], alone: Alone
) -> None:
    rig = make_rig()
    rig.submit("r", [1, 2, 3, 4, 5, 6, 7], 4)
    rig.run_all()
    assert rig.tokens("r") == alone([1, 2, 3, 4, 5, 6, 7], 4)
    assert rig.events[-1] == HeadEvent(RequestId("r"), RequestEnd(FinishReason.LENGTH, ""))
    rig.check_empty()


# Micro-batches


def test_requests_ready_at_once_are_spread_over_the_micro_batches(make_rig: type[Rig]) -> None:
    rig = decoding(make_rig, 7, Batching(Mode.NO_BUBBLES, 3, 8, 3))
    assert [sizes(rig.next_step()) for _ in range(3)] == [[DECODE] * 3, [DECODE] * 3, [DECODE]]
    assert rig.next_step() is None


def test_steps_go_in_sweeps_where_stages_stream(make_rig: type[Rig]) -> None:
    """Two sweeps of two are in flight; the next one begins when all of the first is back."""
    rig = decoding(make_rig, 8, Batching(Mode.NO_BUBBLES, 4, 2, 4, fixed=True, sweep=2))
    first, second = rig.next_sweep(), rig.next_sweep()
    assert [[step.plan.following for step in sweep] for sweep in (first, second)] == [
        [1, 0],
        [1, 0],
    ]
    assert [sizes(step) for step in (*first, *second)] == [[DECODE] * 2] * 4
    assert rig.next_sweep() == ()
    rig.take(first[0])
    assert rig.next_sweep() == (), "a stage waits for the whole of a sweep"
    rig.take(first[1])
    assert [sizes(step) for step in rig.next_sweep()] == [[DECODE] * 2] * 2


def test_each_step_of_a_sweep_says_how_many_follow(make_rig: type[Rig]) -> None:
    rig = decoding(make_rig, 8, Batching(Mode.NO_BUBBLES, 4, 2, 4, fixed=True, sweep=4))
    assert [step.plan.following for step in rig.next_sweep()] == [3, 2, 1, 0]


def test_a_sweep_has_as_many_steps_as_there_is_work_for(make_rig: type[Rig], alone: Alone) -> None:
    rig = make_rig(blocks=200, batching=Batching(Mode.NO_BUBBLES, 4, 1, 4, fixed=True, sweep=4))
    for number in range(3):
        rig.submit(f"r{number}", [number + 1, 5], 6)
    rig.run_all()
    for number in range(3):
        assert rig.tokens(f"r{number}") == alone([number + 1, 5], 6)
    rig.check_empty()


def test_few_requests_keep_as_many_stages_busy_as_there_are_requests(make_rig: type[Rig]) -> None:
    rig = decoding(make_rig, 2, Batching(Mode.NO_BUBBLES, 3, 8, 3))
    assert [sizes(rig.next_step()) for _ in range(2)] == [[DECODE], [DECODE]]


def test_with_a_cost_two_may_be_better_off_together(make_rig: type[Rig]) -> None:
    """If a step takes as long as the pipeline whatever it contains, two of them only wait for each
    other."""
    together = Chunking(512, inter_token_s=lambda pieces, in_flight: 1.0 * in_flight)
    rig = decoding(make_rig, 2, Batching(Mode.NO_BUBBLES, 3, 8, 3), chunking=together)
    assert sizes(rig.next_step()) == [DECODE, DECODE]
    rig = decoding(make_rig, 2, Batching(Mode.NO_BUBBLES, 3, 8, 3, fixed=True), chunking=together)
    assert sizes(rig.next_step()) == [DECODE], "the number was asked for"
    apart = Chunking(
        512, inter_token_s=lambda pieces, in_flight: max(3.0, in_flight) + 0.1 * len(pieces)
    )
    rig = decoding(make_rig, 2, Batching(Mode.NO_BUBBLES, 3, 8, 3), chunking=apart)
    assert sizes(rig.next_step()) == [DECODE]


def test_a_micro_batch_is_never_larger_than_placed_whatever_the_cost_says(
    make_rig: type[Rig],
) -> None:
    cost = Chunking(512, inter_token_s=lambda pieces, in_flight: 1.0 * in_flight)
    rig = decoding(make_rig, 7, Batching(Mode.NO_BUBBLES, 3, 3, 3), chunking=cost)
    assert [sizes(rig.next_step()) for _ in range(3)] == [[DECODE] * 3, [DECODE] * 3, [DECODE]]


def test_a_micro_batch_goes_on_the_moment_its_own_tokens_are_back(make_rig: type[Rig]) -> None:
    rig = decoding(make_rig, 4, Batching(Mode.NO_BUBBLES, 2, 8, 2))
    first, second = rig.formed_step(), rig.formed_step()
    assert rig.next_step() is None
    rig.take(first)
    again = rig.formed_step()
    assert [span.request for span in again.plan.spans] == [
        span.request for span in first.plan.spans
    ]
    rig.take(second)
    assert [s.request for s in rig.formed_step().plan.spans] == [
        s.request for s in second.plan.spans
    ]


def test_with_bubbles_the_next_round_begins_when_all_are_back(make_rig: type[Rig]) -> None:
    rig = decoding(make_rig, 4, Batching(Mode.BUBBLES, 2, 8, 2))
    first, second = rig.next_step(), rig.next_step()
    rig.take(first)
    assert rig.next_step() is None
    rig.take(second)
    assert sizes(rig.next_step()) == sizes(rig.next_step()) == [DECODE, DECODE]


def test_sequential_has_one_step_in_flight(make_rig: type[Rig]) -> None:
    rig = decoding(make_rig, 4, Batching(Mode.SEQUENTIAL, 3, 8, 1))
    step = rig.next_step()
    assert sizes(step) == [DECODE] * 4 and rig.next_step() is None
    rig.take(step)
    assert rig.next_step() is not None


def test_micro_batches_even_out_when_requests_leave(make_rig: type[Rig]) -> None:
    """Three of five in one micro-batch end: of the five in the other, one moves over."""
    rig = decoding(make_rig, 10, Batching(Mode.NO_BUBBLES, 2, 8, 2))
    shrunk, other = rig.formed_step(), rig.formed_step()
    for span in shrunk.plan.spans[:3]:
        assert rig.cancel(f"r{span.request}")
    rig.take(shrunk)
    pipe, found = [other, rig.formed_step()], []
    for _ in range(3):
        rig.take(pipe.pop(0))
        pipe.append(rig.formed_step())
        found.append(len(pipe[-1].plan.spans))
    assert found == [4, 3, 4]


def test_one_that_joins_goes_with_the_smaller_micro_batch(make_rig: type[Rig]) -> None:
    rig = decoding(make_rig, 3, Batching(Mode.NO_BUBBLES, 2, 8, 2))
    large, small = rig.formed_step(), rig.formed_step()
    assert (len(large.plan.spans), len(small.plan.spans)) == (2, 1)
    rig.submit("late", [9], 50)
    rig.take(large)
    large = rig.formed_step()
    assert sizes(large) == [DECODE, DECODE, 1] and large.plan.spans[-1].sampling is not None
    rig.take(small)
    small = rig.formed_step()
    rig.take(large)
    large = rig.formed_step()
    assert sizes(large) == [DECODE, DECODE]
    rig.take(small)
    assert sizes(rig.next_step()) == [DECODE, DECODE]


def test_no_more_requests_run_than_there_are_places(make_rig: type[Rig]) -> None:
    rig = decoding(make_rig, 9, Batching(Mode.NO_BUBBLES, 2, 3, 2))
    stats = rig.scheduler.stats
    assert (stats.running, stats.waiting) == (6, 3)


# Prompts


def test_a_prompts_chunks_do_not_wait_for_each_other(make_rig: type[Rig]) -> None:
    rig = make_rig(batching=Batching(Mode.NO_BUBBLES, 3, 8, 2), chunking=Chunking(5))
    rig.submit("r", list(range(13)), 1)
    steps = [rig.next_step() for _ in range(4)]
    assert [s and [span.sample for span in s.plan.spans] for s in steps] == [
        [False],
        [False],
        [True],
        None,
    ]


def test_short_prompts_are_composed_until_the_budget_is_full(make_rig: type[Rig]) -> None:
    rig = make_rig(blocks=40, chunking=Chunking(10))
    for name, length in (("a", 4), ("b", 3), ("c", 8)):
        rig.submit(name, list(range(length)), 1)
    assert sizes(rig.next_step()) == [4, 3, 3]
    assert sizes(rig.next_step()) == [5]


def test_decodes_come_first_and_the_rest_of_the_budget_is_the_prompts(make_rig: type[Rig]) -> None:
    rig = decoding(make_rig, 3, Batching(Mode.NO_BUBBLES, 1, 8, 1), chunking=Chunking(10))
    rig.submit("long", list(range(40)), 2)
    for _ in range(5):
        step = rig.formed_step()
        assert sizes(step) == [DECODE] * 3 + [7] and step.plan.token_count == 10
        rig.take(step)


def test_places_in_the_window_that_decodes_leave_go_to_prompts(make_rig: type[Rig]) -> None:
    """One decode cannot keep two stages busy; a prompt's chunks can."""
    rig = decoding(make_rig, 1, Batching(Mode.NO_BUBBLES, 2, 8, 2), chunking=Chunking(10))
    rig.submit("long", list(range(60)), 2)
    assert sizes(rig.next_step()) == [DECODE, 9]
    assert sizes(rig.next_step()) == [10]


@pytest.mark.parametrize(("window", "most"), [(1, 49), (2, 25)])
def test_chunks_grow_to_what_the_promised_latency_allows(
    make_rig: type[Rig], window: int, most: int
) -> None:
    chunking = Chunking(
        512,
        least_tokens=4,
        max_inter_token_latency_s=0.5,
        inter_token_s=lambda pieces, in_flight: (
            in_flight * sum(0.01 * count for _, count in pieces)
        ),
    )
    rig = decoding(make_rig, 1, Batching(Mode.NO_BUBBLES, window, 8, 1), chunking=chunking)
    rig.submit("long", [i % 50 for i in range(150)], 2)
    rig.run_all()
    chunks = [
        span.token_count for step in rig.steps for span in step.plan.spans if span.request == 1
    ]
    assert chunks[:4] == [4, 8, 16, min(32, most)] and most in chunks
    assert max(step.plan.token_count for step in rig.steps) <= 50 // window


def test_prompts_come_through_though_the_decodes_alone_break_the_promise(
    make_rig: type[Rig],
) -> None:
    chunking = Chunking(
        512,
        least_tokens=4,
        max_inter_token_latency_s=0.5,
        inter_token_s=lambda pieces, in_flight: 1.0,
    )
    rig = decoding(make_rig, 2, Batching(Mode.NO_BUBBLES, 1, 8, 1), chunking=chunking)
    rig.submit("a", list(range(10)), 2)
    rig.submit("b", list(range(10)), 2)
    assert sizes(rig.next_step()) == [DECODE, DECODE, 4]


def test_one_chunk_a_step_goes_beyond_the_promise_though_prompts_are_of_one_token(
    make_rig: type[Rig],
) -> None:
    chunking = Chunking(
        512, max_inter_token_latency_s=0.5, inter_token_s=lambda pieces, in_flight: 1.0
    )
    rig = decoding(make_rig, 2, Batching(Mode.NO_BUBBLES, 1, 8, 1), chunking=chunking)
    for name in "abc":
        rig.submit(name, [1], 2)
    assert sizes(rig.next_step()) == [DECODE, DECODE, 1]


def test_prompts_come_through_though_decodes_fill_the_budget(
    make_rig: type[Rig], alone: Alone
) -> None:
    """As over a slow link, for which a step's budget is smaller than a micro-batch."""
    rig = decoding(
        make_rig, 6, Batching(Mode.NO_BUBBLES, 1, 8, 1), chunking=Chunking(6, least_tokens=4)
    )
    for name in ("a", "b"):
        rig.submit(name, list(range(10)), 2)
    assert sizes(rig.next_step()) == [DECODE] * 6 + [3], "half a budget, of one prompt"
    rig.take(rig.steps[-1])
    rig.run_all()
    assert rig.tokens("a") == rig.tokens("b") == alone(list(range(10)), 2)


def test_a_prompt_that_nobody_waits_behind_is_not_held_to_the_promise(make_rig: type[Rig]) -> None:
    chunking = Chunking(
        64, max_inter_token_latency_s=0.5, inter_token_s=lambda pieces, in_flight: 1.0
    )
    rig = make_rig(blocks=40, chunking=chunking)
    rig.submit("r", list(range(40)), 2)
    assert sizes(rig.next_step()) == [40]


def test_slices_that_were_given_are_used_while_nobody_decodes(
    make_rig: type[Rig], alone: Alone
) -> None:
    chunking = Chunking(9, max_step_tokens=40, slices=lambda length: (length - 20, 8, 12))
    rig = make_rig(blocks=40, batching=Batching(Mode.NO_BUBBLES, 3, 8, 2), chunking=chunking)
    prompt = [i % 7 for i in range(30)]
    rig.submit("r", prompt, 3)
    steps = [rig.next_step() for _ in range(3)]
    assert [sizes(step) for step in steps] == [[10], [8], [12]]
    for step in steps:
        rig.take(step)
    rig.submit("second", prompt, 3)
    assert sizes(rig.next_step()) == [DECODE, 8], "now somebody waits"
    rig.take(rig.steps[-1])
    rig.run_all()
    assert rig.tokens("r") == rig.tokens("second") == alone(prompt, 3)


@pytest.mark.parametrize("window", [1, 2, 4])
def test_no_decode_misses_a_step_and_no_step_exceeds_the_budget(
    make_rig: type[Rig], window: int
) -> None:
    """A long prompt among decodes: each stream continues as soon as its token has returned."""
    rig = decoding(
        make_rig, 6, Batching(Mode.NO_BUBBLES, window, 8, min(2, window)), chunking=Chunking(16)
    )
    rig.submit("long", [i % 50 for i in range(150)], 2)
    pipe = []
    while rig.scheduler.stats.prompt_tokens < 6 + 150:
        while (step := rig.next_step()) is not None:
            pipe.append(step)
            assert step.plan.token_count <= 16
        step = pipe.pop(0)
        rig.take(step)
        decoded = [s.request for s in step.plan.spans if s.token_count == DECODE]
        following = rig.formed_step()
        pipe.append(following)
        assert decoded == [s.request for s in following.plan.spans if s.token_count == DECODE]


# Ends


def test_the_window_is_never_exceeded(make_rig: type[Rig]) -> None:
    rig = make_rig(batching=Batching(Mode.NO_BUBBLES, 2, 8, 2), chunking=Chunking(1))
    for name in "abcd":
        rig.submit(name, [1], 2)
    assert rig.next_step() and rig.next_step()
    assert rig.next_step() is None


def test_a_cancel_is_a_step_without_tokens(make_rig: type[Rig]) -> None:
    rig = make_rig(batching=Batching(Mode.NO_BUBBLES, 2, 8, 2), chunking=Chunking(2))
    rig.submit("r", [1, 2, 3, 4, 5, 6], 4)
    step = rig.next_step()
    assert rig.cancel("r") and not rig.cancel("r")
    rig.take(step)
    free = rig.formed_step()
    assert free.plan.spans == () and free.tokens == ()
    rig.take(free)
    assert rig.ends("r") == [RequestEnd(FinishReason.CANCELLED, "")]
    rig.check_empty()


def test_a_waiting_request_enters_when_the_pool_can_promise_its_worst_case(
    make_rig: type[Rig], alone: Alone
) -> None:
    rig = make_rig(blocks=3)
    rig.submit("a", [1], 7)
    rig.submit("b", [2], 7)
    stats = rig.scheduler.stats
    assert (stats.running, stats.waiting) == (1, 1)
    rig.run_all()
    assert rig.tokens("a") == alone([1], 7) and rig.tokens("b") == alone([2], 7)


def test_end_of_sequence_ends_unless_ignored(make_rig: type[Rig], alone: Alone) -> None:
    prompt = [1, 2]
    rig = make_rig(eos=frozenset({alone(prompt, 3)[2]}))
    rig.submit("r", prompt, 8)
    rig.submit("i", prompt, 8, ignore_eos=True)
    rig.run_all()
    assert len(rig.tokens("r")) == 3 and len(rig.tokens("i")) == 8
    assert rig.ends("r") == [RequestEnd(FinishReason.STOP, "")]


def test_a_taken_over_request_goes_on_where_it_was(make_rig: type[Rig], alone: Alone) -> None:
    prompt, all_tokens = [5, 6, 7], alone([5, 6, 7], 6)
    rig = make_rig()
    text = TextStream(lambda ids: "", prompt)
    rig.scheduler.submit(
        RequestId("r"), Generation(tuple(prompt), 6), prompt, text, tuple(all_tokens[:4])
    )
    rig.run_all()
    assert rig.tokens("r") == all_tokens[4:]


@pytest.mark.parametrize(
    ("emitted", "options", "reason"),
    [
        ((3, 4), {}, FinishReason.LENGTH),
        ((9,), {}, FinishReason.STOP),
        ((9,), {"ignore_eos": True}, None),
        ((5,), {"stop_tokens": (5,)}, FinishReason.STOP),
        ((5,), {"stop_strings": ("<5>",)}, FinishReason.STOP),
        ((4,), {"stop_strings": ("<5>",)}, None),
    ],
)
def test_a_taken_over_request_that_has_its_end_already_runs_nothing(
    make_rig: type[Rig],
    emitted: tuple[int, ...],
    options: dict[str, Any],
    reason: FinishReason | None,
) -> None:
    """The lost head may have sent the last token, and no coordinator received the reason of the
    end."""
    rig = make_rig(eos=frozenset({9}))
    generation = Generation((1,), 2, **options)
    text = TextStream(lambda ids: "".join(f"<{i}>" for i in ids), [1], generation.stop_strings)
    for token in emitted:
        text.push(token)
    end = rig.scheduler.submit(RequestId("x"), generation, [1], text, emitted, resumed=True)
    assert (end.reason if end is not None else None) == reason
    assert rig.scheduler.idle == (reason is not None)


def test_refusals_are_typed_and_change_nothing(make_rig: type[Rig], alone: Alone) -> None:
    rig = make_rig(blocks=6, limits=Limits(48, 1))
    with pytest.raises(InvalidArgumentError) as too_long:
        rig.submit("x", [1] * 40, 9)
    assert too_long.value.reason == "CONTEXT_EXCEEDED" and too_long.value.field == "max_new_tokens"
    with pytest.raises(ResourceExhaustedError) as too_big:
        rig.submit("x", [1] * 20, 8)
    assert too_big.value.reason == "KV_POOL_EXHAUSTED"
    rig.submit("a", [1] * 20, 4)  # the whole pool
    with pytest.raises(AlreadyExistsError):
        rig.submit("a", [1], 2)
    rig.submit("b", [1], 2)
    with pytest.raises(ResourceExhaustedError) as full:
        rig.submit("c", [1], 2)
    assert full.value.reason == "QUEUE_FULL" and full.value.retry_after_s
    rig.run_all()
    assert rig.tokens("a") == alone([1] * 20, 4) and rig.tokens("b") == alone([1], 2)
    rig.check_empty()


@pytest.mark.parametrize("field", ["window", "micro_batch", "micro_batches"])
def test_a_batching_of_nothing_is_refused_by_name(field: str) -> None:
    values: dict[str, Any] = {"window": 1, "micro_batch": 1, "micro_batches": 1, field: 0}
    with pytest.raises(InvalidArgumentError) as refused:
        Batching(Mode.NO_BUBBLES, **values)
    assert refused.value.field == field


# Priorities and shares


def test_a_higher_priority_goes_first(make_rig: type[Rig]) -> None:
    rig = make_rig(batching=Batching(Mode.NO_BUBBLES, 1, 1, 1))
    for name, priority in (("running", 0), ("low", -1), ("plain", 0), ("high", 5)):
        rig.submit(name, [1], 2, priority=priority)
    rig.run_all()
    assert [e.request_id for e in rig.events if isinstance(e.event, RequestEnd)] == [
        "running",
        "high",
        "plain",
        "low",
    ]


def test_clients_share_the_prompt_budget_however_many_requests_each_has(
    make_rig: type[Rig],
) -> None:
    rig = make_rig(
        blocks=200,
        batching=Batching(Mode.NO_BUBBLES, 1, 16, 1),
        chunking=Chunking(8),
        limits=Limits(200, 100),
    )
    for number in range(6):
        rig.submit(f"greedy{number}", list(range(48)), 2, client="greedy")
    rig.submit("modest", list(range(48)), 2, client="modest")
    tokens = {"greedy": 0, "modest": 0}
    for _ in range(10):
        step = rig.formed_step()
        for span in step.plan.spans:
            tokens["modest" if span.request == 6 else "greedy"] += span.token_count
        rig.take(step)
    assert tokens == {"greedy": 40, "modest": 40}


def test_a_client_that_comes_late_has_saved_nothing_up(make_rig: type[Rig]) -> None:
    """It begins level with the one that was served all the while, and from then on they take
    turns."""
    rig = make_rig(
        blocks=200,
        batching=Batching(Mode.NO_BUBBLES, 1, 16, 1),
        chunking=Chunking(8),
        limits=Limits(200, 9),
    )
    rig.submit("old", list(range(100)), 2, client="old")
    for _ in range(8):
        rig.take(rig.next_step())
    rig.submit("new", list(range(100)), 2, client="new")
    served = []
    for _ in range(4):
        step = rig.formed_step()
        served += [span.request for span in step.plan.spans]
        rig.take(step)
    assert sorted(served) == [0, 0, 1, 1]


# Overcommit


def overcommitted(make_rig: type[Rig], blocks: int, **options: Any) -> Rig:
    return make_rig(
        blocks=blocks, limits=Limits(48, 100, overcommit=True), chunking=Chunking(16),
        batching=Batching(Mode.NO_BUBBLES, 2, 8, 2), **options,
    )  # fmt: skip


def test_overcommit_lets_more_in_and_sets_the_youngest_back(
    make_rig: type[Rig], alone: Alone
) -> None:
    rig = overcommitted(make_rig, 6)
    for number in range(3):
        rig.submit(f"r{number}", [number + 1] * 3, 16)
    assert rig.scheduler.stats.running == 3, (
        "their worst case, 15 blocks, is far more than there is"
    )
    rig.run_all()
    for number in range(3):
        assert rig.tokens(f"r{number}") == alone([number + 1] * 3, 16)
    assert rig.scheduler.stats.preemptions > 0
    assert next(e.request_id for e in rig.events if isinstance(e.event, RequestEnd)) == "r0"
    rig.check_empty()


def test_the_lowest_priority_gives_way_first(make_rig: type[Rig], alone: Alone) -> None:
    rig = overcommitted(make_rig, 6)
    rig.submit("low", [1, 1, 1], 16, priority=-1)
    rig.submit("high", [2, 2, 2], 16)
    rig.run_all()
    assert [e.request_id for e in rig.events if isinstance(e.event, RequestEnd)] == ["high", "low"]
    assert rig.tokens("low") == alone([1, 1, 1], 16)


def test_a_penalty_counts_what_was_generated_before_a_preemption(make_rig: type[Rig]) -> None:
    rig = overcommitted(make_rig, 6)
    for number in range(3):
        rig.submit(f"r{number}", [number + 1] * 3, 16, sampling=Sampling(repetition_penalty=1.3))
    rig.run_all()
    again = [
        s for step in rig.steps for s in step.plan.spans if s.sampling is not None and s.request > 2
    ]
    assert len(again) == rig.scheduler.stats.preemptions > 0
    emitted = [set(rig.tokens(f"r{number}")) | {number + 1} for number in range(3)]
    assert all(any(set(span.seen_tokens) <= tokens for tokens in emitted) for span in again)
    assert any(len(span.seen_tokens) > 1 for span in again)


@pytest.mark.parametrize(
    "sampling", [Sampling(presence_penalty=0.5), Sampling(frequency_penalty=-0.5)]
)
def test_a_penalty_on_the_answer_is_told_the_answer_alone_after_a_preemption(
    make_rig: type[Rig], sampling: Sampling
) -> None:
    rig = overcommitted(make_rig, 6)
    for number in range(3):
        rig.submit(f"r{number}", [number + 1] * 3, 16, sampling=sampling)
    rig.run_all()
    told = [s for step in rig.steps for s in step.plan.spans if s.sampling is not None]
    assert all(not span.seen_tokens for span in told) and all(
        not span.answer_tokens for span in told[:3]
    )
    again = told[3:]
    answers = [tuple(rig.tokens(f"r{number}")) for number in range(3)]
    assert len(again) == rig.scheduler.stats.preemptions > 0
    assert all(len(span.answer_tokens) + 3 == span.end_position for span in again if span.sample)
    assert all(
        any(answer[: len(s.answer_tokens)] == s.answer_tokens for answer in answers) for s in again
    )
    assert max(len(span.answer_tokens) for span in again) > 1


def test_without_overcommit_nobody_is_set_back(make_rig: type[Rig]) -> None:
    rig = make_rig(blocks=6)
    for number in range(3):
        rig.submit(f"r{number}", [number + 1] * 3, 16)
    assert rig.scheduler.stats.running == 1
    rig.run_all()
    assert rig.scheduler.stats.preemptions == 0


# Prefix cache


def caching(make_rig: type[Rig], **options: Any) -> Rig:
    return make_rig(
        blocks=40, limits=Limits(48, 100, prefix_cache=True), chunking=Chunking(32), **options
    )


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def test_an_equal_beginning_is_run_once(make_rig: type[Rig], alone: Alone) -> None:
    rig = caching(make_rig)
    rig.submit("first", PROMPT, 3)
    rig.run_all()
    rig.submit("second", [*PROMPT[:8], 7, 7], 3)
    rig.run_all()
    spans = [span for step in rig.steps for span in step.plan.spans if span.request == 1]
    assert spans[0].first_position == 8 and spans[0].token_count == 2
    assert rig.tokens("second") == alone([*PROMPT[:8], 7, 7], 3)
    assert rig.scheduler.stats.prefix_hit_tokens == 8
    rig.check_empty()


def test_a_beginning_still_at_work_is_shared(make_rig: type[Rig], alone: Alone) -> None:
    rig = caching(make_rig)
    rig.submit("first", PROMPT, 20)
    rig.take(rig.next_step())
    rig.submit("second", PROMPT, 20)
    assert rig.scheduler.stats.prefix_hit_tokens == 8
    rig.run_all()
    assert rig.tokens("first") == rig.tokens("second") == alone(PROMPT, 20)
    rig.check_empty()


def test_the_last_position_of_a_prompt_is_run_though_all_of_it_is_known(
    make_rig: type[Rig], alone: Alone
) -> None:
    rig = caching(make_rig)
    for name in ("first", "second"):
        rig.submit(name, PROMPT[:8], 3)
        rig.run_all()
    assert rig.scheduler.stats.prefix_hit_tokens == 4
    assert rig.tokens("second") == alone(PROMPT[:8], 3)


def test_what_was_generated_is_a_beginning_too(make_rig: type[Rig], alone: Alone) -> None:
    """The next turn of a conversation."""
    rig = caching(make_rig)
    rig.submit("turn one", PROMPT, 8)
    rig.run_all()
    conversation = [*PROMPT, *rig.tokens("turn one"), 11, 12]
    rig.submit("turn two", conversation, 4)
    rig.run_all()
    assert rig.scheduler.stats.prefix_hit_tokens == 16
    assert rig.tokens("turn two") == alone(conversation, 4)


def test_clients_share_nothing(make_rig: type[Rig]) -> None:
    rig = caching(make_rig)
    rig.submit("first", PROMPT, 3, client="a")
    rig.run_all()
    rig.submit("second", PROMPT, 3, client="b")
    rig.run_all()
    assert rig.scheduler.stats.prefix_hit_tokens == 0


def test_nothing_is_shared_unless_asked_for(make_rig: type[Rig]) -> None:
    rig = make_rig(blocks=40)
    for name in ("first", "second"):
        rig.submit(name, PROMPT, 3)
        rig.run_all()
    stats = rig.scheduler.stats
    assert stats.prefix_hit_tokens == 0 and stats.kv_blocks_cached == 0


def test_cached_blocks_give_way_to_requests(make_rig: type[Rig], alone: Alone) -> None:
    rig = make_rig(blocks=8, limits=Limits(32, 100, prefix_cache=True), chunking=Chunking(32))
    dice = random.Random(5)
    for number in range(12):
        prompt = [dice.randrange(50) for _ in range(20)]
        rig.submit(f"r{number}", prompt, 8)
        rig.run_all()
        assert rig.tokens(f"r{number}") == alone(prompt, 8)
    assert rig.scheduler.stats.kv_blocks_cached > 0
    rig.check_empty()
