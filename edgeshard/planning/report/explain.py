"""A plan in words: its stages, its limit, its reasons and its runners-up. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from edgeshard.domain.models.dtypes import weights_text
from edgeshard.domain.models.packed_units import NOTHING_HELD
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.prompt_time import PromptTimes
from edgeshard.planning.costs.shortage import GIB, gibibytes
from edgeshard.planning.inputs.measured import doubtful, doubts_line
from edgeshard.planning.inputs.problem import Objective
from edgeshard.planning.search.plan import CutPrediction, PlanResult
from edgeshard.planning.solvers.instance import Score
from edgeshard.planning.solvers.scoring import score

_SMALL_SHARE = 0.02


def bottleneck(result: PlanResult) -> str:
    """One sentence on the limit that binds the plan; for an infeasible one, on the resource that is
    short."""
    words = _bottleneck(result)
    for stage in result.streaming:  # its time is the disk's or the computing's, whichever is longer
        words = words.replace(
            f"compute of {stage.node} ", f"streaming and compute of {stage.node} ", 1
        )
    return words


def _bottleneck(result: PlanResult) -> str:
    if result.prediction is None:
        return result.shortage.text if result.shortage is not None else "there is no plan"
    prediction = result.prediction
    if is_saturated(prediction):
        station = prediction.decode
        return (
            f"{station.bottleneck} is always busy ({_ms(station.bottleneck_s)} for each "
            "micro-batch); "
            "more requests in flight would not help"
        )
    name, seconds = longest_part(prediction.decode, [stage.node for stage in result.stages])
    share = seconds / prediction.decode.round_s
    return (
        f"{name} takes {_ms(seconds)} of the {_ms(prediction.decode.round_s)} a token needs "
        f"({100 * share:.0f} %)"
    )


def describe_locality(result: PlanResult) -> str:
    """The reason why a plan that is not the best was taken, and its cost; "" if the plan is simply
    the best."""
    locality, problem = result.locality, result.problem
    if locality is None:
        return ""
    holds = []
    for stage in result.stages:
        packed_layers = problem.packed_parts.get(stage.node, NOTHING_HELD).layers
        if stage_layers := sorted(
            packed_layers & frozenset(range(stage.layers.first, stage.layers.end))
        ):
            holds.append(f"{stage.node} holds layers {_ranges(stage_layers)} packed")
    more = "more energy" if problem.goal is Objective.ENERGY else "slower"
    costs = f"{100 * locality.slower:.1f} % {more}" if locality.slower >= 0.0005 else "as good"
    saved = gibibytes(locality.saved_bytes)
    return (
        f"{', '.join(holds)}: chosen over {locality.best}, {costs}, {saved} less to fetch and pack"
    )


def _ranges(layers: Sequence[int]) -> str:
    """`0:4 and 6:9` of layers that rise."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and ranges[-1][1] == layer:
            ranges[-1][1] += 1
        else:
            ranges.append([layer, layer + 1])
    return " and ".join(f"{first}:{end}" for first, end in ranges)


def is_saturated(prediction: CutPrediction) -> bool:
    """Whether the busiest station, not the way round, sets the rate."""
    m = prediction.in_flight
    return m > 1 and m * prediction.decode.bottleneck_s >= prediction.decode.round_s


def longest_part(score: Score, nodes: Sequence[str]) -> tuple[str, float]:
    """The largest single part of a round: a node's compute, a hop, or all pure delays together."""
    parts = [
        (f"compute of {node}", seconds) for node, seconds in zip(nodes, score.stage_s, strict=True)
    ]
    following = [*nodes[1:], nodes[0]]
    parts += [
        (f"link {sender} -> {receiver}", seconds)
        for sender, receiver, seconds in zip(nodes, following, score.hop_s, strict=False)
    ]
    parts.append(("delay of the links", score.round_s - sum(score.stage_s) - sum(score.hop_s)))
    return max(parts, key=lambda part: part[1])


def explain(result: PlanResult) -> tuple[str, ...]:
    """The plan as short lines for a person."""
    problem = result.problem
    weights = weights_text(problem.dtype, problem.quantisation)
    task_line = (
        f"{problem.model.name} in {weights}, {problem.prompt_tokens} tokens in and "
        f"{problem.new_tokens} out, "
        f"from {problem.cluster.source}: {_goal(result)}."
    )
    if result.prediction is None:
        return (task_line, f"There is no plan: {bottleneck(result)}.")
    prediction = result.prediction
    lines = [
        task_line,
        _choice(result),
        f"What binds it: {bottleneck(result)}.",
        _where_time_goes(prediction),
    ]
    if prediction.joules_per_token is not None:
        lines.append(f"Energy: {prediction.joules_per_token:.2f} J per token, of its nodes only.")
    if not result.streams and (sliced := _sliced(result)):
        lines.append(sliced)
    tightest = max(
        result.stages, key=lambda stage: stage.memory.needed / max(1, stage.memory.usable)
    )
    memory = tightest.memory
    lines.append(
        f"Fullest node: {tightest.node} with {memory.needed / GIB:.1f} of "
        f"{memory.usable / GIB:.1f} GiB "
        f"({memory.weights / GIB:.1f} weights, {memory.kv / GIB:.2f} KV)."
    )
    if detour := _detour(result):
        lines.append(detour)
    lines += [_runner_up(result, index) for index in range(len(result.alternatives))]
    lines.append(_certainty(result))
    if estimated := sorted(
        {stage.kind for stage in result.stages if stage.node not in problem.times}
    ):
        lines.append(
            "Not measured but from figures of data sheets or the cluster file: "
            f"{', '.join(estimated)}. "
            "Real kernels are slower."
        )
    if doubts := doubtful(problem):
        lines.append(
            f"Doubtful figures of {doubts_line(doubts)}. Plan again when they are measured again."
        )
    return tuple(lines)


def _goal(result: PlanResult) -> str:
    problem = result.problem
    single = {
        Objective.REQUEST: "least time of one request, prompt and answer",
        Objective.TTFT: "least time to the first token of one request",
        Objective.LATENCY: "least time per token of one request",
    }
    if problem.goal in single:
        return single[problem.goal]
    limit, requests = problem.max_time_per_token_s, problem.request_limit
    most = "fewest joules per token" if problem.goal is Objective.ENERGY else "most tokens a second"
    if requests is not None:
        most += " of one request" if requests == 1 else f" with at most {requests} requests"
    return most if limit is None else f"{most}, within {_ms(limit)} per token"


def _choice(result: PlanResult) -> str:
    assert result.prediction is not None
    load = result.prediction.load
    parts = [f"{stage.node} {stage.layers}" for stage in result.stages]
    flight = (
        f"; {load.micro_batches} micro-batches of {load.batch} in flight"
        if load.requests > 1
        else ""
    )
    return f"Plan: {', then '.join(parts)}{flight}."


def _where_time_goes(prediction: CutPrediction) -> str:
    decode = prediction.decode
    compute, hops = sum(decode.stage_s), sum(decode.hop_s)
    delay = max(0.0, decode.round_s - compute - hops)
    text = (
        f"A token's way round takes {_ms(decode.round_s)}: {_ms(compute)} computing, "
        f"{_ms(hops)} on links"
    )
    return text + (f", {_ms(delay)} of delay." if delay > _SMALL_SHARE * decode.round_s else ".")


def _sliced(result: PlanResult) -> str:
    """A sentence if a single prompt goes through the stages in slices, with the time that this
    saves; else ""."""
    assert result.prediction is not None
    first = PromptTimes(Costs(result.problem)).first_token(result.prediction.cut)
    whole_s = result.prediction.prefill.round_s
    if result.prediction.load.batch > 1:
        whole_s = score(Costs(result.problem).prefill(Load()), result.prediction.cut).round_s
    if len(first.slices) < 2 or first.seconds >= whole_s * (1 - _SMALL_SHARE):
        return ""
    lengths, after = ", ".join(map(str, first.slices)), _ms(first.seconds)
    return (
        f"A single prompt is sent in slices of {lengths} tokens: first token after {after}, not "
        f"{_ms(whole_s)}."
    )


def _detour(result: PlanResult) -> str:
    """Says it when neighbours avoid a link that is much slower than the two they take instead."""
    problem, nodes = result.problem, [stage.node for stage in result.stages]
    cluster = problem.cluster
    by_name = {node.name: node for node in cluster.nodes}
    for index in range(len(nodes) - 2):
        start, middle, end = (by_name[name] for name in nodes[index : index + 3])
        direct = cluster.link(start, end).bandwidth_bps
        around = min(
            cluster.link(start, middle).bandwidth_bps, cluster.link(middle, end).bandwidth_bps
        )
        if around > 2 * direct:
            return (
                f"It goes around the slow link {start.name} -> {end.name} ({_rate(direct)}) "
                f"through {middle.name} "
                f"({_rate(around)})."
            )
    return ""


def _runner_up(result: PlanResult, index: int) -> str:
    assert result.prediction is not None
    other, best = result.alternatives[index], result.prediction
    match result.problem.goal:
        case Objective.REQUEST:
            worse = (
                f"{_ms(other.request_s)} a request, {_ms(other.request_s - best.request_s)} more"
            )
        case Objective.TTFT:
            worse = (
                f"first token after {_ms(other.ttft_s)}, {_ms(other.ttft_s - best.ttft_s)} later"
            )
        case Objective.LATENCY:
            more_s = other.time_per_token_s - best.time_per_token_s
            worse = f"{_ms(other.time_per_token_s)} per token, {_ms(more_s)} more"
        case Objective.ENERGY:
            assert other.joules_per_token is not None and best.joules_per_token is not None
            more_j = other.joules_per_token - best.joules_per_token
            worse = f"{other.joules_per_token:.2f} J per token, {more_j:.2f} more"
        case _:
            worse = f"{other.throughput_tps:.2f} tokens/s instead of {best.throughput_tps:.2f}"
    return f"Runner-up {index + 1}: {other.placement} ({worse})."


def _certainty(result: PlanResult) -> str:
    if result.gap is None:
        return "This placement was given, not chosen."
    if result.gap <= 1e-9:
        return f"No placement has a better {result.gap_objective}: the search is exact."
    return (
        f"At most {100 * result.gap:.2f} % could be gained in {result.gap_objective} (certified "
        "gap)."
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _rate(bps: float) -> str:
    return f"{bps / 1e6:g} Mb/s"
