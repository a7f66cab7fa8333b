"""The pause of a request that loses a node, and its parts.

Each try is a single request on a whole site, and one fault in its middle. A pause is the longest
wait for a token. Its parts come from the coordinator's log, which uses the same clock as the
marks of failpoints.

* `detect`: until the coordinator knows.
* `plan`: until it has decided which nodes get the lost layers.
* `load`: until every stage has its weights.
* `rebuild`: until the client gets its next token. Links, the head, and all earlier tokens run once
  more.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from tests.chaos.failpoints import Action, Place
from tests.chaos.matrix import PROMPT, STAGES, Case, Dtype, Fault, LinkFault, LinkKind
from tests.chaos.site import DEPLOYMENT, ChaosSite
from tests.chaos.trial import Trials
from tests.support.load import Stream
from tests.support.site import COORDINATOR

PARTS = ("detect", "plan", "load", "rebuild")
MILESTONES: tuple[tuple[frozenset[str], Mapping[str, object]], ...] = (
    (frozenset({"node_lost", "link_lost", "service_ended"}), {}),
    (frozenset({"replanned"}), {}),
    (frozenset({"deployment_saved"}), {"phase": "activating"}),
)
"""The end of each part but the last, as the coordinator logs it: the first of these events with
these fields."""
IN_THE_MIDDLE = PROMPT + 9


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to lose a node; `warm` is whether the spare has the lost layers in memory already."""

    name: str
    warm: bool = False

    def case(self, number: int) -> Case:
        """The try of this number: the nodes of all stages take turns."""
        stage = number % STAGES
        if self.name == "stalled link":
            return Case("pauses", Dtype.FP32, links=(LinkFault(stage, LinkKind.STALL, 10),), seed=1)
        action = Action.HALT if self.name == "halted node" else Action.KILL
        return Case(
            "pauses",
            Dtype.FP32,
            (Fault(stage, Place.BEFORE_COMPUTE, IN_THE_MIDDLE, action=action),),
        )


KINDS = (
    Kind("death", warm=True),
    Kind("death"),
    Kind("stalled link", warm=True),
    Kind("halted node", warm=True),
)


@dataclass(frozen=True, slots=True)
class Pause:
    """Seconds in total, and of each part that the log shows."""

    whole_s: float
    parts: Mapping[str, float]
    predicted_s: float | None = None
    """The plan's prediction before, for a node that dies."""


def log_events(lines: Sequence[str]) -> Iterator[tuple[float, Mapping[str, object]]]:
    """(seconds of the wall clock, the event) of each line of a log."""
    for line in lines:
        if line.startswith("{"):
            event = json.loads(line)
            yield datetime.fromisoformat(event["timestamp"]).timestamp(), event


def parts_of(fault_at: float, token_at: float, lines: Sequence[str]) -> dict[str, float]:
    """The parts of a pause that began at `fault_at` and ended at `token_at`, without parts that the
    log does not show.
    """
    events = [(at, event) for at, event in log_events(lines) if fault_at <= at <= token_at]
    ends: list[float] = []
    since = fault_at
    for names, fields in MILESTONES:
        found = [
            at
            for at, event in events
            if at >= since and event["event"] in names and _has(event, fields)
        ]
        if not found:
            return {}
        since = found[0]
        ends.append(since)
    begins = [fault_at, *ends]
    return {
        name: after - before
        for name, before, after in zip(PARTS, begins, [*ends, token_at], strict=True)
    }


def _has(event: Mapping[str, object], fields: Mapping[str, object]) -> bool:
    return all(event.get(name) == value for name, value in fields.items())


def pause_of(stream: Stream, fault_at: float, offset: float, lines: Sequence[str]) -> Pause:
    """The pause of the longest wait for a token; `offset` takes the stream's clock to the wall
    clock."""
    longest = max(range(len(stream.waits_s)), key=lambda number: stream.waits_s[number])
    return Pause(
        stream.waits_s[longest], parts_of(fault_at, stream.times[longest + 1] + offset, lines)
    )


def table(pauses: Mapping[Kind, Sequence[Pause]]) -> str:
    """Medians, a row for each kind."""
    rows = [
        "| loss | spare | tries | pause | worst | predicted | most off | "
        + " | ".join(PARTS)
        + " |"
    ]
    rows.append("| " + "--- | " * (7 + len(PARTS)))
    for kind, measured in pauses.items():
        whole = [pause.whole_s for pause in measured]
        told = [pause.parts for pause in measured if pause.parts]
        parts = [
            f"{statistics.median(part[name] for part in told):.3f} s" if told else ""
            for name in PARTS
        ]
        spare = "warm" if kind.warm else "cold"
        said = [
            (pause.predicted_s, pause.whole_s)
            for pause in measured
            if pause.predicted_s is not None
        ]
        predicted = f"{statistics.median(expected for expected, _ in said):.3f} s" if said else ""
        off = f"{max(abs(expected - was) for expected, was in said):.3f} s" if said else ""
        cells = [
            kind.name,
            spare,
            str(len(measured)),
            f"{statistics.median(whole):.3f} s",
            f"{max(whole):.3f} s",
        ]
        cells += [predicted, off]
        rows.append("| " + " | ".join([*cells, *parts]) + " |")
    return "\n".join(rows)


async def run(tries: int, keep: Path | None, kinds: Sequence[Kind] = KINDS) -> int:
    """Measure and print the table; the exit code is 1 when a try went wrong."""
    measured: dict[Kind, list[Pause]] = {kind: [] for kind in kinds}
    problems: list[str] = []
    with ExitStack() as stack:
        directory = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        for number, kind in enumerate(kinds):
            home = directory / f"pauses-{number}"
            home.mkdir(parents=True)
            async with ChaosSite(home, proxied=kind.name == "stalled link") as site:
                problems += await _measure(site, kind, tries, measured[kind])
    sys.stdout.write(table(measured) + "\n")
    for problem in problems:
        sys.stdout.write(f"FAIL {problem}\n")
    return int(bool(problems))


async def _predicted(site: ChaosSite, case: Case) -> float | None:
    """The coordinator's predicted cost of losing the case's node."""
    outlook = (await site.client.deployment(DEPLOYMENT, outlook=True)).outlook
    assert outlook is not None
    pause = outlook.losses[case.faults[0].at].pause
    return None if pause is None else pause.total_s


async def _measure(site: ChaosSite, kind: Kind, tries: int, into: list[Pause]) -> list[str]:
    """Append the pause of each try; what went wrong."""
    trials, problems = Trials(site, **({"standby": ["auto"]} if kind.warm else {})), []
    log = site.daemons[COORDINATOR].log_path
    for number in range(tries):
        case = kind.case(number)
        await trials.prepare(case)
        predicted_s = await _predicted(site, case) if kind.name == "death" else None
        seen = len(log.read_bytes())
        offset = time.time() - time.monotonic()
        outcome = await trials.run(case)
        problems += [f"{kind.name} {number}: {problem}" for problem in outcome.problems]
        if outcome.problems:
            continue
        lines = log.read_bytes()[seen:].decode().splitlines()
        into.append(
            replace(
                pause_of(outcome.streams[0], outcome.fault_at, offset, lines),
                predicted_s=predicted_s,
            )
        )
        sys.stdout.write(f"{kind.name} {number + 1}/{tries}: {into[-1].whole_s:.3f} s\n")
        sys.stdout.flush()
    return problems
