"""HPipe, six other ways of using its nodes, and EdgeShard's own plans: which layers where, and what follows what.

Each is a `Schedule`: a ring of stages for the simulator, the slices of a prompt, and the mode. Times of blocks, links
and slices are the planner's. The only time made here is that of tensor parallelism, which the planner does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.hpipe_paper.partition import balanced_partition
from bench.hpipe_paper.testbed import MACHINES
from edgeshard.domain.deployments.mode import Mode
from edgeshard.domain.errors import EdgeShardError
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.prompt_time import PromptTimes
from edgeshard.planning.inputs.problem import Objective
from edgeshard.planning.report.baselines import cut_of, even
from edgeshard.planning.search.plan import plan
from edgeshard.planning.simulation.simulated_pipeline import ring, traffic
from edgeshard.planning.simulation.simulator import simulate
from edgeshard.planning.simulation.timing import Pipeline, StageTimes
from edgeshard.planning.solvers.instance import Cut

MOST_SLICES = 16
"""Of equal length: shorter ones than HPipe's are not tried."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """`cut` names the first node of each stage, `nodes` all that share it; `slices` are a prompt's.

    `sums_share` is the part of a stage's time in which its nodes compute nothing but wait for each other's sums.
    `gap` is what a plan certifies: how much better its objective could at most be.
    """

    name: str
    cut: Cut
    nodes: tuple[tuple[int, ...], ...]
    pipeline: Pipeline
    slices: tuple[int, ...]
    mode: Mode = Mode.NO_BUBBLES
    sums_share: tuple[float, ...] = ()
    gap: float | None = None


def one_node(costs: Costs) -> Schedule:
    """The whole model on the source."""
    return _schedule("one node", costs, Cut((costs.source,), (costs.problem.model.layer_count,)))


def in_turn(costs: Costs) -> Schedule:
    """Equal layers; the next prompt begins when the one before is done."""
    return _schedule("layers in turn", costs, even_cut(costs), mode=Mode.SEQUENTIAL)


def even_batches(costs: Costs) -> Schedule:
    """Equal layers; whole prompts follow each other."""
    return _schedule("batches, even layers", costs, even_cut(costs))


def balanced_batches(costs: Costs) -> Schedule:
    """Layers by the nodes' speed; whole prompts follow each other."""
    return _schedule("batches, balanced layers", costs, balanced_cut(costs))


def even_slices(costs: Costs) -> Schedule:
    """Equal layers; each prompt in equal slices, as many as bring its first token soonest."""
    cut, tokens = even_cut(costs), costs.problem.prompt_tokens
    pipeline = ring(costs, cut, 1)
    found = min(
        (equal_slices(tokens, count) for count in range(1, MOST_SLICES + 1)),
        key=lambda slices: simulate(pipeline, traffic(costs.problem, 1, 1, slices)).ttft_s,
    )
    return _schedule("equal slices, even layers", costs, cut, found)


def hpipe(costs: Costs) -> Schedule:
    """Layers by the nodes' speed, and the slices of the search over slice ends."""
    cut = balanced_cut(costs)
    return _schedule("HPipe", costs, cut, PromptTimes(costs).first_token(cut).slices)


def planned_first_token(costs: Costs) -> Schedule:
    """EdgeShard's plan for the first token of a prompt alone, with its slices."""
    return _planned("EdgeShard, ttft", costs, Objective.TTFT)


def planned_rate(costs: Costs) -> Schedule:
    """EdgeShard's plan for the rate of all prompts together."""
    return _planned("EdgeShard, throughput", costs, Objective.THROUGHPUT)


def _planned(name: str, costs: Costs, objective: Objective) -> Schedule:
    result = plan(replace(costs.problem, objective=objective), alternatives=0)
    if result.prediction is None:
        raise EdgeShardError("the model has no plan on HPipe's test bed")
    return replace(_schedule(name, costs, result.prediction.cut, result.prediction.slices), gap=result.gap)


def tensor_parallel(costs: Costs) -> Schedule:
    """Each block divided among the nodes of one computer; the two computers have half the layers each, in a pipeline.

    A node computes 1/D of each block: a roofline's time of 1/D of the bytes and operations. Then D nodes add up what
    each has of the hidden states, once behind attention and once behind the MLP: a ring all-reduce, 2 (D - 1) hops of
    1/D of the bytes.
    """
    groups = tuple(
        tuple(index for index, node in enumerate(costs.nodes) if node.group == machine) for machine in MACHINES
    )
    cut = cut_of(even([group[0] for group in groups], costs.problem.model.layer_count))
    whole, tokens = ring(costs, cut, 1), costs.problem.prompt_tokens
    layers = (end - first for first, end in zip((0, *cut.ends), cut.ends, strict=False))
    sums = [_sums_s(costs, group, 2 * count) for group, count in zip(groups, layers, strict=True)]
    stages = tuple(
        _divided(stage, len(group), waiting) for stage, group, waiting in zip(whole.stages, groups, sums, strict=True)
    )
    shares = tuple(waiting(tokens) / stage.prefill_s(tokens, 0) for waiting, stage in zip(sums, stages, strict=True))
    pipeline = replace(whole, stages=stages, names=MACHINES)
    return Schedule("tensor parallel", cut, groups, pipeline, (tokens,), sums_share=shares)


def _sums_s(costs: Costs, group: Sequence[int], count: int) -> Callable[[int], float]:
    """(tokens) -> seconds of so many all-reduces of their hidden states among the nodes of a group."""
    width, size = costs.hidden_bytes, len(group)

    def seconds(tokens: int) -> float:
        hop_s = costs.hop_s(-(-tokens * width // size))
        slowest = max(float(hop_s[sender, receiver]) for sender in group for receiver in group)
        return count * 2 * (size - 1) * slowest

    return seconds


def _divided(stage: StageTimes, size: int, sums_s: Callable[[int], float]) -> StageTimes:
    """The stage with its work divided among so many nodes, and the time that they take to add up."""
    return StageTimes(
        prefill_s=lambda tokens, context: stage.prefill_s(tokens, context) / size + sums_s(tokens),
        decode_s=lambda sequences, context: stage.decode_s(sequences, context) / size + sums_s(sequences),
    )


BASELINES: tuple[Callable[[Costs], Schedule], ...] = (
    one_node,
    in_turn,
    even_batches,
    balanced_batches,
    tensor_parallel,
    even_slices,
)
ALL = (*BASELINES, hpipe, planned_first_token, planned_rate)


def even_cut(costs: Costs) -> Cut:
    """Equal shares over the nodes in the order of the file, the source first."""
    return cut_of(even(_in_order(costs), costs.problem.model.layer_count))


def balanced_cut(costs: Costs) -> Cut:
    """HPipe's partition of the prompt's work over the nodes in the order of the file, within their memory."""
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
    nodes = tuple((node,) for node in cut.nodes)
    return Schedule(name, cut, nodes, ring(costs, cut, 1), slices or (costs.problem.prompt_tokens,), mode)
