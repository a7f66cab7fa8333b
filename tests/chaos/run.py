"""Kill the nodes of a site, one in every step of an answer, and see that every client gets the very
tokens of an undisturbed run.

    python -m tests.chaos.run --cases quick|full [--seed N] [--only TEXT] [--table FILE]
        [--keep DIR]

A line for each case, and a last one with the sums. It exits with 1 if a token was changed, lost or
repeated, a request failed, or a failpoint did not act. The option --only takes cases whose name has
the text. The option --table writes the results into the marked part of a document. With --keep the
logs of the processes stay in a directory. `--pauses N` measures how long requests stand still
instead, N times each way (tests/chaos/pauses.py).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.pages import SITE
from edgeshard.domain.errors import EdgeShardError
from tests.chaos import matrix
from tests.chaos.matrix import Case
from tests.chaos.site import ChaosSite
from tests.chaos.trial import Outcome, Trials
from tools.figures import marker, trees_now

BEGIN, END = "<!-- results: written by python -m tests.chaos.run -->", "<!-- end of results -->"


@dataclass(frozen=True, slots=True)
class Options:
    cases: str = "quick"
    seed: int = 1
    only: str = ""
    table: Path | None = None
    keep: Path | None = None
    share: int = 1
    """A quick run has one so-many-th of its cases."""


def chosen(options: Options) -> list[Case]:
    """The cases to run, grouped by site, shape and dtype."""
    cases = (
        matrix.full(options.seed)
        if options.cases == "full"
        else matrix.quick(options.seed, options.share)
    )
    wanted = [case for case in cases if options.only in case.name]
    return sorted(
        wanted,
        key=lambda case: (bool(case.links), case.shape or "", list(matrix.Dtype).index(case.dtype)),
    )


async def run_cases(cases: Sequence[Case], directory: Path) -> tuple[list[Outcome], list[str]]:
    """Each case's outcome, and what else went wrong. A site that does not recover is replaced by a
    new one."""
    outcomes: list[Outcome] = []
    problems: list[str] = []
    for proxied in (False, True):
        group = [case for case in cases if bool(case.links) == proxied]
        sites = 0
        while group:
            sites += 1
            home = directory / f"{'links' if proxied else 'nodes'}-{sites}"
            home.mkdir(parents=True)
            async with ChaosSite(home, proxied=proxied) as site:
                if not site.native:
                    raise SystemExit(
                        "The native kernels are not in use, and no other bits are promised: `make "
                        "setup`."
                    )
                group = await _run_on(Trials(site), group, outcomes, problems, len(cases))
    return outcomes, problems


async def _run_on(
    trials: Trials, cases: Sequence[Case], outcomes: list[Outcome], problems: list[str], total: int
) -> list[Case]:
    """Run cases until the site is broken; those that are left."""
    for number, case in enumerate(cases):
        behind = cases[number + 1 :]
        last = not behind or (behind[0].shape, behind[0].dtype) != (case.shape, case.dtype)
        began = time.monotonic()
        try:
            outcome = await trials.run(case)
            if last:
                problems += [f"after {case.name}: {found}" for found in await trials.nothing_left()]
        except (TimeoutError, EdgeShardError, RuntimeError) as error:
            why = (
                f"the site did not serve undisturbed, before or after: {type(error).__name__}: "
                f"{error}"
            )
            outcomes.append(Outcome(case, (why,), 0, 0, 0.0, time.monotonic() - began))
            say(line(outcomes[-1], len(outcomes), total))
            return list(behind)
        outcomes.append(outcome)
        say(line(outcome, len(outcomes), total))
    return []


def line(outcome: Outcome, number: int, total: int) -> str:
    width = len(str(total))
    verdict = "FAIL" if outcome.problems else "ok"
    text = f"[{number:{width}}/{total}] {verdict:4} {outcome.pause_s:6.2f} s  {outcome.case.name}"
    return "\n".join([text, *(f"    {problem}" for problem in outcome.problems)])


def last_line(outcomes: Sequence[Outcome], problems: Sequence[str], wall_s: float) -> str:
    kills, wrong = sum(o.kills for o in outcomes), sum(o.wrong_tokens for o in outcomes)
    failed = sum(bool(outcome.problems) for outcome in outcomes)
    pauses = [outcome.pause_s for outcome in outcomes if outcome.kills and not outcome.problems]
    pause = (
        f"pause {statistics.median(pauses):.2f} s median, {max(pauses):.2f} s worst"
        if pauses
        else "no pause known"
    )
    return (
        f"{kills} kills in {len(outcomes)} cases, {wrong} wrong tokens, {failed} cases failed"
        f"{f', {len(problems)} leaks' if problems else ''}; {pause}; {wall_s:.0f} s in all"
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """A row for each group and dtype."""
    rows = [
        "| cases | dtype | runs | kills | requests | wrong tokens | failed | median pause | worst "
        "pause |"
    ]
    rows.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    keys = list(dict.fromkeys((outcome.case.group, outcome.case.dtype) for outcome in outcomes))
    for group, dtype in keys:
        own = [o for o in outcomes if (o.case.group, o.case.dtype) == (group, dtype)]
        pauses = [outcome.pause_s for outcome in own]
        rows.append(
            f"| {group} | {dtype} | {len(own)} | {sum(o.kills for o in own)} | "
            f"{sum(len(o.streams) for o in own)} "
            f"| {sum(o.wrong_tokens for o in own)} | {sum(bool(o.problems) for o in own)} "
            f"| {statistics.median(pauses):.2f} s | {max(pauses):.2f} s |"
        )
    return "\n".join(rows)


def write_table(path: Path, text: str) -> None:
    """Put `text` between the document's marks. Raises ValueError when it has none."""
    document = path.read_text()
    begin, end = document.find(BEGIN), document.find(END)
    if not 0 <= begin < end:
        raise ValueError(f"{path} must hold the lines {BEGIN!r} and {END!r}")
    path.write_text(f"{document[: begin + len(BEGIN)]}\n\n{text}\n\n{document[end:]}")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def run(options: Options) -> int:
    """The exit code."""
    cases = chosen(options)
    if not cases:
        say(f"no case's name has {options.only!r}")
        return 1
    say(f"{len(cases)} cases, seed {options.seed}")
    began = time.monotonic()
    with ExitStack() as stack:
        directory = options.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-"))
        )
        outcomes, problems = await run_cases(cases, directory)
    for problem in problems:
        say(f"FAIL {problem}")
    summary = last_line(outcomes, problems, time.monotonic() - began)
    if options.table is not None:
        command = f"python -m tests.chaos.run --cases {options.cases} --seed {options.seed}"
        measured = marker(command, trees_now(SITE))
        write_table(options.table, f"{measured}\n\nBy `{command}`: {summary}.\n\n{table(outcomes)}")
    say(summary)
    return int(bool(problems) or any(outcome.problems for outcome in outcomes))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", choices=("quick", "full"), default="quick")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--pauses", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    if arguments.pauses:
        from tests.chaos import pauses

        sys.exit(asyncio.run(pauses.run(arguments.pauses, arguments.keep)))
    options = Options(
        arguments.cases, arguments.seed, arguments.only, arguments.table, arguments.keep
    )
    sys.exit(asyncio.run(run(options)))


if __name__ == "__main__":
    main()
