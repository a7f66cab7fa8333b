"""The paper's figure 10: plans made from profiles of prefill, of decode and of both, and their
costs.

Its premise is that a layer's prefill takes about ten times as long as its decode. For one prompt of
32 tokens a roofline gives 1.0 instead, because both read all weights once. So the experiment is
repeated with cases in which the premise holds: with the prompts of a batch of eight together, and
with prompts ten times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.edgeshard_paper import prose
from bench.edgeshard_paper.experiments import paper_cluster, placement_of, problem
from bench.edgeshard_paper.paper_numbers import (
    MODELS,
    PREFILL_OVER_DECODE,
    PROMPT_TOKENS,
    REQUESTS,
    TITLES,
)
from bench.pages import markdown_table, number
from edgeshard.cli.render.svg import bar_chart
from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.errors import EdgeShardError
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.inputs.problem import Objective, PlanProblem
from edgeshard.planning.search.plan import plan
from edgeshard.planning.simulation.simulated_pipeline import ring, traffic
from edgeshard.planning.simulation.simulator import simulate
from edgeshard.planning.solvers.instance import Cut, Instance, with_tokens
from edgeshard.planning.solvers.solve import solve_latency, solve_throughput

PREFILL = "prefill"
DECODE = "decode"
MEAN = "mean"
BOTH = "both"
HOPS = "prefill with its hops"
LONG_TOKENS = 10 * PROMPT_TOKENS
_COMPUTED = ("compute_s", "embed_s", "head_s")
_KINDS = {"AGX Orin": "agx-1", "Orin NX": "nx-1", "RTX 3090": "cloud"}


@dataclass(frozen=True, slots=True)
class Case:
    """Requests to plan and run: their prompt tokens and their number in a micro-batch."""

    prompt_tokens: int
    load: Load

    @property
    def title(self) -> str:
        count = self.load.requests
        if count == 1:
            return f"one request, {self.prompt_tokens} in"
        return (
            f"{count} requests, {self.prompt_tokens} in, {self.load.batch} x "
            f"{self.load.micro_batches}"
        )


ONE = Case(PROMPT_TOKENS, Load())
BATCH = Case(PROMPT_TOKENS, Load(REQUESTS))
LONG = Case(LONG_TOKENS, Load())
RATE = Case(LONG_TOKENS, Load(1, REQUESTS))
CASES = (ONE, BATCH, LONG, RATE)


@dataclass(frozen=True, slots=True)
class Block:
    """Milliseconds of one block on one kind of node: of a case's prompts, and of one token of each
    request."""

    device: str
    case: Case
    prefill_ms: float
    decode_ms: float

    @property
    def ratio(self) -> float:
        return self.prefill_ms / self.decode_ms


@dataclass(frozen=True, slots=True)
class Profiling:
    """A plan made from one of the profiles, and the requests' times under it. `seconds` is until
    the last token."""

    model: str
    case: Case
    profile: str
    placement: str
    ms_per_token: float
    ttft_s: float
    seconds: float
    tokens_per_s: float


def blocks(model: str) -> list[Block]:
    """How unlike prefill and decode are, by kind of node."""
    found = []
    for case in (ONE, BATCH, LONG):
        costs = Costs(_problem(model, case))
        prefill, decode = costs.prefill(case.load).compute_s, costs.decode(case.load).compute_s
        for title, name in _KINDS.items():
            node = costs.names.index(name)
            found.append(
                Block(title, case, 1e3 * float(prefill[node, 0]), 1e3 * float(decode[node, 0]))
            )
    return found


def profiling(model: str) -> list[Profiling]:
    return [row for case in CASES for row in profiling_of(model, case)]


def profiling_of(model: str, case: Case) -> list[Profiling]:
    """Plans of least time per token, or of the highest rate with several micro-batches, by profile.

    The first three have the hops of a token, as the paper. "both" knows the prompts and all tokens,
    each with its own times and hops, as the planner does. Prompts go in one piece, as in the paper.
    """
    asked = _problem(model, case)
    costs = Costs(asked)
    prefill, decode = costs.prefill(case.load), costs.decode(case.load)
    profiles = {
        PREFILL: replace(decode, **{name: getattr(prefill, name) for name in _COMPUTED}),
        DECODE: decode,
        MEAN: replace(
            decode,
            **{name: (getattr(prefill, name) + getattr(decode, name)) / 2 for name in _COMPUTED},
        ),
    }
    cuts = {name: _solved(instance, case.load) for name, instance in profiles.items()}
    cuts[BOTH] = _both(costs, case.load)
    cuts[HOPS] = _solved(prefill, case.load)
    return [_outcome(costs, case, model, name, cut) for name, cut in cuts.items()]


def _problem(model: str, case: Case) -> PlanProblem:
    asked = problem(model, paper_cluster(), Objective.THROUGHPUT)
    return replace(
        asked,
        prompt_tokens=case.prompt_tokens,
        batch=case.load.batch,
        concurrency=case.load.requests,
        sliced=False,
    )


def _solved(instance: Instance, load: Load) -> Cut:
    solution = (
        solve_latency(instance)
        if load.micro_batches == 1
        else solve_throughput(instance, load.micro_batches)
    )
    if solution is None:
        raise EdgeShardError("a model of the paper has no plan on its test bed")
    return solution.cut


def _both(costs: Costs, load: Load) -> Cut:
    """The cut of the least time until the last token, prompts and tokens each with their own
    times."""
    if load.micro_batches == 1:
        return _solved(
            with_tokens(costs.prefill(load), costs.decode(load), costs.problem.new_tokens - 1), load
        )
    found = plan(costs.problem, alternatives=0).prediction
    if found is None:
        raise EdgeShardError("a model of the paper has no plan on its test bed")
    return found.cut


def _outcome(costs: Costs, case: Case, model: str, profile: str, cut: Cut) -> Profiling:
    load = case.load
    run = simulate(
        ring(costs, cut, load.batch),
        traffic(costs.problem, load.batch, load.micro_batches),
        Mode.NO_BUBBLES,
    )
    return Profiling(
        model=model,
        case=case,
        profile=profile,
        placement=placement_of(costs, cut),
        ms_per_token=1e3 * run.inter_token_s,
        ttft_s=run.worst_ttft_s,
        seconds=run.makespan_s,
        tokens_per_s=run.tokens_per_s,
    )


HEADER = ["model", "requests", "profile", "ms/token", "TTFT, s", "until the last token, s"]


def section(premise: Sequence[Block], found: Sequence[Profiling]) -> list[str]:
    parts = [
        "## Which profile the plan is made from: figure 10\n",
        prose.PREMISE.format(factor=PREFILL_OVER_DECODE.value),
        markdown_table(
            ["one block of 7B", *(case.title for case in (ONE, BATCH, LONG))], _premise(premise)
        ),
        markdown_table(HEADER, [row for row in table_rows(found) if row[0] == TITLES[MODELS[0]]]),
        prose.PROFILING.format(**_words(found)),
    ]
    return parts


def _premise(premise: Sequence[Block]) -> list[list[str]]:
    rows = []
    for device in _KINDS:
        each = [block for block in premise if block.device == device]
        cells = [
            f"{block.prefill_ms:.2f} / {block.decode_ms:.2f} ms = {block.ratio:.1f}"
            for block in each
        ]
        rows.append([device, *cells])
    return rows


def table_rows(found: Sequence[Profiling]) -> list[list[str]]:
    """One row for all profiles of a model and case that cost the same."""
    merged: dict[tuple[str, ...], list[str]] = {}
    for row in found:
        figures = (number(row.ms_per_token), number(row.ttft_s), number(row.seconds))
        merged.setdefault((TITLES[row.model], row.case.title, *figures), []).append(row.profile)
    return [
        [model, case, ", ".join(names), *figures]
        for (model, case, *figures), names in merged.items()
    ]


def placements(found: Sequence[Profiling]) -> list[list[str]]:
    """The plan of each profile, if those of a model and case cost differently."""
    differing = {
        (r.model, r.case)
        for r in found
        for o in found
        if _same_question(r, o) and r.seconds != o.seconds
    }
    rows = [row for row in found if (row.model, row.case) in differing]
    return [[TITLES[row.model], row.case.title, row.profile, row.placement] for row in rows]


def _same_question(row: Profiling, other: Profiling) -> bool:
    return (row.model, row.case) == (other.model, other.case)


def seconds_of(
    found: Sequence[Profiling], case: Case, profile: str, model: str = MODELS[0]
) -> float:
    return next(
        r.seconds for r in found if r.case == case and r.profile == profile and r.model == model
    )


def _words(found: Sequence[Profiling]) -> dict[str, float]:
    """Numbers of the text: how much longer than with both, in per cent."""
    both = {case: seconds_of(found, case, BOTH) for case in CASES}
    return {
        "long_prefill": 100 * (seconds_of(found, LONG, PREFILL) / both[LONG] - 1),
        "rate_prefill": 100 * (seconds_of(found, RATE, PREFILL) / both[RATE] - 1),
        "rate_decode": 100 * (seconds_of(found, RATE, DECODE) / both[RATE] - 1),
        "long_hops": seconds_of(found, LONG, HOPS) / both[LONG],
    }


def pictures(found: Sequence[Profiling]) -> dict[str, str]:
    """SVG by file name."""
    groups: dict[str, dict[str, float | None]] = {}
    for row in found:
        if row.case in (LONG, RATE) and row.model != MODELS[-1]:  # of 70B all are equal
            group = groups.setdefault(f"{TITLES[row.model]}, {row.case.load.requests} at once", {})
            group[row.profile] = row.seconds
    title = (
        f"Until the last of {LONG_TOKENS} + 96 tokens, by the profile that the plan is made from"
    )
    return {"profiling.svg": bar_chart(groups, title, "seconds", log_y=True)}
