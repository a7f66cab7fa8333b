"""edgectl plan: which boxes and layers, how fast, and why; from a cluster file alone, without any daemon."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeshard.cli.output import Output, OutputOption
from edgeshard.errors import InvalidArgumentError

if TYPE_CHECKING:
    from edgeshard.planning.devices import Cluster
    from edgeshard.planning.problem import PlanProblem
    from edgeshard.planning.shapes import ModelSpec

LARGEST_INPUT_BYTES = 16 << 20


def plan(  # noqa: PLR0913 - one parameter for each option
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Boxes and links as TOML; see docs/planning.md.")
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="llama2-7b, -13b, -70b, a config.json or a directory with one.")
    ] = "",
    source: Annotated[str | None, typer.Option(metavar="BOX", help="Box of the first layer, else the file's.")] = None,
    objective: Annotated[str, typer.Option(metavar="WHAT", help="latency, throughput or auto.")] = "latency",
    prompt_tokens: Annotated[int | None, typer.Option(metavar="N", help="Tokens of a prompt.")] = None,
    new_tokens: Annotated[int | None, typer.Option(metavar="N", help="Tokens of an answer.")] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", help="Most requests in one micro-batch.")] = None,
    concurrency: Annotated[int | None, typer.Option(metavar="N", help="Most requests at once.")] = None,
    dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="float32, float16 or bfloat16.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="Of the KV cache, else as --dtype.")] = None,
    max_time_per_token: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Slowest a request may get its tokens.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(metavar="BOX", help="Do not use it; may be repeated.")] = None,
    reserve: Annotated[
        list[str] | None, typer.Option(metavar="BOX=SIZE", help="Memory to leave free; may be repeated.")
    ] = None,
    max_share: Annotated[
        list[str] | None, typer.Option(metavar="BOX=PART", help="Largest part of the layers, as 0.5; may be repeated.")
    ] = None,
    min_boxes: Annotated[int, typer.Option(metavar="N", help="Use at least so many boxes.")] = 1,
    max_boxes: Annotated[int | None, typer.Option(metavar="N", help="Use at most so many boxes.")] = None,
    head_on_source: Annotated[bool, typer.Option("--head-on-source", help="No other box sees a token.")] = False,
    relays: Annotated[bool, typer.Option("--relays", help="Boxes without layers may go between two others.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Show all strategies in one table.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Say in words why it is so.")] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(metavar='"+2 orin-nx"', help="Add boxes, or remove one with -BOX; may be repeated."),
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(metavar="bandwidth=1:100", help="Plan at many link rates, in Mb/s.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw the sweep.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Plan a model on boxes you have, or might buy: which boxes, which layers, how fast, and what limits it.

    Needs no daemon, no weights and no PyTorch. Exits 1 when the model cannot be placed.
    """
    from edgeshard.cli import plan_views as views

    read = read_cluster(cluster)
    fields = {
        "prompt_tokens": read.workload.prompt_tokens if prompt_tokens is None else prompt_tokens,
        "new_tokens": read.workload.new_tokens if new_tokens is None else new_tokens,
        "batch": read.workload.batch if batch is None else batch,
        "concurrency": read.workload.concurrency if concurrency is None else concurrency,
        "max_time_per_token_s": max_time_per_token,
        "exclude": tuple(exclude or ()),
        "reserve": _sizes(reserve or ()),
        "max_share": _shares(max_share or ()),
        "min_boxes": min_boxes,
        "max_boxes": max_boxes,
        "head_on_source": head_on_source,
        "relays": relays,
    }
    problem = _problem(read, read_model(model), source, objective, (dtype, kv_dtype), fields)
    if plot is not None and sweep is None:
        raise InvalidArgumentError("--plot draws a sweep: give --sweep bandwidth=1:100 too", field="plot")
    if sum((compare, explain, sweep is not None)) > 1:
        raise InvalidArgumentError("give one of --compare, --explain and --sweep", field="compare")
    changed = replace(problem, cluster=_changed(problem.cluster, what_if or ()))
    if sweep is not None:
        views.show_sweep(changed, sweep, plot, output)
    elif compare:
        views.show_comparison(changed, output)
    elif not views.show_plan(changed, problem if what_if else None, explain, output):
        raise typer.Exit(1)


def read_cluster(path: Path | None) -> Cluster:
    """The cluster of a TOML file. Raises InvalidArgumentError naming the file or the key at fault."""
    from edgeshard.planning.devices import parse_cluster

    if path is None:
        raise InvalidArgumentError(
            "--cluster is missing: give a cluster file, such as deploy/examples/paper-testbed.toml", field="cluster"
        )
    try:
        return parse_cluster(tomllib.loads(_read(path, "cluster")))
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgumentError(f"--cluster {path} is not TOML: {error}", field="cluster") from None
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{path}: {error.message}", field=error.field, reason=error.reason) from None


def read_model(name: str) -> ModelSpec:
    """A model known by name, or of a config.json. Raises InvalidArgumentError naming the key at fault."""
    from edgeshard.planning.shapes import BUILT_IN_CONFIGS, built_in_model, model_from_config

    known = built_in_model(name)
    if known is not None:
        return known
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if not name or not path.exists():
        raise InvalidArgumentError(
            f"--model {name!r} is neither {', '.join(BUILT_IN_CONFIGS)} nor a config.json or a directory with one",
            field="model",
            reason="UNKNOWN_MODEL",
        )
    try:
        config = json.loads(_read(path, "model"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"--model {path} is not JSON: {error}", field="model") from None
    return model_from_config(path.resolve().parent.name, config)


def _read(path: Path, field: str) -> str:
    try:
        if path.stat().st_size > LARGEST_INPUT_BYTES:
            raise InvalidArgumentError(f"--{field} {path} is larger than {LARGEST_INPUT_BYTES >> 20} MiB", field=field)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"cannot read --{field} {path}: {error}", field=field) from None


def _problem(
    cluster: Cluster,
    model: ModelSpec,
    source: str | None,
    objective: str,
    dtypes: tuple[str | None, str | None],
    fields: dict[str, Any],
) -> PlanProblem:
    from edgeshard.dtypes import DType
    from edgeshard.planning.problem import Objective, PlanProblem

    if source is not None:
        cluster.index(source, "source")
        cluster = replace(cluster, source=source, cloud=None if cluster.cloud == source else cluster.cloud)
    if objective not in list(Objective):
        raise InvalidArgumentError(f"--objective {objective!r}: use one of {', '.join(Objective)}", field="objective")
    dtype, kv_dtype = dtypes
    problem = PlanProblem(
        model=model,
        cluster=cluster,
        objective=Objective(objective),
        dtype=DType.parse(dtype) if dtype is not None else cluster.dtype or DType.BFLOAT16,
        kv_dtype=DType.parse(kv_dtype, "kv_dtype") if kv_dtype is not None else cluster.kv_dtype,
        **fields,
    )
    problem.check()
    return problem


def _changed(cluster: Cluster, changes: list[str] | tuple[str, ...]) -> Cluster:
    """The cluster after changes such as `+2 orin-nx` and `-agx-3`."""
    from edgeshard.planning.devices import with_boxes, without_boxes

    for change in changes:
        text = change.strip()
        if text.startswith("-"):
            cluster = without_boxes(cluster, text[1:].strip(), "what_if")
            continue
        number, _, kind = text.removeprefix("+").strip().partition(" ")
        if not kind:
            number, kind = "1", number
        if not text.startswith("+") or not number.isascii() or not number.isdigit() or not 0 < int(number) <= 10_000:
            raise InvalidArgumentError(
                f'--what-if {change!r} is not a change: say "+2 orin-nx", or "-BOX" to take one away', field="what_if"
            )
        cluster = with_boxes(cluster, kind.strip(), int(number), "what_if")
    return cluster


def _sizes(items: list[str] | tuple[str, ...]) -> dict[str, float]:
    if not items:
        return {}
    from edgeshard.config import parse_bytes  # brings gRPC along, which planning does without

    return {name: float(parse_bytes(value, f"reserve.{name}")) for name, value in _pairs(items, "reserve")}


def _shares(items: list[str] | tuple[str, ...]) -> dict[str, float]:
    shares = {}
    for name, value in _pairs(items, "max-share"):
        try:
            shares[name] = float(value)
        except ValueError:
            raise InvalidArgumentError(f"--max-share {name}={value} is not a number", field="max_share") from None
    return shares


def _pairs(items: list[str] | tuple[str, ...], option: str) -> list[tuple[str, str]]:
    pairs = []
    for item in items:
        name, equals, value = item.partition("=")
        if not name or not equals or not value:
            raise InvalidArgumentError(f"--{option} {item!r} is not BOX=VALUE", field=option.replace("-", "_"))
        pairs.append((name, value))
    return pairs
