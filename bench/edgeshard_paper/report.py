"""The results as a page of tables with the paper's numbers, and as pictures."""

from __future__ import annotations

from collections.abc import Sequence

from bench.edgeshard_paper import bandwidth, profiling, prose
from bench.edgeshard_paper.by_lab import LabRow
from bench.edgeshard_paper.experiments import SWEPT, Modes, Row
from bench.edgeshard_paper.paper_numbers import (
    NO_BUBBLES_GAIN_TPS,
    PERFORMANCE,
    SOURCE_AGX_MS,
    SOURCE_NX_MS,
    SOURCE_OPT_APART_MS,
    SOURCE_RATE_RATIOS,
    STRATEGIES,
    TITLES,
    Quoted,
)
from bench.edgeshard_paper.results import Results
from bench.pages import NONE, markdown_table, number
from edgeshard.cli.render.svg import bar_chart, timeline
from edgeshard.domain.deployments.placement import Mode

DRAWN = (*STRATEGIES, "edgeshard-paper")


def page(results: Results, lab: Sequence[LabRow]) -> str:
    """docs/paper/README.md."""
    parts = [
        prose.INTRODUCTION,
        *_performance(results),
        *lab_section(lab),
        *bandwidth.section(results.sweeps),
        *_sources(results),
        *profiling.section(results.blocks, results.profiling),
        *_modes(results),
    ]
    return "\n".join(parts)


def _quoted(value: Quoted | None) -> str:
    return "OOM" if value is None else f"{value.value:g} [{value.tag.value}]"


def _difference(ours: float | None, paper: Quoted | None) -> str:
    return NONE if ours is None or paper is None else f"{100 * (ours / paper.value - 1):+.0f} %"


def _row(results: Results, model: str, strategy: str) -> Row:
    return next(row for row in results.performance[model] if row.strategy == strategy)


def performance_rows(model: str, found: Sequence[Row]) -> list[list[str]]:
    """The cells of a model's rows of the first table."""
    rows = []
    for row in found:
        paper = PERFORMANCE.get((model, row.strategy))
        ms, tps = row.ms_per_token, row.tokens_per_s
        rows.append(
            [
                TITLES[model],
                row.strategy,
                "OOM" if ms is None else number(ms),
                NONE if paper is None else _quoted(paper.ms_per_token),
                NONE if paper is None else _difference(ms, paper.ms_per_token),
                "OOM" if tps is None else number(tps),
                NONE if paper is None else _quoted(paper.tokens_per_s),
                NONE if paper is None else _difference(tps, paper.tokens_per_s),
            ]
        )
    return rows


def _performance(results: Results) -> list[str]:
    tables = results.performance
    rows = [row for model, found in tables.items() for row in performance_rows(model, found)]
    solo, ours = _row(results, "llama2-7b", "edge-solo"), _row(results, "llama2-7b", "edgeshard")
    share = (ours.ms_per_token or 0) / (solo.ms_per_token or 1)
    missing = {row.strategy: row.ms_per_token for row in results.free}
    return [
        "## Performance\n",
        markdown_table(
            ["model", "strategy", "ms/token", "paper", "diff.", "tokens/s", "paper", "diff."], rows
        ),
        prose.PERFORMANCE.format(
            share=share, even=missing["cloud-edge-even"], opt=missing["cloud-edge-opt"]
        ),
    ]


def lab_section(lab: Sequence[LabRow]) -> list[str]:
    """Its parts, in order."""
    alone = [
        [*_lab_cells(row, "time_per_token_s", 1e3), _percent(row.deviation("ttft_s"))]
        for row in lab
        if _alone(row)
    ]
    many = [_lab_cells(row, "throughput_tps", 1.0) for row in lab if not _alone(row)]
    added = [seconds for row in lab if (seconds := _added_for_each_stage(row)) is not None]
    return [
        "## The 7B row by the lab\n",
        markdown_table(
            ["latency plan of", "paper, ms/token", "predicted", "lab", "off", "TTFT off"], alone
        ),
        markdown_table(["throughput plan of", "paper, tokens/s", "predicted", "lab", "off"], many),
        prose.LAB.format(
            hop=f"{1e3 * min(added):.1f} to {1e3 * max(added):.1f}" if added else NONE
        ),
    ]


def _added_for_each_stage(row: LabRow) -> float | None:
    """Seconds that a token of a single request took longer than predicted, for each stage of
    several."""
    stages = len(row.run.stages)
    if row.measured is None or stages == 1 or not _alone(row):
        return None
    return (row.measured.time_per_token_s - row.predicted.time_per_token_s) / stages


def _alone(row: LabRow) -> bool:
    return row.run.streams == 1


def _lab_cells(row: LabRow, figure: str, unit: float) -> list[str]:
    predicted, measured = unit * getattr(row.predicted, figure), row.measured
    return [
        row.strategy,
        NONE if row.paper is None else _quoted(row.paper),
        number(predicted),
        NONE if measured is None else number(unit * getattr(measured, figure)),
        _percent(row.deviation(figure)),
    ]


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:+.1f} %"


def _placement(row: Row) -> list[str]:
    if row.latency.simulation is None:
        return [
            row.latency.reason,
            row.throughput.reason if row.throughput.simulation is None else "",
            NONE,
        ]
    load = row.throughput.load
    return [row.latency.placement, row.throughput.placement, f"{load.batch} x {load.micro_batches}"]


def _sources(results: Results) -> list[str]:
    agx, nx = ({row.strategy: row for row in rows} for rows in results.sources.values())
    rows = [
        [
            name,
            number(agx[name].ms_per_token),
            number(nx[name].ms_per_token),
            number(agx[name].tokens_per_s),
            number(nx[name].tokens_per_s),
            nx[name].latency.reason or nx[name].latency.placement,
        ]
        for name in SWEPT
    ]
    pairs = [
        ("EdgeShard, AGX, ms", agx["edgeshard"].ms_per_token, SOURCE_AGX_MS),
        ("EdgeShard, NX, ms", nx["edgeshard"].ms_per_token, SOURCE_NX_MS),
    ]
    opt_agx, opt_nx = agx["cloud-edge-opt"], nx["cloud-edge-opt"]
    if opt_agx.ms_per_token is not None and opt_nx.ms_per_token is not None:
        pairs.append(
            (
                "Cloud-Edge-Opt, ms apart",
                opt_nx.ms_per_token - opt_agx.ms_per_token,
                SOURCE_OPT_APART_MS,
            )
        )
    for name, quoted in SOURCE_RATE_RATIOS.items():
        first, second = agx[name].tokens_per_s, nx[name].tokens_per_s
        pairs.append(
            (
                f"{name}, tokens/s with AGX over NX",
                first / second if first and second else None,
                quoted,
            )
        )
    return [
        "## Source: AGX Orin or Orin NX (7B)\n",
        markdown_table(
            ["strategy", "AGX, ms", "NX, ms", "AGX, tokens/s", "NX, tokens/s", "with NX"], rows
        ),
        markdown_table(
            ["", "here", "paper", "diff."],
            [[n, number(v), _quoted(q), _difference(v, q)] for n, v, q in pairs],
        ),
        prose.SOURCES,
    ]


def _modes(results: Results) -> list[str]:
    rows = []
    for item in results.modes:
        gain = NO_BUBBLES_GAIN_TPS.get(item.model)
        rows.append(
            [
                TITLES[item.model],
                f"{item.load.batch} x {item.load.micro_batches}",
                *(number(item.rates[mode]) for mode in Mode),
                f"{item.gain:+.2f}",
                f"{item.gain_of_best:+.2f} ({item.best_bubbles_load.batch} x "
                f"{item.best_bubbles_load.micro_batches})",
                NONE if gain is None else f"+{_quoted(gain)}",
            ]
        )
    bound = max((_bound(item) for item in results.modes), default=0.0)
    return [
        "## Bubbles and no-bubbles\n",
        markdown_table(
            [
                "model",
                "b x m",
                *(f"{mode.value}, tokens/s" for mode in Mode),
                "gain",
                "gain, own plans",
                "paper",
            ],
            rows,
        ),
        prose.MODES.format(bound=100 * bound),
    ]


def _bound(item: Modes) -> float:
    return (
        item.rates[Mode.NO_BUBBLES] / item.rates[Mode.BUBBLES] / (2 - 1 / item.load.micro_batches)
    )


def tables(results: Results) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Rows that the page leaves out, by title: placements, and every bandwidth."""
    places = [
        [TITLES[model], row.strategy, *_placement(row)]
        for model, found in results.performance.items()
        for row in found
    ]
    return {
        "placements": (["model", "strategy", "latency plan", "throughput plan", "b x m"], places),
        **{
            f"bandwidth, {TITLES[model]}": (
                bandwidth.table_header(found),
                bandwidth.table_rows(found),
            )
            for model, found in results.sweeps.items()
        },
        "profiles": (profiling.HEADER, profiling.table_rows(results.profiling)),
        "placements by profile": (
            ["model", "requests", "profile", "plan"],
            profiling.placements(results.profiling),
        ),
    }


def pictures(results: Results) -> dict[str, str]:
    """SVG by file name."""
    ms = {
        TITLES[model]: _bars(model, rows, in_ms=True) for model, rows in results.performance.items()
    }
    tps = {
        TITLES[model]: _bars(model, rows, in_ms=False)
        for model, rows in results.performance.items()
    }
    modes = {
        TITLES[item.model]: {mode.value: item.rates[mode] for mode in Mode}
        for item in results.modes
    }
    return {
        "latency.svg": bar_chart(ms, "Time per token, latency plans", "ms per token", log_y=True),
        "throughput.svg": bar_chart(tps, "Throughput, at most 8 requests", "tokens/s", log_y=True),
        **bandwidth.pictures(results.sweeps),
        **profiling.pictures(results.profiling),
        "modes.svg": bar_chart(modes, "Throughput by mode", "tokens/s", log_y=True),
        **{
            f"timeline-{mode.value}.svg": timeline(
                run.timeline, f"Llama2-7B, five decode steps, {mode.value}"
            )
            for mode, run in results.timelines.items()
        },
    }


def _bars(model: str, rows: Sequence[Row], in_ms: bool) -> dict[str, float | None]:
    """Bars of a model, the paper's EdgeShard last."""
    paper = PERFORMANCE[model, "edgeshard"]
    quoted = paper.ms_per_token if in_ms else paper.tokens_per_s
    bars = {
        row.strategy: row.ms_per_token if in_ms else row.tokens_per_s
        for row in rows
        if row.strategy in DRAWN
    }
    return bars | {"the paper's EdgeShard": None if quoted is None else quoted.value}
