"""A box that stands still for a moment, or computes a long step, is not given up.

More: `python -m tests.chaos.standstill`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from edgeshard_agent.ops import native_available

from tests.chaos import standstill
from tests.chaos.standstill import LONG_S, SHORT_S

TRIES, STEP_S = "EDGESHARD_CHAOS_PAUSES", "EDGESHARD_CHAOS_STEP_S"
"""Names the environment variables with the number of each pause, and with the seconds of a long step."""

pytestmark = [
    pytest.mark.skipif(not native_available(), reason="torch's operators do not promise the bits"),
    pytest.mark.timeout(900),
]


async def test_a_pause_costs_no_token_and_a_short_one_no_epoch(tmp_path: Path) -> None:
    tries = int(os.environ.get(TRIES, "1"))
    done = await standstill.pauses(tmp_path, [SHORT_S] * tries + [LONG_S] * tries)
    assert [one for one in done if one.problems] == []


@pytest.mark.parametrize("kind", ["emulated", "computed"])
async def test_a_long_step_costs_nothing(tmp_path: Path, kind: str) -> None:
    """Longer than a link may be silent, and than a box that stands still is waited for."""
    step_s = float(os.environ.get(STEP_S, "4"))
    tried = await (standstill.emulated_step if kind == "emulated" else standstill.computed_step)(tmp_path, step_s)
    assert tried.problems == ()
