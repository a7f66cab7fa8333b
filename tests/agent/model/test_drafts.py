"""A draft with real stages: the tokens and log-probabilities stay bit for bit, and it draws as the
model would.

The demo model as its own draft never guesses wrong. That holds only if it draws with the same
numbers, reads each token once, cuts wrong guesses, and counts penalties as the model does. If any
of these is missing, a test fails.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from edgeshard_agent.engine.drafter import Drafter
from edgeshard_agent.model.attention.kv import KvMemory
from edgeshard_agent.model.draft_steps import DraftSteps
from edgeshard_agent.model.stage import StageModel
from edgeshard_agent.model.weights.weights import StageWeights
from edgeshard_agent.scheduler.drafting import DraftAsk, Prices
from edgeshard_agent.scheduler.scheduler import SchedulerStats

from bench.quantisation import MODEL
from bench.safetensors_directory import SafetensorsDirectory
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.generation import Generation, Sampling
from edgeshard.domain.requests.step import DRAFT_TOKENS, GuessedTokens, Span, StepPlan
from tests.agent.model.test_guesses import (
    GENERATIONS,
    LIST,
    TALE,
    generation,
    needs_bits,
    run,
    stages,
    tokenizer,
)

DRAFT = MODEL.parents[1] / "bench" / "draft_model"
BLOCKS, PLACES = 96, 3


class Clock:
    """Each reading of it is a fixed number of seconds later."""

    def __init__(self, seconds: float) -> None:
        self._now = 0.0
        self._seconds = seconds

    def __call__(self) -> float:
        self._now += self._seconds
        return self._now


class Free(Prices):
    """Guesses cost nothing."""

    are_known = True

    def __init__(self) -> None:
        super().__init__()
        self.token_s = 1.0

    def drew(self, seconds: float) -> None:
        pass

    def passed(self, guesses: int, tokens: int, seconds: float, drafting_s: float) -> None:
        pass


@cache
def draft_model(name: str) -> StageModel:
    path = MODEL if name == "itself" else DRAFT
    config = json.loads((path / "config.json").read_text())
    layers = LayerRange(0, config["num_hidden_layers"])
    weights = StageWeights.load(
        SafetensorsDirectory(path), config, layers, dtype=DType.BFLOAT16, device="cpu"
    )
    return StageModel.with_kv(weights, KvMemory(DType.BFLOAT16, BLOCKS, 16))


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    draft_model.cache_clear()
    stages.cache_clear()


class Always(Drafter):
    """Makes as many guesses as requested, whatever they cost."""

    def __init__(self, steps: DraftSteps, vocab_size: int = 4096) -> None:
        super().__init__(steps, PLACES, vocab_size)
        self.prices = Free()


class Marred(Always):
    """A draft that proposes every fourth token of `answer` as it is and every fourth one wrong;
    others are its own.

    So some draft tokens are accepted and some rejected, whatever bits the draft computes.
    """

    answer: tuple[int, ...] = ()

    def guess(self, asks: Sequence[DraftAsk]) -> GuessedTokens:
        drafted = super().guess(asks)
        begins = {ask.request: len(ask.tokens) - ask.prompt_count for ask in asks}
        return {
            request: self._marred(begins[request], tokens) for request, tokens in drafted.items()
        }

    def _marred(self, begin: int, drafted: tuple[int, ...]) -> tuple[int, ...]:
        tokens = list(drafted)
        for index, right in enumerate(self.answer[begin : begin + len(tokens)]):
            kind = (begin + index) % 4
            if kind == 1:
                tokens[index] = right
            if kind == 3:
                tokens[index] = right ^ 1
        return tuple(tokens)


def steps_of(name: str, in_native_rows: bool = True) -> DraftSteps:
    model = draft_model(name)
    model.reset()
    steps = DraftSteps(model, PLACES)
    if not in_native_rows:
        steps._rows = None
    return steps


def drafter(name: str, in_native_rows: bool = True) -> Drafter:
    return Always(steps_of(name, in_native_rows))


def compared(
    requests: dict[str, tuple[str, Generation]],
    own: Drafter,
    cuts: tuple[int, ...] = (),
    **options: Any,
) -> tuple[SchedulerStats, SchedulerStats]:
    """The figures without guesses and with a draft, whose answers are the same bit for bit."""
    plain, before = run(requests, False, cuts=cuts, **options)
    guessed, after = run(requests, True, cuts=cuts, drafter=own, **options)
    assert guessed == plain and all(plain.values())
    return before, after


@pytest.mark.one_in(2)
@needs_bits
@pytest.mark.parametrize("cuts", [(), (5,)], ids=["one node", "two nodes"])
@pytest.mark.parametrize("name", GENERATIONS)
def test_no_option_of_a_generation_gets_another_answer(name: str, cuts: tuple[int, ...]) -> None:
    """The draft is another model. Some draft tokens are accepted and some rejected, on every
    processor."""
    requests = {"r": (TALE, generation(**GENERATIONS[name]))}
    plain, _ = run(requests, False)
    own = Marred(steps_of("small"))
    own.answer = tuple(token for token, *_ in plain["r"])
    guessed, stats = run(requests, True, cuts=cuts, drafter=own)
    assert guessed == plain
    assert stats.guesses > stats.right_guesses > 0


@needs_bits
@pytest.mark.parametrize("in_native_rows", [True, False], ids=["native rows", "as a stage"])
@pytest.mark.parametrize("name", ["greedy", "sampled", "penalties", "a penalty on what was there"])
def test_a_draft_that_is_the_model_itself_is_always_right(name: str, in_native_rows: bool) -> None:
    """Also in the middle of right guesses: it cuts nothing, and reads nothing twice."""
    request = {"r": (TALE, generation(**GENERATIONS[name]))}
    before, stats = compared(request, drafter("itself", in_native_rows))
    assert (
        stats.guesses == stats.right_guesses > 0.6 * stats.new_tokens
        and stats.steps < before.steps / 2
    )


@needs_bits
def test_wrong_guesses_leave_no_trace_in_what_the_draft_knows() -> None:
    """Every third guess is spoilt before the step: the others stay right."""

    class Spoilt(Always):
        spoilt = 0

        def guess(self, asks: Sequence[DraftAsk]) -> Any:
            made = {of: list(guesses) for of, guesses in super().guess(asks).items()}
            for guesses in made.values():
                if len(guesses) > 2:
                    guesses[2] ^= 1  # The draft is the model: its own token would be right.
                    self.spoilt += 1
            return {of: tuple(guesses) for of, guesses in made.items()}

    own = Spoilt(steps_of("itself"))
    sampling = Sampling(temperature=0.8, seed=2, logprobs=True)
    request = {"r": (TALE, generation(sampling=sampling, ignore_eos=True))}
    plain, _ = run(request, False)
    guessed, stats = run(request, True, drafter=own)
    assert (
        guessed == plain
        and own.spoilt > 10
        and stats.right_guesses == 2 * own.spoilt + stats.right_guesses % 2
    )


@needs_bits
@pytest.mark.parametrize("scheme", ["int4", "bfloat16, KV int4", "bfloat16 mixture"])
def test_no_format_gets_another_answer(scheme: str) -> None:
    requests = {
        "list": (LIST, generation(sampling=Sampling(logprobs=True))),
        "tale": (TALE, generation(sampling=Sampling(temperature=0.8, seed=1, logprobs=True))),
    }
    _, stats = compared(requests, drafter("small"), (3,), scheme=scheme)
    assert stats.right_guesses > 10


@needs_bits
@pytest.mark.parametrize("swap_blocks", [0, 100])
def test_requests_that_give_way_and_ones_that_are_cancelled_get_their_answers(
    swap_blocks: int,
) -> None:
    requests = {
        f"r{n}": (TALE, generation(sampling=Sampling(temperature=0.9, seed=n), max_new_tokens=90))
        for n in (1, 2, 3)
    }
    plain, _ = run(requests, False, blocks=14, swap_blocks=swap_blocks)
    own = drafter("small")
    guessed, stats = run(requests, True, blocks=14, swap_blocks=swap_blocks, drafter=own)
    assert guessed == plain and stats.preemptions > 0 and stats.right_guesses > 3
    run(requests, True, cancel="r1", drafter=own)


@needs_bits
def test_rows_in_native_calls_have_the_logits_of_a_stage() -> None:
    """The text may be cut anywhere, also if some of it is read again."""
    tokens = text(150)
    pieces = [(0, 128), (128, 130), (130, 131), (129, 133), (133, 134), (120, 150)]
    found = []
    for in_native_rows in (True, False):
        steps = steps_of("small", in_native_rows)
        with torch.inference_mode():
            steps.begin(1)
            found.append(
                [steps.logits(1, first, tokens[first:end]).clone() for first, end in pieces]
            )
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True)) and found[0][0].shape == (
        1,
        4096,
    )


# The data it keeps


def ask(request: int, tokens: Sequence[int], most: int = 3, **options: Any) -> DraftAsk:
    return DraftAsk(request, tuple(tokens), len(tokens), Sampling(**options), most)


def text(count: int) -> list[int]:
    return (tokenizer().encode(TALE) * 40)[:count]


def test_it_reads_a_long_text_over_several_steps_and_then_guesses() -> None:
    own, tokens = drafter("itself"), text(2 * DRAFT_TOKENS + 9)
    assert own.guess([ask(1, tokens)]) == {} == own.guess([ask(1, tokens)])
    guesses = own.guess([ask(1, tokens)])
    assert len(guesses[1]) == 3
    assert own.guess([ask(1, (*tokens, guesses[1][0]))])[1][:2] == guesses[1][1:]


def test_its_memory_is_bounded_whoever_asks() -> None:
    """More requests than places, one after the other and again: the one asked for longest ago makes
    room."""
    own, pool = drafter("small"), draft_model("small").pool
    for request in [1, 2, 3, 4, 5, 1, 5, 4]:
        assert len(own.guess([ask(request, text(20 + request))])[request]) == 3
        assert len(own._known) <= PLACES and pool.requests <= set(range(PLACES))
    four = [ask(n, text(9)) for n in range(10, 14)]
    assert set(own.guess(four)) == {10, 11, 12}
    own.follow(StepPlan(frees=(10, 11), spans=(Span(12, 3, 1),)), ())
    assert set(own._known) == {12}
    assert set(own.guess([ask(12, text(10)), ask(13, text(9))])) == {12, 13}
    own.reset()
    assert not own._known and len(own.guess([ask(1, text(9))])[1]) == 3


def test_a_place_is_empty_for_whoever_gets_it() -> None:
    """Even unread data of a former request is gone."""
    own, pool = drafter("small"), draft_model("small").pool
    for request in range(PLACES):
        own.guess([ask(request, text(60))])
    assert all(arena.keys.any() for arena in (pool.arena(0), pool.arena(1)))
    own.reset()
    for request in range(PLACES):
        own._taken(request)
    assert not any(
        arena.keys.any() or arena.values.any() for arena in (pool.arena(0), pool.arena(1))
    )


def test_a_text_that_its_context_does_not_hold_is_not_guessed() -> None:
    own = drafter("small")
    longest = BLOCKS // PLACES * 16
    tokens = text(longest)
    while not (guesses := own.guess([ask(1, tokens)])):
        pass
    assert len(guesses[1]) == 1
    assert own.guess([ask(1, (*tokens, 5))]) == {}
    assert not own.guess([ask(2, (*tokens, 5))])


def test_a_token_or_a_bias_beyond_its_vocabulary_costs_guesses_and_nothing_else() -> None:
    own = drafter("small")
    assert own.guess(
        [ask(1, [5, 6, 4096]), ask(2, [5, 6], logit_bias=((4100, 1.0), (9, 99.0)))]
    ) == {2: (9, 9, 9)}
    assert own.guess([ask(1, [5, 6, 4096, 7])]) == {}
    small = Always(steps_of("small"), vocab_size=9)
    assert small.guess([ask(1, [5, 6], logit_bias=((9, 99.0),))]) == {}


def test_nothing_is_guessed_that_ends_a_text() -> None:
    own = drafter("small")
    one = DraftAsk(1, (5, 6), 2, Sampling(logit_bias=((9, 99.0),)), 3, frozenset({9}))
    assert own.guess([one]) == {}


def test_where_a_guess_takes_longer_than_the_round_that_it_saves_it_rests() -> None:
    """By this clock a step of the draft takes as long as a round through the pipeline."""
    own, tokens = Drafter(steps_of("itself"), PLACES, 4096, Clock(1.0)), text(20)
    counts = []
    for _ in range(80):
        guesses = own.guess([ask(1, tokens)]).get(1, ())
        counts.append(len(guesses))
        tokens = [*tokens, *(guesses or (3,))]
    assert any(counts[:5]) and sum(map(bool, counts[20:])) < 12
