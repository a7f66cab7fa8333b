"""The results as a page of tables, and as pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.hpipe_paper import prose
from bench.hpipe_paper.experiments import LENGTHS, Outcome, Results
from bench.hpipe_paper.measured import Measured
from bench.hpipe_paper.schedules import MOST_SLICES
from bench.hpipe_paper.testbed import ANCHORS, MACHINES, MODELS, PROMPTS, cluster, model
from bench.pages import NONE, markdown_table, number
from edgeshard.cli.render.svg import bar_chart, line_chart, timeline
from edgeshard.domain.models.dtypes import DType
from edgeshard.planning.inputs.catalogue import CATALOGUE, TERA

HPIPE = "HPipe"
DRAWN = (
    "one node",
    "GPipe",
    "GP-B",
    "Megatron-LM",
    "TeraPipe",
    "TP-T",
    HPIPE,
)
"""Shown in the pictures, with one of EdgeShard's plans."""
FIRST, RATE = "EdgeShard, ttft", "EdgeShard, throughput"
_WHOLE = "whole prompts follow each other"
_DIVIDED = "half for each computer, each block divided among its nodes"
_COMPARED = (
    ("one node", "all on one RTX 3090", "prompts one after another"),
    ("Base", "equal shares", "a prompt begins when the one before is done"),
    ("GPipe", "equal shares", _WHOLE),
    ("GP-B", "by speed", _WHOLE),
    ("Megatron-LM", _DIVIDED, _WHOLE),
    ("TeraPipe", "equal shares", "slices follow each other, their lengths searched"),
    (
        "TP-T",
        _DIVIDED,
        f"equal slices follow each other, as many as are best (at most {MOST_SLICES})",
    ),
    (HPIPE, "by speed", "slices follow each other, their lengths searched"),
    (FIRST, "the plan for the first token of one prompt", "the plan's slices follow each other"),
    (RATE, f"the plan for {PROMPTS} prompts at once", _WHOLE),
)
GB = 1e9
_SHOWN = (1, 2, 4, 6, 7, 12, 24, 64, 128, 256, 1024)
"""Measured slices on the page; the file of tables has all."""
_BUSY = 128
"""Tokens from which every device is busy."""
_SHOWN_MBPS = (100, 500, 1000, 10000)
BED_MBPS = 1000
"""Rate of the link between the computers."""


def page(results: Results, kernels: Measured) -> str:
    """docs/paper/hpipe.md."""
    workload = cluster().workload
    parts = [
        prose.INTRODUCTION.format(
            speed_up=ANCHORS.speed_up,
            energy=100 * ANCHORS.energy_saved,
            prompt=workload.prompt_tokens,
        ),
        "## What is compared\n",
        markdown_table(["name", "layers", "what follows what"], _COMPARED),
        prose.SCHEDULES,
        "## Figures\n",
        prose.FIGURES.format(prompts=PROMPTS),
    ]
    for name, found in results.tables.items():
        parts += _figures(name, found)
    parts += [
        prose.FOUND.format(**_found(results)),
        *_halves(results),
        *_utilisation(results, kernels),
        *_sweep(results),
    ]
    return "\n".join(parts)


def _figures(name: str, found: Sequence[Outcome]) -> list[str]:
    ours = _named(found, HPIPE)
    rows = []
    for row in found:
        if not row.runs:
            rows.append([row.name, row.reason, *[NONE] * 7])
            continue
        rows.append(
            [
                row.name,
                number(1e3 * row.ttft_s, 0),
                number(row.tokens_per_s, 0),
                number(row.joules, 0),
                f"{row.memory_bytes / GB:.1f} ({row.in_flight})",
                f"{100 * row.fullest:.0f} %",
                *(_against(row, ours) if row.name != HPIPE else [NONE] * 3),
            ]
        )
    header = [
        "",
        "TTFT, ms",
        "tokens/s",
        "J a prompt",
        "memory, GB",
        "fullest",
        *(f"{HPIPE}: {w}" for w in _WORDS),
    ]
    return [f"### {name}\n", markdown_table(header, rows)]


_WORDS = ("sooner", "more", "energy")


def _against(row: Outcome, ours: Outcome) -> list[str]:
    return [
        f"{row.ttft_s / ours.ttft_s:.2f} x",
        f"{ours.tokens_per_s / row.tokens_per_s:.2f} x",
        f"{100 * (ours.joules / row.joules - 1):+.0f} %",
    ]


def _slices(lengths: Sequence[int]) -> str:
    """Runs of equal lengths: `14 x 128, 255`."""
    runs: list[tuple[int, int]] = []
    for length in lengths:
        if runs and runs[-1][1] == length:
            runs[-1] = (runs[-1][0] + 1, length)
        else:
            runs.append((1, length))
    return ", ".join(f"{count} x {length}" if count > 1 else str(length) for count, length in runs)


def _named(found: Sequence[Outcome], name: str) -> Outcome:
    return next(row for row in found if row.name == name)


def _found(results: Results) -> dict[str, float]:
    """Numbers of the text."""
    llama, gpt = (results.tables[name] for name in MODELS)
    ours = _named(llama, HPIPE)
    base = _named(llama, "Base")
    gpipe = _named(llama, "GPipe")
    rates = {}
    for name in ("GPipe", "Megatron-LM", "TeraPipe", "GP-B", "TP-T", "one node"):
        for model_name, rows in (("", llama), ("_gpt", gpt)):
            key = name.lower().replace(" ", "_").replace("-", "_") + model_name
            rates[key] = _named(rows, HPIPE).tokens_per_s / _named(rows, name).tokens_per_s
    sliced = _named(llama, "TP-T")
    return {
        **rates,
        "speed_up": ANCHORS.speed_up,
        "energy": 100 * ANCHORS.energy_saved,
        "tp_t_ms": 1e3 * sliced.ttft_s,
        "tp_t_rate": sliced.tokens_per_s,
        "tp_t_sooner": sliced.ttft_s / ours.ttft_s,
        "prompts": PROMPTS,
        "gpipe_held": gpipe.in_flight,
        "gpipe_ttft": gpipe.ttft_s / ours.ttft_s,
        "base_j": 100 * (1 - ours.joules / base.joules),
        "gpipe_j": 100 * (1 - ours.joules / gpipe.joules),
        "memory": 100 * (1 - ours.memory_bytes / gpipe.memory_bytes),
        "per_3090": _watts_per_tera("rtx-3090"),
        "per_p100": _watts_per_tera("p100"),
        "gap": 100 * (_named(llama, FIRST).gap or 0.0),
        "host_w": _host_w(base, ours) / len(MACHINES),
    }


def _host_w(base: Outcome, ours: Outcome) -> float:
    """The watts besides the boards at which all computers together would save the paper's part
    against Base.

    `ours.joules + w t_ours = (1 - saved) (base.joules + w t_base)` for the times t of one prompt of
    many.
    """
    tokens = cluster().workload.prompt_tokens
    rest = 1 - ANCHORS.energy_saved
    base_s, ours_s = tokens / base.tokens_per_s, tokens / ours.tokens_per_s
    return (ours.joules - rest * base.joules) / (rest * base_s - ours_s)


def _halves(results: Results) -> list[str]:
    """Cuts inside blocks compared with cuts between them, over the test bed's own link; and the
    best gain over any link.
    """
    found = [(name, row) for name, sweep in results.halves.items() for row in sweep[BED_MBPS]]
    rows = []
    for name, row in found:
        sooner, more = row.gains
        ms = None if row.ttft_s is None else (1e3 * row.ttft_s[0], 1e3 * row.ttft_s[1])
        rows.append([name, row.name, *_gained(ms, sooner, 1), *_gained(row.tokens_per_s, more, 0)])
    gains = {}
    for mbps in results.halves[MODELS[0]]:
        at_rate = [row for sweep in results.halves.values() for row in sweep[mbps]]
        gains[mbps] = 100 * max(gain or 0.0 for row in at_rate for gain in row.gains)
    fastest = max(gains, key=gains.__getitem__)
    words = prose.HALVES.format(
        row=_hidden_bytes(MODELS[0]),
        row_gpt=_hidden_bytes(MODELS[1]),
        best=gains[BED_MBPS],
        most=gains[fastest],
        mbps=fastest,
        certified=100 * max(row.gap or 0.0 for _, row in found if row.name == RATE),
    )
    header = ["model", "", "TTFT, ms", "by halves", "gain", "tokens/s", "by halves", "gain"]
    return ["## Cuts inside a block\n", words, markdown_table(header, rows)]


def _gained(pair: tuple[float, float] | None, gain: float | None, digits: int) -> list[str]:
    if pair is None or gain is None:
        return [NONE] * 3
    return [*(number(value, digits) for value in pair), f"{100 * gain:.1f} %"]


def _utilisation(results: Results, kernels: Measured) -> list[str]:
    lines = results.utilisations
    rows = [
        [str(tokens), *(f"{100 * found[tokens]:.1f} %" for found in lines.values())]
        for tokens in LENGTHS
        if tokens <= _BUSY
    ]
    measured = [
        [str(length), f"{100 * part:.0f} %", f"{100 * kernels.read[length]:.0f} %"]
        for length, part in kernels.by_length.items()
        if length in _SHOWN
    ]
    behind = [[str(context), f"{100 * part:.0f} %"] for context, part in kernels.by_context.items()]
    words = prose.MEASURED.format(
        cpu=kernels.cpu,
        kernels=kernels.kernels,
        fma=kernels.fma_gflop_per_s,
        read=kernels.read_gb_per_s,
        long_slice=kernels.long_slice,
        busiest=100 * max(kernels.by_length.values()),
        before_step=100 * kernels.by_length[6],
        after_step=100 * kernels.by_length[7],
        dearer=7 / 6 * kernels.by_length[6] / kernels.by_length[7],
        far=max(kernels.by_context),
    )
    return [
        "## Utilisation by slice length: figure 2\n",
        prose.UTILISATION,
        markdown_table(["tokens", *lines], rows),
        words,
        markdown_table(["tokens", "utilisation", "by the roofline"], measured),
        markdown_table([f"positions before {kernels.long_slice} tokens", "utilisation"], behind),
    ]


def _watts_per_tera(kind: str) -> float:
    spec = CATALOGUE[kind]
    return (spec.busy_w or 0.0) / (spec.flops[DType.FLOAT16] / TERA)


def _hidden_bytes(name: str) -> int:
    """Bytes of one position's hidden states."""
    return model(name).shape.frame_width * DType.FLOAT16.itemsize


def _sweep(results: Results) -> list[str]:
    size = cluster().workload.prompt_tokens * _hidden_bytes(MODELS[0])
    parts = [
        "## The link between the computers\n",
        prose.SWEEP.format(size=size / 1e6, hop=8 * size / 1e9),
    ]
    parts.append(f"{MODELS[0]}, by Mb/s:\n")
    for header, rows in _sweep_tables(results, MODELS[0]):
        parts.append(markdown_table(header, [row for row in rows if int(row[0]) in _SHOWN_MBPS]))
    return parts


def _sweep_tables(results: Results, name: str) -> list[tuple[list[str], list[list[str]]]]:
    """A model's first tokens and rates, a row for each rate of the link."""
    sweep = results.sweeps[name]
    tables = []
    for drawn, words, value in _QUANTITIES[:2]:
        rows = [
            [str(mbps), *(number(value(_named(found, one)), 0) for one in drawn)]
            for mbps, found in sweep.items()
        ]
        tables.append(([words, *drawn], rows))
    return tables


def tables(results: Results, kernels: Measured) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Rows that the page leaves out, by title: layers and slices, every rate of the link, every
    measured slice."""
    found: dict[str, tuple[list[str], list[list[str]]]] = {}
    for name, outcomes in results.tables.items():
        places = [[row.name, row.placement, _slices(row.slices)] for row in outcomes]
        found[f"layers and slices, {name}"] = (["", "layers", "slices"], places)
        for header, rows in _sweep_tables(results, name):
            found[f"link, {name}, {header[0]}"] = (header, rows)
    measured = [[str(length), f"{100 * part:.0f} %"] for length, part in kernels.by_length.items()]
    found["measured utilisation"] = (["tokens", "utilisation"], measured)
    return found


_Value = Callable[[Outcome], float]
_QUANTITIES: tuple[tuple[tuple[str, ...], str, _Value], ...] = (
    ((*DRAWN, FIRST), "TTFT, ms", lambda row: 1e3 * row.ttft_s),
    ((*DRAWN, RATE), "prompt tokens/s", lambda row: row.tokens_per_s),
    ((*DRAWN, RATE), "joules a prompt", lambda row: row.joules),
    ((*DRAWN, RATE), "GB on all nodes", lambda row: row.memory_bytes / GB),
)
_FILES = ("ttft", "throughput", "energy", "memory")
_TITLES = ("Time to first token of a prompt alone", "Rate", "Energy of a prompt", "Memory")


def pictures(results: Results, kernels: Measured) -> dict[str, str]:
    """SVG by file name."""
    files = {}
    for file, title, (drawn, words, value) in zip(_FILES, _TITLES, _QUANTITIES, strict=True):
        groups = {
            name: {one: value(row) if (row := _named(found, one)).runs else None for one in drawn}
            for name, found in results.tables.items()
        }
        files[f"hpipe-{file}.svg"] = bar_chart(groups, title, words, log_y=True)
    link = "Mb/s between the computers"
    for name, sweep in results.sweeps.items():
        for (drawn, words, value), file, title in zip(
            _QUANTITIES[:2], ("link-ttft", "link"), _TITLES[:2], strict=True
        ):
            lines = {
                one: [(mbps, value(_named(found, one))) for mbps, found in sweep.items()]
                for one in drawn
            }
            files[f"hpipe-{file}-{_file(name)}.svg"] = line_chart(
                lines, f"{name}: {title.lower()}", link, words, log_x=True, log_y=True
            )
    used = {
        name: [(x, 100 * part) for x, part in found.items()]
        for name, found in results.utilisations.items()
    }
    used["a core of this page"] = [
        (length, 100 * part) for length, part in kernels.by_length.items()
    ]
    files["hpipe-utilisation.svg"] = line_chart(
        used,
        "Utilisation by slice length",
        "tokens of the slice",
        "% of the operations a second",
        log_x=True,
    )
    batches, slices = results.timelines.values()
    names = ("prompt", "token")
    files["hpipe-timeline-batches.svg"] = timeline(
        batches, "Whole prompts over balanced layers", names=names
    )
    files["hpipe-timeline-slices.svg"] = timeline(
        slices, "HPipe's slices over the same layers", names=names
    )
    return files


def _file(name: str) -> str:
    return name.lower()
