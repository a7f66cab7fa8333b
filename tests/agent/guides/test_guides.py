"""Masks lead to answers that satisfy the guide and continue anywhere from the answer's tokens, and
no guide harms another request.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path as FilePath

import numpy as np
import psutil
import pytest
import torch
from edgeshard_agent.guides import guide_process
from edgeshard_agent.guides.guide_messages import Message, Open, Path, Setup
from edgeshard_agent.guides.guide_process import Matchers
from edgeshard_agent.guides.guides import GRACE_S, Banned, Guided, GuideError, Guides
from edgeshard_agent.model.sampling import Sampler
from tokenizers import Tokenizer

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.generation import GUIDE_LIMIT_BYTES, Guide, GuideKind, Sampling
from edgeshard.domain.requests.step import StepResult

TOKENIZER_FILE = (
    FilePath(__file__).resolve().parents[3] / "edgeshard" / "demo_model" / "tokenizer.json"
)
VOCAB, EOS = 4096, 2
SETUP = Setup(str(TOKENIZER_FILE), VOCAB, (EOS,))
TOKENIZER = Tokenizer.from_file(str(TOKENIZER_FILE))
PATTERN = r"(yes|no), [a-z]{3,12}!?"
REGEX = Guide(GuideKind.REGEX, PATTERN)
SCHEMA = Guide(
    GuideKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {
                "age": {"type": "integer", "minimum": 0, "maximum": 99},
                "kind": {"enum": ["fox", "king"]},
            },
            "required": ["age", "kind"],
            "additionalProperties": False,
        }
    ),
)
EXPONENTIAL = Guide(
    GuideKind.JSON_SCHEMA,
    json.dumps({"allOf": [{"type": "string", "pattern": f".*{number}.*"} for number in range(24)]}),
)
"""The library would take hours for it."""


@pytest.fixture(scope="module")
def guides() -> Iterator[Guides]:
    """As the last stage has them."""
    guides = Guides(SETUP)
    yield guides
    guides.close()


@pytest.fixture(scope="module")
def checks() -> Iterator[Guides]:
    """As the head has them."""
    guides = Guides()
    yield guides
    guides.close()


def allowed(banned: Banned) -> list[int]:
    assert banned.shape == (VOCAB,)
    return [int(token) for token in np.flatnonzero(~banned)]


def walk(guided: Guided, chance: random.Random, most: int = 200) -> list[int]:
    """A random answer that the guide allows, with its end if it ends."""
    answer: list[int] = []
    while len(answer) < most and EOS not in answer:
        answer.append(chance.choice(allowed(guided.banned())))
        guided.advance(answer[-1])
    return answer


def test_whatever_is_drawn_matches_and_ends_only_where_it_may(guides: Guides) -> None:
    chance = random.Random(5)
    for _ in range(20):
        answer = walk(guides.open(REGEX), chance)
        assert answer[-1] == EOS and re.fullmatch(PATTERN, TOKENIZER.decode(answer[:-1]))
        answer = walk(guides.open(SCHEMA), chance)
        value = json.loads(TOKENIZER.decode(answer[:-1]))
        assert 0 <= value["age"] <= 99 and value["kind"] in ("fox", "king") and len(value) == 2


@pytest.mark.parametrize(
    "guide",
    [REGEX, SCHEMA, Guide(GuideKind.JSON_OBJECT), Guide(GuideKind.GRAMMAR, 'start: ("a" "b")+')],
)
def test_a_request_goes_on_from_its_tokens_anywhere(guides: Guides, guide: Guide) -> None:
    guided, chance = guides.open(guide), random.Random(7)
    answer: list[int] = []
    for _ in range(12):
        banned = guided.banned()
        assert np.array_equal(guides.open(guide, answer).banned(), banned)
        choice = chance.choice(allowed(banned))
        if choice == EOS:
            break
        answer.append(choice)
        guided.advance(choice)


@pytest.mark.parametrize(
    "guide", [REGEX, SCHEMA, Guide(GuideKind.GRAMMAR, 'start: "a king" ("b" | "c and d")+')]
)
def test_masks_ahead_of_forced_tokens_are_those_of_each_place(guides: Guides, guide: Guide) -> None:
    """Whether forced tokens are drawn, or others that spell the same text."""
    chance = random.Random(3)
    drawn_forced = 0
    others = 0
    for _ in range(16):
        guided, answer = guides.open(guide, forced=7), list[int]()
        while len(answer) < 60 and EOS not in answer:
            banned = guided.banned()
            assert np.array_equal(guides.open(guide, answer).banned(), banned)
            forced, choices = guided.forced(5.0), allowed(banned)
            assert len(forced) <= 7 and set(forced[:1]) <= set(choices)
            if forced:  # a longer text of them is what all choices begin, or begin with
                text = TOKENIZER.decode(list(forced))
                assert all(
                    text.startswith(TOKENIZER.decode([one])) or one == forced[0] for one in choices
                )
            takes_it = forced and chance.random() < 0.8
            answer.append(forced[0] if takes_it else chance.choice(choices))
            drawn_forced = drawn_forced + bool(takes_it)
            others = others + (bool(forced) and not takes_it)
            guided.advance(answer[-1])
        guided.close()
    assert drawn_forced > 9 and others > 0


def test_a_run_of_forced_tokens_is_asked_for_once(
    guides: Guides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its length counts as it is: of a text of any length, at most a fixed number of tokens is sent
    at a time."""
    asked: list[Path] = []
    ask = Guides._ask

    def noted(guides: Guides, message: Message) -> Path:
        asked.append(ask(guides, message))
        return asked[-1]

    monkeypatch.setattr(Guides, "_ask", noted)
    text = "the king and the queen and the fox and the miller"
    guided = guides.open(Guide(GuideKind.REGEX, text), forced=7)
    answer: list[int] = []
    while not answer or answer[-1] != EOS:
        assert guided.banned().any()
        answer.append((*guided.forced(5.0), EOS)[0])
        guided.advance(answer[-1])
    assert TOKENIZER.decode(answer[:-1]) == text
    assert [len(path.forced) for path in asked][:1] == [7] and len(asked) < 2 + len(answer) / 6


def test_a_text_that_is_dear_to_cut_is_not_cut_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guide_process, "DEAR_S", 0.0)
    matchers = Matchers()
    matchers.answer(SETUP)
    paths = [
        matchers.answer(Open(1, GuideKind.REGEX, "the king", (), 7)),
        matchers.answer(Open(2, GuideKind.REGEX, "x")),
    ]
    assert [path.forced for path in paths if path] == [(), ()]


@pytest.mark.parametrize(
    ("guide", "why"),
    [
        (Guide(GuideKind.REGEX, "(("), "unclosed group"),
        (Guide(GuideKind.GRAMMAR, "start: foo"), 'unknown name: "foo"'),
        (Guide(GuideKind.JSON_SCHEMA, "{"), "it is not JSON"),
        (Guide(GuideKind.JSON_SCHEMA, "[" * 60_000), "it is not JSON"),
        (Guide(GuideKind.JSON_SCHEMA, '{}], "x": [{}'), "it is not JSON"),
        (Guide(GuideKind.JSON_SCHEMA, '{"type": "strin"}'), "Invalid type: strin"),
        (Guide(GuideKind.JSON_SCHEMA, '{"not": {"type": "string"}}'), "not"),
        (Guide(GuideKind.JSON_SCHEMA, '{"$ref": "#"}'), "no text satisfies it"),
        (Guide(GuideKind.JSON_SCHEMA, '{"$ref": "https://example.com/x.json"}'), "example.com"),
        (EXPONENTIAL, "too much time or memory"),
    ],
)
def test_a_guide_that_cannot_be_is_refused_with_the_reason(
    checks: Guides, guide: Guide, why: str
) -> None:
    guide.validate()
    with pytest.raises(InvalidArgumentError, match=re.escape(why)) as refused:
        checks.check(guide).result()
    assert refused.value.field == "guide" and refused.value.reason == "GUIDE_INVALID"
    checks.check(REGEX).result()


def test_a_text_of_the_largest_size_that_recurses_does_no_harm(checks: Guides) -> None:
    """On a thread with an ordinary stack the process would crash."""
    text, number = "start: r0\n", 0
    while len(line := f"r{number:x}:r{number + 1:x}\n") + len(text) < GUIDE_LIMIT_BYTES - 20:
        text += line
        number += 1
    guide = Guide(GuideKind.GRAMMAR, f'{text}r{number:x}:"x"\n')
    guide.validate()
    checks.check(guide).result()


def test_a_guide_that_takes_too_much_ends_and_the_others_go_on(guides: Guides) -> None:
    """Also if lack of memory killed their process."""
    guided = guides.open(REGEX)
    guided.advance(allowed(guided.banned())[0])
    before = guided.banned()
    with pytest.raises(GuideError, match="too much time or memory"):
        guides.open(EXPONENTIAL).banned()
    assert np.array_equal(guides.open(REGEX, guided.answer).banned(), before)
    guided.advance(allowed(before)[0])
    after = allowed(guided.banned())
    (process,) = [
        child
        for child in psutil.Process().children()
        if "edgeshard_agent.guides.guide_process" in child.cmdline()
    ][-1:]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    guided.advance(after[0])
    assert allowed(guided.banned()) == allowed(guides.open(REGEX, guided.answer).banned())


def test_a_tokenizer_that_cannot_be_used_is_an_answer() -> None:
    for tokenizer in ("nowhere", __file__):
        guides = Guides(Setup(tokenizer, VOCAB, (EOS,)))
        with pytest.raises(GuideError, match=r"tokenizer\.json cannot be read"):
            guides.open(REGEX).banned()
        guides.close()


def test_a_guide_changes_its_own_row_alone(guides: Guides) -> None:
    logits = 3 * torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    samplings = [
        Sampling(temperature=0.9, seed=3),
        Sampling(temperature=0.9, seed=3, top_logprobs=20),
        Sampling(),
    ]
    wanted = [(0, 7), (1, 7), (2, 7)]

    def run(guided: dict[int, Guide]) -> tuple[object, ...]:
        sampler = Sampler(VOCAB, guides)
        for request, sampling in enumerate(samplings):
            sampler.open(request, sampling, ())
        for request, guide in guided.items():
            sampler.open_guide(request, guide, ())
        drawn = sampler.draw(logits.clone(), wanted)
        assert not drawn.pending  # this guide has no permission to be late
        return {token.request: token for token in drawn.tokens}, {
            failure.request for failure in drawn.guide_failures
        }

    plain, none = run({})
    assert isinstance(plain, dict) and none == set()
    guided, none = run({1: Guide(GuideKind.REGEX, "a|the")})
    assert isinstance(guided, dict) and none == set()
    assert (guided[0], guided[2]) == (plain[0], plain[2])
    text = TOKENIZER.decode([guided[1].token])
    assert text and ("a".startswith(text) or "the".startswith(text))
    assert 1 <= len(guided[1].top) < 20 and guided[1].token in [
        entry.token for entry in guided[1].top
    ]
    assert sum(np.exp(entry.logprob) for entry in guided[1].top) == pytest.approx(1)
    failed, who = run({1: Guide(GuideKind.JSON_SCHEMA, '{"$ref": "#"}')})
    assert who == {1} and failed == {0: plain[0], 2: plain[2]}


class SlowGuides(Guides):
    """Masks that come when `let` is set."""

    def __init__(self) -> None:
        super().__init__(SETUP)
        self.let = threading.Event()

    def _path_of(self, guided: Guided) -> Path:
        assert self.let.wait(20)
        return super()._path_of(guided)


@pytest.fixture
def slow() -> Iterator[SlowGuides]:
    guides = SlowGuides()
    yield guides
    guides.let.set()
    guides.close()


def drawn_late(sampler: Sampler) -> StepResult:
    """The late result once it is ready: a step without a row of its own is queried repeatedly."""
    until_s = time.monotonic() + 20
    while not (drawn := sampler.draw(None, [])).tokens and not drawn.guide_failures:
        assert time.monotonic() < until_s
        time.sleep(0.005)
    return drawn


def test_a_mask_that_is_not_ready_holds_up_its_own_row_alone(
    guides: Guides, slow: SlowGuides
) -> None:
    """The token comes later, and is the one of a guide that is quick."""
    logits = 3 * torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(5))

    def sampler(of: Guides, party: int) -> Sampler:
        made = Sampler(VOCAB, of)
        for request in range(2):
            made.open(request, Sampling(temperature=0.9, seed=3, top_logprobs=2), ())
        made.open_guide(0, REGEX, (), party)
        return made

    quick, late = sampler(guides, 0), sampler(slow, 7)
    right = {
        token.request: token for token in quick.draw(logits[:2].clone(), [(0, 5), (1, 5)]).tokens
    }
    began_s = time.monotonic()
    drawn = late.draw(logits[:2], [(0, 5), (1, 5)])
    assert (drawn.tokens, drawn.pending) == ((right[1],), (0,)) and time.monotonic() - began_s < 1
    logits[:2] = 0.0  # the stage may use the memory for the next step
    more = late.draw(logits[2:3].clone(), [(1, 6)])
    assert [token.request for token in more.tokens] == [1] and not more.pending
    slow.let.set()
    came = drawn_late(late)
    assert came.tokens == (right[0],) and not came.pending and not late.has_late
    following = logits[3:].clone()
    (expected,) = quick.draw(following.clone(), [(0, 6)]).tokens
    again = late.draw(following, [(0, 6)])
    assert (again if again.tokens else drawn_late(late)).tokens == (expected,)


@pytest.mark.parametrize("how", ["one", "all"])
def test_a_request_that_is_freed_while_its_token_is_late_leaves_nothing(
    slow: SlowGuides, how: str
) -> None:
    sampler = Sampler(VOCAB, slow)
    sampler.open(0, Sampling(), ())
    sampler.open_guide(0, REGEX, (), 7)
    assert sampler.draw(torch.zeros(1, VOCAB), [(0, 5)]).pending == (0,) and sampler.has_late
    sampler.close(0) if how == "one" else sampler.close_all()
    assert not sampler.has_late
    slow.let.set()
    sampler.open(1, Sampling(), ())
    sampler.open_guide(1, REGEX, (), 7)
    drawn = sampler.draw(torch.zeros(1, VOCAB), [(1, 5)])
    assert [token.request for token in (drawn if drawn.tokens else drawn_late(sampler)).tokens] == [
        1
    ]


@pytest.mark.long
def test_a_guide_whose_every_token_is_dear_ends(guides: Guides) -> None:
    """Each of its masks is within the limit of one mask."""
    guided = guides.open(
        Guide(GuideKind.GRAMMAR, "start: a\na: a a a | a a | /[a-zA-Z ,.]/"), party=3
    )
    letters = TOKENIZER.encode("a", add_special_tokens=False).ids
    with pytest.raises(GuideError, match="too much time or memory"):
        for _ in range(200):
            guided.banned()
            guided.advance(letters[-1])
    assert guided.budget.used_s > GRACE_S
    guided.close()
    assert allowed(guides.open(REGEX).banned())


def test_a_check_that_is_no_longer_wanted_is_skipped(checks: Guides) -> None:
    first = checks.check(EXPONENTIAL)
    second = checks.check(Guide(GuideKind.REGEX, "never made"))
    assert second.cancel()
    with pytest.raises(InvalidArgumentError):
        first.result()
    checks.check(REGEX).result(20)


def test_a_model_without_a_tokenizer_has_no_guides() -> None:
    sampler = Sampler(8)
    sampler.open(1, Sampling(), ())
    sampler.open_guide(1, REGEX, ())
    drawn = sampler.draw(torch.zeros(1, 8), [(1, 3)])
    assert drawn.tokens == () and "tokenizer.json" in drawn.guide_failures[0].message
