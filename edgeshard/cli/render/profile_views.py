"""Measurements of nodes and links, as tables, lines and plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from edgeshard.cli.render.output import Column, human_age, human_rate, plain
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import NodeId
from edgeshard.domain.models.dtypes import weights_text
from edgeshard.domain.nodes.profile import (
    ComputeProfile,
    Effort,
    LayerKind,
    LayerProfile,
    LinkProfile,
)
from edgeshard.planning.inputs.site_cluster import listed
from edgeshard.profiles.fit import fit_profile
from edgeshard.profiles.profile_quality import may_improve, quality_warnings
from edgeshard.profiles.report import profile_lines, time_text

if TYPE_CHECKING:
    from edgeshard.client import NodeDetails, NodeProgress, Site, StoredLink, StoredProfile


_LONGEST_RESULT = 22
"""Characters of a result in the table; a longer one would squeeze the others in 80 columns."""
_GONE = "a model that is no longer in the store"


@dataclass(frozen=True, slots=True)
class LinkRow:
    """One direction between two nodes, by their names."""

    sender: str
    receiver: str
    profile: LinkProfile
    age_s: float

    def as_data(self) -> dict[str, Any]:
        return {
            "from": self.sender,
            "to": self.receiver,
            **asdict(self.profile),
            "age_s": self.age_s,
        }


@dataclass(frozen=True, slots=True)
class NodeRow:
    """The outcome of measuring one node: its profile, None if it failed or was not requested, and
    its links.

    `missed` are the nodes to which the way could not be measured; earlier measurements of it are no
    result.
    """

    node: str
    failure: EdgeShardError | None
    measured: StoredProfile | None
    links: tuple[LinkRow, ...]
    missed: tuple[str, ...] = ()

    def as_data(self) -> dict[str, Any]:
        return {
            "node": self.node,
            "failure": plain(self.failure),
            "profile": profile_data(self.measured) if self.measured is not None else None,
            "links": [link.as_data() for link in self.links],
            "missed": list(self.missed),
        }


LINK_COLUMNS: list[Column[LinkRow]] = [
    Column("FROM", lambda row: row.sender),
    Column("TO", lambda row: row.receiver),
    Column("LATENCY", lambda row: time_text(row.profile.latency_s), right=True),
    Column("BANDWIDTH", lambda row: human_rate(row.profile.bandwidth_bps), right=True),
    Column("FIT", lambda row: f"within {row.profile.spread:.1%}", right=True),
    Column("MEASURED", lambda row: human_age(row.age_s)),
    Column("SAMPLES", lambda row: str(row.profile.samples), wide=True, right=True),
]

LINKS_ONLY_COLUMNS: list[Column[NodeRow]] = [
    Column("NODE", lambda row: row.node),
    Column("RESULT", lambda row: _short_result(row)),
]

NODE_COLUMNS: list[Column[NodeRow]] = [
    Column("NODE", lambda row: row.node),
    Column("DECODE", lambda row: _of_profile(row, _decode), right=True),
    Column("PREFILL", lambda row: _of_profile(row, _prefill), right=True),
    Column(
        "STEP",
        lambda row: _of_profile(row, lambda profile: time_text(profile.step_overhead_s)),
        right=True,
    ),
    Column("SPREAD", lambda row: _of_profile(row, _spread), right=True),
    Column("RESULT", lambda row: _short_result(row)),
]


def long_results(rows: Sequence[NodeRow]) -> Iterator[str]:
    """A line for each node whose result has no room in the table."""
    for row in rows:
        if len(result := _result(row)) > _LONGEST_RESULT:
            yield f"{row.node}: {result}"


def node_rows(
    site: Site, outcomes: Mapping[str, NodeProgress], measured: Mapping[NodeId, StoredProfile]
) -> list[NodeRow]:
    """A row for each node that was to be measured: why it was not, or its profile."""
    names = {site_node.node_id: str(site_node.name) for site_node in site.nodes}
    links = link_rows(site.links, names)
    profiles = {names.get(node_id, node_id): stored for node_id, stored in measured.items()}
    rows = []
    for node, last in sorted(outcomes.items()):
        # An earlier profile is no result of this measurement.
        profile = profiles.get(node) if last.failure is None else None
        outgoing = (link for link in links if link.sender == node)
        own_links = tuple(link for link in outgoing if link.receiver not in last.missed)
        rows.append(NodeRow(node, last.failure, profile, own_links, last.missed))
    return rows


def link_rows(links: Sequence[StoredLink], names: Mapping[Any, str]) -> list[LinkRow]:
    """The links by the nodes' names; a node that is no longer known goes by its id."""
    rows = [
        LinkRow(
            names.get(stored.link.sender, stored.link.sender),
            names.get(stored.link.receiver, stored.link.receiver),
            stored.link.profile,
            stored.age_s,
        )
        for stored in links
    ]
    return sorted(rows, key=lambda row: (row.sender, row.receiver))


def profile_data(stored: StoredProfile) -> dict[str, Any]:
    """A node's profile as plain data; `samples` of the layers and all."""
    doubts = quality_warnings(fit_profile(stored.profile))
    return {
        "models": list(stored.models),
        "age_s": stored.age_s,
        "doubts": list(doubts),
        **plain(stored.profile),
    }


def node_data(details: NodeDetails, names: Mapping[Any, str]) -> dict[str, Any]:
    """Everything about a node as plain data."""
    return {
        **plain(details.node),
        "unknown": plain(details.unknown),
        "profiles": [profile_data(stored) for stored in details.profiles],
        "links": [row.as_data() for row in link_rows(details.links, names)],
    }


def unknown_fields(details: NodeDetails) -> dict[str, str]:
    """Missing measurements of a node: models, and ways to other nodes."""
    models = [
        f"{' or '.join(profile.models) or _GONE} in "
        f"{weights_text(profile.dtype, profile.quantisation)}"
        for profile in details.unknown.profiles
    ]
    parts = [f"profile of {', '.join(models)}"] if models else []
    if ways := details.unknown.links:
        parts.append(f"{'link' if len(ways) == 1 else 'links'} to {listed(ways)}")
    return {"Unknown": "; ".join(parts) or "-"}


def profile_text(stored: StoredProfile) -> Iterator[str]:
    """A heading, and the figures of every layer under it."""
    models = ", ".join(stored.models) or _GONE
    weights = weights_text(stored.profile.dtype, stored.profile.quantisation)
    yield f"Profile of {models} in {weights}, measured {human_age(stored.age_s)}:"
    for line in profile_lines(stored.profile):
        yield "  " + line
    if may_improve(stored.profile):
        yield "  measured again automatically when the node is idle, a few times at most"


def _short_result(row: NodeRow) -> str:
    if len(result := _result(row)) <= _LONGEST_RESULT:
        return result
    return "failed: see below" if row.failure is not None else "see below"


def _result(row: NodeRow) -> str:
    if row.failure is not None:
        return f"failed: {row.failure.message}"
    ways = ["1 link" if len(row.links) == 1 else f"{len(row.links)} links"]
    missed = [f"none to {listed(row.missed)}"] if row.missed else []
    if row.measured is None:
        return ", ".join(ways + missed)
    profile = row.measured.profile
    words = ["quick"] if profile.effort is Effort.QUICK else []
    words += quality_warnings(fit_profile(profile))
    return ", ".join(
        [*words, f"measured {human_age(row.measured.age_s)}", *(ways + missed if missed else [])]
    )


def _of_profile(row: NodeRow, text: Any) -> str:
    return "-" if row.measured is None else str(text(row.measured.profile))


def _main_block(profile: ComputeProfile) -> LayerProfile:
    """The sort of block that most of the model's layers are."""
    blocks = [
        layer for layer in profile.layers if layer.kind in (LayerKind.BLOCK, LayerKind.MOE_BLOCK)
    ]
    return max(blocks or profile.layers, key=lambda layer: layer.layers)


def _decode(profile: ComputeProfile) -> str:
    sample = _main_block(profile).decode[0]
    return f"{time_text(sample.seconds)}/layer"


def _prefill(profile: ComputeProfile) -> str:
    sample = max((s for s in _main_block(profile).prefill if s.context == 0), key=lambda s: s.count)
    return f"{sample.count} tokens {time_text(sample.seconds)}/layer"


def _spread(profile: ComputeProfile) -> str:
    block = _main_block(profile)
    return f"{max(sample.spread for sample in (*block.prefill, *block.decode)):.1%}"
