"""edgectl plan: which nodes and layers, how fast, and why; for the site, or from a cluster file
without any daemon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeshard.cli.commands.command_options import option, switch, with_option_groups
from edgeshard.cli.commands.spec_options import (
    pairs,
    quantise_option,
    read_texts,
    spec_option,
    spec_options,
)
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

    batch: Annotated[int | None, option("N", "Put at most N requests into a micro-batch.")] = None
    max_share: Annotated[
        list[str] | None,
        option("NODE=PART", "Limit a node's share of the layers, such as a=0.5; repeatable."),
    ] = None
    min_nodes: Annotated[int, option("N", "Use at least N nodes.")] = 1
    max_nodes: Annotated[int | None, option("N", "Use at most N nodes.")] = None
    head_on_source: Annotated[
        bool,
        switch(
            "--head-on-source",
            "Keep the LM head on the source, so that no other node sees a token.",
        ),
    ] = False
    rate: Annotated[
        str,
        option(
            "RATE",
            "Assume that a new request begins when another ends (steady), or that all begin at "
            "once (together).",
        ),
    ] = "steady"

    def given(self) -> dict[str, Any]:
        """Fields of `PlanProblem`. Raises InvalidArgumentError for a share or a rate that is
        none."""
        from edgeshard.planning.inputs.problem import Rate

        if self.rate not in list(Rate):
            raise InvalidArgumentError(
                f"--rate {self.rate!r}: use one of {', '.join(Rate)}", field="rate"
            )
        values = asdict(self) | {
            "max_share": _shares(self.max_share or ()),
            "rate": Rate(self.rate),
        }
        return {name: value for name, value in values.items() if value is not None}


def _shares(items: Sequence[str]) -> dict[str, float]:
    """`--max-share NODE=PART`, repeated. Raises InvalidArgumentError for one that is not."""
    shares = {}
    for name, value in pairs(items, "max_share"):
        try:
            shares[name] = float(value)
        except ValueError:
            raise InvalidArgumentError(
                f"--max-share {name}={value} is not a number", field="max_share"
            ) from None
    return shares


@dataclass(frozen=True, slots=True)
class QuestionOptions:
    """The options that select a question about the plan, or about plans of other nodes, links or
    loads."""

    compare: Annotated[
        bool, switch("--compare", "Compare all strategies, including one node only.")
    ] = False
    explain: Annotated[bool, switch("--explain", "Explain the plan in words.")] = False
    what_if: Annotated[
        list[str] | None, option('"+2 orin-nx"', "Add nodes, or remove one with -NODE; repeatable.")
    ] = None
    sweep: Annotated[
        str | None, option("bandwidth=MIN:MAX", "Plan for several link rates from MIN to MAX Mb/s.")
    ] = None
    simulate: Annotated[
        str | None,
        option(
            "LOAD",
            "Predict latency under one of four loads. together: run the planned batch. saturated: "
            "keep as many "
            "requests running as fit. rate=2,requests=100: draw requests; "
            "prompt=64:512,new=128,seed=1 may follow. "
            "file=arrivals.csv: read requests, with columns arrival_s,prompt_tokens,new_tokens.",
        ),
    ] = None
    verify: Annotated[
        bool,
        switch(
            "--verify",
            "Search for a better plan with CP-SAT, for up to 60 s; exit with 1 if there is one.",
        ),
    ] = False
    plot: Annotated[
        Path | None,
        option("FILE.svg", "Draw the sweep, the comparison or the simulation into this file."),
    ] = None

    def check(self, allow_streaming: bool) -> None:
        """Raise InvalidArgumentError for options that do not go together."""
        if self.verify and (self.compare or self.sweep is not None or self.simulate is not None):
            raise InvalidArgumentError(
                "--verify checks one plan: leave out --compare, --sweep and --simulate",
                field="verify",
            )
        if self.verify and allow_streaming:
            raise InvalidArgumentError(
                "--allow-streaming: --verify knows only nodes that hold their weights; give one of "
                "them",
                field="allow_streaming",
            )
        if (
            self.plot is not None
            and self.sweep is None
            and self.simulate is None
            and not self.compare
        ):
            raise InvalidArgumentError(
                "--plot draws a --sweep, a --compare or a --simulate: give one too", field="plot"
            )
        if sum((self.compare, self.explain, self.sweep is not None, self.simulate is not None)) > 1:
            raise InvalidArgumentError(
                "give one of --compare, --explain, --sweep and --simulate", field="compare"
            )
        if allow_streaming and (self.compare or self.simulate is not None):
            raise InvalidArgumentError(
                "--allow-streaming: --compare and --simulate know only nodes that hold their "
                "weights; give one of them",
                field="allow_streaming",
            )

    @property
    def is_of_other_nodes(self) -> bool:
        """Whether it is about other nodes, links, loads or strategies than the site's: then the
        nodes' packed units do not matter."""
        return bool(self.sweep or self.compare or self.simulate or self.what_if)

    def show(
        self,
        problem: PlanProblem,
        rules: Sequence[Rule],
        output: Output,
        guesses: SiteGuesses | None = None,
    ) -> bool:
        """Print the answer, of a site's plan with its `guesses`. False if no requested plan was
        found, or only one that is not the best."""
        from edgeshard.cli.render.plan_compare import show_comparison, show_sweep
        from edgeshard.cli.render.plan_views import show_plan
        from edgeshard.cpsat.solver_process import VERIFY_S, CpSat, check_installed
        from edgeshard.planning.inputs.what_if import changed

        if self.verify:
            check_installed("verify", "--verify")
        changed_problem = changed(problem, self.what_if or ())
        if self.what_if and rules:
            changed_problem = replace(changed_problem, rules=changed_problem.cluster.under(rules))
        with CpSat() as prover, CpSat(VERIFY_S, VERIFY_S, field="verify") as verifier:
            if self.sweep is not None:
                show_sweep(changed_problem, self.sweep, self.plot, output, prover)
                return True
            if self.compare:
                show_comparison(changed_problem, self.plot, output, prover)
                return True
            if self.simulate is not None:
                from edgeshard.cli.commands.deployments.plan_load import show_simulation

                return show_simulation(changed_problem, self.simulate, self.plot, output, prover)
            earlier = problem if self.what_if else None
            return show_plan(
                changed_problem,
                earlier,
                self.explain,
                output,
                prover,
                verifier if self.verify else None,
                guesses,
            )


_SPEC = spec_options(
    *("objective", "head_quantisation", "kv_dtype", "max_time_per_token_s"),
    *("exclude", "reserve", "allow_streaming", "rule"),
    source="Put the first layer on this node (default: the file's source, or the measured node "
    "with the most free "
    "memory).",
    concurrency="Plan for at most N requests at once (default: the file's, else 1, or for "
    "throughput as many as fit).",
    dtype="Compute in float32, float16 or bfloat16.",
    prompt_tokens="Plan for prompts of N tokens.",
    new_tokens="Plan for answers of N tokens.",
)
"""The keys of a spec that can be planned for; a cluster file has defaults of its own."""


@with_option_groups
def plan(
    context: typer.Context,
    *,
    cluster: Annotated[
        Path | None, option("FILE", "Read nodes and links from this TOML file instead of the site.")
    ] = None,
    model: Annotated[
        str,
        spec_option(
            "model",
            "Plan this model: of the store, ./config.json, ./DIR or OWNER/NAME of the Hub; with "
            "--cluster also llama2-7b.",
        ),
    ] = "",
    options: Annotated[dict[str, Any], _SPEC],
    quantise: Annotated[
        str | None, quantise_option("stored; --dtype on a site with accelerators")
    ] = None,
    own: ProblemOptions,
    question: QuestionOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Plan a model on the nodes of the running site: which nodes, which layers, how fast, and what
    limits the speed. The plan uses what `edgectl profile` measured. With --cluster, plan for the
    nodes of a file, such as nodes you might buy; that needs no daemon, no weights and no PyTorch.
    """
    from edgeshard.cli.commands.deployments.plan_inputs import (
        Asked,
        offline_problem,
        online_problem,
    )

    question.check(options.get("allow_streaming", False))
    if not model:
        raise InvalidArgumentError("--model is missing: name the model to plan", field="model")
    spec, mistakes = read_texts(options)
    if mistakes:
        raise mistakes[0]
    quantisation = parse_quantisation(quantise, spec.pop("head_quantisation", None))
    request = Asked(model, quantisation, spec | own.given(), tuple(question.what_if or ()))
    if cluster is not None:
        (problem, notes), guesses = offline_problem(cluster, request), None
    else:
        problem, notes, guesses = online_problem(context, request)
    for note in notes:
        show_text(f"note: {note}", err=True)
    if question.is_of_other_nodes:
        problem, guesses = replace(problem, packed_parts={}), None
    if not question.show(problem, spec.get("rule", ()), output, guesses):
        raise typer.Exit(1)
