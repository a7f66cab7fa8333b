"""Write docs/real-models.md: what fits on plausible sites and how fast it would be, by
`edgectl plan`.

    python -m bench.real_models [--output docs] [--check]

The sites and the models' shapes are in deploy/examples/real-models. It takes a quarter of a minute
and gives the same every time. With --check it writes nothing and exits 1 if the page would change,
its comments aside.
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
MODELS = (
    "llama-3.2-3b",
    "llama-3.1-8b",
    "gpt-oss-20b",
    "qwen3-30b-a3b",
    "llama-3.3-70b",
    "qwen3-235b-a22b",
)

INTRODUCTION = """# Choose a model for your nodes

This page plans six popular models for five typical sites: one request at a time, 512 tokens in and 256 out.

**These plans use data sheets, not measurements.** Real kernels reach a part of a data sheet, so real sites are slower.
Comparisons between rows are sounder than the figures. If you have the nodes, run `edgectl profile`; `edgectl plan` and
`edgectl deploy` then use the measurements ([docs/planning.md](planning.md)).

- *Layers*: the layers of each node, without the end of a range; or the missing memory.
- *Tokens/s*: the rate of one stream after its first token. *First token*: the wait for it.
- *Weights*: bfloat16, or int4 if all nodes compute on CPUs
  ([docs/configure.md](configure.md#weights-as-small-integers)).

A program writes this page (`bench/real_models.py`), and a test compares it with the commands' output. The shapes of the
models are in `deploy/examples/real-models/`; any other `config.json` works too. Other sites take the commands of [two
Jetsons](#two-jetson-orin-nx) with another cluster file, and with `--quantise int4` for int4:

```bash
cd deploy/examples/real-models
```
"""  # noqa: E501

CONCLUSIONS = """## Read the tables

- **More equal nodes do not make one stream faster**, because a token passes all of them. They give memory for larger
  models and more requests, and an earlier first token, because they work on slices of a prompt at the same time.
- **Memory decides what runs, and its bandwidth how fast.** A token reads all weights that it uses once.
- **A mixture of experts is fast for its size**, because a token uses few experts. It suits nodes with large, slow
  memory.
- **int4 gives about three times the rate of bfloat16** on CPUs with little more than a quarter of the memory
  ([quality](benchmarks/kernels.md#what-small-integers-cost)).
- **If a model does not fit**, `--allow-streaming` reads a part of the weights from the disk in every step
  ([docs/memory.md](memory.md#streaming)).
"""  # noqa: E501


@dataclass(frozen=True)
class Site:
    """A cluster file of the examples, the heading of its section, and the weights that its nodes
    can compute with."""

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
"""The site whose commands are on the page, and run by the documents' test; this program runs those
of all."""


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
            typed.append(
                f"edgectl {' '.join(words)}" + ("" if found["feasible"] else " || test $? = 1")
            )
    described = (EXAMPLES / f"{site.name}.toml").read_text(encoding="utf-8").partition("\n")[0]
    text = described.removeprefix("# ").removesuffix(" Figures are those of data sheets.")
    table = markdown_table(["model", "weights", "layers", "tokens/s", "first token"], rows)
    commands = "\n".join(typed)
    typed_text = (
        f"\nCommands, in this order:\n\n```bash\n{commands}\n```\n" if site.name == TYPED else ""
    )
    return f"## {site.title}\n\n{text}\n\n{comment}\n\n{table}{typed_text}"


def page() -> str:
    comment = marker("python -m bench.real_models", trees_now(ROOMS))
    return "\n".join([INTRODUCTION, *(section(site, comment) for site in SITES), CONCLUSIONS])


def without_comments(text: str) -> str:
    return re.sub(r"<!-- figures: .*?-->", "", text)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.real_models")
    parser.add_argument("--output", type=Path, default=ROOT / "docs", metavar="DIR")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 where the page would change"
    )
    arguments = parser.parse_args()
    text, path = page(), arguments.output / PAGE
    if not arguments.check:
        path.write_text(text, encoding="utf-8")
        return 0
    if path.exists() and without_comments(path.read_text(encoding="utf-8")) == without_comments(
        text
    ):
        return 0
    print(f"differs: {path}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
