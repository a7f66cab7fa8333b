"""HPipe, its six baselines, a single node, and EdgeShard's own plans: the layers of each stage, and
the order of work.

Each is a `Schedule`: a ring of stages for the simulator, the slices of a prompt, and the mode.
Times of blocks, links and slices are the planner's. The only time made here is that of tensor
parallelism, which the planner does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.hpipe_paper.partition import balanced_partition
from bench.hpipe_paper.testbed import MACHINES
from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.errors import EdgeShardError
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.prompt_time import PromptTimes
from edgeshard.planning.inputs.problem import Objective
from edgeshard.planning.report.baselines import cut_of, even
from edgeshard.planning.search.load_search import search_rate
from edgeshard.planning.search.plan import predict
from edgeshard.planning.search.request_search import search_request
from edgeshard.planning.simulation.simulated_pipeline import ring, traffic
from edgeshard.planning.simulation.simulator import simulate
from edgeshard.planning.simulation.timing import Pipeline, StageTimes
from edgeshard.planning.solvers.instance import Cut, gap_of

MOST_SLICES = 16
"""Limit of slices of equal length: shorter slices than HPipe's are not tried."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """`cut` names the first node of each stage, `nodes` all that share it, and `parts` the part of
    each; `slices` are a prompt's.

    `sums_share` is the part of a stage's time in which its nodes compute nothing but wait for each
    other's sums. `gap` is the plan's certificate: the most by which its objective could be better.
    """

    name: str
    cut: Cut
    nodes: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[float, ...], ...]
    pipeline: Pipeline
    slices: tuple[int, ...]
    mode: Mode = Mode.NO_BUBBLES
    sums_share: tuple[float, ...] = ()
    gap: float | None = None


def one_node(costs: Costs) -> Schedule:
    """The whole model on the source."""
    return _schedule("one node", costs, Cut((costs.source,), (costs.problem.model.layer_count,)))


def base(costs: Costs) -> Schedule:
    """Equal layers; the next prompt begins when the one before is done."""
    return _schedule("Base", costs, even_cut(costs), mode=Mode.SEQUENTIAL)


def gpipe(costs: Costs) -> Schedule:
    """Equal layers; whole prompts follow each other."""
    return _schedule("GPipe", costs, even_cut(costs))


def balanced_gpipe(costs: Costs) -> Schedule:
    """Layers by the nodes' speed; whole prompts follow each other."""
    return _schedule("GP-B", costs, balanced_cut(costs))


def terapipe(costs: Costs) -> Schedule:
    """Equal layers; a prompt in the slices that TeraPipe's search over slice ends finds for
    them."""
    cut = even_cut(costs)
    return _schedule("TeraPipe", costs, cut, PromptTimes(costs).first_token(cut).slices)


def hpipe(costs: Costs) -> Schedule:
    """Layers by the nodes' speed, and the slices of the search over slice ends."""
    cut = balanced_cut(costs)
    return _schedule("HPipe", costs, cut, PromptTimes(costs).first_token(cut).slices)


def planned_first_token(costs: Costs) -> Schedule:
    """EdgeShard's plan for the first token of a single prompt, with its slices."""
    found = search_request(costs, Objective.TTFT)
    if found is None:
        raise EdgeShardError("the model has no plan on HPipe's test bed")
    slices = PromptTimes(costs).first_token(found.cut).slices
    return replace(_schedule("EdgeShard, ttft", costs, found.cut, slices), gap=found.gap)


def planned_rate(costs: Costs) -> Schedule:
    """EdgeShard's plan for the rate of all prompts together."""
    found = search_rate(costs)
    if found.cut is None:
        raise EdgeShardError("the model has no plan on HPipe's test bed")
    gap = gap_of(predict(costs, found.load, found.cut).throughput_tps, found.rate_bound, 0.0)
    return replace(_schedule("EdgeShard, throughput", costs, found.cut), gap=gap)


def megatron(costs: Costs) -> Schedule:
    """Each block divided among the nodes of one computer; the two computers have half the layers
    each, in a pipeline.

    A node computes its part of each block, by its speed: a roofline's time of that part of the
    bytes and operations. Then D nodes sum their partial hidden states, once after attention and
    once after the MLP. This is a ring all-reduce: 2 (D - 1) hops of 1/D of the bytes, each as slow
    as the slowest link between two of them.
    """
    groups = tuple(
        tuple(index for index, node in enumerate(costs.nodes) if node.group == machine)
        for machine in MACHINES
    )
    return _divided("Megatron-LM", costs, groups, MACHINES)


def sliced_tensor_parallel(costs: Costs) -> Schedule:
    """As Megatron-LM; a prompt is cut into equal slices, in the number that gives the earliest
    first token."""
    whole = megatron(costs)
    tokens = costs.problem.prompt_tokens
    slices = min(
        (equal_slices(tokens, count) for count in range(1, MOST_SLICES + 1)),
        key=lambda found: simulate(whole.pipeline, traffic(costs.problem, 1, 1, found)).ttft_s,
    )
    return replace(whole, name="TP-T", slices=slices)


def _divided(
    name: str, costs: Costs, groups: tuple[tuple[int, ...], ...], names: tuple[str, ...]
) -> Schedule:
    """Equal layers for the groups in order, each block divided among a group's nodes."""
    cut = cut_of(even([group[0] for group in groups], costs.problem.model.layer_count))
    whole, tokens = ring(costs, cut, 1), costs.problem.prompt_tokens
    speeds = 1 / costs.prefill(Load()).compute_s.sum(axis=1)
    parts = tuple(
        tuple((speeds[list(group)] / speeds[list(group)].sum()).tolist()) for group in groups
    )
    layers = np.diff((0, *cut.ends)).tolist()
    sums = [_sums_s(costs, group, 2 * count) for group, count in zip(groups, layers, strict=True)]
    stages = tuple(
        _shared(stage, part[0], waiting)
        for stage, part, waiting in zip(whole.stages, parts, sums, strict=True)
    )
    shares = tuple(
        waiting(tokens) / stage.prefill_s(tokens, 0)
        for waiting, stage in zip(sums, stages, strict=True)
    )
    return Schedule(
        name,
        cut,
        groups,
        parts,
        replace(whole, stages=stages, names=names),
        (tokens,),
        sums_share=shares,
    )


def _sums_s(costs: Costs, group: Sequence[int], count: int) -> Callable[[int], float]:
    """(tokens) -> seconds of `count` all-reduces of their hidden states among the nodes of a
    group."""
    width, size = costs.hidden_bytes, len(group)

    def seconds(tokens: int) -> float:
        hop_s = costs.hop_s(-(-tokens * width // size))
        slowest = max(float(hop_s[sender, receiver]) for sender in group for receiver in group)
        return count * 2 * (size - 1) * slowest

    return seconds


def _shared(stage: StageTimes, part: float, sums_s: Callable[[int], float]) -> StageTimes:
    """The stage with only this part of the work for its first node, and the time that all take to
    add up."""
    return StageTimes(
        prefill_s=lambda tokens, context: part * stage.prefill_s(tokens, context) + sums_s(tokens),
        decode_s=lambda sequences, context: (
            part * stage.decode_s(sequences, context) + sums_s(sequences)
        ),
    )


BASELINES: tuple[Callable[[Costs], Schedule], ...] = (
    one_node,
    base,
    gpipe,
    balanced_gpipe,
    megatron,
    terapipe,
    sliced_tensor_parallel,
)
ALL = (*BASELINES, hpipe, planned_first_token, planned_rate)


def even_cut(costs: Costs) -> Cut:
    """Equal shares over the nodes in the order of the file, the source first."""
    return cut_of(even(_in_order(costs), costs.problem.model.layer_count))


def balanced_cut(costs: Costs) -> Cut:
    """HPipe's partition of the prompt's work over the nodes in the order of the file, within their
    memory."""
    whole, order = costs.prefill(Load()), _in_order(costs)
    seconds = whole.compute_s.copy()
    seconds[:, 0] += whole.embed_s
    seconds[:, -1] += whole.head_s
    sizes = whole.layer_bytes.copy()
    sizes[0] += whole.embed_bytes
    sizes[-1] += whole.head_bytes
    rooms = whole.capacity_bytes - whole.stage_bytes
    ends = balanced_partition(seconds[order].tolist(), sizes.tolist(), rooms[order].tolist())
    if ends is None:
        raise EdgeShardError("the model has no balanced partition on HPipe's test bed")
    return Cut(tuple(order), ends)


def equal_slices(tokens: int, count: int) -> tuple[int, ...]:
    """So many slices that differ by one token at most, the longer ones first."""
    each, over = divmod(tokens, count)
    return tuple(each + (index < over) for index in range(count))


def _in_order(costs: Costs) -> list[int]:
    return [costs.source, *(index for index in range(len(costs.nodes)) if index != costs.source)]


def _schedule(
    name: str, costs: Costs, cut: Cut, slices: tuple[int, ...] = (), mode: Mode = Mode.NO_BUBBLES
) -> Schedule:
    nodes, parts = tuple((node,) for node in cut.nodes), ((1.0,),) * len(cut.nodes)
    return Schedule(
        name, cut, nodes, parts, ring(costs, cut, 1), slices or (costs.problem.prompt_tokens,), mode
    )
