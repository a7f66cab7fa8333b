"""edgectl plan: which nodes and layers, how fast, and why; for the site, or from a cluster file without any daemon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeshard.cli.commands.options import option, switch, with_option_groups
from edgeshard.cli.commands.spec_options import Quantise, pairs, read_texts, spec_option, spec_options
from edgeshard.cli.render.output import Output, OutputOption, show_text
from edgeshard.domain.deployments.rules import Rule
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.models.dtypes import parse_quantisation

if TYPE_CHECKING:
    from edgeshard.planning.inputs.problem import PlanProblem
    from edgeshard.planning.report.speculation import SiteGuesses


@dataclass(frozen=True, slots=True)
class ProblemOptions:
    """The options that limit what may be planned, in addition to the keys of a spec."""

    batch: Annotated[int | None, option("N", "Most requests in one micro-batch.")] = None
    max_share: Annotated[
        list[str] | None, option("NODE=PART", "Largest part of the layers, as 0.5; may be repeated.")
    ] = None
    min_nodes: Annotated[int, option("N", "Use at least so many nodes.")] = 1
    max_nodes: Annotated[int | None, option("N", "Use at most so many nodes.")] = None
    head_on_source: Annotated[bool, switch("--head-on-source", "No other node sees a token.")] = False
    rate: Annotated[str, option("RATE", "steady: a request begins whenever one ends; together: all start at once.")] = (
        "steady"
    )

    def given(self) -> dict[str, Any]:
        """Fields of `PlanProblem`. Raises InvalidArgumentError for a share or a rate that is none."""
        from edgeshard.planning.inputs.problem import Rate

        if self.rate not in list(Rate):
            raise InvalidArgumentError(f"--rate {self.rate!r}: use one of {', '.join(Rate)}", field="rate")
        values = asdict(self) | {"max_share": _shares(self.max_share or ()), "rate": Rate(self.rate)}
        return {name: value for name, value in values.items() if value is not None}


def _shares(items: Sequence[str]) -> dict[str, float]:
    """`--max-share NODE=PART`, repeated. Raises InvalidArgumentError for one that is not."""
    found = {}
    for name, value in pairs(items, "max_share"):
        try:
            found[name] = float(value)
        except ValueError:
            raise InvalidArgumentError(f"--max-share {name}={value} is not a number", field="max_share") from None
    return found


@dataclass(frozen=True, slots=True)
class QuestionOptions:
    """The options that select the reported facts of the plan, or of plans of other nodes, links or loads."""

    compare: Annotated[bool, switch("--compare", "Show all strategies, and whether to split at all.")] = False
    explain: Annotated[bool, switch("--explain", "Say in words why it is so.")] = False
    what_if: Annotated[
        list[str] | None, option('"+2 orin-nx"', "Add nodes, or remove one with -NODE; may be repeated.")
    ] = None
    sweep: Annotated[str | None, option("bandwidth=1:100", "Plan at many link rates, in Mb/s.")] = None
    simulate: Annotated[
        str | None,
        option(
            "LOAD",
            "Latencies under a load: rate=2,requests=100,prompt=64:512,new=128,seed=1 draws requests, "
            "file=arrivals.csv reads them (arrival_s,prompt_tokens,new_tokens), together runs the planned batch, "
            "saturated as many as run at once, another whenever one ends.",
        ),
    ] = None
    verify: Annotated[
        bool, switch("--verify", "Check the plan with CP-SAT, for up to 60 s; exits 1 if one is better.")
    ] = False
    plot: Annotated[Path | None, option("FILE.svg", "Draw the sweep, the comparison or the simulation.")] = None

    def check(self, allow_streaming: bool) -> None:
        """Raise InvalidArgumentError for options that do not go together."""
        if self.verify and (self.compare or self.sweep is not None or self.simulate is not None):
            raise InvalidArgumentError(
                "--verify checks one plan: leave out --compare, --sweep and --simulate", field="verify"
            )
        if self.verify and allow_streaming:
            raise InvalidArgumentError(
                "--allow-streaming: --verify knows only nodes that hold their weights; give one of them",
                field="allow_streaming",
            )
        if self.plot is not None and self.sweep is None and self.simulate is None and not self.compare:
            raise InvalidArgumentError(
                "--plot draws a --sweep, a --compare or a --simulate: give one too", field="plot"
            )
        if sum((self.compare, self.explain, self.sweep is not None, self.simulate is not None)) > 1:
            raise InvalidArgumentError("give one of --compare, --explain, --sweep and --simulate", field="compare")
        if allow_streaming and (self.compare or self.simulate is not None):
            raise InvalidArgumentError(
                "--allow-streaming: --compare and --simulate know only nodes that hold their weights; give one of them",
                field="allow_streaming",
            )

    @property
    def is_of_other_nodes(self) -> bool:
        """Whether it uses other nodes, links, loads or strategies than the site's: then the weights
        that nodes hold do not matter.
        """
        return bool(self.sweep or self.compare or self.simulate or self.what_if)

    def show(
        self, problem: PlanProblem, rules: Sequence[Rule], output: Output, guesses: SiteGuesses | None = None
    ) -> bool:
        """Print the answer, of a site's plan with its `guesses`. Return False if a requested plan
        was not found, or if a plan is not the best."""
        from edgeshard.cli.render.plan_compare import show_comparison, show_sweep
        from edgeshard.cli.render.plan_views import show_plan
        from edgeshard.cpsat.process import VERIFY_S, CpSat, check_installed
        from edgeshard.planning.inputs.what_if import changed

        if self.verify:
            check_installed("verify", "--verify")
        asked = changed(problem, self.what_if or ())
        if self.what_if and rules:
            asked = replace(asked, rules=asked.cluster.under(rules))
        with CpSat() as prover, CpSat(VERIFY_S, VERIFY_S, field="verify") as verifier:
            if self.sweep is not None:
                show_sweep(asked, self.sweep, self.plot, output, prover)
                return True
            if self.compare:
                show_comparison(asked, self.plot, output, prover)
                return True
            if self.simulate is not None:
                from edgeshard.cli.commands.deployments.plan_load import show_simulation

                return show_simulation(asked, self.simulate, self.plot, output, prover)
            earlier = problem if self.what_if else None
            return show_plan(asked, earlier, self.explain, output, prover, verifier if self.verify else None, guesses)


_SPEC = spec_options(
    *("objective", "concurrency", "head_quantisation", "kv_dtype", "max_time_per_token_s"),
    *("exclude", "reserve", "allow_streaming", "rule"),
    source="Node of the first layer; by default the file's, or the largest measured node of the site.",
    dtype="float32, float16 or bfloat16.",
    prompt_tokens="Tokens of a prompt.",
    new_tokens="Tokens of an answer.",
)
"""The keys of a spec that can be planned for; a cluster file has defaults of its own."""


@with_option_groups
def plan(
    context: typer.Context,
    *,
    cluster: Annotated[Path | None, option("FILE", "Nodes and links as TOML, instead of the site's own.")] = None,
    model: Annotated[
        str,
        spec_option(
            "model", "Of the store, or ./config.json, ./DIR, OWNER/NAME of the Hub; with --cluster llama2-7b, too."
        ),
    ] = "",
    options: Annotated[dict[str, Any], _SPEC],
    quantise: Quantise = None,
    own: ProblemOptions,
    question: QuestionOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Plan a model on nodes you have, or might buy: which nodes, which layers, how fast, and what limits it.

    Plans for the running site, from what `edgectl profile` measured of its nodes and links. With --cluster it plans
    for the nodes of a file instead, and needs no daemon, no weights and no PyTorch. Exits 1 when nothing fits.
    """
    from edgeshard.cli.commands.deployments.plan_inputs import Asked, offline_problem, online_problem

    question.check(options.get("allow_streaming", False))
    if not model:
        raise InvalidArgumentError("--model is missing: name what is to be planned", field="model")
    spec, mistakes = read_texts(options)
    if mistakes:
        raise mistakes[0]
    quantisation = parse_quantisation(quantise, spec.pop("head_quantisation", None))
    asked = Asked(model, quantisation, spec | own.given(), tuple(question.what_if or ()))
    if cluster is not None:
        (problem, notes), guesses = offline_problem(cluster, asked), None
    else:
        problem, notes, guesses = online_problem(context, asked)
    for note in notes:
        show_text(f"note: {note}", err=True)
    if question.is_of_other_nodes:
        problem, guesses = replace(problem, held={}), None
    if not question.show(problem, spec.get("rule", ()), output, guesses):
        raise typer.Exit(1)
