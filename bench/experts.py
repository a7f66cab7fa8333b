"""A mixture's experts on the disk: hit rates on recorded routing, and time per token with large experts.

    python -m bench.experts hits MODEL --text HELD_OUT                      JSON on stdout
    python -m bench.experts time MODEL DIR --text HELD_OUT [--tokens 256]    the same; DIR takes 3 GB of packed experts
    python -m bench.experts page HITS.json TIME.json docs/experts.md        the page's tables and its plot

MODEL is a directory that has its expert table (`python -m bench.training.measure_experts`). Routing is what the model's
routers chose on the text. `time` lets recorded routing choose among experts of 7.9 million random weights each (4.4 MB
as int4) between attention's matrices of the same width; packed files are read past the page cache, no faster than 0.5
GB/s, by the store that nodes run. The baselines are EdgeMoE's: IO-FREE has all experts in memory, IO-EXP reads what a
router chose as bf16, IO-QEXP as int4; LRU keeps what was used last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from edgeshard_agent.experts.cache import ExpertCache, ForecastCache, LeastRecentlyUsed
from edgeshard_agent.experts.table import Choices, ExpertTable
from edgeshard_agent.model.blocks import BlockOptions, GatedMlp, MixtureMlp
from edgeshard_agent.model.projection import Integers
from edgeshard_agent.model.weights.expert_store import ExpertStore
from edgeshard_agent.model.weights.packed_modules import AdoptedUnit, ModelUnit, unit_bytes, unit_checksum, unit_memory
from edgeshard_agent.ops.linear import PackedLinear
from edgeshard_agent.store.direct import ChunkReader
from edgeshard_agent.store.packed import PackedFile
from edgeshard_agent.store.packed_units import PackedUnits

from bench.sizes import sized
from bench.training.expert_learning import replay
from bench.training.expert_runs import Mixture, token_ids
from edgeshard.architectures import EXPERT_WIDTHS
from edgeshard.architectures.record import BlockStyle
from edgeshard.cli.render.svg import bar_chart
from edgeshard.domain.models.dtypes import IntegerFormat
from edgeshard.domain.models.residency import in_disk_blocks
from edgeshard.storage.forms import EXPERT_TABLE

HIDDEN, INNER = sized((1024, 2560), (128, 256))
RATE = 0.5e9
"""Bytes per second of the disk that reads stand in for."""
BUDGETS = (25, 50, 75)
WHOLE = "bf16"
WITHOUT_CACHE = 32
"""Tokens of the baselines to which every token is alike."""


@dataclass(frozen=True)
class Recorded:
    """A model's routing on a text, its table, and the bits of each expert as text by layer; None without."""

    choices: Choices
    table: ExpertTable
    widths: list[str] | None

    @classmethod
    def of(cls, model: Path, text: Path, size: int | None) -> Recorded:
        mixture = Mixture.load(model, None)
        choices = mixture.routing(token_ids(model, text, size))
        layers, experts = len(mixture.mixtures()), len(mixture.mixtures()[0].experts)
        table = ExpertTable.of_values(json.loads((model / EXPERT_TABLE).read_text()), layers, experts)
        return cls(choices, table, mixture.config.get(EXPERT_WIDTHS))


def hits(recorded: Recorded) -> list[dict[str, Any]]:
    """What caches of equal experts do on the whole recording."""
    sizes = np.ones((recorded.table.layers, recorded.table.experts), np.int64)
    rows = []
    for percent in BUDGETS:
        room = sizes.size * percent // 100
        caches: dict[str, ExpertCache] = {
            "LRU": LeastRecentlyUsed(room, sizes),
            "eviction alone": ForecastCache(room, sizes, recorded.table, most_ahead=0),
            "ours": ForecastCache(room, sizes, recorded.table),
        }
        for name, cache in caches.items():
            counts = replay(recorded.choices, cache)
            rows.append(
                {
                    "budget_percent": percent,
                    "cache": name,
                    "tokens": len(recorded.choices),
                    "hit_rate": round(counts.hit_rate, 4),
                    "loads_per_token": round(counts.bytes_read / len(recorded.choices), 3),
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


class Disk:
    """Reads take their time one after another, however fast the files come."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._lock = threading.Lock()

    def pace(self, size: int) -> None:
        with self._lock:
            self.bytes_read += size
            ends = time.perf_counter() + size / RATE
            while (left := ends - time.perf_counter()) > 0:
                time.sleep(left)


class Recording(torch.nn.Module):
    """A router that chooses what was recorded, whatever it is given."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.chosen: Sequence[int] = ()
        self._experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = torch.full((len(x), self._experts), -30.0, dtype=x.dtype)
        logits[:, list(self.chosen)] = 0.0
        return logits


class Layers:
    """Mixtures of large experts in given widths, each behind matrices as large as attention's; no norms."""

    def __init__(self, directory: Path, layers: int, widths: list[list[str]], chosen: int) -> None:
        self._packed = PackedUnits(directory)
        self._style = BlockStyle(eps=1e-6, scaling=1.0, activation="silu", experts_per_token=chosen)
        self._bytes = {width: self._made(width) for width in sorted({w for some in widths for w in some})}
        self.attention = [self._attention(seed) for seed in range(layers)]
        self.mixtures = [self._mixture(len(some)) for some in widths]
        self.units = [
            [
                self._adopt(layer, expert, width, mlp)
                for expert, (width, mlp) in enumerate(zip(some, experts, strict=True))
            ]
            for layer, (some, experts) in enumerate((s, self.mixtures[at].experts) for at, s in enumerate(widths))
        ]
        self.sizes = np.array([[in_disk_blocks(unit.large_bytes) for unit in some] for some in self.units], np.int64)

    def _options(self, width: str) -> BlockOptions:
        kind = None if width == WHOLE else IntegerFormat(width)
        return BlockOptions(
            self._style, 8, 8, 128, HIDDEN, integers=None if kind is None else Integers(kind, kind.group)
        )

    def _made(self, width: str) -> Any:
        """One expert's packed bytes; all experts of a width have the same numbers, in files of their own."""
        random = torch.Generator().manual_seed(0)
        mlp = GatedMlp(INNER, HIDDEN, False, self._options(width))
        for projection, rows, first in ((mlp.gate_up, INNER, 0), (mlp.gate_up, INNER, INNER), (mlp.down, HIDDEN, 0)):
            weight = torch.randn(rows, projection.columns, generator=random) * 0.02
            projection.fill("weight", first, weight, torch.bfloat16, "cpu")
        data = unit_bytes(ModelUnit("expert", (("", mlp),)))
        assert data is not None
        return data

    @staticmethod
    def _attention(seed: int) -> tuple[PackedLinear, PackedLinear]:
        random = torch.Generator().manual_seed(seed)
        shapes = ((2 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN))
        first, second = (PackedLinear.pack(torch.randn(s, generator=random).bfloat16() * 0.02, "int4") for s in shapes)
        return first, second

    def _mixture(self, experts: int) -> MixtureMlp:
        mixture = MixtureMlp(experts, INNER, HIDDEN, self._options("int4"))
        mixture.router = Recording(experts)  # type: ignore[assignment]
        return mixture

    def _adopt(self, layer: int, expert: int, width: str, mlp: Any) -> AdoptedUnit:
        name = f"layer-{layer}-expert-{expert}-{width}"
        data = self._bytes[width]
        if self._packed.take(name) is not None:
            file: PackedFile | None = self._packed.find(name, name)
        else:
            file = self._packed.write(name, name, data)
        assert file is not None
        if width != "int4":  # made for another width than the mixture's own
            fresh = GatedMlp(INNER, HIDDEN, False, self._options(width))
            mlp.gate_up, mlp.down = fresh.gate_up, fresh.down
        return AdoptedUnit(ModelUnit(name, (("", mlp),)), file, unit_memory(max(1, file.header.small_bytes)))

    def token(self, choices: np.ndarray) -> None:
        """One token [layers, chosen] through all layers."""
        x = torch.ones(1, HIDDEN, dtype=torch.bfloat16)
        for (first, second), mixture, chosen in zip(self.attention, self.mixtures, choices.tolist(), strict=True):
            x = second(first(x)[:, :HIDDEN])
            mixture.router.chosen = chosen
            x = mixture(x)


class NoCache:
    """Every expert is read when a router chooses it, and gone afterwards."""

    def __init__(self, sizes: np.ndarray) -> None:
        self._lru = LeastRecentlyUsed(int(np.sort(sizes.ravel())[-2:].sum()), sizes)
        self.room, self.counts = self._lru.room, self._lru.counts
        self.likely, self.bring, self.choose = self._lru.likely, self._lru.bring, self._lru.choose


def run(layers: Layers, cache: ExpertCache, choices: Choices, *, free: bool = False) -> dict[str, Any]:
    """Seconds per token; the first quarter of the tokens fills the cache and is not counted."""
    disk = Disk()
    reader = ChunkReader(unit_checksum, threads=1, pace=None if free else disk.pace)
    store = ExpertStore(layers.units, range(len(layers.units)), cache, reader)
    for number, mixture in enumerate(layers.mixtures):
        mixture.source = partial(store.use, number)
    if free:
        every = np.arange(len(layers.mixtures[0].experts))
        for number in range(len(layers.mixtures)):
            list(store.use(number, torch.from_numpy(every[:, None])))
    seconds, warm = [], len(choices) // 4
    waited, read = 0.0, 0
    for index, token in enumerate(choices):
        if index == warm:
            waited, read = store.counts.waited_s, disk.bytes_read
        began = time.perf_counter()
        layers.token(token)
        seconds.append(time.perf_counter() - began)
    counted = len(choices) - warm
    result = {
        "ms_per_token": round(1e3 * statistics.mean(seconds[warm:]), 2),
        "median_ms": round(1e3 * statistics.median(seconds[warm:]), 2),
        "waited_ms": round(1e3 * (store.counts.waited_s - waited) / counted, 2),
        "mb_per_token": round((disk.bytes_read - read) / counted / 1e6, 2),
        "ahead_used": store.counts.ahead_used,
        "ahead_wasted": store.counts.ahead_wasted,
        "memory_mb": round(store.memory_bytes / 1e6),
    }
    store.close()
    return result


def times(recorded: Recorded, directory: Path, tokens: int) -> list[dict[str, Any]]:
    directory.mkdir(parents=True, exist_ok=True)
    table, choices = recorded.table, recorded.choices[:tokens]
    rows: list[dict[str, Any]] = []

    def made(width: str) -> Layers:
        widths = [[width] * table.experts] * table.layers
        return Layers(directory, table.layers, widths, choices.shape[2])

    def add(name: str, percent: int | None, figures: dict[str, Any]) -> None:
        rows.append({"name": name, "budget_percent": percent, **figures})
        print(rows[-1], file=sys.stderr, flush=True)

    whole = made(WHOLE)
    few = choices[:WITHOUT_CACHE]
    add("IO-EXP", None, run(whole, NoCache(whole.sizes), few))
    del whole
    even = made("int4")
    all_bytes = int(even.sizes.sum())
    add("IO-FREE", None, run(even, LeastRecentlyUsed(all_bytes, even.sizes), choices, free=True))
    add("IO-QEXP", None, run(even, NoCache(even.sizes), few))
    measured = None
    if recorded.widths is not None:
        digits = [[f"int{digit}" for digit in some] for some in recorded.widths]
        measured = Layers(directory, table.layers, digits, choices.shape[2])
    for percent in BUDGETS:
        room = all_bytes * percent // 100
        add("LRU", percent, run(even, LeastRecentlyUsed(room, even.sizes), choices))
        add("ours, int4", percent, run(even, ForecastCache(room, even.sizes, table), choices))
        if measured is not None:
            cache = ForecastCache(room, measured.sizes, table)
            add("ours, measured widths", percent, run(measured, cache, choices))
    return rows


def page(hit_rows: list[dict[str, Any]], time_rows: list[dict[str, Any]]) -> tuple[str, str]:
    """The tables, and the plot of the times."""
    lines = ["| budget | cache | hit rate | experts read a token |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {row['budget_percent']} % | {row['cache']} | {100 * row['hit_rate']:.1f} % | {row['loads_per_token']:.2f} |"
        for row in hit_rows
    ]
    lines += ["", "| | budget | ms a token | of it waiting | MB read a token |", "| --- | --- | --- | --- | --- |"]
    for row in time_rows:
        budget = "-" if row["budget_percent"] is None else f"{row['budget_percent']} %"
        figures = f"{row['ms_per_token']:.1f} | {row['waited_ms']:.1f} | {row['mb_per_token']:.1f}"
        lines.append(f"| {row['name']} | {budget} | {figures} |")
    bars: dict[str, dict[str, float | None]] = {}
    for percent in BUDGETS:
        bars[f"{percent} %"] = {
            row["name"]: row["ms_per_token"] for row in time_rows if row["budget_percent"] in (None, percent)
        }
    return "\n".join(lines), bar_chart(bars, "Time per token by memory for experts", "milliseconds", log_y=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("hits", "time"):
        command = commands.add_parser(name)
        command.add_argument("model", type=Path)
        if name == "time":
            command.add_argument("directory", type=Path)
            command.add_argument("--tokens", type=int, default=256)
        command.add_argument("--text", type=Path, required=True)
        command.add_argument("--bytes", type=int, default=30_000, help="of the text, its first")
    command = commands.add_parser("page")
    for name in ("hits", "times", "document"):
        command.add_argument(name, type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "page":
        rows = [json.loads(path.read_text())["rows"] for path in (options.hits, options.times)]
        text, plot = page(*rows)
        print(text)
        options.document.with_suffix("").mkdir(exist_ok=True)
        (options.document.with_suffix("") / "times.svg").write_text(plot, encoding="utf-8")
        return 0
    with torch.inference_mode():
        recorded = Recorded.of(options.model, options.text, options.bytes)
        rows = hits(recorded) if options.command == "hits" else times(recorded, options.directory, options.tokens)
    print(json.dumps({"benchmark": f"experts {options.command}", "rows": rows}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
