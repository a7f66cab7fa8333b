"""A short run of the fuzzer of bodies, and a check that it finds faults."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from edgeshard.gateway.app import FORMS
from tests.fuzz import bodies
from tests.fuzz.bodies import BodyMaker, fault_of, fuzz
from tests.support.body_exchange import Exchange, Gateway

BODIES = 150
ERROR = Exchange(400, "application/json", b'{"error":{}}', 0.01)


def test_random_bodies_of_all_routes_are_answered(tmp_path: Path) -> None:
    report = fuzz(30.0, 1, tmp_path, most=BODIES)
    assert not report.findings and report.bodies > 0
    assert any(name.endswith(" 200") for name in report.statuses), report.statuses


def test_bodies_follow_from_their_seed() -> None:
    def made(seed: str) -> list[bytes]:
        maker = BodyMaker(random.Random(seed))
        return [maker.body(form) for form in FORMS.values()]

    assert made("1/7") == made("1/7") != made("2/7")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Exchange(500, "application/json", b"{}", 0.0), "status 500"),
        (Exchange(200, "application/json", b'{"a":Infinity}', 0.0), "no JSON"),
        (
            Exchange(200, "text/event-stream", b'data: {"a":NaN}\n\ndata: [DONE]\n\n', 0.0),
            "no JSON",
        ),
        (Exchange(200, "application/x-ndjson", b'{}\n{"a"\n', 0.0), "no JSON"),
        (Exchange(400, "application/json", b'"%b"' % (b"x" * 10_000), 0.0), "an error of"),
        (ERROR, ""),
    ],
)
def test_a_wrong_answer_is_a_finding(answer: Exchange, words: str) -> None:
    found = fault_of(answer)
    assert found.startswith(words) and bool(found) == bool(words)


@pytest.mark.parametrize("wrong", ["exception", "slow"])
def test_what_is_wrong_is_found_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    def post(gateway: Gateway, path: str, body: bytes, headers: dict[str, str]) -> Exchange:
        if wrong == "exception":
            raise KeyError("x")
        return Exchange(200, "application/json", b"{}", bodies.MAX_CALLBACK_S + 0.1)

    monkeypatch.setattr(Gateway, "post", post)
    report = fuzz(30.0, 1, tmp_path, most=2)
    assert len(report.findings) == 2
    assert len(list((tmp_path / "findings" / "bodies").glob("*.txt"))) == 2
    assert ("KeyError" if wrong == "exception" else "a callback of") in report.findings[0]
