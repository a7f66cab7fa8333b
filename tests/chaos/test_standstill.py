"""A node that stands still for a moment, or computes a long step, is not given up; one that stays
so soon is.

More: `python -m tests.chaos.standstill` and `python -m tests.chaos.stops`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from edgeshard_agent.ops.native import native_available

from tests.chaos import standstill, stops
from tests.chaos.standstill import BLIND_S, LONG_S, SHORT_S

TRIES, STEP_S = "EDGESHARD_CHAOS_PAUSES", "EDGESHARD_CHAOS_STEP_S"
"""Names the environment variables with the number of each pause, and with the seconds of a long
step."""

SOON_S = 8.0
"""Until the coordinator gives up a node: 3.0 s, 10 s if no other node watches it."""

pytestmark = [
    pytest.mark.skipif(not native_available(), reason="torch's operators do not promise the bits"),
    pytest.mark.timeout(900),
]


async def test_a_pause_costs_no_token_and_a_short_one_no_epoch(tmp_path: Path) -> None:
    tries = int(os.environ.get(TRIES, "1"))
    done = await standstill.pauses(tmp_path, [SHORT_S] * tries + [LONG_S] * tries)
    assert [one for one in done if one.problems] == []


@pytest.mark.long
async def test_a_coordinator_that_stood_still_for_long_gives_up_nobody(tmp_path: Path) -> None:
    """First its streams stay, then the head has dialled it again, and then all nodes' control
    streams have ended."""
    done = await standstill.pauses(tmp_path, [], [3.0, 8.0, BLIND_S])
    assert [one for one in done if one.problems] == []


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param([1], id="sole node"),
        pytest.param([1, 1, 2, 2, 3, 4], marks=pytest.mark.long, id="any node"),
    ],
)
async def test_a_node_that_stays_still_is_replaced_whatever_it_holds(
    tmp_path: Path, stages: list[int]
) -> None:
    """It is noticed soon. How long its work takes on another node depends on what else the machine
    does."""
    done = await stops.stops(tmp_path, stages, seed=7)
    assert [stop for stop in done if stop.problems or stop.noticed_s > SOON_S] == []


@pytest.mark.parametrize("kind", ["emulated", "computed"])
@pytest.mark.long
async def test_a_long_step_costs_nothing(tmp_path: Path, kind: str) -> None:
    """Longer than a link may be silent, and than a node that stands still is waited for."""
    step_s = float(os.environ.get(STEP_S, "4"))
    tried = await (standstill.emulated_step if kind == "emulated" else standstill.computed_step)(
        tmp_path, step_s
    )
    assert tried.problems == ()
