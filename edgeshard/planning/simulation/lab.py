"""The lab's file as a value: emulated nodes and links, the model they pretend to run, and the runs
to measure. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgeshard.domain.deployments.placement import ExplicitStage, check_cover, parse_layers
from edgeshard.domain.errors import invalid
from edgeshard.domain.ids import NodeName
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.inputs.devices import Cluster, parse_cluster
from edgeshard.planning.inputs.problem import ComputeTimes, PlanProblem
from edgeshard.planning.inputs.shapes import ModelSpec, built_in_model, model_from_config
from edgeshard.planning.search.plan import CutPrediction, predict
from edgeshard.planning.solvers.instance import Cut

MODES = ("sequential", "no-bubbles")


@dataclass(frozen=True, slots=True)
class LabRun:
    """One measurement: a placement, and `streams` requests at once (1 in sequential mode)."""

    stages: tuple[ExplicitStage, ...]
    mode: str
    streams: int

    @property
    def placement(self) -> str:
        return ",".join(f"{stage.node}={stage.layers}" for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Lab:
    """Emulated nodes and links (`cluster`), the emulated model and its dtype, and the runs that the
    file lists."""

    cluster: Cluster
    model: ModelSpec
    dtype: DType
    runs: tuple[LabRun, ...]

    def times(self, name: str) -> ComputeTimes:
        """The compute times of node `name`, which the emulator charges."""
        return Costs(self.problem()).times[self.cluster.index(name, "name")]

    def problem(self, **changes: Any) -> PlanProblem:
        """The planning problem of this lab's workload, planned with one sequence in each
        micro-batch."""
        work = self.cluster.workload
        base = PlanProblem(
            model=self.model,
            cluster=self.cluster,
            prompt_tokens=work.prompt_tokens,
            new_tokens=work.new_tokens,
            batch=1,
            dtype=self.dtype,
            kv_dtype=self.cluster.kv_dtype,
        )
        return replace(base, **changes)

    def predict(self, run: LabRun) -> CutPrediction:
        """The planner's prediction of a run: with its streams in as many equal micro-batches as
        serve them fastest. Prompts follow each other one by one, however many requests are decoded
        at once."""
        costs = Costs(self.problem())
        nodes = tuple(costs.names.index(stage.node) for stage in run.stages)
        cut = Cut(nodes, tuple(stage.layers.end for stage in run.stages))
        counts = [count for count in range(1, run.streams + 1) if run.streams % count == 0]
        predictions = [predict(costs, Load(run.streams // count, count), cut) for count in counts]
        best = max(predictions, key=lambda prediction: prediction.throughput_tps)
        return replace(best, ttft_s=predictions[-1].ttft_s)


def parse_lab(values: Mapping[str, Any], read_config: Callable[[str], Mapping[str, Any]]) -> Lab:
    """The lab that a decoded TOML file describes: a cluster file with a `[lab]` table.

    `read_config` returns the decoded config.json that `lab.model` names if it is no built-in model.
    Raises InvalidArgumentError naming the key at fault.
    """
    rest = dict(values)
    table = rest.pop("lab", None)
    if not isinstance(table, Mapping):
        raise invalid("lab", "is missing: a lab file has a [lab] table that names its model")
    for key in table:
        if key not in ("model", "run"):
            raise invalid(f"lab.{key}", "is not a known key", "UNKNOWN_KEY")
    cluster = parse_cluster(rest)
    name = table.get("model")
    if not isinstance(name, str) or not name:
        raise invalid("lab.model", "is missing: a built-in model or a config.json")
    model = built_in_model(name) or model_from_config(name, read_config(name))
    runs = table.get("run", [])
    if not isinstance(runs, list):
        raise invalid("lab.run", "must be a list of tables, [[lab.run]]")
    parsed = tuple(_run(run, cluster, model) for run in runs)
    return Lab(cluster, model, cluster.dtype or DType.BFLOAT16, parsed)


def _run(values: Any, cluster: Cluster, model: ModelSpec) -> LabRun:
    if not isinstance(values, Mapping) or not isinstance(values.get("layers"), str):
        raise invalid("lab.run.layers", "is missing: a placement such as a=0:4,b=4:12")
    for key in values:
        if key not in ("layers", "mode", "streams"):
            raise invalid(f"lab.run.{key}", "is not a known key")
    mode = values.get("mode", "sequential")
    if mode not in MODES:
        raise invalid("lab.run.mode", f"{mode!r} is not one of {', '.join(MODES)}")
    streams = values.get("streams", 1)
    if not isinstance(streams, int) or isinstance(streams, bool) or not 1 <= streams <= 64:
        raise invalid("lab.run.streams", "must be a number from 1 to 64")
    stages = parse_layers(values["layers"])
    check_cover(stages, model.layer_count, cluster.source)
    for stage in stages:
        cluster.index(stage.node, "lab.run.layers")
    return LabRun(stages, mode, streams if mode == "no-bubbles" else 1)


def planned_runs(stages: list[tuple[str, LayerRange]], streams: int) -> tuple[LabRun, ...]:
    """The two runs of a planned placement: a single stream, and `streams` at once."""
    explicit = tuple(ExplicitStage(NodeName(name), layers) for name, layers in stages)
    return LabRun(explicit, "sequential", 1), LabRun(explicit, "no-bubbles", streams)
