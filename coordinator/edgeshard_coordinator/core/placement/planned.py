"""Placement by the planner: the best nodes and layers by the measured times of nodes and links.

If measurements are missing, free memory decides, and the placement's note names the nodes that lack
them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from math import isfinite
from typing import Any

from edgeshard.architectures import ModelShape, context_note
from edgeshard.domain.deployments import rules
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.placement import ExplicitStage, Placement, Prediction, rank_among
from edgeshard.domain.deployments.traffic import WORTH_SAYING, Outlook
from edgeshard.domain.errors import (
    EdgeShardError,
    FailedPreconditionError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.ids import NodeId, NodeName
from edgeshard.domain.models.dtypes import Quantisation
from edgeshard.domain.models.packed_units import NOTHING_HELD
from edgeshard.domain.nodes.profile import config_hash
from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.shortage import Shortage
from edgeshard.planning.costs.step_budget import stage_costs
from edgeshard.planning.inputs.problem import Objective, PlanProblem
from edgeshard.planning.inputs.shapes import model_from_config
from edgeshard.planning.inputs.site_cluster import (
    NOT_MEASURED,
    SiteCluster,
    listed,
    site_cluster,
    site_problem,
)
from edgeshard.planning.report.describe_tiers import (
    advice_without_streaming,
    describe_offer,
    describe_streaming,
)
from edgeshard.planning.report.speculation import weighed
from edgeshard.planning.search.load_search import loads
from edgeshard.planning.search.plan import (
    GAP_OF_LATENCY,
    PlanResult,
    given_streaming,
    plan,
    predict,
    result_of,
)
from edgeshard.planning.search.tier_search import StreamedLoad, stream_loads
from edgeshard.planning.search.tier_steps import streaming_costs
from edgeshard.planning.solvers.instance import Cut
from edgeshard.planning.solvers.linear import Prover
from edgeshard.planning.solvers.scoring import violations
from edgeshard_coordinator.core.placement import by_memory, describe_planned, repair
from edgeshard_coordinator.core.placement.nearest_placement import nearest, without_held
from edgeshard_coordinator.core.placement.problem import PlacementProblem, typical_request
from edgeshard_coordinator.core.placement.repair import Lost
from edgeshard_coordinator.core.placement.ruled import allowed_sources, conditions_of
from edgeshard_coordinator.core.values.candidate import Candidate
from edgeshard_coordinator.core.values.measurements import Measurements, links_of, profiles_for

RULES_NEED_CPSAT = "RULES_NEED_CPSAT"
Provers = Callable[[], AbstractContextManager[Prover | None]]
_MIXED = "nodes that keep their weights in different ways are not planned together"


class PlanningPlacer:
    """An explicit `layers` list unchanged, otherwise the planner's choice; both with predicted
    figures.

    The KV pool holds `concurrency` requests of the longest context if the chosen nodes have the
    memory, and never fewer than the plan has in flight. Every plan passes the same memory check as
    a placement by hand; the planner counts everything that the check counts, and more.
    """

    def __init__(self, provers: Provers = nullcontext) -> None:
        """`provers` starts the solver for plans under rules; without one a rule is an error."""
        self._provers = provers

    def place(self, problem: PlacementProblem) -> Placement:
        try:
            return self._noted(_Site(problem, self._provers, advises=True))
        except ResourceExhaustedError as error:
            fitting = _fitting_concurrency(problem) if error.reason == by_memory.MEMORY_SHORT else 0
            if not fitting:
                raise
            message = f"{error.message}; concurrency {fitting} fits"
            raise ResourceExhaustedError(
                message, field=error.field, reason=error.reason, retry_after_s=error.retry_after_s
            ) from None

    def _noted(self, site: _Site) -> Placement:
        placement = weighed(self._with_starting(site))
        notes = [
            placement.note,
            describe_planned.mixed_bits(placement, site.candidates),
            site.context_note,
        ]
        return replace(placement, note=" ".join(note for note in notes if note))

    def outlook(self, problem: PlacementProblem, placement: Placement) -> Outlook:
        current_layers, nodes = repair.layers_of(placement), problem.candidates

        def with_layers(
            layers: tuple[ExplicitStage, ...], candidates: Sequence[Candidate]
        ) -> Placement:
            variant = problem.with_spec(prompt_tokens=None, new_tokens=None, layers=layers)
            return self._placed(_Site(replace(variant, candidates=candidates), self._provers))

        try:
            here, best = with_layers(current_layers, nodes), with_layers((), nodes)
            if here.predicted is not None and best.predicted is not None:
                # Packed units of nodes decide where to move, not whether.
                small = here.predicted.gain_of(best.predicted) < WORTH_SAYING
                if small and any(node.packed_parts != NOTHING_HELD for node in nodes):
                    best = with_layers((), without_held(nodes))
        except EdgeShardError as error:
            return Outlook(note=f"It cannot be weighed against other placements: {error.message}.")
        if here.predicted is None or best.predicted is None:
            return Outlook(here.predicted, note=here.note if here.predicted is None else best.note)
        gain = here.predicted.gain_of(best.predicted)
        if gain < WORTH_SAYING:
            return Outlook(here.predicted)
        return Outlook(here.predicted, best.predicted, repair.layers_of(best), gain)

    def repair(self, problem: PlacementProblem, broken: Placement, losses: Lost) -> Placement:
        candidates = problem.candidates
        usable = [
            replace(node, connected=node.connected and node.node_id not in losses.nodes)
            for node in candidates
        ]
        problem = replace(problem, candidates=usable)
        # A stalled link may be avoided by dropping either endpoint.
        without = [losses, *(replace(losses, nodes=losses.nodes | {end}) for end in losses.ends)]
        conditions = conditions_of(problem.spec, candidates)
        barred = [node.name for node in candidates if rules.barred(conditions, node.name)]
        unusable = (*problem.spec.exclude, *barred)
        left = [repair.survivors(broken, candidates, scenario, unusable) for scenario in without]
        placements: list[Placement] = []
        ways = [repair.ways(one, lambda used: not rules.broken(conditions, used)) for one in left]
        for stages in itertools.chain.from_iterable(ways):
            with suppress(EdgeShardError):
                placement = _Site(
                    problem.with_spec(layers=stages, source=stages[0].node), self._provers
                ).kept(broken)
                if not losses.crosses(placement):
                    placements.append(placement)
        # Weights in memory count more than a better pace, and those on the disk more than a
        # slightly better one. Without figures, the first placement wins, which touches the fewest
        # nodes.
        if placements:
            rank = rank_among(placement.predicted for placement in placements)
            best = nearest(
                placements,
                lambda one: (_is_cold(one, broken, candidates), _cost(one, rank)),
                candidates,
            )
        else:
            best = self._without(
                replace(problem, measured=_without_links(problem.measured, losses)), losses
            )
        return replace(
            best, note=f"{best.note} {repair.moved_bits(broken, best, candidates)}".strip()
        )

    def _without(self, problem: PlacementProblem, losses: Lost) -> Placement:
        """Any placement on the nodes that are left, from any of them if the source is lost."""
        spec = problem.spec
        sources = [
            node for node in problem.candidates if node.placeable and node.name not in spec.exclude
        ]
        sources.sort(key=lambda node: (node.name != spec.source, -node.free_bytes, node.name))
        sources = [*allowed_sources(spec, problem.candidates, sources)]
        error: EdgeShardError = ResourceExhaustedError(
            "no node is left", field="node", reason="NO_NODE"
        )
        for source in sources[: repair.MOST_SPARES]:
            try:
                placement = self._anew(
                    _Site(problem.with_spec(layers=(), source=source.name), self._provers)
                )
            except EdgeShardError as refused:
                error = refused
                continue
            if not losses.crosses(placement):
                return placement
            error = UnavailableError(
                "every placement needs a stalled link", field="link", reason="NO_LINK"
            )
        raise error

    def _anew(self, site: _Site) -> Placement:
        """A placement to continue with: by memory if rules need a solver that is not installed."""
        try:
            return self._noted(site)
        except FailedPreconditionError as error:
            if error.reason != RULES_NEED_CPSAT:
                raise
            return replace(
                site.by_memory(),
                note=f"Placed by memory, because no plan is possible: {error.message}.",
            )

    def _with_starting(self, site: _Site) -> Placement:
        starting = () if site.spec.layers else _starting(site.spec, site.candidates)
        if not starting:
            return self._placed(site)
        left_out = f"Left out: {listed(starting)}, still starting."
        try:
            placement = self._placed(site)
        except ResourceExhaustedError as error:
            raise ResourceExhaustedError(
                f"{error.message}. {left_out}",
                field=error.field,
                reason=error.reason,
                retry_after_s=1.0,
            ) from None
        return replace(placement, note=f"{placement.note} {left_out}".lstrip())

    def _placed(self, site: _Site) -> Placement:
        if len(site.formats) > 1:
            return replace(site.by_memory(), note=describe_planned.not_planned(site.spec, _MIXED))
        try:
            return site.predicted_by_hand() if site.spec.layers else site.planned()
        except FailedPreconditionError as error:
            if error.reason != NOT_MEASURED:
                raise
            return replace(
                site.by_memory(), note=describe_planned.not_planned(site.spec, error.message)
            )


def _fitting_concurrency(problem: PlacementProblem) -> int:
    """The most concurrent requests that fit, if fewer than requested; 0 if not even one does."""

    def fits(concurrency: int) -> bool:
        spec = problem.with_spec(concurrency=concurrency).spec
        try:
            by_memory.SimplePlacer().place(
                spec, problem.manifest, problem.candidates, problem.draft
            )
        except EdgeShardError:
            return False
        return True

    return bisect_left(
        range(1, problem.spec.concurrency), True, key=lambda concurrency: not fits(concurrency)
    )


def _is_cold(placement: Placement, broken: Placement, candidates: Sequence[Candidate]) -> bool:
    stood_by = any(node.warm is not None for node in candidates)
    return stood_by and any(
        layers for _, layers in repair.cold_layers(placement, broken, candidates)
    )


def _cost(placement: Placement, rank: Callable[[Prediction], float]) -> float:
    return 0.0 if placement.predicted is None else rank(placement.predicted)


class _Site:
    """A problem as the planner sees it. Raises as SimplePlacer does for nodes that cannot be."""

    def __init__(self, problem: PlacementProblem, provers: Provers, advises: bool = False) -> None:
        """With `advises`, a note describes what would do without streaming, which takes some plans
        more."""
        self._provers, self._advises = provers, advises
        self.spec, self.candidates = problem.spec, problem.candidates
        self._manifest = problem.manifest
        self._measured = problem.measured
        self._draft = problem.draft
        self._shape: ModelShape = by_memory.checked_shape(self.spec, self._manifest)
        self._context = self.spec.max_context or self._shape.max_context
        self._typical = typical_request(self.spec, self._context, problem.traffic)
        self._nodes = by_memory.usable_nodes(self.spec, self.candidates)

    @property
    def context_note(self) -> str:
        """The consequence of the deployment's context for the model's arithmetic, if there is
        any."""
        return context_note(self._manifest.config, self.spec.max_context)

    @property
    def formats(self) -> frozenset[Quantisation | None]:
        """The forms in which the nodes that may serve keep their weights."""
        spec = self.spec
        may_serve = [
            name
            for name, node in self._nodes.items()
            if node.placeable and name not in spec.exclude
        ]
        return frozenset(
            spec.quantisation_of(name)
            for name in [stage.node for stage in spec.layers] or may_serve
        )

    @property
    def _quantisation(self) -> Quantisation | None:
        (only,) = self.formats
        return only

    def by_memory(self) -> Placement:
        return by_memory.SimplePlacer().place(
            self.spec, self._manifest, self.candidates, self._draft
        )

    def kept(self, broken: Placement) -> Placement:
        """The spec's layers with the KV pool and the load of a placement before, so that nodes keep
        their stages."""
        load = Load(broken.micro_batch, broken.micro_batches)
        sizes = by_memory.sizes_of(self.spec, self._manifest, broken)
        placement = by_memory.place_stages(self.spec, sizes, self._nodes, self.spec.layers, load)
        with suppress(EdgeShardError):  # without measurements there are no figures
            figures = self.predicted_by_hand()
            return weighed(
                replace(
                    placement, predicted=figures.predicted, note=figures.note, costs=figures.costs
                )
            )
        return placement

    def predicted_by_hand(self) -> Placement:
        """The operator's layers, with the figures of the best load that fits them."""
        spec, placement = self.spec, self.by_memory()
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
            return replace(
                placement,
                note=f"Not predicted: {describe_planned.links_are(missing)} not measured yet.",
            )
        result = result_of(costs, figures, None, GAP_OF_LATENCY)
        return replace(
            placement,
            micro_batch=load.batch,
            micro_batches=load.micro_batches,
            predicted=describe_planned.prediction_of(result, self._typical.source),
            note=describe_planned.placed_note(spec, site, result, spec.concurrency),
            costs=stage_costs(costs, cut),
        )

    def planned(self) -> Placement:
        spec = self.spec
        site = self._cluster([])
        # If stages are given, the placement's check has examined the rules.
        problem = replace(self._problem(site), rules=conditions_of(spec, self._nodes.values()))
        with self._provers() as prover:
            result = plan(problem, 0, prover)
        if result.prediction is None:
            assert result.shortage is not None
            return self._without_plan(site, result.shortage, describe_offer(result))
        costs = Costs(problem)
        cut = result.prediction.cut
        load = result.prediction.load
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
            predicted=describe_planned.prediction_of(result, self._typical.source),
            note=describe_planned.placed_note(spec, site, result, requests),
            costs=stage_costs(costs, cut),
        )

    def _streaming(self, site: SiteCluster, result: PlanResult, costs: Costs) -> Placement:
        """A plan whose nodes stream, with a KV pool for the requests that it is for: more of them
        would stream more."""
        assert result.prediction is not None
        if micro_batches := self.spec.micro_batches:
            # If no load with the spec's own number of micro-batches fits the cut, the plan stays as
            # it is.
            matching_loads = [
                load for load in stream_loads(costs) if load.load.micro_batches == micro_batches
            ]
            result = _fastest(costs, result.prediction.cut, matching_loads) or result
        assert result.prediction is not None
        load = result.prediction.load
        stages = [ExplicitStage(NodeName(stage.node), stage.layers) for stage in result.stages]
        advice = advice_without_streaming(result) if self._advises else ""
        pool = self._with_pool(stages, load, load.requests)
        return self._told_streaming(pool, site, costs, result, load.requests, advice)

    def _streaming_by_hand(
        self, site: SiteCluster, placement: Placement, costs: Costs, cut: Cut
    ) -> Placement:
        """The operator's layers, of which some stream, with the figures of the pool that they
        have."""
        requests = self.spec.concurrency if costs.problem.request_limit != 1 else 1
        loads = [
            StreamedLoad(
                Load(placement.micro_batch, placement.micro_batches), placement.micro_batches
            )
        ]
        loads += [load for load in stream_loads(costs) if load.load.requests <= requests]
        best = _fastest(costs, cut, loads)
        if best is None or best.prediction is None:
            return replace(
                placement, note="Not predicted: a disk that weights stream from was not measured."
            )
        load = best.prediction.load
        placement = replace(placement, micro_batch=load.batch, micro_batches=load.micro_batches)
        return self._told_streaming(placement, site, costs, best, self.spec.concurrency)

    def _told_streaming(
        self,
        placement: Placement,
        site: SiteCluster,
        costs: Costs,
        result: PlanResult,
        requests: int,
        advice: str = "",
    ) -> Placement:
        """The placement with the figures of a plan that streams; `requests` of full length fit the
        KV pool."""
        assert result.prediction is not None
        sentences = [f"Streams weights: {'; '.join(describe_streaming(result))}."]
        sentences += [f"{advice[0].upper()}{advice[1:]}."] if advice else []
        return replace(
            placement,
            predicted=describe_planned.prediction_of(result, self._typical.source),
            note=" ".join(
                [*sentences, describe_planned.placed_note(self.spec, site, result, requests)]
            ).rstrip(),
            costs=streaming_costs(costs, result),
            sweep=result.prediction.sweep,
        )

    def _with_pool(self, stages: Sequence[ExplicitStage], load: Load, requests: int) -> Placement:
        sizes = by_memory.StageSizes(
            self.spec, self._manifest, self._shape, load, requests, draft=self._draft
        )
        return by_memory.place_stages(self.spec, sizes, self._nodes, stages, load)

    def _cluster(self, only: Sequence[NodeName]) -> SiteCluster:
        """The nodes that may serve, or only those named."""
        spec = self.spec
        return site_cluster(
            [node for node in self._nodes.values() if not only or node.name in only],
            links_of(self._measured),
            profiles_for(
                self._measured, (config_hash(self._manifest.config), spec.dtype, self._quantisation)
            ),
            model=spec.model,
            dtype=spec.dtype,
            quantisation=self._quantisation,
            source=spec.source,
            exclude=spec.exclude,
        )

    def _problem(self, site: SiteCluster) -> PlanProblem:
        spec = self.spec
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
            "reserve": {
                name: float(size) for name in site.cluster.names if (size := self._reserve_of(name))
            },
            "packed_parts": {
                node.name: node.packed_parts
                for node in self._nodes.values()
                if node.packed_parts != NOTHING_HELD
            },
        }
        return site_problem(site, model_from_config(spec.model, self._manifest.config), **options)

    def _reserve_of(self, node: str) -> int:
        """Bytes of a node that are not for layers: the draft uses the first layer's node."""
        drafted = 0 if self._draft is None or node != self.spec.source else self._draft.held_bytes
        return self.spec.reserve_of(node) + drafted

    def _load(self, costs: Costs, cut: Cut) -> Load | None:
        """The load with the highest rate on this cut, of at most `concurrency` requests; None when
        no load fits."""
        if self.spec.mode == "sequential":
            return Load()
        many = Costs(replace(costs.problem, objective=Objective.AUTO))
        fitting = [load for load in self._loads(many) if not violations(many.decode(load), cut)]
        figures = [predict(many, load, cut) for load in fitting]
        limit = self.spec.max_time_per_token_s
        in_time = [item for item in figures if limit is None or item.time_per_token_s <= limit]
        best = max(in_time or figures[:1], key=lambda item: item.throughput_tps, default=None)
        return None if best is None else best.load

    def _loads(self, costs: Costs) -> list[Load]:
        """The loads to consider, the smallest first; with the spec's own number of micro-batches
        only such."""
        micro_batches = self.spec.micro_batches
        if not micro_batches:
            return loads(costs)
        most = max(1, self.spec.concurrency // micro_batches)
        return [
            Load(batch, micro_batches)
            for batch in sorted({min(load.batch, most) for load in loads(costs)})
        ]

    def _without_plan(self, site: SiteCluster, shortage: Shortage, offer: str) -> Placement:
        """A placement by memory, if there is one: the planner wants measured links."""
        if shortage.constraint == "max_time_per_token":
            raise FailedPreconditionError(
                f"max_time_per_token_s: {shortage.text}",
                field="max_time_per_token_s",
                reason="TOO_SLOW",
            )
        try:
            placement = self.by_memory()
        except ResourceExhaustedError as error:
            text = f"no placement fits: {shortage.text}" + (f"; {offer}" if offer else "")
            raise ResourceExhaustedError(text, field=error.field, reason=error.reason) from None
        note = f"Placed by memory, because no plan is possible: {shortage.text}."
        return replace(placement, note=f"{note} {describe_planned.unused_links(site)}".rstrip())


def _starting(spec: DeploymentSpec, candidates: Sequence[Candidate]) -> tuple[NodeName, ...]:
    """The nodes that would be considered if they were done with starting."""
    return tuple(
        n.name for n in candidates if n.connected and n.starting and n.name not in spec.exclude
    )


def _fastest(costs: Costs, cut: Cut, loads: Sequence[StreamedLoad]) -> PlanResult | None:
    """The plan of the load whose tokens cost least on a cut, streaming; None if none of `loads`
    fits."""
    tried = [given_streaming(costs, cut, load) for load in loads]
    fitting = [one for one in tried if one is not None and one.prediction is not None]
    return min(fitting, key=_token_cost, default=None)


def _token_cost(result: PlanResult) -> float:
    """Seconds that a token of the batch takes."""
    assert result.prediction is not None
    return 1.0 / result.prediction.throughput_tps


def _without_links(
    measured: Mapping[NodeId, Measurements], losses: Lost
) -> Mapping[NodeId, Measurements]:
    """Stalled links count as not measured."""
    without = {}
    for sender, measurements in measured.items():
        pairs = measurements.links.items()
        links = {to: link for to, link in pairs if (sender, to) not in losses.links}
        without[sender] = replace(measurements, links=links)
    return without


def _objective(spec: DeploymentSpec) -> Objective:
    """The planner's objective. In mode `sequential` one step is under way at a time, so a single
    request matters."""
    objective = Objective(spec.objective)
    one = objective.is_single or objective is Objective.ENERGY
    return objective if one or spec.mode != "sequential" else Objective.REQUEST
