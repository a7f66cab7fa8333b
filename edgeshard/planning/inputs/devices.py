"""A cluster: its nodes, the links between them, and the reading of both from a mapping (a decoded
TOML file). Pure.

Every unknown key and every value that cannot be raises InvalidArgumentError naming the field:
`device[1].count`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count as numbers
from itertools import islice
from types import MappingProxyType
from typing import Any

from edgeshard.domain.deployments.rules import Rule, RuleCondition, RuledNode, resolve
from edgeshard.domain.errors import InvalidArgumentError, invalid
from edgeshard.domain.ids import check_name
from edgeshard.domain.models.dtypes import DType, KvFormat
from edgeshard.domain.nodes.labels import check_labels
from edgeshard.planning.inputs.catalogue import CATALOGUE, DeviceSpec
from edgeshard.planning.inputs.table_fields import Fields

MAX_NODES = 10_000
MAX_PAIRS = 500_000
"""Most (sender, receiver) pairs that the [[link]] tables of a file may describe besides the
default: two groups of 500 nodes."""
NO_NEIGHBOUR_BPS = 1e9
"""Rate of the links of a single node, which need not describe links that it lacks; used once nodes
are added to it."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """One node of a cluster. `up_bps` and `down_bps` cap its sending and receiving, in bits a
    second; None: no cap."""

    name: str
    device: DeviceSpec
    group: str
    up_bps: float | None = None
    down_bps: float | None = None
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """For rules (`domain.deployments.rules`)."""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two nodes: bits a second (0 if there is no link), and the pure delay in
    seconds."""

    bandwidth_bps: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests that a plan is for: tokens in and out of each, sequences in one micro-batch,
    requests at once.

    If `batch` or `concurrency` is None, the planner chooses it. `assumed` is true if the lengths
    are defaults.
    """

    prompt_tokens: int = 128
    new_tokens: int = 128
    batch: int | None = None
    concurrency: int | None = None
    assumed: bool = True


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes and links."""

    nodes: tuple[ClusterNode, ...]
    default_link: Link
    source: str
    links: Mapping[tuple[str, str], Link] = field(default_factory=lambda: MappingProxyType({}))
    """Links that differ from `default_link`, by (sender, receiver)."""
    cloud: str | None = None
    """The node that baselines offload to; None: the one with the fastest memory except the
    source."""
    workload: Workload = Workload()
    dtype: DType | None = None
    kv_dtype: KvFormat | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes)

    def under(self, rules: Sequence[Rule]) -> tuple[RuleCondition, ...]:
        """Rules as conditions on these nodes. Raises InvalidArgumentError naming `rule[i]`."""
        return resolve(
            rules, [RuledNode(node.name, node.labels, node.device.busy_w) for node in self.nodes]
        )

    def link(self, sender: ClusterNode, receiver: ClusterNode) -> Link:
        """The link from one node to another, within what both ends can do."""
        link = self.links.get((sender.name, receiver.name), self.default_link)
        caps = [rate for rate in (sender.up_bps, receiver.down_bps) if rate is not None]
        return replace(link, bandwidth_bps=min(link.bandwidth_bps, *caps)) if caps else link

    def index(self, name: str, field_name: str) -> int:
        """Position of a node. Raises InvalidArgumentError naming `field_name` when there is none of
        that name."""
        for index, node in enumerate(self.nodes):
            if node.name == name:
                return index
        listing = ", ".join(self.names[:12]) + (", ..." if len(self.nodes) > 12 else "")
        raise InvalidArgumentError.about(
            field_name, f"there is no node {name!r}; nodes are {listing}", "UNKNOWN_NODE"
        )


def parse_cluster(values: Mapping[str, Any]) -> Cluster:
    """The cluster that a decoded TOML file describes; docs/planning-reference.md lists its keys."""
    if not isinstance(values, Mapping):
        raise invalid("cluster", "holds no object")
    top = Fields(values, "")
    top.only("device", "link", "model", "source", "cloud", "workload")
    nodes = _nodes(top.tables("device"))
    default, links = _links(values.get("link"), nodes)
    model = top.table("model")
    model.only("dtype", "kv_dtype")
    dtype, kv_dtype = model.text("dtype", None), model.text("kv_dtype", None)
    cluster = Cluster(
        nodes=nodes,
        default_link=default,
        source=top.text("source"),
        links=MappingProxyType(links),
        cloud=top.text("cloud", None),
        workload=_workload(top.table("workload")),
        dtype=None if dtype is None else DType.parse(dtype, model.name("dtype")),
        kv_dtype=None if kv_dtype is None else KvFormat.parse(kv_dtype, model.name("kv_dtype")),
    )
    cluster.index(cluster.source, "source")
    if cluster.cloud is not None and cluster.index(cluster.cloud, "cloud") == cluster.index(
        cluster.source, "source"
    ):
        raise invalid("cloud", f"{cluster.cloud!r} is the source; name another node")
    return cluster


def _workload(values: Fields) -> Workload:
    names = ("prompt_tokens", "new_tokens", "batch", "concurrency")
    values.only(*names)
    counts: dict[str, Any] = {
        name: values.count(name, None) for name in names if values.given(name)
    }
    return Workload(**counts, assumed="prompt_tokens" not in counts and "new_tokens" not in counts)


_FIGURES = (
    *("memory_bytes", "system_bytes", "bandwidth_bytes_per_s", "flops", "unified"),
    *("idle_w", "busy_w", "disk_bytes_per_s", "disk_bytes"),
)
_DEVICE_KEYS = (
    "name",
    "kind",
    "count",
    *_FIGURES,
    "step_overhead_s",
    "up_bps",
    "down_bps",
    "figures_source",
    "labels",
)


def _nodes(tables: Sequence[Fields]) -> tuple[ClusterNode, ...]:
    if not tables:
        raise invalid("device", "is missing; a cluster needs at least one [[device]]")
    nodes: list[ClusterNode] = []
    for table in tables:
        table.only(*_DEVICE_KEYS)
        name, count = table.text("name"), table.count("count", 1)
        check_name(name, table.name("name"))
        if len(nodes) + count > MAX_NODES:
            raise invalid(
                table.name("count"), f"is {count}; a cluster has at most {MAX_NODES} nodes"
            )
        node = ClusterNode(
            name=name,
            device=_device(table),
            group=name,
            up_bps=table.positive("up_bps", None),
            down_bps=table.positive("down_bps", None),
            labels=_labels(table.table("labels")),
        )
        numbered = count > 1 or table.given("count")
        nodes += (
            [replace(node, name=f"{name}-{n}") for n in range(1, count + 1)] if numbered else [node]
        )
    names: set[str] = set()
    for node in nodes:
        if node.name in names:
            raise invalid(
                "device", f"{node.name!r} appears twice; give each [[device]] its own name"
            )
        names.add(node.name)
    return tuple(nodes)


def _device(table: Fields) -> DeviceSpec:
    kind = table.text("kind", None)
    if kind is not None and kind not in CATALOGUE:
        instead = "leave kind out and give memory_bytes, bandwidth_bytes_per_s and flops"
        why = (
            f"device {kind!r} is not in the catalogue; use one of {', '.join(CATALOGUE)}, or "
            f"{instead}"
        )
        raise InvalidArgumentError.about(table.name("kind"), why, "UNKNOWN_DEVICE")
    base = CATALOGUE[kind] if kind is not None else None
    memory = table.positive("memory_bytes", base.memory_bytes if base else ...)
    system = table.not_negative("system_bytes", base.system_bytes if base else 0.0)
    if system >= memory:
        raise invalid(
            table.name("system_bytes"),
            f"is {system:g}, which leaves none of memory_bytes {memory:g}",
        )
    flops = dict(base.flops) if base else {}
    if base is None or table.given("flops"):
        flops = dict.fromkeys(DType, table.positive("flops", ...))
    changed = [key for key in _FIGURES if table.given(key)]
    source = table.text("figures_source", None) or (base.source if base else "cluster file")
    if base is not None and changed and not table.given("figures_source"):
        source += f" ({', '.join(changed)}: cluster file)"
    idle_w, busy_w = _power(table, base)
    return DeviceSpec(
        kind=kind or table.text("name"),
        memory_bytes=memory,
        system_bytes=system,
        bandwidth_bytes_per_s=table.positive(
            "bandwidth_bytes_per_s", base.bandwidth_bytes_per_s if base else ...
        ),
        flops=MappingProxyType(flops),
        unified=table.flag("unified", base.unified if base else True),
        source=source,
        step_overhead_s=table.not_negative(
            "step_overhead_s", base.step_overhead_s if base else 0.0
        ),
        idle_w=idle_w,
        busy_w=busy_w,
        disk_bytes_per_s=table.positive(
            "disk_bytes_per_s", base.disk_bytes_per_s if base else None
        ),
        disk_bytes=table.positive("disk_bytes", base.disk_bytes if base else None),
    )


def _labels(table: Fields) -> Mapping[str, str]:
    labels = {key: str(table.text(key)) for key in table.values}
    return check_labels(labels, table.path)


def _power(table: Fields, base: DeviceSpec | None) -> tuple[float | None, float | None]:
    """Watts, idle and busy: both or neither."""
    if not table.given("idle_w") and not table.given("busy_w"):
        return (base.idle_w, base.busy_w) if base else (None, None)
    for key, other in (("idle_w", "busy_w"), ("busy_w", "idle_w")):
        if not table.given(key):
            raise invalid(table.name(key), f"is missing; give it too, since {other} is given")
    idle_w, busy_w = table.not_negative("idle_w", 0.0), table.not_negative("busy_w", 0.0)
    if busy_w < idle_w:
        raise invalid(table.name("busy_w"), f"is {busy_w:g}, less than idle_w {idle_w:g}")
    return idle_w, busy_w


def _links(value: Any, nodes: Sequence[ClusterNode]) -> tuple[Link, dict[tuple[str, str], Link]]:
    """The [link] table, or a list of [[link]] of which the one without ends is the default."""
    if value is None and len(nodes) == 1:
        return Link(NO_NEIGHBOUR_BPS), {}
    tables = [value] if isinstance(value, Mapping) else value
    if (
        not isinstance(tables, list)
        or not all(isinstance(item, Mapping) for item in tables)
        or not tables
    ):
        raise invalid(
            "link",
            "is missing; give [[link]] with bandwidth_bps, and more with from and to, or between",
        )
    default: Link | None = None
    links: dict[tuple[str, str], Link] = {}
    pairs = 0
    for position, item in enumerate(tables):
        table = Fields(item, f"link[{position}]" if len(tables) > 1 else "link")
        table.only("bandwidth_bps", "latency_s", "between", "from", "to")
        link = Link(table.positive("bandwidth_bps", ...), table.not_negative("latency_s", 0.0))
        ends = _ends(table, nodes)
        if ends is not None:
            pairs += sum(len(senders) * len(receivers) for senders, receivers in ends)
            _check_pairs(pairs, table.name("between" if table.given("between") else "from"))
            links |= {
                (a, b): link
                for senders, receivers in ends
                for a in senders
                for b in receivers
                if a != b
            }
        elif default is not None:
            raise invalid(
                table.name("between"),
                "is missing; only one [[link]] can be the default for all others",
            )
        else:
            default = link
    if default is None:
        if len(nodes) > 1 and len(links) < len(nodes) * (len(nodes) - 1):
            raise invalid("link", "has no default; give one [[link]] without from, to and between")
        default = next(iter(links.values()))
    return default, links


def _ends(table: Fields, nodes: Sequence[ClusterNode]) -> list[tuple[list[str], list[str]]] | None:
    """Senders and receivers of a [[link]]; None if it is the default one. A group's name stands for
    all its nodes."""
    if table.given("between"):
        if table.given("from") or table.given("to"):
            raise invalid(
                table.name("between"), "cannot be combined with from or to; give one or the other"
            )
        pair = table.values["between"]
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(isinstance(name, str) for name in pair)
        ):
            raise invalid(table.name("between"), f"is {pair!r}; it must be two names of nodes")
        first, second = (_named(name, table.name("between"), nodes) for name in pair)
        return [(first, second), (second, first)]
    if not table.given("from") and not table.given("to"):
        return None
    senders, receivers = (_named(table.text(key), table.name(key), nodes) for key in ("from", "to"))
    return [(senders, receivers)]


def _check_pairs(pairs: int, field_name: str) -> None:
    if pairs > MAX_PAIRS:
        most = f"at most {MAX_PAIRS} can differ from the default [[link]]"
        remedy = "give what most pairs have as the default"
        raise invalid(
            field_name, f"brings the links to {pairs} pairs of nodes; {most}, so {remedy}"
        )


def _named(name: str, field_name: str, nodes: Sequence[ClusterNode]) -> list[str]:
    names = [node.name for node in nodes if node.name == name] or [
        node.name for node in nodes if node.group == name
    ]
    if not names:
        raise InvalidArgumentError.about(field_name, f"there is no node {name!r}", "UNKNOWN_NODE")
    return names


def with_nodes(cluster: Cluster, kind: str, count: int, field_name: str) -> Cluster:
    """The cluster with `count` more nodes of a kind: of one it has (with its caps and labels), or
    of the catalogue."""
    like = node_like(cluster, kind)
    if like is None and kind not in CATALOGUE:
        why = f"{kind!r} is neither in the cluster nor in the catalogue ({', '.join(CATALOGUE)})"
        raise InvalidArgumentError.about(field_name, why, "UNKNOWN_DEVICE")
    if len(cluster.nodes) + count > MAX_NODES:
        raise invalid(field_name, f"requests {count} more nodes; a cluster has at most {MAX_NODES}")
    device = like.device if like is not None else CATALOGUE[kind]
    base = (
        ClusterNode("", device, f"{kind}-new")
        if like is None
        else replace(like, group=f"{kind}-new")
    )
    names, used_names = (f"{kind}-new-{number}" for number in numbers(1)), set(cluster.names)
    free = islice((name for name in names if name not in used_names), count)
    added = (replace(base, name=name) for name in free)
    return replace(cluster, nodes=(*cluster.nodes, *added))


def node_like(cluster: Cluster, kind: str) -> ClusterNode | None:
    """The first node of a group or kind that the cluster has."""
    return next((node for node in cluster.nodes if kind in (node.group, node.device.kind)), None)


def without_nodes(cluster: Cluster, name: str, field_name: str) -> Cluster:
    """The cluster without a node. Raises InvalidArgumentError when there is none, or when it is the
    source."""
    index = cluster.index(name, field_name)
    if name == cluster.source:
        raise invalid(field_name, f"would remove the source {name}; name another node")
    cloud = None if cluster.cloud == name else cluster.cloud
    return replace(cluster, nodes=cluster.nodes[:index] + cluster.nodes[index + 1 :], cloud=cloud)


def with_figures(
    cluster: Cluster, name: str, change: Callable[[DeviceSpec], DeviceSpec], field_name: str
) -> Cluster:
    """The cluster with other figures for a node or for all nodes of a group; for all nodes if no
    name is given.

    Raises InvalidArgumentError naming `field_name` when there is no such node.
    """
    named = set(_named(name, field_name, cluster.nodes)) if name else set(cluster.names)
    before = {id(node.device): node.device for node in cluster.nodes if node.name in named}
    # nodes that share a spec continue to share one
    devices = {key: change(device) for key, device in before.items()}
    nodes = (
        replace(node, device=devices[id(node.device)]) if node.name in named else node
        for node in cluster.nodes
    )
    return replace(cluster, nodes=tuple(nodes))


def with_bandwidth(cluster: Cluster, bandwidth_bps: float, pair: tuple[str, str] | None) -> Cluster:
    """The cluster with every link it has at this rate, or only those between two nodes, in both
    directions."""
    if pair is None:
        links = {ends: _at_rate(link, bandwidth_bps) for ends, link in cluster.links.items()}
        default = _at_rate(cluster.default_link, bandwidth_bps)
        return replace(cluster, default_link=default, links=MappingProxyType(links))
    first, second = (_named(name, "sweep", cluster.nodes) for name in pair)
    links = dict(cluster.links)
    _check_pairs(len(links) + 2 * len(first) * len(second), "sweep")
    for a in first:
        for b in second:
            for ends in ((a, b), (b, a)):
                if a != b:
                    links[ends] = replace(
                        links.get(ends, cluster.default_link), bandwidth_bps=bandwidth_bps
                    )
    return replace(cluster, links=MappingProxyType(links))


def _at_rate(link: Link, bandwidth_bps: float) -> Link:
    return replace(link, bandwidth_bps=bandwidth_bps) if link.bandwidth_bps else link
