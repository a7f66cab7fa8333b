"""The load of `edgectl plan --simulate`: the request, the arrivals drawn or read, and the figures
as text."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeshard.cli.render.output import (
    TABLES,
    Column,
    Output,
    human_seconds,
    plain,
    show_fields,
    show_text,
    show_value,
    stdout_console,
    table,
    visible,
)
from edgeshard.cli.render.plan_compare import draw
from edgeshard.cli.render.plan_views import describe_load, describe_plan, plan_data
from edgeshard.cli.render.views import percent
from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.planning.inputs.problem import PlanProblem, Rate
from edgeshard.planning.report.explain import bottleneck
from edgeshard.planning.search.plan import PlanResult, plan
from edgeshard.planning.simulation.forecast import (
    ASSUMPTIONS,
    Forecast,
    ForecastSpread,
    NodeLoad,
    forecast,
    most_held,
    saturated,
    together,
)
from edgeshard.planning.simulation.serving import ServedRequest
from edgeshard.planning.solvers.linear import Prover
from edgeshard.storage.inputs import read_input

DEFAULT_REQUESTS = 100
MOST_REQUESTS = 10_000
LEAST_RATE = 1e-6
MOST_NEW_TOKENS = 2_000_000
"""Over all requests: a time is kept for each of them."""
PICTURED_STEPS = 24
"""Most steps that a drawing can show distinctly."""
TOGETHER, SATURATED = "together", "saturated"
_DRAWN = ("rate", "requests", "prompt", "new", "seed")
_COLUMNS = ("arrival_s", "prompt_tokens", "new_tokens")


@dataclass(frozen=True, slots=True)
class AskedLoad:
    """A load: these requests, or without any the batch that starts together in `mode`, or a plan
    that is `saturated`. `words` describes it."""

    words: str
    requests: tuple[ServedRequest, ...] = ()
    mode: Mode = Mode.NO_BUBBLES
    saturated: bool = False


def parse_load(text: str, problem: PlanProblem) -> AskedLoad:
    """`saturated`, `together`, `together,mode=bubbles`,
    `rate=2,requests=100,prompt=64:512,new=128,seed=1` or `file=arrivals.csv`.

    Prompts and answers are as long as the problem's unless given. Raises InvalidArgumentError
    naming the key at fault.
    """
    first, *rest = text.split(",")
    if text.strip() == SATURATED:
        return AskedLoad("as many requests as it holds, another whenever one ends", saturated=True)
    is_together = first.strip() == TOGETHER
    values = _pairs(rest if is_together else [first, *rest], text)
    if is_together:
        _only(values, ("mode",), TOGETHER)
        mode = values.get("mode", Mode.NO_BUBBLES)
        if mode not in set(Mode):
            raise _wrong(f"mode={mode}", f"use one of {', '.join(Mode)}")
        return AskedLoad(f"one batch that starts together, {mode}", mode=Mode(mode))
    if "file" in values:
        _only(values, ("file",), "file")
        return AskedLoad(
            f"the requests of {values['file']}", _read_requests(Path(values["file"]), problem)
        )
    _only(values, _DRAWN, "rate")
    if "rate" not in values:
        raise _wrong(
            repr(text),
            f"give {TOGETHER}, {SATURATED}, rate=2 for two requests a second, or file=arrivals.csv",
        )
    return _drawn(values, problem)


def show_simulation(
    problem: PlanProblem, text: str, plot: Path | None, output: Output, prover: Prover | None = None
) -> bool:
    """Plan, simulate the load on the plan, print the figures, draw some steps to `plot`. Returns
    whether there is a plan."""
    load = parse_load(text, problem)
    if (tokens := sum(request.new_tokens for request in load.requests)) > MOST_NEW_TOKENS:
        raise _wrong(
            "new",
            f"amounts to {tokens} tokens over all requests; at most {MOST_NEW_TOKENS} are "
            "simulated",
        )
    if not load.requests and not load.saturated:
        problem = replace(problem, rate=Rate.TOGETHER)
    result = plan(problem, alternatives=0, prover=prover)
    if not result.feasible:
        show_text(f"no plan: {bottleneck(result)}", err=True)
        return False
    if load.saturated:
        simulation = saturated(result)
    else:
        simulation = (
            forecast(result, load.requests) if load.requests else together(result, load.mode)
        )
    if plot is not None:
        draw(plot, _picture(simulation, load, problem.model.name))
    if output in TABLES:
        _show_tables(result, simulation, load, output)
    else:
        show_value(
            plan_data(result) | {"simulation": _data(simulation, load)}, output, [result.placement]
        )
    return True


def _pairs(items: list[str], text: str) -> dict[str, str]:
    pairs = {}
    for item in items:
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value:
            raise _wrong(
                repr(text),
                f"give {TOGETHER}, file=arrivals.csv, or rate=2,requests=100,prompt=64:512,new=128",
            )
        if name in pairs:
            raise _wrong(name, "is given twice")
        pairs[name] = value
    return pairs


def _only(values: Mapping[str, str], allowed_names: tuple[str, ...], what: str) -> None:
    for name in values:
        if name not in allowed_names:
            raise _wrong(name, f"is unknown with {what}; use one of {', '.join(allowed_names)}")


def _drawn(values: Mapping[str, str], problem: PlanProblem) -> AskedLoad:
    """Requests of a Poisson process, lengths even over their ranges: the same for the same seed."""
    try:
        rate = float(values["rate"])
    except ValueError:
        rate = math.nan
    if not LEAST_RATE <= rate < math.inf:
        raise _wrong(
            f"rate={values['rate']}",
            f"it must be requests a second, a number above 0 (at least {LEAST_RATE})",
        )
    count = _whole(values, "requests", DEFAULT_REQUESTS, 1, MOST_REQUESTS)
    seed = _whole(values, "seed", 0, 0, 2**63)
    prompt = _range(values, "prompt", problem.prompt_tokens)
    new = _range(values, "new", problem.new_tokens)
    if prompt[1] + new[1] > problem.held_tokens:
        what = f"prompt={_describe_range(prompt)} and new={_describe_range(new)}"
        raise _wrong(what, f"amount to {prompt[1] + new[1]} tokens; {most_held(problem)}")
    chance = random.Random(seed)
    arrival_s, requests = 0.0, []
    for _ in range(count):
        arrival_s += chance.expovariate(rate)
        requests.append(ServedRequest(arrival_s, chance.randint(*prompt), chance.randint(*new)))
    lengths = f"{_describe_range(prompt)} tokens in, {_describe_range(new)} out"
    words = f"{count} requests, {rate:g} a second (Poisson, seed {seed}), {lengths}"
    return AskedLoad(words, tuple(requests))


def _whole(values: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = values.get(name, str(default))
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise _wrong(f"{name}={text}", f"it must be a whole number from {least} to {most}")
    return int(text)


def _range(values: Mapping[str, str], name: str, default: int) -> tuple[int, int]:
    """`128` or `64:512`, both ends included."""
    text = values.get(name, str(default))
    low, colon, high = text.partition(":")
    ends = [low, high] if colon else [low, low]
    if not all(end.isascii() and end.isdigit() for end in ends) or not 0 < int(ends[0]) <= int(
        ends[1]
    ):
        raise _wrong(
            f"{name}={text}", "it must be a number of tokens such as 128, or a range such as 64:512"
        )
    return int(ends[0]), int(ends[1])


def _describe_range(ends: tuple[int, int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _read_requests(path: Path, problem: PlanProblem) -> tuple[ServedRequest, ...]:
    """The requests of a CSV file whose first line names its columns; spaces and a byte order mark
    do not matter."""
    text = read_input(path, f"--simulate {path}", "simulate").removeprefix("\ufeff")
    rows = csv.reader(text.splitlines())
    requests = []
    try:
        names = [name.strip() for name in next(rows, [])]
        if missing := [name for name in _COLUMNS if name not in names]:
            raise _wrong(
                str(path),
                f"its first line must name the columns {','.join(_COLUMNS)}; {missing[0]} is "
                "missing",
            )
        for row in rows:
            if row:
                requests.append(
                    _read_request(
                        dict(zip(names, row, strict=False)), f"{path}, line {rows.line_num}"
                    )
                )
                if requests[-1].prompt_tokens + requests[-1].new_tokens > problem.held_tokens:
                    tokens = (
                        f"{requests[-1].prompt_tokens} tokens in and {requests[-1].new_tokens} out"
                    )
                    raise _wrong(
                        f"{path}, line {rows.line_num}", f"it has {tokens}; {most_held(problem)}"
                    )
    except csv.Error as error:
        raise _wrong(f"{path}, line {rows.line_num}", str(error)) from None
    if not 0 < len(requests) <= MOST_REQUESTS:
        raise _wrong(
            str(path), f"it holds {len(requests)} requests; it must hold 1 to {MOST_REQUESTS}"
        )
    return tuple(requests)


def _read_request(row: Mapping[str, str], where: str) -> ServedRequest:
    try:
        arrival_s = float(row["arrival_s"])
        prompt = int(row["prompt_tokens"])
        new = int(row["new_tokens"])
    except (KeyError, ValueError):
        arrival_s = math.nan
        prompt = 0
        new = 0
    if not 0 <= arrival_s < math.inf or prompt < 1 or new < 1:
        raise _wrong(
            where, "it must hold seconds of at least 0 and two whole numbers of tokens above 0"
        )
    return ServedRequest(arrival_s, prompt, new)


def _wrong(what: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"--simulate {what}: {why}", field="simulate")


SPREAD_COLUMNS: list[Column[tuple[str, ForecastSpread]]] = [
    Column("LATENCY", lambda row: row[0]),
    Column("MEAN", lambda row: human_seconds(row[1].mean), right=True),
    Column("MEDIAN", lambda row: human_seconds(row[1].median), right=True),
    Column("P90", lambda row: human_seconds(row[1].p90), right=True),
    Column("P99", lambda row: human_seconds(row[1].p99), right=True),
]

NODE_COLUMNS: list[Column[NodeLoad]] = [
    Column("NODE", lambda node: node.node),
    Column("LAYERS", lambda node: str(node.layers)),
    Column("COMPUTING", lambda node: percent(node.computing), right=True),
    Column("SENDS TO", lambda node: node.receiver or "-"),
    Column("SENDING", lambda node: percent(node.sending) if node.receiver else "-", right=True),
]


def _show_tables(result: PlanResult, simulation: Forecast, load: AskedLoad, output: Output) -> None:
    assert result.prediction is not None
    steps = (
        f"; at most {simulation.token_budget} tokens a step"
        if simulation.token_budget is not None
        else ""
    )
    waiting = {}
    if simulation.waiting:
        waiting["waiting"] = (
            f"{simulation.waiting} of {simulation.requests} requests for a place when the last one "
            "came"
        )
    show_fields(
        {
            "model": describe_plan(result.problem),
            "plan": result.placement,
            "load": load.words,
            "at once": f"at most {describe_load(result)}{steps}",
            "throughput": f"{simulation.tokens_per_s:.2f} tokens/s, "
            f"{simulation.requests_per_s:.3g} requests/s over "
            f"{human_seconds(simulation.span_s)}",
            "planned": f"{result.prediction.throughput_tps:.2f} tokens/s with "
            f"{describe_load(result)} all the time",
            "idle": f"{percent(simulation.bubble_share)} of the nodes' time",
        }
        | waiting
    )
    spreads = [
        ("time to first token", simulation.ttft_s),
        ("between two tokens", simulation.inter_token_s),
        ("per token of a request", simulation.time_per_token_s),
        ("whole request", simulation.end_to_end_s),
    ]
    show_text()
    stdout_console().print(table(spreads, SPREAD_COLUMNS))
    show_text()
    stdout_console().print(table(simulation.nodes, visible(NODE_COLUMNS, output)))
    show_text("\nassumed: " + ";\n         ".join(ASSUMPTIONS))


def _data(simulation: Forecast, load: AskedLoad) -> dict[str, Any]:
    values = {name: value for name, value in plain(simulation).items() if name != "visits"}
    return {
        "load": load.words,
        **values,
        "requests_per_s": simulation.requests_per_s,
        "assumed": list(ASSUMPTIONS),
    }


def _picture(simulation: Forecast, load: AskedLoad, model: str) -> str:
    """Some steps from the middle of the run: a row for each node and each link, in the order of the
    ring."""
    from edgeshard.cli.render.svg import timeline

    rows = [
        row for node in simulation.nodes for row in (node.node, f"{node.node} -> {node.receiver}")
    ]
    steps = [visit for visit in simulation.visits if visit.station == rows[0]]
    first = max(0, (len(steps) - PICTURED_STEPS) // 2)
    from_s = steps[first].start_s
    until_s = steps[min(first + PICTURED_STEPS, len(steps)) - 1].end_s
    visits = [
        visit._replace(start_s=max(0.0, visit.start_s - from_s), end_s=visit.end_s - from_s)
        for visit in simulation.visits
        if from_s < visit.end_s and visit.start_s < until_s
    ]
    names = ("turn", "step") if load.requests else ("micro-batch", "token")
    title = f"{model}: {until_s - from_s:.3g} s of the simulation, from {from_s:.3g} s on"
    return timeline(
        sorted(visits, key=lambda visit: rows.index(visit.station)),
        title,
        until_s - from_s,
        names=names,
    )
