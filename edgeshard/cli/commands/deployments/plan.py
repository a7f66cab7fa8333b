"""edgectl plan: which nodes and layers, how fast, and why; for the site, or from a cluster file without any daemon."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgeshard.cli import completion
from edgeshard.cli.connect import connect_of
from edgeshard.cli.render.output import Output, OutputOption
from edgeshard.domain.errors import InvalidArgumentError

if TYPE_CHECKING:
    from edgeshard.planning.inputs.problem import PlanProblem


def plan(  # noqa: PLR0913 - one parameter for each option
    context: typer.Context,
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Nodes and links as TOML, instead of the site's own.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            autocompletion=completion.models,
            help="Of the store; with --cluster llama2-7b, -13b, -70b or a config.json.",
        ),
    ] = "",
    source: Annotated[
        str | None,
        typer.Option(metavar="NODE", autocompletion=completion.nodes, help="Node of the first layer, else the file's."),
    ] = None,
    objective: Annotated[
        str, typer.Option(metavar="WHAT", help="request, ttft, latency, throughput, energy or auto.")
    ] = "auto",
    prompt_tokens: Annotated[int | None, typer.Option(metavar="N", help="Tokens of a prompt.")] = None,
    new_tokens: Annotated[int | None, typer.Option(metavar="N", help="Tokens of an answer.")] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", help="Most requests in one micro-batch.")] = None,
    concurrency: Annotated[int | None, typer.Option(metavar="N", help="Most requests at once.")] = None,
    dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="float32, float16 or bfloat16.")] = None,
    quantise: Annotated[
        str | None,
        typer.Option("--quantise", "--quantize", metavar="FORMAT", help="Weights as small integers: int8 or int4."),
    ] = None,
    head_quantisation: Annotated[
        str | None,
        typer.Option(
            "--head-quantisation",
            "--head-quantization",
            metavar="FORMAT",
            help="Of the LM head with --quantise: int8 (default), int4 or none.",
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Of the KV cache, or int4; else as --dtype.")
    ] = None,
    max_time_per_token: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Slowest a request may get its tokens.")
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE", autocompletion=completion.nodes, help="Do not use it; may be repeated."),
    ] = None,
    reserve: Annotated[
        list[str] | None, typer.Option(metavar="NODE=SIZE", help="Memory to leave free; may be repeated.")
    ] = None,
    max_share: Annotated[
        list[str] | None, typer.Option(metavar="NODE=PART", help="Largest part of the layers, as 0.5; may be repeated.")
    ] = None,
    min_nodes: Annotated[int, typer.Option(metavar="N", help="Use at least so many nodes.")] = 1,
    max_nodes: Annotated[int | None, typer.Option(metavar="N", help="Use at most so many nodes.")] = None,
    head_on_source: Annotated[bool, typer.Option("--head-on-source", help="No other node sees a token.")] = False,
    allow_streaming: Annotated[
        bool, typer.Option("--allow-streaming", help="Nodes may read a part of their weights from disk in every step.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Show all strategies, and whether to split at all.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Say in words why it is so.")] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(metavar='"+2 orin-nx"', help="Add nodes, or remove one with -NODE; may be repeated."),
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(metavar="bandwidth=1:100", help="Plan at many link rates, in Mb/s.")
    ] = None,
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="LOAD",
            help="Latencies under a load: rate=2,requests=100,prompt=64:512,new=128,seed=1 draws requests, "
            "file=arrivals.csv reads them (arrival_s,prompt_tokens,new_tokens), together runs the planned batch.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw the sweep, the comparison or the simulation.")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Plan a model on nodes you have, or might buy: which nodes, which layers, how fast, and what limits it.

    Plans for the running site, from what `edgectl profile` measured of its nodes and links. With --cluster it plans
    for the nodes of a file instead, and needs no daemon, no weights and no PyTorch. Exits 1 when nothing fits.
    """
    from edgeshard.cli.commands.deployments.plan_inputs import Asked, offline_problem, online_problem, shares, sizes
    from edgeshard.cli.render.plan_compare import show_comparison, show_sweep
    from edgeshard.cli.render.plan_views import show_plan
    from edgeshard.domain.models.dtypes import parse_quantisation
    from edgeshard.planning.inputs.what_if import changed

    if not model:
        raise InvalidArgumentError("--model is missing: name what is to be planned", field="model")
    if plot is not None and sweep is None and simulate is None and not compare:
        raise InvalidArgumentError("--plot draws a --sweep, a --compare or a --simulate: give one too", field="plot")
    if sum((compare, explain, sweep is not None, simulate is not None)) > 1:
        raise InvalidArgumentError("give one of --compare, --explain, --sweep and --simulate", field="compare")
    if allow_streaming and (compare or simulate is not None):
        raise InvalidArgumentError(
            "--allow-streaming: --compare and --simulate know only nodes that hold their weights; give one of them",
            field="allow_streaming",
        )
    asked = Asked(
        model=model,
        source=source,
        objective=objective,
        dtype=dtype,
        quantisation=parse_quantisation(quantise, head_quantisation),
        kv_dtype=kv_dtype,
        exclude=tuple(exclude or ()),
        what_if=tuple(what_if or ()),
        workload={
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "batch": batch,
            "concurrency": concurrency,
        },
        more={
            "max_time_per_token_s": max_time_per_token,
            "reserve": sizes(reserve or ()),
            "max_share": shares(max_share or ()),
            "min_nodes": min_nodes,
            "max_nodes": max_nodes,
            "head_on_source": head_on_source,
            "allow_streaming": allow_streaming,
        },
    )
    if cluster is not None:
        problem, notes = offline_problem(cluster, asked)
    else:
        problem, notes = online_problem(connect_of(context), asked)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    problem = _of_a_site(problem, what_would_be=bool(sweep or compare or simulate or what_if))
    with_changes = changed(problem, asked.what_if)
    if sweep is not None:
        show_sweep(with_changes, sweep, plot, output)
    elif compare:
        show_comparison(with_changes, plot, output)
    elif simulate is not None:
        from edgeshard.cli.commands.deployments.plan_load import show_simulation

        if not show_simulation(with_changes, simulate, plot, output):
            raise typer.Exit(1)
    elif not show_plan(with_changes, problem if what_if else None, explain, output):
        raise typer.Exit(1)


def _of_a_site(problem: PlanProblem, *, what_would_be: bool) -> PlanProblem:
    """With what the nodes hold now, unless the question is about other nodes, links, loads or strategies."""
    return replace(problem, held={}) if what_would_be else problem
