"""Inputs of `edgectl plan`: a cluster file and a config.json, or the site as its coordinator knows
it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import typer

from edgeshard.architectures import parse_config
from edgeshard.architectures.units import UnitForm, held_of
from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import human_rate, human_seconds
from edgeshard.domain.deployments.rules import RuledNode, resolve
from edgeshard.domain.deployments.traffic import NO_TRAFFIC, Traffic
from edgeshard.domain.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from edgeshard.domain.ids import Digest, NodeId
from edgeshard.domain.models.dtypes import DType, KvFormat, Quantisation
from edgeshard.domain.models.packed_units import NOTHING_HELD, PackedParts
from edgeshard.planning.inputs.devices import Cluster, Workload, parse_cluster
from edgeshard.planning.inputs.measured import doubtful, doubts_line
from edgeshard.planning.inputs.problem import Objective, PlanProblem
from edgeshard.planning.inputs.shapes import (
    BUILT_IN_CONFIGS,
    ModelSpec,
    built_in_model,
    model_from_config,
)
from edgeshard.planning.inputs.site_cluster import (
    NOT_MEASURED,
    SiteCluster,
    has_times,
    profile_command,
    site_cluster,
    site_problem,
)
from edgeshard.planning.inputs.what_if import typical_link
from edgeshard.planning.report.speculation import SiteGuesses
from edgeshard.storage.inputs import read_toml

if TYPE_CHECKING:
    from edgeshard.client import Client, Site
    from edgeshard.domain.control.site import NodeDetails
    from edgeshard.domain.nodes.profile import ComputeProfile


@dataclass(frozen=True, slots=True)
class Asked:
    """The request for a plan. `options` are the options by the names of PlanProblem's fields, and
    the source; a missing one is the cluster's own, or the planner's default."""

    model: str
    quantisation: Quantisation | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    what_if: tuple[str, ...] = ()

    @property
    def source(self) -> str | None:
        return self.options.get("source")

    @property
    def exclude(self) -> tuple[str, ...]:
        return tuple(self.options.get("exclude", ()))

    def fields(
        self, workload: Workload, dtype: DType | None = None, kv_dtype: KvFormat | None = None
    ) -> dict[str, Any]:
        """Fields of the problem for a cluster with these of its own. Raises InvalidArgumentError
        naming the option."""
        objective = self.options.get("objective", Objective.AUTO)
        if objective not in list(Objective):
            raise InvalidArgumentError(
                f"--objective {objective!r}: use one of {', '.join(Objective)}", field="objective"
            )
        kv_format = (
            KvFormat.parse(self.options["kv_dtype"]) if "kv_dtype" in self.options else kv_dtype
        )
        fields = {
            **asdict(workload),
            **self.options,
            "objective": Objective(objective),
            "quantisation": self.quantisation,
            "exclude": self.exclude,
            "dtype": self.weights_dtype(dtype),
            "kv_dtype": kv_format,
        }
        return {
            name: value
            for name, value in fields.items()
            if name not in ("source", "assumed", "rule")
        }

    @property
    def lengths_missing(self) -> list[str]:
        return [key for key in ("prompt_tokens", "new_tokens") if key not in self.options]

    def weights_dtype(self, default: DType | None) -> DType:
        return (
            DType.parse(self.options["dtype"])
            if "dtype" in self.options
            else default or DType.BFLOAT16
        )


def offline_problem(path: Path, request: Asked) -> tuple[PlanProblem, tuple[str, ...]]:
    """The nodes of a file and any model, and notes on the figures, in words.

    Raises InvalidArgumentError naming the mistake, and as `read_model` does.
    """
    model = read_model(request.model)
    problem, notes = planned_offline(
        path, model, replace(request, quantisation=_as_stored(request, model))
    )
    return problem, (*_format_notes(problem, request), *notes)


def planned_offline(
    path: Path, model: ModelSpec, request: Asked
) -> tuple[PlanProblem, tuple[str, ...]]:
    """The same for a model that has been read."""
    cluster = read_cluster(path)
    if request.source is not None:
        cluster.index(request.source, "source")
        cloud = None if cluster.cloud == request.source else cluster.cloud
        cluster = replace(cluster, source=request.source, cloud=cloud)
    fields = request.fields(cluster.workload, cluster.dtype, cluster.kv_dtype)
    rules = cluster.under(request.options.get("rule", ()))
    problem = PlanProblem(model=model, cluster=cluster, rules=rules, **fields)
    problem.check()
    return problem, _lengths_notes(problem, request, NO_TRAFFIC) if cluster.workload.assumed else ()


def online_problem(
    context: typer.Context, request: Asked
) -> tuple[PlanProblem, tuple[str, ...], SiteGuesses | None]:
    """A model on the site's connected nodes, notes on its figures, in words, and its counted draft
    tokens.

    A model outside of the store is planned as `unstored_problem` does.

    Prompts arrive at the largest node that has figures unless a source is named. Nodes without
    figures are left out.

    Raises FailedPreconditionError naming the nodes and the command that measures them if no node,
    or not the named source, has figures; NotFoundError or UnavailableError for the model, the
    source and a site without nodes; InvalidArgumentError naming the option at fault.
    """
    from edgeshard.importing.model_sources import is_source

    if is_source(request.model):
        return *unstored_problem(context, read_model(request.model), request), None
    site = _fetch_site(context, request.model)
    model = model_from_config(request.model, site.config)
    problem, measured_site, request = _on_site(site, model, request)
    guesses = SiteGuesses(
        {str(node.name): node.facts for node in site.nodes if node.placeable}, site.traffic.guesses
    )
    return (
        problem,
        (*_notes(measured_site, problem, request), *_lengths_notes(problem, request, site.traffic)),
        guesses,
    )


def unstored_problem(
    context: typer.Context, model: ModelSpec, request: Asked
) -> tuple[PlanProblem, tuple[str, ...]]:
    """A model that has been read, but that no node was measured for, on the site's connected nodes.
    They count with their times for other models, or by their data sheets.

    Raises as `online_problem` does.
    """
    site, details = ask(context, _fetch_details)
    # A node without a data sheet goes by another model.
    others = {
        detail.node.node_id: max(detail.profiles, key=lambda profile: -profile.age_s).profile
        for detail in details
        if detail.profiles
    }
    request = replace(request, model=model.name)
    try:
        problem, measured_site, request = _on_site(site, model, request, others)
    except FailedPreconditionError as error:
        if error.reason != NOT_MEASURED:
            raise
        raise FailedPreconditionError(
            f"{error.message.partition('; run ')[0]}, nor for any other model; have one of the "
            "store measured with "
            "`edgectl profile --model NAME`, or describe the nodes with --cluster FILE",
            field=error.field,
            reason=error.reason,
        ) from None
    estimated = ", ".join(sorted(measured_site.estimated))
    notes = [
        f"estimated by data sheets or by other models' measurements: {estimated}",
        *_link_notes(measured_site, request),
    ]
    if measured_site.without_times:
        command = f"edgectl profile {' '.join(measured_site.without_times)} --model NAME"
        notes.append(
            f"{', '.join(measured_site.without_times)}: left out, not measured for any model; run "
            f"`{command}`"
        )
    return problem, (
        *_format_notes(problem, request),
        *notes,
        *_lengths_notes(problem, request, NO_TRAFFIC),
    )


async def _fetch_details(client: Client) -> tuple[Site, list[NodeDetails]]:
    site = await client.site()
    return site, [await client.node_details(node.node_id) for node in site.nodes if node.placeable]


def _on_site(
    site: Site,
    model: ModelSpec,
    request: Asked,
    others: Mapping[NodeId, ComputeProfile] = MappingProxyType({}),
) -> tuple[PlanProblem, SiteCluster, Asked]:
    """The problem, its nodes, and the request with the weights as they would be deployed."""
    if request.options.get("head_on_source"):
        raise InvalidArgumentError(
            "--head-on-source: a site runs the head on the last node only; leave it out, or plan a "
            "--cluster FILE",
            field="head_on_source",
        )
    for option in _BY_NODE:
        _check_known(site, option, request.options.get(option, ()))
    dtype = request.weights_dtype(None)
    if all(node.facts.kind == "cpu" for node in site.nodes):
        request = replace(request, quantisation=_as_stored(request, model))
    profiles = {
        key: stored.profile for key, stored in site.profiles_of(dtype, request.quantisation).items()
    }
    request = _with_source(site, request, profiles, others)
    measured_site = _measured_cluster(site, request, dtype, profiles, others)
    fields = _of_nodes(measured_site.cluster, request.fields(_seen_workload(site.traffic)))
    energies = {stored.node_id: stored.profile.energy for stored in site.profiles}
    watts = {
        node_id: energy.working_w for node_id, energy in energies.items() if energy is not None
    }
    nodes = [RuledNode(node.name, node.labels, watts.get(node.node_id)) for node in site.nodes]
    fields["rules"] = resolve(request.options.get("rule", ()), nodes)
    problem = site_problem(measured_site, model, packed_parts=_held(site, request, dtype), **fields)
    problem.check()
    return problem, measured_site, request


def _as_stored(request: Asked, model: ModelSpec) -> Quantisation | None:
    """The requested form, or else the store's, in which it would be deployed."""
    return model.shape.stored_as if request.quantisation is None else request.quantisation


def _format_notes(problem: PlanProblem, request: Asked) -> tuple[str, ...]:
    """A note that weights are planned in the form of the store, if no form was requested."""
    if problem.quantisation is None or request.quantisation is not None:
        return ()
    return (f"its weights would be stored as {problem.quantisation}, and are planned so",)


def _held(site: Site, request: Asked, dtype: DType) -> dict[str, PackedParts]:
    """The packed parts of the model on each node, in the requested form."""
    if not (site.packed and site.manifest_digest):
        return {}
    names = {node.node_id: str(node.name) for node in site.nodes}
    form = UnitForm(
        Digest(site.manifest_digest), dtype, request.quantisation, parse_config(site.config)
    )
    parts_by_node = {
        names[on.node_id]: held_of(form, site.config, frozenset(on.ids))
        for on in site.packed
        if on.node_id in names
    }
    return {name: parts for name, parts in parts_by_node.items() if parts != NOTHING_HELD}


def _seen_workload(traffic: Traffic) -> Workload:
    """The mean lengths of the requests that the model's deployments served; the defaults if there
    were none."""
    if not traffic.requests:
        return Workload()
    return Workload(math.floor(traffic.prompts.mean), math.floor(traffic.answers.mean))


def _lengths_notes(problem: PlanProblem, request: Asked, traffic: Traffic) -> tuple[str, ...]:
    """Lengths that were not given, and those that the plan uses instead."""
    if not request.lengths_missing:
        return ()
    options = " and ".join("--" + key.replace("_", "-") for key in request.lengths_missing)
    lengths = " and ".join(str(getattr(problem, key)) for key in request.lengths_missing)
    why = "the default"
    if traffic.requests:
        why = (
            f"as in the latest of {traffic.requests} requests that deployments of "
            f"{request.model} served"
        )
    return (f"{options} not given: planned for {lengths}, {why}",)


def _fetch_site(context: typer.Context, model: str) -> Site:
    try:
        return ask(context, lambda client: client.site(model))
    except UnavailableError as error:
        raise UnavailableError(
            f"{error.message}; without a site, describe the nodes with --cluster FILE",
            reason=error.reason,
            retry_after_s=error.retry_after_s,
        ) from None


def _check_known(site: Site, option: str, names: Iterable[str]) -> None:
    """A node that is away may be named, one that there is not may not."""
    site_names = sorted(str(node.name) for node in site.nodes)
    for name in names:
        if name not in site_names:
            raise InvalidArgumentError(
                f"{option}: there is no node {name!r}; nodes are {', '.join(site_names)}",
                field=option,
                reason="UNKNOWN_NODE",
            )


_BY_NODE = ("exclude", "reserve", "max_share")


def _of_nodes(cluster: Cluster, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without settings for nodes that are away or left out. Only the source among these
    can be in the cluster, and is refused by name."""
    node_fields = {
        option: _among(fields[option], cluster.names) for option in _BY_NODE if option in fields
    }
    return {**fields, **node_fields}


def _among(named: Any, names: Sequence[str]) -> Any:
    """The settings for these nodes, by name or as a list of names."""
    if isinstance(named, Mapping):
        return {name: value for name, value in named.items() if name in names}
    return tuple(name for name in named if name in names)


def _with_source(
    site: Site,
    request: Asked,
    profiles: Mapping[NodeId, ComputeProfile],
    others: Mapping[NodeId, ComputeProfile],
) -> Asked:
    """The request, with the node of the most free memory as the source unless one is named: one
    that has figures, if any has. Raises UnavailableError if no node is there."""
    if request.source is not None:
        return request
    there = [node for node in site.nodes if node.placeable and node.name not in request.exclude]
    if not there:
        raise UnavailableError(
            "no node of the site is connected: start one, or plan for a file of nodes with "
            "--cluster FILE"
        )
    candidates = [node for node in there if has_times(node, profiles, others)] or there
    largest = max(candidates, key=lambda node: node.free_bytes)
    return replace(request, options={**request.options, "source": str(largest.name)})


def _measured_cluster(
    site: Site,
    request: Asked,
    dtype: DType,
    profiles: Mapping[NodeId, ComputeProfile],
    others: Mapping[NodeId, ComputeProfile],
) -> SiteCluster:
    return site_cluster(
        site.nodes,
        [stored.link for stored in site.links],
        profiles,
        model=request.model,
        dtype=dtype,
        quantisation=request.quantisation,
        source=request.source or "",
        exclude=request.exclude,
        others=others,
        skip_unmeasured=True,
    )


def _notes(measured_site: SiteCluster, problem: PlanProblem, request: Asked) -> tuple[str, ...]:
    notes, dtype = _link_notes(measured_site, request), problem.dtype
    if measured_site.without_times:
        command = profile_command(
            request.model, dtype, request.quantisation, measured_site.without_times
        )
        notes.append(
            f"{', '.join(measured_site.without_times)}: left out, not measured for "
            f"{request.model}; run `{command}`"
        )
    if measured_site.estimated:
        command = profile_command(
            request.model, dtype, request.quantisation, measured_site.estimated
        )
        notes.append(
            f"{', '.join(measured_site.estimated)}: not measured, figures are of data sheets; run "
            f"`{command}`"
        )
    if doubted := doubtful(problem):
        command = profile_command(request.model, dtype, request.quantisation, tuple(doubted))
        notes.append(
            f"doubtful figures of {doubts_line(doubted)}; run `{command} --again` when these nodes "
            "are idle"
        )
    return tuple(notes)


def _link_notes(measured_site: SiteCluster, request: Asked) -> list[str]:
    """Notes on the nodes and links, which hold for any model."""
    notes = []
    if any(change.lstrip().startswith("+") for change in request.what_if):
        link = typical_link(measured_site.cluster)
        rate = human_rate(link.bandwidth_bps)
        notes.append(
            f"added nodes get the median of the site's links: {rate}, "
            f"{human_seconds(link.latency_s)}"
        )
    if measured_site.starting:
        notes.append(
            f"{', '.join(measured_site.starting)}: left out, still starting; try again in a moment"
        )
    if measured_site.unmeasured:
        links_text = ", ".join(
            f"{sender} -> {receiver}" for sender, receiver in measured_site.unmeasured[:4]
        )
        more = (
            f" and {len(measured_site.unmeasured) - 4} more"
            if len(measured_site.unmeasured) > 4
            else ""
        )
        senders = " ".join(sorted({str(sender) for sender, _ in measured_site.unmeasured}))
        notes.append(
            f"no link was measured for {links_text}{more}: none is planned with; run `edgectl "
            f"profile {senders}`"
        )
    return notes


def read_cluster(path: Path) -> Cluster:
    """The cluster of a TOML file. Raises InvalidArgumentError naming the file or the key at
    fault."""
    try:
        return parse_cluster(read_toml(path, "--cluster", "cluster"))
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"{path}: {error.message}", field=error.field, reason=error.reason
        ) from None


def read_model(name: str) -> ModelSpec:
    """A model known by name, of a config.json or a GGUF file's header, or of the Hub, in the form
    of the store.

    No weights are read or fetched. Raises InvalidArgumentError naming the key at fault, and as
    adding it does.
    """
    from edgeshard.importing.blocks import Width
    from edgeshard.importing.model_sources import names_program, parse_source
    from edgeshard.importing.outlook import config_of

    built_in_spec = built_in_model(name)
    if built_in_spec is not None:
        return built_in_spec
    source = parse_source(name) if names_program(name) else None
    with suppress(NotFoundError):
        source = source or parse_source(name)
    path = None if source is None else source.path
    if source is None or (
        path is not None and path.is_dir() and not (path / "config.json").exists()
    ):
        raise InvalidArgumentError(
            f"--model {name!r} is neither {', '.join(BUILT_IN_CONFIGS)} nor a config.json, a "
            "directory with one, a "
            ".gguf file, OWNER/NAME of the Hub nor ollama:NAME",
            field="model",
            reason="UNKNOWN_MODEL",
        )
    return model_from_config(source.name, config_of(source, Width.INT8))
