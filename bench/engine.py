"""The engine under load, on two real agents of one thread and one core each, compared with engines
in use today.

The random Llama of `bench/random_llama.py` is deployed whole on one node and in halves on both, in
every mode, with bf16, int8 and int4 weights. Client streams run through each deployment in turns,
round by round, so that other load of the machine affects all alike. `transformers.generate` (one
thread, one core) takes its turns in the same rounds. So does llama.cpp's RPC backend (two servers
of one thread and one core) if a build is given. A row has the medians over the rounds; see
`bench/engine_streams.py` for how a rate is taken. Client and coordinator have no core of their own:
they share the two with the agents.

    python -m bench.engine [--quick] [--llama-cpp DIR] -o FILE
        JSON: a list of rows
    python -m bench.engine --limit -o FILE
        only what a long prompt does to streams that decode: its row in the place of the one that
        FILE has
    python -m bench.engine_report FILE docs/benchmarks.md
        the page and its plots, of these rows
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeshard_agent.measuring.machine_facts import processor_name
from edgeshard_agent.ops import native
from edgeshard_agent.ops.sources import kernel_set

from bench.engine_cases import FULL, LIMIT_S, LONG_CONTEXT, QUICK, Case, Plan, setups
from bench.engine_kernels import kernels
from bench.engine_limit import measure_limit
from bench.engine_others import others, tell, usable_llama_cpp
from bench.engine_rows import Rows
from bench.engine_site import PinnedSite, Setup
from bench.engine_streams import Sample, sample_of
from bench.pages import with_trees

_TOKENS_AFTER_LONG_PROMPT = 16


async def run(plan: Plan, scratch: Path, llama_cpp: Path | None) -> list[dict[str, Any]]:
    """Every row of the plan; the model's files and the daemons' go into `scratch`."""
    began = time.monotonic()
    async with PinnedSite(scratch) as site:
        if plan.limit:
            # while they are empty: figures measured while stages run are doubtful
            await site.profile()
        await hold(site, setups(plan.cases), ())
        with (
            others(scratch, llama_cpp) as beside,
            kernels(plan.prompt_tokens, plan.new_tokens) as stages,
        ):
            rows = Rows(stages)
            for number in range(plan.rounds):
                round_began = time.monotonic()
                await measure_cases(
                    site, plan.cases, plan.new_tokens, rows, f"{number + 1}/{plan.rounds}"
                )
                await beside.measure(plan, rows)
                await asyncio.to_thread(stages.measure)
                ended = time.monotonic()
                if ended - began + ended - round_began > plan.decoding_s:
                    break
            await hold(site, setups(plan.long_cases), setups(plan.cases))
            for number in range(plan.long_rounds):
                name = f"{number + 1}/{plan.long_rounds}"
                await measure_cases(site, plan.long_cases, _TOKENS_AFTER_LONG_PROMPT, rows, name)
                await beside.measure_long(plan.longest_prompt, _TOKENS_AFTER_LONG_PROMPT, rows)
        report = rows.report()
        if plan.limit:
            await hold(site, (), setups(plan.long_cases))
            report.append(await measure_limit(site, LIMIT_S, LONG_CONTEXT))
        return report


async def run_limit(scratch: Path) -> dict[str, Any]:
    """The row of the long prompt among streams, alone."""
    async with PinnedSite(scratch) as site:
        await site.profile()
        return await measure_limit(site, LIMIT_S, LONG_CONTEXT)


async def hold(site: PinnedSite, wanted: Sequence[Setup], held: Sequence[Setup]) -> None:
    """Have these deployments, and no others, in the nodes' memory."""
    for setup in held:
        if setup not in wanted:
            await site.delete(setup)
    for setup in wanted:
        if setup not in held:
            await site.deploy(setup)


async def measure_cases(
    site: PinnedSite, cases: Sequence[Case], new_tokens: int, rows: Rows, name: str
) -> None:
    """Each case once, in their order."""
    for case in cases:
        sample, used_s = await measure(site, case, new_tokens)
        rows.add(case, sample, used_s)
        tell(
            f"{name} {case.setup.name} x{case.streams} p{case.prompt_tokens}: "
            f"{sample.tokens_per_s:.1f} tok/s, "
            f"first token after {sample.ttft_s:.2f} s"
        )


async def measure(site: PinnedSite, case: Case, new_tokens: int) -> tuple[Sample, dict[str, float]]:
    """The sample, and the processor seconds of every process for each token."""
    await site.warm_up(case.setup)
    before = site.processor_s_by_process()
    sample = sample_of(await site.streams(case.setup, case.streams, case.prompt_tokens, new_tokens))
    tokens = case.streams * new_tokens
    return sample, {
        name: (used - before[name]) / tokens for name, used in site.processor_s_by_process().items()
    }


def described(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the trees of git, the processor, and the kernels that it runs."""
    kernels = f"{native.best_kernel_name()} by {' '.join(kernel_set().split()[:2])}"
    machine = f"{processor_name()}, kernels {kernels}"
    return [{**row, "machine": machine} for row in with_trees(rows)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer cases and tokens, up to 2 rounds: under 5 minutes",
    )
    parser.add_argument(
        "--limit", action="store_true", help="only the long prompt among streams, under 3 minutes"
    )
    parser.add_argument(
        "--llama-cpp", type=Path, metavar="DIR", help="where its ggml-rpc-server is"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", required=True)
    options = parser.parse_args()
    llama_cpp = usable_llama_cpp(options.llama_cpp)
    with tempfile.TemporaryDirectory(prefix="edgeshard-bench-engine-") as scratch:
        if options.limit:
            known = (
                json.loads(options.output.read_text(encoding="utf-8"))
                if options.output.exists()
                else []
            )
            kept = [row for row in known if row["section"] != "limit"]
            report = [*kept, *described([asyncio.run(run_limit(Path(scratch)))])]
        else:
            report = described(
                asyncio.run(run(QUICK if options.quick else FULL, Path(scratch), llama_cpp))
            )
    options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
