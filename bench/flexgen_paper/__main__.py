"""Write docs/paper/flexgen.md: FlexGen's published table by its cost model, with our linear
program.

    python -m bench.flexgen_paper [--output docs/paper] [--pictures DIR] [--check]

It takes a few seconds and gives the same every time. With --check it writes nothing and exits 1
when a file would change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from bench.flexgen_paper import prose
from bench.flexgen_paper.machine import (
    OPT_6_7B,
    OPT_30B,
    OPT_175B,
    T4,
    TierMachine,
    TierModel,
    TierWorkload,
)
from bench.flexgen_paper.offloading import (
    FLEXGEN,
    Runtime,
    TierPolicy,
    best_at,
    best_policy,
    frontier,
    policies,
)
from bench.pages import NONE, markdown_table, run_page_program
from edgeshard.cli.render.svg import line_chart

OUTPUT = Path(__file__).parents[2] / "docs" / "paper"
ALGORITHM = "../papers" + ".md#tensors-over-three-tiers"
"""A link from the page, no citation of this code."""
STREAMING = "../papers" + ".md#nodes-that-stream"
WORK = TierWorkload(prompt=512, new=32)
MODELS = (OPT_6_7B, OPT_30B, OPT_175B)
NVME = replace(T4, disk_to_host=2e9)
"""The same node with a disk that reads 2 GB a second."""
_ON_GPU = MappingProxyType({"cache_gpu": 1.0, "hidden_gpu": 1.0, "hidden_disk": 0.0})
COMPRESSED = Runtime(compressed=True)
DEEPSPEED = Runtime(one_batch=True, fixed=MappingProxyType({**_ON_GPU, "weights_gpu": 0.0}))
ACCELERATE = Runtime(one_batch=True, overlap=False, fixed=_ON_GPU)


@dataclass(frozen=True, slots=True)
class Published:
    """A row of the paper's table: tokens a second, and (batch, batches) that they were measured
    with, by model."""

    name: str
    runtime: Runtime
    rates: tuple[float, ...]
    batches: tuple[tuple[int, int], ...]


PUBLISHED = (
    Published("Accelerate", ACCELERATE, (25.12, 0.62, 0.01), ((2, 1), (8, 1), (2, 1))),
    Published("DeepSpeed ZeRO-Inference", DEEPSPEED, (9.28, 0.60, 0.01), ((16, 1), (4, 1), (1, 1))),
    Published("FlexGen", FLEXGEN, (25.26, 7.32, 0.69), ((2, 1), (48, 3), (32, 8))),
    Published("FlexGen, compressed", COMPRESSED, (29.12, 8.38, 1.12), ((72, 1), (64, 8), (24, 6))),
)
BOUNDS_S = (600, 1200, 2500, 5000, 10000, 20000)


def main() -> int:
    return run_page_program("bench.flexgen_paper", OUTPUT, files, pictures)


def files() -> dict[str, str]:
    """The page, by name."""
    parts = [
        prose.INTRODUCTION.replace("{ALGORITHM}", ALGORITHM),
        main_table(),
        prose.TABLE_SAYS.replace("{STREAMING}", STREAMING),
        "## Which policies\n",
        prose.POLICIES,
        _policies_table(),
        "## Ablation\n",
        prose.ABLATION,
        _ablation_table(),
        "## Under a bound on latency\n",
        prose.FRONTIER,
        _bounds_table(_by_kind()),
    ]
    return {"flexgen.md": "\n".join(parts)}


def _by_kind() -> dict[tuple[str, str], list[TierPolicy]]:
    return {
        (model.name, name): _searched(NVME, model, runtime)
        for model in MODELS
        for name, runtime in (("plain", FLEXGEN), ("compressed", COMPRESSED))
    }


def pictures() -> dict[str, str]:
    """SVG by file name."""
    lines = {
        f"{model}, {kind}": [(policy.seconds, policy.tokens_per_s) for policy in frontier(those)]
        for (model, kind), those in _by_kind().items()
        if model != OPT_6_7B.name
    }
    picture = line_chart(
        lines,
        "Most tokens a second within a time for the whole block",
        "seconds",
        "tokens/s",
        log_x=True,
        log_y=True,
    )
    return {"flexgen-frontier.svg": picture}


_KNOWN: dict[str, list[TierPolicy]] = {}


def _searched(machine: TierMachine, model: TierModel, runtime: Runtime) -> list[TierPolicy]:
    """The best policy of each batch and number of batches; the tables share them."""
    key = f"{machine} {model} {runtime}"
    if key not in _KNOWN:
        _KNOWN[key] = list(policies(machine, model, WORK, runtime))
    return _KNOWN[key]


def main_table() -> str:
    """The published table next to the model's, for two rates of the disk
    (docs/papers.md#tensors-over-three-tiers)."""
    rows = []
    for row in PUBLISHED:
        for index, model in enumerate(MODELS):
            batch, batches = row.batches[index]
            cells = [row.name, model.name, f"{batch} x {batches}", f"{row.rates[index]:.2f}"]
            for machine in (T4, NVME):
                # These ran, so they may have all of the memory.
                there = best_at(
                    replace(machine, usable=1.0), model, WORK, row.runtime, batch, batches
                )
                best = best_policy(_searched(machine, model, row.runtime))
                cells += [_rate(there), _rate(best)]
            rows.append(cells)
    header = [
        "system",
        "model",
        "batches",
        "published",
        "model, its batches",
        "model, best",
        "2 GB/s",
        "2 GB/s, best",
    ]
    return markdown_table(header, rows)


def _policies_table() -> str:
    rows = []
    for row in PUBLISHED:
        for model in MODELS:
            best = best_policy(_searched(NVME, model, row.runtime))
            if best is not None:
                held = [_split(best.fractions[at : at + 3]) for at in (0, 3, 6)]
                rows.append(
                    [
                        row.name,
                        model.name,
                        f"{best.batch} x {best.batches}",
                        *held,
                        f"{best.seconds:.0f} s",
                    ]
                )
    return markdown_table(
        ["system", "model", "batches", "weights", "KV cache", "activations", "block"], rows
    )


def _ablation_table() -> str:
    rows = []
    columns = [(OPT_30B, (48, 3)), (OPT_175B, (32, 8))]
    for name, change in _ABLATED.items():
        cells = [name]
        for model, (batch, batches) in columns:
            machine, runtime, shape = change(model, batch, batches)
            cells.append(
                _rate(best_at(machine, model, WORK, runtime, *shape))
                if shape
                else _search(machine, model)
            )
        rows.append([*cells, *_RECALLED[name]])
    return markdown_table(
        ["", *(model.name for model, _ in columns), "paper, OPT-30B", "paper, OPT-175B"], rows
    )


def _search(machine: TierMachine, model: TierModel) -> str:
    return _rate(best_policy(_searched(machine, model, FLEXGEN)))


_WHOLE = replace(NVME, usable=1.0)
_Change = tuple[TierMachine, Runtime, tuple[int, int] | tuple[()]]


def _by_hand(model: TierModel, batch: int, batches: int) -> _Change:
    """The paper's policies without a search: no weights on the accelerator; of OPT-175B one
    batch."""
    weights = {"weights_gpu": 0.0, "weights_host": 0.5 if model is OPT_175B else 1.0}
    return (
        _WHOLE,
        Runtime(fixed={**FLEXGEN.fixed, **weights}),
        (32, 1) if model is OPT_175B else (batch, batches),
    )


_ABLATED: Mapping[str, Callable[[TierModel, int, int], _Change]] = {
    "all of it": lambda model, batch, batches: (_WHOLE, FLEXGEN, (batch, batches)),
    "no policy search": _by_hand,
    "no overlapping": lambda model, batch, batches: (
        _WHOLE,
        Runtime(overlap=False),
        (batch, batches),
    ),
    "no attention on the host": lambda model, batch, batches: (
        _WHOLE,
        Runtime(host_attention=False),
        (batch, batches),
    ),
    "no disk": lambda model, batch, batches: (replace(NVME, disk_bytes=0.0), FLEXGEN, ()),
    "DeepSpeed's policy": lambda model, batch, batches: (
        _WHOLE,
        DEEPSPEED,
        (8, 1) if model is OPT_30B else (2, 1),
    ),
}
_RECALLED = {
    "all of it": ("7.32", "0.69"),
    "no policy search": ("7.26", "0.27"),
    "no overlapping": ("5.86", "0.59"),
    "no attention on the host": ("4.03", "0.62"),
    "no disk": ("7.32", "out of memory"),
    "DeepSpeed's policy": ("1.57", "0.01"),
}


def _bounds_table(found: dict[tuple[str, str], list[TierPolicy]]) -> str:
    rows = []
    for bound in BOUNDS_S:
        cells = [f"{bound} s"]
        for model in (OPT_30B, OPT_175B):
            for kind in ("plain", "compressed"):
                best = best_policy(found[model.name, kind], bound)
                cells.append(
                    NONE
                    if best is None
                    else f"{best.tokens_per_s:.2f} ({best.batch} x {best.batches})"
                )
        rows.append(cells)
    header = ["block within"] + [
        f"{model.name}{kind}" for model in (OPT_30B, OPT_175B) for kind in ("", ", compressed")
    ]
    return markdown_table(header, rows)


def _rate(policy: TierPolicy | None) -> str:
    if policy is None:
        return NONE
    rate = policy.tokens_per_s
    return f"{rate:.2f}" if rate >= 0.1 else f"{rate:.3f}"


def _split(parts: Sequence[float]) -> str:
    return " / ".join(f"{100 * part:.0f}" for part in parts)


if __name__ == "__main__":
    sys.exit(main())
