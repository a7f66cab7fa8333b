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
        _INTRODUCTION.replace("{ALGORITHM}", ALGORITHM),
        main_table(),
        _TABLE_SAYS.replace("{STREAMING}", STREAMING),
        "## Which policies\n",
        _POLICIES,
        _policies_table(),
        "## Ablation\n",
        _ABLATION,
        _ablation_table(),
        "## Under a bound on latency\n",
        _FRONTIER,
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


_INTRODUCTION = """\
# Compare three tiers of memory with FlexGen

Sheng et al. (*FlexGen*, ICML 2023) generate with OPT models on one T4 (16 GB) with 208 GB of memory and 1.5 TB of
SSD. Prompts have 512 tokens and answers 32; rates are of a whole block of sequences with its prompts.
`python -m bench.flexgen_paper` writes this page; `--check` reports changes, and `--pictures DIR` draws the last
table.

Nothing here ran on such a node. Times come from the authors' released cost model with its fitted constants, and our
own linear program chooses the fractions ([the
algorithm]({ALGORITHM})). *Batches* are sequences in a batch x
batches that share each read of a layer. *Its batches* uses the published ones; *best* chooses them with 80 % of
each memory, as the released search. The released disk reads 0.473 GiB/s; the last two columns assume 2 GB/s.
"""
_TABLE_SAYS = """
The model is near the measured rates in some rows only:

- **FlexGen with OPT-30B** is within 5 %.
- **FlexGen with OPT-175B** depends on the disk: a quarter of the measured rate with the released one, and 0.54 against
  0.69 with 2 GB/s. A cache of about 650 GB is read for every token.
- **OPT-6.7B on the accelerator** is 2.4 times too fast, because the model has no term for reading weights from the
  accelerator's own memory.
- **Compressed** rows are 1.4 to 2.1 times too fast, because packing and unpacking count as nothing.
- **Accelerate and DeepSpeed with OPT-30B** are 1.5 to 3 times too fast, because the model is another system's.

EdgeShard uses these parts of the paper:

| of the paper | here |
| --- | --- |
| a layer's weights are read once for all batches | sweeps of micro-batches ([docs/memory.md](../memory.md#streaming)) |
| weights by layer in memory or on disk | exact, with the cut ([nodes that stream]({STREAMING})) |
| 4 bits by group | weights are symmetric int4; [KV](../kernels.md#keys-and-values-of-4-bits) has groups of 32 |
| attention at the cache's place | always: a stage's KV is on its node |
| cache on disk | no ([tried](../decisions/memory.md#choice-no-running-kv-on-the-disk)), except for preempted requests |
| activations on the disk, attention over the highest scores | no: too small; it changes the tokens |
"""
_POLICIES = """\
Per cent on accelerator / host / disk:
"""
_ABLATION = """\
Each row removes one part, at the published batches, with the disk at 2 GB/s. "No disk" chooses its batches anew.
The paper's figures are recalled. Only attention on the host differs much: by the fitted constants it takes as long
as moving the cache over the bus.
"""
_FRONTIER = """\
The highest rate if the whole block, with its prompts, must finish within the bound; the disk at 2 GB/s.
"""

if __name__ == "__main__":
    sys.exit(main())
