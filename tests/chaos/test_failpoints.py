"""A failpoint acts in its place and no other, once, and leaves its mark before it does."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgeshard.domain.requests.step import Span
from tests.chaos import failpoints
from tests.chaos.failpoints import Action, Failpoint, Moment, Place, Trap
from tests.chaos.hooks import replace_method
from tests.support.nursery import PATHS

DECODE = Moment(Place.BEFORE_COMPUTE, 5, (Span(1, 20, 1, True),))
CHUNK = Moment(Place.BEFORE_COMPUTE, 2, (Span(1, 64, 32),))


@pytest.mark.parametrize(
    ("fields", "moment", "matches"),
    [
        ({}, DECODE, True),
        ({}, Moment(Place.AFTER_COMPUTE, 5, DECODE.spans), False),
        ({}, Moment(Place.BEFORE_COMPUTE, 5), False),
        ({"step": 5}, DECODE, True),
        ({"step": 4}, DECODE, False),
        ({"position": 20}, DECODE, True),
        ({"position": 21}, DECODE, False),
        ({"position": 64}, CHUNK, True),
        ({"position": 95}, CHUNK, True),
        ({"position": 96}, CHUNK, False),
        (
            {"place": Place.BEFORE_SAVE, "what": "a->b"},
            Moment(Place.BEFORE_SAVE, what="a->b"),
            True,
        ),
        (
            {"place": Place.BEFORE_SAVE, "what": "a->b"},
            Moment(Place.BEFORE_SAVE, what="b->c"),
            False,
        ),
        ({"place": Place.BEFORE_LOAD}, Moment(Place.BEFORE_LOAD), True),
    ],
)
def test_a_failpoint_matches_what_it_asks_for(
    fields: dict[str, object], moment: Moment, matches: bool
) -> None:
    values: dict[str, object] = {"id": "f", "place": Place.BEFORE_COMPUTE, **fields}
    assert Failpoint(**values).matches(moment) is matches  # type: ignore[arg-type]


def test_it_acts_at_its_time_once_and_leaves_a_mark(tmp_path: Path) -> None:
    trap = Trap(tmp_path, "a")
    point = Failpoint("f", Place.BEFORE_COMPUTE, position=20, time=3, action=Action.SLEEP)
    trap.hit(DECODE)
    failpoints.arm(tmp_path, "a", [point])
    for count in range(1, 6):
        trap.hit(DECODE)
        trap.hit(CHUNK)
        assert ("f" in failpoints.marks(tmp_path)) == (count >= 3)
    assert failpoints.marks(tmp_path)["f"].step == DECODE.step
    assert len((tmp_path / "marks").read_text().splitlines()) == 1


def test_arming_anew_counts_anew_and_disarming_ends_it(tmp_path: Path) -> None:
    trap = Trap(tmp_path, "a")
    failpoints.arm(
        tmp_path, "a", [Failpoint("f", Place.BEFORE_COMPUTE, time=2, action=Action.SLEEP)]
    )
    trap.hit(DECODE)
    failpoints.arm(
        tmp_path, "a", [Failpoint("g", Place.BEFORE_COMPUTE, time=2, action=Action.SLEEP)]
    )
    trap.hit(DECODE)
    assert not failpoints.marks(tmp_path)
    failpoints.disarm(tmp_path, "a")
    trap.hit(DECODE)
    assert not failpoints.marks(tmp_path)


def test_only_its_own_process_acts_and_not_again_when_it_is_back(tmp_path: Path) -> None:
    failpoints.arm(tmp_path, "a", [Failpoint("f", Place.BEFORE_COMPUTE, action=Action.SLEEP)])
    Trap(tmp_path, "b").hit(DECODE)
    assert not failpoints.marks(tmp_path)
    for _ in range(2):
        Trap(tmp_path, "a").hit(DECODE)
    assert len((tmp_path / "marks").read_text().splitlines()) == 1


def test_what_a_call_is_to_suffer_is_left_to_who_serves_it(tmp_path: Path) -> None:
    trap = Trap(tmp_path, "coordinator")
    failpoints.arm(
        tmp_path,
        "coordinator",
        [Failpoint("f", Place.CALL, what="Deploy", action=Action.LOSE_REPLY)],
    )
    assert trap.hit(Moment(Place.CALL, what="DeleteModel")) == []
    assert trap.hit(Moment(Place.CALL, what="Deploy")) == [Action.LOSE_REPLY]
    assert trap.hit(Moment(Place.CALL, what="Deploy")) == []


@pytest.mark.parametrize(
    ("action", "ended_by"), [(Action.KILL, signal.SIGKILL), (Action.HALT, signal.SIGSTOP)]
)
def test_the_mark_is_on_disk_when_the_process_is_gone(
    tmp_path: Path, action: Action, ended_by: signal.Signals
) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.chaos.failpoints import Moment, Place, "
        "Trap\n"
        "Trap(Path(sys.argv[1]), 'a').hit(Moment(Place.BEFORE_LOAD)); print('went on')"
    )
    failpoints.arm(tmp_path, "a", [Failpoint("f", Place.BEFORE_LOAD, action=action)])
    environment = {"PYTHONPATH": ":".join(map(str, PATHS))}
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    if action is Action.HALT:
        deadline = time.monotonic() + 60
        while not failpoints.marks(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.01)
        while Path(f"/proc/{process.pid}/stat").read_text().split()[2] != "T":
            time.sleep(0.01)
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=60)
        assert output == "went on\n" and process.returncode == 0
    else:
        output, _ = process.communicate(timeout=60)
        assert output == "" and process.returncode == -ended_by
    assert failpoints.marks(tmp_path)["f"].pid == process.pid


def test_a_hook_into_a_method_that_is_not_there_is_refused() -> None:
    with pytest.raises(AttributeError, match="no_such_method"):
        replace_method(Trap, "no_such_method", lambda method: method)


def test_every_place_of_the_product_is_still_there() -> None:
    """In a process of its own: the hooks stay in the classes."""
    script = (
        "from pathlib import Path; from tests.chaos.failpoints import Trap\n"
        "from tests.chaos.hooks import cut_prompts, hook_agent, hook_coordinator\n"
        "hook_agent(Trap(Path('.'), 'a')); hook_coordinator(Trap(Path('.'), 'coordinator')); "
        "cut_prompts(32)"
    )
    environment = {"PYTHONPATH": ":".join(map(str, PATHS))}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
