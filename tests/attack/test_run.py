"""The runner of attacks reports missed limits, and computes them from figures of a live site."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.attack import run
from tests.attack.live.attacks import NAMES
from tests.attack.live.honest import Timer
from tests.attack.live.verdict import Figures, Gaps, missed

ATTACKERS = ("lying_node", "lying_agent", "costly_bodies", "late_bodies", "middle", "local_user")
QUIET = Figures(
    30.0,
    {"sdk": Gaps(5000, 0.006, 0.05, {}), "http": Gaps(5000, 0.007, 0.06, {})},
    {"kept connection": 0.01, "new connection": 0.03},
    0.2,
    {"coordinator": 10_000_000, "a": 1_000_000},
    1000.0,
    {"tales": (3, 3), "poems": (4, 4)},
)


def with_client(name: str, **changes: object) -> Figures:
    gaps = replace(QUIET.clients[name], **changes)  # type: ignore[arg-type]
    return replace(QUIET, clients={**QUIET.clients, name: gaps})


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        (QUIET, None),
        (with_client("http", worst_s=1.0), None),
        (with_client("http", worst_s=1.01), "http: longest gap 1.01 s"),
        (with_client("http", tokens=0), "http: no token came under the attack"),
        (
            replace(QUIET, calls={**QUIET.calls, "kept connection": 1.1}),
            "operator, kept connection: a call took 1.10 s",
        ),
        (
            replace(QUIET, calls={**QUIET.calls, "new connection": 1.1}),
            "operator, new connection: a call took 1.10 s",
        ),
        (replace(QUIET, joined_s=None), "the honest joiner did not join"),
        (replace(QUIET, joined_s=9.0), None),
        (with_client("sdk", tokens=3501), None),
        (with_client("sdk", tokens=3400), "sdk: 0.68 of the baseline's tokens a second"),
        (
            replace(QUIET, epochs={"tales": (3, 3), "poems": (4, 5)}),
            "poems: its epoch went from 4 to 5",
        ),
        (replace(QUIET, grown_bytes={"coordinator": 200_000_000}), None),
        (replace(QUIET, grown_bytes={"coordinator": 0, "a": 201_000_000}), "a grew by 201 MB"),
        (replace(QUIET, log_bytes_per_minute=1e7), None),
        (replace(QUIET, log_bytes_per_minute=1.1e7), "its log grew by 11.0 MB a minute"),
    ],
)
def test_each_limit_is_missed_by_what_is_beyond_it(figures: Figures, said: str | None) -> None:
    found = missed(figures, replace(QUIET, joined_s=None))
    assert len(found) == (said is not None) and all(text.startswith(said or "") for text in found)


def test_a_promise_that_is_broken_is_missed_and_no_baseline_is_no_pass() -> None:
    assert missed(QUIET, QUIET, ["the log hides it"]) == ["the log hides it"]
    assert missed(QUIET, with_client("sdk", tokens=0, median_s=0.0)) == [
        "sdk: no token came in the baseline"
    ]


def test_a_refused_request_is_waited_for_from_its_beginning() -> None:
    timer = Timer()
    timer.asked(1.0)
    timer.asked(5.0)  # it was refused, and is made again
    timer.arrived(6.0)
    timer.arrived(6.5)
    timer.ended()
    timer.asked(20.0)
    timer.stopped(23.0)
    assert timer.gaps == [5.0, 0.5, 3.0] and timer.came == 2


def test_attacks_are_chosen_by_how_their_names_begin() -> None:
    assert run.chosen([]) == list(NAMES)
    assert run.chosen(["joining", "audit"]) == [
        "audit.drown",
        "joining.hold_turns",
        "joining.guess",
    ]
    with pytest.raises(ValueError, match=r"'nothing'.*audit\.drown"):
        run.chosen(["nothing"])


@pytest.mark.long
@pytest.mark.timing
def test_two_attacks_on_a_live_site_have_figures(tmp_path: Path) -> None:
    rows = asyncio.run(run.run(["audit.drown", "joining.guess"], 3.0, 0.5, tmp_path))
    assert [row.attack for row in rows] == ["audit.drown", "joining.guess"]
    for row in rows:
        for figures in (row.attacked, row.baseline):
            assert all(
                gaps.tokens > 0 and 0 < gaps.median_s <= gaps.worst_s
                for gaps in figures.clients.values()
            )
            assert all(took_s > 0 for took_s in figures.calls.values())
        assert row.attacked.joined_s is not None and row.baseline.joined_s is None
        assert not [why for why in row.missed if "hides" in why or "ended" in why]
    assert rows[0].told["refused"] > 0 and rows[1].told["PERMISSION_DENIED"] > 0


@pytest.mark.long
@pytest.mark.timing
def test_no_attacker_breaks_a_promise_or_harms_another_deployment(tmp_path: Path) -> None:
    """Limits of time are for longer runs on a quiet machine."""
    of_time = ("sdk:", "http:", "operator,", "the honest joiner")
    names = run.chosen(ATTACKERS)
    rows = asyncio.run(run.run(names, 4.0, 0.5, tmp_path))
    assert [row.attack for row in rows] == names
    for row in rows:
        assert row.told, row.attack
        assert not [why for why in row.missed if not why.startswith(of_time)], row.line()
        assert set(row.attacked.epochs) == {"tales", "poems"} and set(row.attacked.grown_bytes) >= {
            "coordinator",
            "a",
        }
