"""Placement by the planner: the best nodes and layers by the measured times of nodes and links.

Where measurements are missing, free memory decides, and the placement's note names the nodes that lack them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import isfinite
from typing import Any

from edgeshard.architectures import ModelShape
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.placement import ExplicitStage, Placement
from edgeshard.domain.deployments.traffic import NO_TRAFFIC, WORTH_SAYING, Outlook, Traffic
from edgeshard.domain.errors import EdgeShardError, FailedPreconditionError, ResourceExhaustedError, UnavailableError
from edgeshard.domain.ids import NodeId, NodeName
from edgeshard.domain.models.dtypes import Quantisation
from edgeshard.domain.models.model import ModelManifest
from edgeshard.domain.models.packed import NOTHING_HELD
from edgeshard.domain.nodes.profile import config_hash
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.shortage import Shortage
from edgeshard.planning.costs.step_budget import stage_costs
from edgeshard.planning.inputs.problem import Objective, PlanProblem
from edgeshard.planning.inputs.shapes import model_from_config
from edgeshard.planning.inputs.site import NOT_MEASURED, SiteCluster, listed, site_cluster, site_problem
from edgeshard.planning.report.describe_tiers import advice_without_streaming, describe_offer, describe_streaming
from edgeshard.planning.search.load_search import loads
from edgeshard.planning.search.plan import GAP_OF_LATENCY, PlanResult, given_streaming, plan, predict, result_of
from edgeshard.planning.search.tier_search import StreamedLoad, stream_loads
from edgeshard.planning.search.tier_steps import streaming_costs
from edgeshard.planning.solvers.instance import Cut
from edgeshard.planning.solvers.scoring import violations
from edgeshard_coordinator.core.placement.by_memory import (
    SimplePlacer,
    StageSizes,
    checked_shape,
    place_stages,
    sizes_of,
    usable_nodes,
)
from edgeshard_coordinator.core.placement.describe_planned import (
    links_are,
    mixed_bits,
    not_planned,
    placed_note,
    prediction_of,
    unused_links,
)
from edgeshard_coordinator.core.placement.nearest_placement import nearest, without_held
from edgeshard_coordinator.core.placement.repair import MOST_SPARES, Lost, cold_layers, moved_bits, survivors, ways
from edgeshard_coordinator.core.placement.typical_request import typical_request
from edgeshard_coordinator.core.values.candidate import Candidate
from edgeshard_coordinator.core.values.measurements import Measurements, links_of, profiles_for

_MIXED = "nodes that keep their weights in different ways are not planned together"


class PlanningPlacer:
    """An explicit `layers` list as it stands, otherwise the planner's choice; both with predicted figures.

    The KV pool holds `concurrency` requests of the longest context where the chosen nodes have the memory, and never
    fewer than the plan has in flight. Whatever is planned passes the same memory check as a placement by hand; the
    planner counts everything that the check counts, and more.
    """

    def place(
        self,
        spec: DeploymentSpec,
        manifest: ModelManifest,
        candidates: Sequence[Candidate],
        measured: Mapping[NodeId, Measurements],
        traffic: Traffic = NO_TRAFFIC,
    ) -> Placement:
        site = _Site(spec, manifest, candidates, measured, traffic, advises=True)
        return self._noted(spec, site, candidates)

    def _noted(self, spec: DeploymentSpec, site: _Site, candidates: Sequence[Candidate]) -> Placement:
        placement = self._with_starting(spec, site, candidates)
        return replace(placement, note=f"{placement.note} {mixed_bits(placement, candidates)}".strip())

    def outlook(
        self,
        spec: DeploymentSpec,
        manifest: ModelManifest,
        candidates: Sequence[Candidate],
        measured: Mapping[NodeId, Measurements],
        traffic: Traffic,
        placement: Placement,
    ) -> Outlook:
        held = tuple(ExplicitStage(stage.node_name, stage.layers) for stage in placement.stages)

        def with_layers(layers: tuple[ExplicitStage, ...]) -> Placement:
            seen = spec.model_copy(update={"prompt_tokens": None, "new_tokens": None, "layers": layers})
            return self._placed(seen, _Site(seen, manifest, candidates, measured, traffic))

        try:
            here, best = with_layers(held), with_layers(())
            if here.predicted is not None and best.predicted is not None:
                # What nodes hold decides where to move, not whether.
                small = here.predicted.gain_of(best.predicted) < WORTH_SAYING
                if small and any(node.held != NOTHING_HELD for node in candidates):
                    candidates = without_held(candidates)
                    best = with_layers(())
        except EdgeShardError as error:
            return Outlook(note=f"It cannot be weighed against other placements: {error.message}.")
        if here.predicted is None or best.predicted is None:
            return Outlook(here.predicted, note=here.note if here.predicted is None else best.note)
        gain = here.predicted.gain_of(best.predicted)
        if gain < WORTH_SAYING:
            return Outlook(here.predicted)
        layers = tuple(ExplicitStage(stage.node_name, stage.layers) for stage in best.stages)
        return Outlook(here.predicted, best.predicted, layers, gain)

    def repair(
        self,
        spec: DeploymentSpec,
        manifest: ModelManifest,
        candidates: Sequence[Candidate],
        measured: Mapping[NodeId, Measurements],
        traffic: Traffic,
        broken: Placement,
        lost: Lost,
    ) -> Placement:
        usable = [replace(node, connected=node.connected and node.node_id not in lost.nodes) for node in candidates]
        # A link that stands still may be gone round by doing without either of its nodes.
        without = [lost, *(replace(lost, nodes=lost.nodes | {end}) for end in lost.ends)]
        left = [survivors(broken, candidates, gone, spec.exclude) for gone in without]
        tried = itertools.chain.from_iterable(map(ways, left))
        found: list[Placement] = []
        for stages in tried:
            here = spec.model_copy(update={"layers": stages, "source": stages[0].node})
            with suppress(EdgeShardError):
                placement = _Site(here, manifest, usable, measured, traffic).kept(broken)
                if not lost.crosses([stage.node_id for stage in placement.stages]):
                    found.append(placement)
        # Weights that are in memory come before a better pace, and those on the disk before one that is little better;
        # of those without figures the first, which touch the fewest nodes.
        if found:
            best = nearest(found, lambda placement: _cost(placement, broken, candidates), candidates)
        else:
            best = self._without(spec, manifest, usable, _without_links(measured, lost), traffic, lost)
        return replace(best, note=f"{best.note} {moved_bits(broken, best, candidates)}".strip())

    def _without(
        self,
        spec: DeploymentSpec,
        manifest: ModelManifest,
        candidates: Sequence[Candidate],
        measured: Mapping[NodeId, Measurements],
        traffic: Traffic,
        lost: Lost,
    ) -> Placement:
        """Any placement on the nodes that are left, from any of them if the source is lost."""
        sources = [node for node in candidates if node.placeable and node.name not in spec.exclude]
        sources.sort(key=lambda node: (node.name != spec.source, -node.free_bytes, node.name))
        error: EdgeShardError = ResourceExhaustedError("no node is left", field="node", reason="NO_NODE")
        for source in sources[:MOST_SPARES]:
            anywhere = spec.model_copy(update={"layers": (), "source": source.name})
            try:
                placement = self._noted(anywhere, _Site(anywhere, manifest, candidates, measured, traffic), candidates)
            except EdgeShardError as refused:
                error = refused
                continue
            if not lost.crosses([stage.node_id for stage in placement.stages]):
                return placement
            error = UnavailableError("every placement needs a link that stands still", field="link", reason="NO_LINK")
        raise error

    def _with_starting(self, spec: DeploymentSpec, site: _Site, candidates: Sequence[Candidate]) -> Placement:
        starting = () if spec.layers else _starting(spec, candidates)
        if not starting:
            return self._placed(spec, site)
        left_out = f"Left out: {listed(starting)}, still starting."
        try:
            placement = self._placed(spec, site)
        except ResourceExhaustedError as error:
            raise ResourceExhaustedError(
                f"{error.message}. {left_out}", field=error.field, reason=error.reason, retry_after_s=1.0
            ) from None
        return replace(placement, note=f"{placement.note} {left_out}".lstrip())

    def _placed(self, spec: DeploymentSpec, site: _Site) -> Placement:
        if len(site.formats) > 1:
            return replace(site.by_memory(), note=not_planned(spec, _MIXED))
        try:
            return site.predicted_by_hand() if spec.layers else site.planned()
        except FailedPreconditionError as error:
            if error.reason != NOT_MEASURED:
                raise
            return replace(site.by_memory(), note=not_planned(spec, error.message))


def _cost(placement: Placement, broken: Placement, candidates: Sequence[Candidate]) -> tuple[bool, float]:
    stood_by = any(node.warm is not None for node in candidates)
    is_cold = stood_by and any(layers for _, layers in cold_layers(placement, broken, candidates))
    return is_cold, placement.predicted.rank if placement.predicted else 0.0


class _Site:
    """One question: a spec on a site. Raises what SimplePlacer raises for nodes that cannot be."""

    def __init__(
        self,
        spec: DeploymentSpec,
        manifest: ModelManifest,
        candidates: Sequence[Candidate],
        measured: Mapping[NodeId, Measurements],
        traffic: Traffic,
        advises: bool = False,
    ) -> None:
        """`advises` to say what would do without streaming, which takes some plans more."""
        self._advises = advises
        self._spec, self._manifest, self._candidates, self._measured = spec, manifest, candidates, measured
        self._shape: ModelShape = checked_shape(spec, manifest)
        self._context = spec.max_context or self._shape.max_context
        self._typical = typical_request(spec, self._context, traffic)
        self._nodes = usable_nodes(spec, candidates)

    @property
    def formats(self) -> frozenset[Quantisation | None]:
        """How the nodes that may serve keep their weights."""
        spec = self._spec
        may_serve = [name for name, node in self._nodes.items() if node.placeable and name not in spec.exclude]
        return frozenset(spec.quantisation_of(name) for name in [stage.node for stage in spec.layers] or may_serve)

    @property
    def _quantisation(self) -> Quantisation | None:
        (only,) = self.formats
        return only

    def by_memory(self) -> Placement:
        return SimplePlacer().place(self._spec, self._manifest, self._candidates)

    def kept(self, broken: Placement) -> Placement:
        """These layers with the KV pool and the load of a placement before, so that nodes keep what they hold."""
        load, sizes = Load(broken.micro_batch, broken.micro_batches), sizes_of(self._spec, self._manifest, broken)
        placement = place_stages(self._spec, sizes, self._nodes, self._spec.layers, load)
        with suppress(EdgeShardError):  # without measurements there are no figures
            figures = self.predicted_by_hand()
            return replace(placement, predicted=figures.predicted, note=figures.note, costs=figures.costs)
        return placement

    def predicted_by_hand(self) -> Placement:
        """The operator's layers, with the figures of the best load that fits them."""
        spec, placement = self._spec, self.by_memory()
        site = self._cluster([stage.node for stage in spec.layers])
        costs = Costs(self._problem(site))
        cut = Cut(
            tuple(costs.names.index(stage.node) for stage in spec.layers),
            tuple(stage.layers.end for stage in spec.layers),
        )
        if placement.streams:
            return self._streaming_by_hand(site, placement, costs, cut)
        load = self._load(costs, cut) or Load(placement.micro_batch, placement.micro_batches)
        figures = predict(costs, Load() if costs.problem.request_limit == 1 else load, cut)
        if not isfinite(figures.time_per_token_s):
            pairs = zip(spec.layers, (*spec.layers[1:], spec.layers[0]), strict=True)
            missing = [(a.node, b.node) for a, b in pairs if (a.node, b.node) in site.unmeasured]
            return replace(placement, note=f"Not predicted: {links_are(missing)} not measured yet.")
        result = result_of(costs, figures, None, GAP_OF_LATENCY)
        return replace(
            placement,
            micro_batch=load.batch,
            micro_batches=load.micro_batches,
            predicted=prediction_of(result, self._typical.source),
            note=placed_note(spec, site, result, spec.concurrency),
            costs=stage_costs(costs, cut),
        )

    def planned(self) -> Placement:
        spec = self._spec
        site = self._cluster([])
        problem = self._problem(site)
        result = plan(problem, alternatives=0)
        if result.prediction is None:
            assert result.shortage is not None
            return self._without_plan(site, result.shortage, describe_offer(result))
        costs, cut, load = Costs(problem), result.prediction.cut, result.prediction.load
        if result.streams:
            return self._streaming(site, result, costs)
        if spec.micro_batches:
            load = self._load(costs, cut) or Load(1, spec.micro_batches)
            micro = result_of(costs, predict(costs, load, cut), None, GAP_OF_LATENCY)
            result = replace(micro, locality=result.locality)
        elif problem.goal.is_single:
            load = self._load(costs, cut) or load
        stages = [ExplicitStage(NodeName(stage.node), stage.layers) for stage in result.stages]
        try:
            requests, placement = spec.concurrency, self._with_pool(stages, load, spec.concurrency)
        except ResourceExhaustedError:
            requests, placement = load.requests, self._with_pool(stages, load, load.requests)
        return replace(
            placement,
            predicted=prediction_of(result, self._typical.source),
            note=placed_note(spec, site, result, requests),
            costs=stage_costs(costs, cut),
        )

    def _streaming(self, site: SiteCluster, result: PlanResult, costs: Costs) -> Placement:
        """A plan whose nodes stream, with a KV pool for the requests that it is for: more of them would stream more."""
        assert result.prediction is not None
        cut = result.prediction.cut
        if self._spec.micro_batches:
            result = self._with_micro_batches(costs, result, cut)
        assert result.prediction is not None
        load = result.prediction.load
        stages = [ExplicitStage(NodeName(stage.node), stage.layers) for stage in result.stages]
        told = [f"Streams weights: {'; '.join(describe_streaming(result))}."]
        if self._advises and (words := advice_without_streaming(result)):
            told.append(f"{words[0].upper()}{words[1:]}.")
        return replace(
            self._with_pool(stages, load, load.requests),
            predicted=prediction_of(result, self._typical.source),
            note=" ".join([*told, placed_note(self._spec, site, result, load.requests)]).rstrip(),
            costs=streaming_costs(costs, result),
            sweep=result.prediction.sweep,
        )

    def _with_micro_batches(self, costs: Costs, result: PlanResult, cut: Cut) -> PlanResult:
        """The plan's cut under the best load with the spec's own number of micro-batches; the plan where none fits."""
        wanted = self._spec.micro_batches
        found = [load for load in stream_loads(costs) if load.load.micro_batches == wanted]
        tried = [given_streaming(costs, cut, load) for load in found]
        fitting = [one for one in tried if one is not None and one.prediction is not None]
        return min(fitting, key=_token_cost, default=result)

    def _streaming_by_hand(self, site: SiteCluster, placement: Placement, costs: Costs, cut: Cut) -> Placement:
        """The operator's layers, of which some stream, with the figures of the pool that they have."""
        requests = self._spec.concurrency if costs.problem.request_limit != 1 else 1
        loads = [StreamedLoad(Load(placement.micro_batch, placement.micro_batches), placement.micro_batches)]
        loads += [load for load in stream_loads(costs) if load.load.requests <= requests]
        tried = [given_streaming(costs, cut, load) for load in loads]
        fitting = [one for one in tried if one is not None and one.prediction is not None]
        best = min(fitting, key=_token_cost, default=None)
        if best is None or best.prediction is None:
            return replace(placement, note="Not predicted: a disk that weights stream from was not measured.")
        told = f"Streams weights: {'; '.join(describe_streaming(best))}."
        return replace(
            placement,
            micro_batch=best.prediction.load.batch,
            micro_batches=best.prediction.load.micro_batches,
            predicted=prediction_of(best, self._typical.source),
            note=f"{told} {placed_note(self._spec, site, best, self._spec.concurrency)}".rstrip(),
            costs=streaming_costs(costs, best),
            sweep=best.prediction.sweep,
        )

    def _with_pool(self, stages: Sequence[ExplicitStage], load: Load, requests: int) -> Placement:
        sizes = StageSizes(self._spec, self._manifest, self._shape, load, requests)
        return place_stages(self._spec, sizes, self._nodes, stages, load)

    def _cluster(self, only: Sequence[NodeName]) -> SiteCluster:
        """The nodes that may serve, or only those named."""
        spec = self._spec
        return site_cluster(
            [node for node in self._nodes.values() if not only or node.name in only],
            links_of(self._measured),
            profiles_for(self._measured, (config_hash(self._manifest.config), spec.dtype, self._quantisation)),
            model=spec.model,
            dtype=spec.dtype,
            quantisation=self._quantisation,
            source=spec.source,
            exclude=spec.exclude,
        )

    def _problem(self, site: SiteCluster) -> PlanProblem:
        spec = self._spec
        options: dict[str, Any] = {
            "objective": _objective(spec),
            "sliced": spec.mode != "sequential",
            "prompt_tokens": self._typical.prompt_tokens,
            "new_tokens": self._typical.new_tokens,
            "context_tokens": self._context,
            "concurrency": 1 if spec.mode == "sequential" else spec.concurrency,
            "dtype": spec.dtype,
            "quantisation": self._quantisation,
            "allow_streaming": spec.allow_streaming,
            "kv_dtype": spec.kv_dtype,
            "max_time_per_token_s": spec.max_time_per_token_s,
            "reserve": {name: float(size) for name in site.cluster.names if (size := spec.reserve_of(name))},
            "held": {node.name: node.held for node in self._nodes.values() if node.held != NOTHING_HELD},
        }
        return site_problem(site, model_from_config(spec.model, self._manifest.config), **options)

    def _load(self, costs: Costs, cut: Cut) -> Load | None:
        """Of at most `concurrency` requests the load with the highest rate on this cut; None when no load fits."""
        if self._spec.mode == "sequential":
            return Load()
        many = Costs(replace(costs.problem, objective=Objective.AUTO))
        fitting = [load for load in self._loads(many) if not violations(many.decode(load), cut)]
        figures = [predict(many, load, cut) for load in fitting]
        limit = self._spec.max_time_per_token_s
        in_time = [item for item in figures if limit is None or item.time_per_token_s <= limit]
        best = max(in_time or figures[:1], key=lambda item: item.throughput_tps, default=None)
        return None if best is None else best.load

    def _loads(self, costs: Costs) -> list[Load]:
        """Those considered, the smallest first; with the spec's own number of micro-batches only such."""
        wanted = self._spec.micro_batches
        if not wanted:
            return loads(costs)
        most = max(1, self._spec.concurrency // wanted)
        return [Load(batch, wanted) for batch in sorted({min(load.batch, most) for load in loads(costs)})]

    def _without_plan(self, site: SiteCluster, shortage: Shortage, offer: str) -> Placement:
        """By memory, if that has a placement: the planner wants measured links."""
        if shortage.constraint == "max_time_per_token":
            raise FailedPreconditionError(
                f"max_time_per_token_s: {shortage.text}", field="max_time_per_token_s", reason="TOO_SLOW"
            )
        try:
            placement = self.by_memory()
        except ResourceExhaustedError as error:
            text = f"no placement fits: {shortage.text}" + (f"; {offer}" if offer else "")
            raise ResourceExhaustedError(text, field=error.field, reason=error.reason) from None
        note = f"Placed by memory, since nothing can be planned: {shortage.text}."
        return replace(placement, note=f"{note} {unused_links(site)}".rstrip())


def _starting(spec: DeploymentSpec, candidates: Sequence[Candidate]) -> tuple[NodeName, ...]:
    """The nodes that would be considered if they were done with starting."""
    return tuple(n.name for n in candidates if n.connected and n.starting and n.name not in spec.exclude)


def _token_cost(result: PlanResult) -> float:
    """Seconds that a token of the batch takes."""
    assert result.prediction is not None
    return 1.0 / result.prediction.throughput_tps


def _without_links(measured: Mapping[NodeId, Measurements], lost: Lost) -> Mapping[NodeId, Measurements]:
    """Links that stand still count as not measured."""
    return {
        sender: replace(known, links={to: link for to, link in known.links.items() if (sender, to) not in lost.links})
        for sender, known in measured.items()
    }


def _objective(spec: DeploymentSpec) -> Objective:
    """In mode `sequential` one step is under way at a time: what matters is one request."""
    objective = Objective(spec.objective)
    one = objective.is_single or objective is Objective.ENERGY
    return objective if one or spec.mode != "sequential" else Objective.REQUEST
