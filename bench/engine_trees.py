"""Two checkouts side by side: is this tree's engine slower than another's?

Each tree serves the quick cases of its own `bench.engine` with its own daemons, in its own virtual
environment. Two more cases are one stream after a prompt of 4,096 tokens, and new prompts of 1,024
tokens, in prompt tokens per second. Both sites run all the time, each with one deployment. Together
they take 20 GB of memory; on a machine that runs short of it, the results are meaningless. Nodes
measure themselves before the first case, while the other site rests: the results decide slices and
micro-batches, and an idle node would otherwise measure during a case. Case by case the two take
turns, and who begins changes with every round, so that drift of the machine weighs on both alike. A
ratio is of one round; the median over the rounds is what counts. Beside it stands the ratio of the
best rounds, since what disturbs a machine only ever slows a tree down.

    git worktree add ../before REVISION && make -C ../before setup
    python -m bench.engine_trees ../before --rounds 10 -o FILE          JSON: a row a case
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.engine import measure
from bench.engine_cases import LONG_SPLIT, LONG_WHOLE, QUICK, Case
from bench.engine_site import MODEL, NODES, PinnedSite, prompt_of
from bench.lines import Tree
from bench.sites import profiled, write_rows
from bench.sizes import sized
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.models.dtypes import Quantisation

DEEP_PROMPT, NEW_PROMPT = 4096, 1024


@dataclass(slots=True)
class CaseRow:
    """Tokens per second of a case (prompt tokens if its name starts so), round by round: of the
    other tree (`before`) and of this one (`after`)."""

    case: str
    streams: int
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """This tree's rate over the other's, in each round."""
        return [after / before for before, after in zip(self.before, self.after, strict=True)]

    def report(self) -> dict[str, Any]:
        ratios = sorted(self.ratios)
        best = max(self.after) / max(self.before)
        return asdict(self) | {
            "ratio": statistics.median(ratios),
            "least": ratios[0],
            "most": ratios[-1],
            "best": best,
        }


def compare(before: Tree, after: Tree, rounds: int, wanted: Sequence[str] = ()) -> list[CaseRow]:
    """The quick cases that both trees have, or those `wanted` ("NAME xSTREAMS"), `rounds` times in
    turns."""
    theirs, ours = (
        {(name, streams): index for index, (name, streams) in enumerate(t.receive())}
        for t in (before, after)
    )
    if theirs.keys() ^ ours.keys():
        print(
            f"in one tree only: {sorted(theirs.keys() ^ ours.keys())}", file=sys.stderr, flush=True
        )
    rows = [
        CaseRow(*case)
        for case in sorted(theirs)
        if case in ours and (not wanted or f"{case[0]} x{case[1]}" in wanted)
    ]
    if not rows:
        raise RuntimeError(
            "none of the cases that both trees have is wanted: "
            f"{sorted(theirs.keys() & ours.keys())}"
        )
    for row in rows:
        case = row.case, row.streams
        for number in range(rounds):
            turns = [(before, theirs[case], row.before), (after, ours[case], row.after)]
            for tree, index, rates in turns if number % 2 == 0 else reversed(turns):
                rates.append(float(tree.ask(index)))
            print(
                f"{number + 1}/{rounds} {row.case} x{row.streams}: {row.ratios[-1]:.3f}",
                file=sys.stderr,
                flush=True,
            )
    return rows


async def work() -> None:
    """A worker: the site of this process's tree, at the command of standard input."""
    decoding = (*QUICK.cases, Case(LONG_WHOLE, 1, DEEP_PROMPT))
    prompts = (LONG_WHOLE, LONG_SPLIT)
    names = [
        *((case.setup.name, case.streams) for case in decoding),
        *((f"prompt {s.name}", 1) for s in prompts),
    ]
    with tempfile.TemporaryDirectory(prefix="edgeshard-bench-tree-") as scratch:
        # Weights are read from blobs: a tree of before may not be able to load all of these from
        # packed files.
        async with PinnedSite(Path(scratch), ("--pack", "never")) as site:
            print(json.dumps(names), flush=True)
            asked = 0
            held = None
            measured = set[Quantisation | None]()
            while line := await asyncio.to_thread(sys.stdin.readline):
                index = int(line)
                setup = (
                    decoding[index].setup
                    if index < len(decoding)
                    else prompts[index - len(decoding)]
                )
                if setup != held:
                    if held is not None:
                        await site.delete(held)
                    held, kept = setup, parse_spec(setup.spec()).quantisation_of(NODES[0])
                    if kept not in measured:
                        measured.add(kept)
                        await profiled(site.client, MODEL, quick=True, quantisation=kept)
                    await site.deploy(setup)
                if index < len(decoding):
                    case = decoding[index]
                    sample, _ = await measure(
                        site, case, sized(max(16, 64 // case.streams), QUICK.new_tokens)
                    )
                    rate = sample.tokens_per_s
                else:
                    asked += (
                        1  # another prompt each time: the blocks of a repeated prompt are cached
                    )
                    prompt = prompt_of(100 + asked, NEW_PROMPT)
                    await site.warm_up(setup)
                    stream = await site.stream(setup, prompt, 1)
                    rate = NEW_PROMPT / (stream.arrivals[0].at_s - stream.began_s)
                print(json.dumps(rate), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "before", type=Path, nargs="?", metavar="DIR", help="the other checkout, set up"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar='"NAME xSTREAMS"',
        help="this one only; repeat",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        asyncio.run(work())
        return 0
    if options.before is None:
        parser.error("name the other checkout")
    with ExitStack() as stack:
        trees = [
            stack.enter_context(Tree(root, "bench.engine_trees"))
            for root in (options.before, Path(__file__).parents[1])
        ]
        report = [row.report() for row in compare(trees[0], trees[1], options.rounds, options.case)]
    for row in report:
        spread = f"{row['least']:.3f} to {row['most']:.3f}, best {row['best']:.3f}"
        print(f"{row['case']} x{row['streams']}: {row['ratio']:.3f} ({spread})")
    write_rows(options.output, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
