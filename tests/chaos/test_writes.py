"""A coordinator that is killed around a write loses nothing that it acknowledged, and ends nothing
that runs.

All writes: `python -m tests.chaos.writes`, or EDGESHARD_CHAOS_WRITES=0. Here are some, chosen by a
seed.
"""

from __future__ import annotations

import inspect
import os
import random
import re
from pathlib import Path

import pytest
from edgeshard_agent.ops.native import native_available
from edgeshard_coordinator.control.persistence.persistence import StateStore
from edgeshard_coordinator.core.deployments.transitions import TRANSITIONS

from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase
from tests.chaos import writes
from tests.chaos.failpoints import OF_SAVES
from tests.chaos.hooks import FILES, WRITES
from tests.support.forms import in_form

COUNT = "EDGESHARD_CHAOS_WRITES"
"""Names the environment variable with the number of cases; 0 is all."""
SEED = "EDGESHARD_CHAOS_SEED"
DEPLOYMENTS = {"save", "forget"}
BEFORE_THE_FIRST, BEHIND_THE_LAST = "new->loading", "deleting->gone"


def test_every_way_between_phases_is_written_in_some_case() -> None:
    edges = [write.edge for write in writes.WRITES if write.edge is not None]
    assert sorted(edges) == sorted(TRANSITIONS)
    for write in writes.WRITES:
        if write.edge is not None:
            assert write.what == f"{write.edge[0]}->{TRANSITIONS[write.edge]}"
    assert {BEFORE_THE_FIRST, BEHIND_THE_LAST} <= {write.what for write in writes.WRITES}


def test_whatever_is_written_can_be_hit_and_is() -> None:
    """Methods of the store that change its file while a coordinator runs, and files of the model
    store."""
    changing = {
        name for name, method in vars(StateStore).items() if "_transaction(" in _source(method)
    }
    changing.remove("_next_term")  # before it runs
    assert changing == DEPLOYMENTS | WRITES.keys()
    phases = "|".join(phase.value for phase in Phase)
    others = {
        write.what
        for write in writes.WRITES
        if not re.fullmatch(f"(new|{phases})->(gone|{phases})", write.what)
    }
    assert others == {*WRITES.values(), *FILES}


def test_each_write_is_tried_on_both_sides() -> None:
    names = [write.name(place) for write, place in writes.cases()]
    assert len(names) == len(set(names)) == len(OF_SAVES) * len(writes.WRITES)


@pytest.mark.skipif(not native_available(), reason="torch's operators do not promise the bits")
@pytest.mark.timeout(900)
async def test_a_coordinator_killed_around_a_write_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen, count = list(writes.cases()), int(os.environ.get(COUNT, in_form(1, 6)))
    if count:
        seed = os.environ.get(SEED, "7")
        chosen = sorted(
            random.Random(f"{seed} writes").sample(chosen, count),
            key=lambda case: case[0].name(case[1]),
        )
    outcomes = await writes.run(chosen, tmp_path)
    assert len(outcomes) == len(chosen) and not any(outcome.problems for outcome in outcomes), (
        capsys.readouterr().out
    )


def _source(method: object) -> str:
    return inspect.getsource(method) if inspect.isfunction(method) else ""
