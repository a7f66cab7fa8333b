"""The paper's figures 7 and 8: time per token and throughput by the bandwidth between source and
cloud, each model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bench.edgeshard_paper import prose
from bench.edgeshard_paper.experiments import SWEPT, Row, paper_cluster, table
from bench.edgeshard_paper.paper_numbers import MODELS, TITLES
from bench.pages import markdown_table, number
from bench.sizes import sized
from edgeshard.cli.render.svg import line_chart
from edgeshard.planning.inputs.devices import Cluster

SWEEP_MBPS = sized((1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50), (1, 10, 50))
SHOWN_MBPS = (1, 5, 10, 20, 50)
"""On the page; the file of tables has all."""
PAIRS = ("cloud-edge-even", "cloud-edge-opt")
"""The strategies that use only the source and the cloud."""
FREE = {name: f"{name}, unlimited" for name in PAIRS}
"""Their names without a limit of memory."""
FREED = ("llama2-13b",)
"""Models that the paper has these strategies of, though they do not fit here."""
_ENDLESS_BYTES = 1e15


@dataclass(frozen=True, slots=True)
class Sweep:
    """The rows of one model, by strategy and Mb/s. `free` are the strategies of a pair without a
    memory limit."""

    model: str
    rows: dict[int, dict[str, Row]]
    free: dict[int, dict[str, Row]]

    @property
    def names(self) -> tuple[str, ...]:
        return (*SWEPT, *(FREE.values() if self.free else ()))

    def row(self, mbps: int, name: str) -> Row:
        return self.rows[mbps][name] if name in SWEPT else self.free[mbps][name]


def endless(cluster: Cluster) -> Cluster:
    """The cluster with nodes whose memory has no limit."""
    nodes = (
        replace(
            node,
            device=replace(node.device, memory_bytes=node.device.memory_bytes + _ENDLESS_BYTES),
        )
        for node in cluster.nodes
    )
    return replace(cluster, nodes=tuple(nodes))


def sweep(model: str, rates_mbps: Sequence[int] = SWEEP_MBPS) -> Sweep:
    rows = {mbps: _by_name(model, paper_cluster(slow_mbps=mbps), SWEPT) for mbps in rates_mbps}
    if model not in FREED:
        return Sweep(model, rows, {})
    free = {
        mbps: _by_name(model, endless(paper_cluster(slow_mbps=mbps)), PAIRS) for mbps in rates_mbps
    }
    return Sweep(
        model,
        rows,
        {mbps: {FREE[name]: row for name, row in found.items()} for mbps, found in free.items()},
    )


def _by_name(model: str, cluster: Cluster, names: tuple[str, ...]) -> dict[str, Row]:
    return {row.strategy: row for row in table(model, cluster, names)}


def section(sweeps: Mapping[str, Sweep]) -> list[str]:
    parts = ["## Bandwidth between source and cloud: figures 7 and 8\n"]
    for model in MODELS[:-1]:  # no bandwidth matters to the largest
        parts += _tables(sweeps[model])
    small = sweeps[MODELS[0]]
    opt = {mbps: small.row(mbps, "cloud-edge-opt").ms_per_token or 0.0 for mbps in SWEEP_MBPS}
    ours = {model: sweeps[model].row(1, "edgeshard").ms_per_token or 0.0 for model in MODELS}
    wide = {model: sweeps[model].row(50, "edgeshard").ms_per_token or 0.0 for model in MODELS}
    parts.append(
        prose.SWEEP.format(
            overtakes=next(mbps for mbps in SWEEP_MBPS if _overtaken(sweeps[FREED[0]], mbps)),
            steep=opt[1] - opt[10],
            flat=opt[10] - opt[50],
            **{
                f"saved_{TITLES[model].lower()}": 100 * (1 - wide[model] / ours[model])
                for model in MODELS
            },
        )
    )
    return parts


def _tables(found: Sweep) -> list[str]:
    missing = [name for name in found.names if not _fits(found, name)]
    rows = [row for row in table_rows(found) if int(row[0]) in SHOWN_MBPS]
    return [
        f"### {TITLES[found.model]}\n",
        markdown_table(table_header(found), rows),
        *([f"Memory never suffices for {', '.join(missing)}.\n"] if missing else []),
    ]


def table_header(found: Sweep) -> list[str]:
    names = [name for name in found.names if _fits(found, name)]
    return ["Mb/s", *(f"{name}, ms" for name in names), *(f"{name}, tokens/s" for name in names)]


def table_rows(found: Sweep) -> list[list[str]]:
    """The cells of a model's table, a row for each bandwidth; strategies that never fit are left
    out."""
    names = [name for name in found.names if _fits(found, name)]
    digits = 2 if found.model == MODELS[-1] else 1
    rows = []
    for mbps in found.rows:
        each = [found.row(mbps, name) for name in names]
        ms = [number(row.ms_per_token, 1) for row in each]
        rows.append([str(mbps), *ms, *(number(row.tokens_per_s, digits) for row in each)])
    return rows


def _overtaken(found: Sweep, mbps: int) -> bool:
    """Whether the pair without a limit of memory is quicker than the plan."""
    return (found.row(mbps, FREE["cloud-edge-opt"]).ms_per_token or 0.0) < (
        found.row(mbps, "edgeshard").ms_per_token or 0.0
    )


def _fits(found: Sweep, name: str) -> bool:
    return any(found.row(mbps, name).ms_per_token is not None for mbps in found.rows)


def pictures(sweeps: Mapping[str, Sweep]) -> dict[str, str]:
    """SVG by file name. A strategy that fits nowhere keeps its place in the legend, so that colours
    mean the same."""
    link = "Mb/s between source and cloud"
    files = {}
    for found in sweeps.values():
        title, size = f"Llama2-{TITLES[found.model]}", TITLES[found.model].lower()
        ms: dict[str, list[tuple[float, float]]] = {}
        tps: dict[str, list[tuple[float, float]]] = {}
        for name in found.names:
            rows = [(mbps, found.row(mbps, name)) for mbps in SWEEP_MBPS]
            words = name if _fits(found, name) else f"{name}: no memory"
            ms[words] = [
                (mbps, row.ms_per_token) for mbps, row in rows if row.ms_per_token is not None
            ]
            tps[words] = [
                (mbps, row.tokens_per_s) for mbps, row in rows if row.tokens_per_s is not None
            ]
        files[f"bandwidth-latency-{size}.svg"] = line_chart(
            ms, f"{title}: time per token", link, "ms per token", True
        )
        files[f"bandwidth-throughput-{size}.svg"] = line_chart(
            tps, f"{title}: throughput", link, "tokens/s", True
        )
    return files
