"""Write docs/real-models.md: what fits on plausible sites and how fast it would be, by `edgectl plan`.

    python -m bench.real_models [--output docs] [--check]

The sites and the models' shapes are in deploy/examples/real-models. It takes a quarter of a minute and gives the same
every time. With --check it writes nothing and exits 1 if the page would change, its comments aside.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from bench.pages import markdown_table
from edgeshard.cli.main import app
from tools.figures import marker, trees_now

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "deploy" / "examples" / "real-models"
PAGE = "real-models.md"
ROOMS = ("edgeshard/planning", "edgeshard/architectures", "deploy/examples/real-models")
MODELS = ("llama-3.2-3b", "llama-3.1-8b", "gpt-oss-20b", "qwen3-30b-a3b", "llama-3.3-70b", "qwen3-235b-a22b")

INTRODUCTION = """# Real models on real nodes

What would fit on a site like yours, and how fast would it be? This page plans six models that people run for five sites
that people have: one request at a time, 512 tokens in and 256 out.

**These are plans from the figures of data sheets, not measurements.** Real kernels reach a part of what a data sheet
says, so a real site is slower; by how much, only measuring tells. Comparisons between rows are sounder than the
figures. On a site that is there, `edgectl profile` measures the nodes, and `edgectl plan` and `edgectl deploy` go by
that ([docs/planning.md](planning.md)).

- *Layers* says which node holds which layers, the end not included; else what lacks.
- *Tokens/s* is the rate at which one stream's tokens come behind the first; *first token* is the wait for it.
- *Weights* are bfloat16. On nodes that compute on their CPU they may also be int4
  ([docs/configure.md](configure.md#weights-as-small-integers)); on accelerators they may not, so the sites with a GPU
  have one row for each model.

The shapes of the models are in `deploy/examples/real-models/`, as the `config.json` of each, shortened to what decides
sizes. Any other `config.json` will do. A program writes the page (`bench/real_models.py`), and a test compares it with
what the commands say now. The commands are typed in the folder of the shapes, with `edgectl` on the path:

```bash
cd deploy/examples/real-models
```
"""

CONCLUSIONS = """## What the tables say

- **More nodes of one kind do not make one stream faster.** A token goes through all of them in turn. They make room,
  for a model that one of them does not hold and for more requests at once, and the first token comes sooner, because
  they work on slices of a prompt at the same time.
- **Memory decides what runs, and the memory's bandwidth how fast.** A token reads all weights that it uses once.
- **A mixture of experts is quick for its size**, because a token uses few of the experts: all of them need room, and
  few are read. It suits nodes with much memory that is not fast.
- **int4 brings about three times the rate of bfloat16** on CPUs, and takes little more than a quarter of the memory.
  What it costs in quality is in
  [docs/benchmarks/kernels.md](benchmarks/kernels.md#what-small-integers-cost).
- **What does not fit may still run**: `--allow-streaming` reads a part of the weights from the disk in every step
  ([docs/memory.md](memory.md#streaming)).
"""


@dataclass(frozen=True)
class Site:
    """A cluster file of the examples, the heading of its section, and the weights that its nodes can compute with."""

    name: str
    title: str
    quantised: tuple[str | None, ...] = (None,)


ON_CPUS = (None, "int4")
SITES = (
    Site("jetson", "One Jetson Orin NX"),
    Site("two-jetsons", "Two Jetson Orin NX"),
    Site("workstation-and-jetson", "A workstation with a GPU, and a Jetson"),
    Site("server", "A server without a GPU", ON_CPUS),
    Site("office", "Four desktop computers", ON_CPUS),
)
TYPED = "two-jetsons"
"""The site whose commands the documents' test types in a shell; this program runs the commands of all sites."""
NOT_TYPED = "<!-- not run: by a shell; `python -m bench.real_models --check` runs them -->"


def command(site: Site, model: str, quantised: str | None) -> list[str]:
    """As it is typed in the folder of the examples."""
    words = ["plan", "--cluster", f"{site.name}.toml", "--model", f"{model}/config.json"]
    return words + (["--quantise", quantised] if quantised else [])


def plan(words: list[str]) -> dict[str, Any]:
    """The output of the command, as JSON. Raises RuntimeError if it contains no plan."""
    absolute = [str(EXAMPLES / word) if (EXAMPLES / word).is_file() else word for word in words]
    result = CliRunner().invoke(app, [*absolute, "-o", "json"])
    try:
        found: dict[str, Any] = json.loads(result.stdout)
    except json.JSONDecodeError as error:
        raise RuntimeError(f"edgectl {' '.join(words)}: {result.output}") from error
    return found


def row(model: str, quantised: str | None, found: dict[str, Any]) -> list[str]:
    weights = quantised or "bfloat16"
    if not found["feasible"]:
        return [model, weights, f"no: {found['shortage']['text']}", "", ""]
    rate, wait = 1 / found["time_per_token_s"], found["ttft_s"]
    layers = ", ".join(f"{stage['node']} {stage['layers']}" for stage in found["stages"])
    return [model, weights, layers, f"{rate:.1f}", f"{wait:.2f} s"]


def section(site: Site, comment: str) -> str:
    rows, typed = [], []
    for model in MODELS:
        for quantised in site.quantised:
            words = command(site, model, quantised)
            found = plan(words)
            rows.append(row(model, quantised, found))
            typed.append(f"edgectl {' '.join(words)}" + ("" if found["feasible"] else " || test $? = 1"))
    described = (EXAMPLES / f"{site.name}.toml").read_text(encoding="utf-8").partition("\n")[0]
    text = described.removeprefix("# ").removesuffix(" Figures are those of data sheets.")
    table = markdown_table(["model", "weights", "layers", "tokens/s", "first token"], rows)
    commands = "\n".join(typed)
    apart = "" if site.name == TYPED else f"{NOT_TYPED}\n"
    typed_text = f"By these commands, in this order:\n\n{apart}```bash\n{commands}\n```\n"
    return f"## {site.title}\n\n{text}\n\n{comment}\n\n{table}\n{typed_text}"


def page() -> str:
    comment = marker("python -m bench.real_models", trees_now(ROOMS))
    return "\n".join([INTRODUCTION, *(section(site, comment) for site in SITES), CONCLUSIONS])


def without_comments(text: str) -> str:
    return re.sub(r"<!-- figures: .*?-->", "", text)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.real_models")
    parser.add_argument("--output", type=Path, default=ROOT / "docs", metavar="DIR")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the page would change")
    arguments = parser.parse_args()
    text, path = page(), arguments.output / PAGE
    if not arguments.check:
        path.write_text(text, encoding="utf-8")
        return 0
    if path.exists() and without_comments(path.read_text(encoding="utf-8")) == without_comments(text):
        return 0
    print(f"differs: {path}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
