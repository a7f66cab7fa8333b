"""A site as its coordinator knows it, as the planner's cluster: measured times and links. Pure.

A plan must not rest on unknown figures. A node without times, measured or of the catalogue, is
therefore left out or makes the site unplannable; the error names it. Two nodes without a measured
link have none, so a plan never sends from one to the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

from edgeshard.domain.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from edgeshard.domain.ids import NodeId, NodeName
from edgeshard.domain.models.dtypes import (
    WHOLE_HEAD,
    DType,
    IntegerFormat,
    Quantisation,
    weights_text,
)
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard.domain.nodes.profile import ComputeProfile, LayerKind, MeasuredLink
from edgeshard.planning.inputs.catalogue import DeviceSpec, recognise
from edgeshard.planning.inputs.devices import Cluster, ClusterNode, Link
from edgeshard.planning.inputs.measured import MeasuredTimes
from edgeshard.planning.inputs.problem import ComputeTimes, PlanProblem, Rate
from edgeshard.planning.inputs.shapes import ModelSpec
from edgeshard.planning.inputs.workspace import largest_step_tokens

NOT_MEASURED = "NOT_MEASURED"
"""Reason of the error for a site that cannot be planned before nodes are measured."""
LOADING_ITEMSIZE = 4
"""A node loads tensor by tensor, and the one at hand is there once more in fp32."""
_NO_LINK = Link(bandwidth_bps=0.0)


class SiteNode(Protocol):
    """A node of the site, such as `edgeshard.domain.nodes.device.Node`; stages may still take
    `free_bytes`."""

    @property
    def node_id(self) -> NodeId: ...

    @property
    def name(self) -> NodeName: ...

    @property
    def facts(self) -> DeviceFacts: ...

    @property
    def free_bytes(self) -> int: ...

    @property
    def connected(self) -> bool: ...

    @property
    def placeable(self) -> bool: ...

    @property
    def labels(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class SiteCluster:
    """The nodes that layers can be placed on, by name, the source first.

    `times` are the measured nodes'; those in `estimated` have the figures of the catalogue.
    `unmeasured` are the pairs (sender, receiver) without a measurement, between which there is no
    link. Those in `starting` are left out, and so are those in `without_times`.
    """

    cluster: Cluster
    times: Mapping[str, ComputeTimes]
    estimated: tuple[NodeName, ...]
    unmeasured: tuple[tuple[NodeName, NodeName], ...]
    starting: tuple[NodeName, ...] = ()
    without_times: tuple[NodeName, ...] = ()


def site_cluster(  # noqa: PLR0913 - the site's figures, and the request
    nodes: Iterable[SiteNode],
    links: Iterable[MeasuredLink],
    profiles: Mapping[NodeId, ComputeProfile],
    *,
    model: str,
    dtype: DType,
    quantisation: Quantisation | None = None,
    source: str,
    exclude: Collection[str] = (),
    others: Mapping[NodeId, ComputeProfile] = MappingProxyType({}),
    skip_unmeasured: bool = False,
) -> SiteCluster:
    """The nodes of a site that can serve, and their links.

    `profiles` are for this model in this dtype and quantisation, by node. If a node has none and no
    known data sheet, it counts like one that would take as long for a model of `others`. Nodes that
    are away, still starting or in `exclude` are left out. If `skip_unmeasured`, nodes without times
    are too, except the source.

    Raises NotFoundError or UnavailableError for a source that is not there, InvalidArgumentError
    for nodes that cannot run small integers, FailedPreconditionError (reason NOT_MEASURED) naming
    the nodes without times.
    """
    nodes = list(nodes)
    usable = _usable(nodes, source, exclude)
    without_times: tuple[NodeName, ...] = ()
    if skip_unmeasured:
        without_times = tuple(
            node.name for node in usable[1:] if not has_times(node, profiles, others)
        )
        usable = [node for node in usable if node.name not in without_times]
    if quantisation is not None:
        _check_processors(usable, quantisation)
    planned = [_cluster_node(node, profiles, others) for node in usable]
    unknown = [node.name for node, one in zip(usable, planned, strict=True) if one is None]
    if unknown:
        raise _not_measured(model, dtype, quantisation, [*unknown, *without_times])
    measured = [node for node in usable if node.node_id in profiles]
    times: dict[str, ComputeTimes] = {
        node.name: MeasuredTimes.of(profiles[node.node_id]) for node in measured
    }
    measured_links, unmeasured = _links(usable, links)
    cluster = Cluster(
        tuple(node for node in planned if node is not None),
        _NO_LINK,
        source=usable[0].name,
        links=MappingProxyType(measured_links),
    )
    estimated = tuple(node.name for node in usable if node.name not in times)
    starting = tuple(
        sorted(n.name for n in nodes if n.connected and not n.placeable and n.name not in exclude)
    )
    return SiteCluster(
        cluster, MappingProxyType(times), estimated, unmeasured, starting, without_times
    )


def _cluster_node(
    node: SiteNode,
    profiles: Mapping[NodeId, ComputeProfile],
    others: Mapping[NodeId, ComputeProfile],
) -> ClusterNode | None:
    """The node with the memory that the coordinator counts: what it grants less what others hold
    there. None if it has neither a profile nor a known data sheet."""
    device = recognise(node.facts)
    profile = profiles.get(node.node_id) or others.get(node.node_id)
    if profile is not None:
        device = _figures(profile, device)
    if device is None:
        return None
    memory = replace(device, memory_bytes=float(node.free_bytes), system_bytes=0.0)
    return ClusterNode(node.name, memory, node.name, labels=node.labels)


def _not_measured(
    model: str, dtype: DType, quantisation: Quantisation | None, nodes: list[NodeName]
) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"not measured for {model} in {weights_text(dtype, quantisation)}: {listed(nodes)}; run "
        f"`{profile_command(model, dtype, quantisation)}`",
        field="model",
        reason=NOT_MEASURED,
    )


def has_times(
    node: SiteNode,
    profiles: Mapping[NodeId, ComputeProfile],
    others: Mapping[NodeId, ComputeProfile],
) -> bool:
    """Whether a node has times to plan with: of a profile, of one for another model, or of a known
    data sheet."""
    return node.node_id in profiles or node.node_id in others or recognise(node.facts) is not None


def site_problem(site: SiteCluster, model: ModelSpec, **options: Any) -> PlanProblem:
    """A model on a site; `options` are PlanProblem's. Its rate is the steady one, as under load.

    Memory has room for the largest step a head forms for requests of this length, whatever prompts
    are planned for.
    """
    problem = PlanProblem(
        **{"rate": Rate.STEADY, **options},
        model=model,
        cluster=site.cluster,
        times=site.times,
        loading_itemsize=LOADING_ITEMSIZE,
    )
    return replace(problem, step_tokens=largest_step_tokens(problem.held_tokens))


def profile_command(
    model: str, dtype: DType, quantisation: Quantisation | None = None, names: Sequence[str] = ()
) -> str:
    """The command that has nodes measured for a model: the named ones, or all that are
    connected."""
    quantise: tuple[str, ...] = ()
    if quantisation is not None:
        is_stored = quantisation is Quantisation.STORED
        quantise = ("--quantise", quantisation if is_stored else quantisation.blocks)
        if not is_stored and quantisation.head is not IntegerFormat.INT8:
            quantise += ("--head-quantisation", quantisation.head or WHOLE_HEAD)
    return " ".join(("edgectl profile --model", model, "--dtype", dtype, *quantise, *names))


def listed(names: Sequence[str], most: int = 5) -> str:
    """Names for a sentence, at most `most` of them: `a, b and 7 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def node_starting(field: str, name: str) -> UnavailableError:
    """The error for a node that `field` names and that has joined, but still imports what
    computes."""
    return UnavailableError(
        f"{field}: node {name} is still starting; try again in a moment, or leave it out",
        field=field,
        reason="NODE_STARTING",
        retry_after_s=1.0,
    )


def _usable(every: Sequence[SiteNode], source: str, exclude: Collection[str]) -> list[SiteNode]:
    """Placeable nodes by name, the source first. `source` is a name or an id."""
    matches = sorted(
        (node for node in every if source in (node.name, node.node_id)),
        key=lambda node: node.connected,
    )
    if not matches:
        names = listed(sorted(node.name for node in every)) or "none"
        raise NotFoundError.about("source", f"there is no node {source}; nodes are {names}")
    first = matches[-1]
    if not first.connected:
        raise UnavailableError(
            f"source: node {source} is not connected",
            field="source",
            reason="NODE_AWAY",
            retry_after_s=1.0,
        )
    if not first.placeable:
        raise node_starting("source", first.name)
    others = [
        node
        for node in every
        if node.placeable and node.node_id != first.node_id and node.name not in exclude
    ]
    return [first, *sorted(others, key=lambda node: node.name)]


def _check_processors(nodes: Sequence[SiteNode], quantisation: Quantisation) -> None:
    others = [node.name for node in nodes if node.facts.kind != "cpu"]
    if others:
        why = (
            f"weights of {quantisation} run on CPUs only, not on {listed(others)}; exclude these "
            "nodes"
        )
        raise InvalidArgumentError.about("quantisation", why, "UNSUPPORTED_QUANTISATION")


def _links(
    nodes: Sequence[SiteNode], links: Iterable[MeasuredLink]
) -> tuple[dict[tuple[str, str], Link], tuple[tuple[NodeName, NodeName], ...]]:
    """Measured links by names, and the pairs that have none."""
    names = {node.node_id: node.name for node in nodes}
    measured_links: dict[tuple[str, str], Link] = {
        (names[link.sender], names[link.receiver]): Link(
            link.profile.bandwidth_bps, link.profile.latency_s
        )
        for link in links
        if link.sender in names and link.receiver in names
    }
    pairs = (
        (sender.name, receiver.name)
        for sender in nodes
        for receiver in nodes
        if sender is not receiver
    )
    return measured_links, tuple(pair for pair in pairs if pair not in measured_links)


def _figures(profile: ComputeProfile, spec: DeviceSpec | None) -> DeviceSpec:
    """A measured node as the device that would take as long by the roofline. Solvers do not see it,
    baselines do.

    Its watts are measured too if it has a sensor; otherwise they are the catalogue's, if the node
    is in it.
    """
    idle_w, busy_w = (spec.idle_w, spec.busy_w) if spec is not None else (None, None)
    disk = profile.disk
    if profile.energy is not None:
        idle_w, busy_w = profile.energy.idle_w, profile.energy.working_w
    block = next(
        layer for layer in profile.layers if layer.kind in (LayerKind.BLOCK, LayerKind.MOE_BLOCK)
    )
    step = min(block.decode, key=lambda sample: (sample.count, sample.context))
    prompt = max(block.prefill, key=lambda sample: sample.count)
    weights = block.weight_bytes or block.parameters * profile.dtype.itemsize
    # nearly all of a block is matrices
    if not block.weight_bytes and profile.quantisation is not None:
        weights = profile.quantisation.blocks.matrix_bytes(1, block.parameters)
    return DeviceSpec(
        kind=profile.device,
        memory_bytes=0.0,
        system_bytes=0.0,
        bandwidth_bytes_per_s=weights / step.seconds,
        flops=dict.fromkeys(DType, 2.0 * block.parameters * prompt.count / prompt.seconds),
        unified=profile.memory.unified,
        source="measured",
        idle_w=idle_w,
        busy_w=busy_w,
        disk_bytes_per_s=None if disk is None else disk.read_bytes_per_s,
        disk_bytes=None if disk is None else float(disk.free_bytes),
    )
