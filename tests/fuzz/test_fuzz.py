"""A short run of every reader of a stranger's bytes: the kept corpus, what hypothesis finds, seeded
mutations."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeshard.domain.errors import InvalidArgumentError
from tests.fuzz import run
from tests.fuzz.mutating import mutated
from tests.fuzz.run import corpus_of, fuzz, tried
from tests.fuzz.targets import TARGETS, Target

MUTATIONS = 400


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_seeds_and_the_kept_corpus_are_answered(target: Target) -> None:
    for data in corpus_of(target):
        outcome, wrong = tried(target, data)
        assert not wrong, (outcome, data[:200], wrong)
    whole = "1 steps" if target.name == "frame" else "taken"
    assert whole in tried(target, target.seeds[0])[0], "the first seed is as it should be"


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_mutated_inputs_are_answered(target: Target) -> None:
    corpus = corpus_of(target)
    for seed in range(MUTATIONS):
        data = mutated(random.Random(seed), corpus, target.words, target.is_json)
        outcome, wrong = tried(target, data)
        assert not wrong, (seed, outcome, wrong)


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_any_bytes_are_answered(target: Target) -> None:
    words = st.sampled_from(target.words) | st.sampled_from(target.seeds)

    @settings(
        max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(pieces=st.lists(words | st.binary(max_size=64), max_size=6))
    def check(pieces: list[bytes]) -> None:
        outcome, wrong = tried(target, b"".join(pieces))
        assert not wrong, (outcome, wrong)

    check()


def reader(data: bytes) -> str | None:
    """One that is wrong in every way there is."""
    if b"slow" in data:
        sum(i * i for i in range(1_000_000))
    if b"large" in data:
        return str(len(bytearray(200 << 20)))
    if b"crash" in data:
        raise KeyError("crash")
    if b"long" in data:
        error = InvalidArgumentError("x", field="x")
        error.message = "x" * 10_000
        raise error
    raise InvalidArgumentError("no", field="data")


BROKEN = Target("broken", reader, (b"x",))


@pytest.mark.parametrize(
    ("data", "words"), [(b"crash", "KeyError"), (b"long", "10000 characters"), (b"slow", "took")]
)
def test_what_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch, data: bytes, words: str) -> None:
    monkeypatch.setattr(run, "SLOW_S", 0.01)
    assert words in tried(BROKEN, data)[1]
    assert tried(BROKEN, b"x")[1] == ""


def test_growth_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([0, run.GROWTH_BYTES + 1])
    monkeypatch.setattr(run, "_peak_bytes", lambda: next(peaks))
    assert "grew" in tried(BROKEN, b"x")[1]


def test_a_run_reports_and_keeps_what_it_found(tmp_path: Path) -> None:
    target = Target("broken", reader, (b"x", b"crash"), (b"crash",))
    report = fuzz(target, 1.0, 1, tmp_path, keep=False)
    written = json.loads((tmp_path / "report-broken.json").read_text())
    assert report.inputs == written["inputs"] >= 1 and written["findings"] == report.findings
    assert len(report.findings) == 1 and "KeyError" in report.findings[0]
    (kept,) = [path for path in (tmp_path / "findings" / "broken").iterdir() if not path.suffix]
    assert b"crash" in kept.read_bytes()


def test_mutations_follow_from_their_seed() -> None:
    target = TARGETS["config"]

    def made(seed: int) -> list[bytes]:
        random_ = random.Random(seed)
        return [mutated(random_, target.seeds, target.words, target.is_json) for _ in range(50)]

    assert made(3) == made(3) != made(4)
