"""How long a start takes, and what an agent without work costs.

Of this tree, or of another checkout and this one in turns, so that drift of the machine weighs on both alike:

- an agent: seconds from its start until the coordinator counts it as connected (joined), and until layers may be placed
  on it; the processor's seconds by then; its resident memory some seconds later (RSS, and PSS, which counts what
  processes share once);
- the coordinator: seconds to its ready file; `edgectl get nodes`: seconds to its end;
- `edgectl demo`: seconds to its first token, and the processor's seconds of all its processes to the end.

Each tree runs in its own virtual environment, with bytecode and page cache warm: one round is thrown away. On a machine
that does other work too, the processor's seconds say more than the clock's.

    git worktree add ../before REVISION && make -C ../before setup
    python -m bench.start ../before --rounds 5 -o FILE          JSON: all figures, and their medians
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.sizes import sized
from edgeshard import Client

POLL_S = 0.01
LIMIT_S = 120.0
IDLE_S = sized(3.0, 0.1)
"""From placeable to the reading of the memory."""
PROMPT = "Once upon a time"
Figures = dict[str, float]


class Tree:
    """A checkout, set up, with a coordinator of its own."""

    def __init__(self, root: Path, directory: Path) -> None:
        self.root = root.resolve()
        self._directory = directory
        self._python = str(self.root / ".venv/bin/python")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._count = 0

    def start(self, module: str, *arguments: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
        with (self._directory / "log").open("ab") as log:
            process = subprocess.Popen(
                [self._python, "-m", module, *arguments], cwd=self.root, stdout=stdout or log, stderr=log
            )
        self._processes.append(process)
        return process

    def start_coordinator(self) -> tuple[str, float]:
        """Its address, and the seconds that it took."""
        self._count += 1
        place = self._directory / f"coordinator-{self._count}"
        ready, began = place.with_suffix(".ready"), time.monotonic()
        options = ("--listen", "127.0.0.1:0", "--state-dir", str(place), "--ready-file", str(ready), "--plaintext")
        process = self.start("edgeshard_coordinator", *options)
        while not ready.exists():
            if process.poll() is not None or time.monotonic() - began > LIMIT_S:
                raise RuntimeError(f"the coordinator of {self.root} did not start")
            time.sleep(POLL_S)
        return json.loads(ready.read_text())["address"], time.monotonic() - began

    def stop(self) -> None:
        """End what was started here and still runs."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()


async def measure(tree: Tree, number: int, directory: Path) -> Figures:
    """One round of one tree."""
    address, coordinator_s = tree.start_coordinator()
    try:
        async with Client(address, plaintext=True) as client:
            figures = await _agent(tree, client, address, directory / f"agent-{number}")
        figures["coordinator_s"] = coordinator_s
        began = time.monotonic()
        tree.start("edgeshard.cli.main", "--coordinator", address, "get", "nodes").wait(LIMIT_S)
        figures["get_nodes_s"] = time.monotonic() - began
    finally:
        tree.stop()
    before = os.times()
    figures["demo_first_token_s"] = _demo(tree)
    after = os.times()
    figures["demo_processor_s"] = sum(after[2:4]) - sum(before[2:4])  # of children that have ended, and of theirs
    return figures


async def _agent(tree: Tree, client: Client, address: str, state: Path) -> Figures:
    began, name = time.monotonic(), "bench"
    figures: Figures = {}
    options = ("--name", name, "--coordinator", address, "--state-dir", str(state), "--plaintext")
    process = tree.start("edgeshard_agent", *options)
    while "placeable_s" not in figures:
        elapsed = time.monotonic() - began
        if process.poll() is not None or elapsed > LIMIT_S:
            raise RuntimeError(f"the agent of {tree.root} did not join")
        for node in await client.nodes():
            if node.connected:
                figures.setdefault("joined_s", elapsed)
            if node.placeable:
                figures["placeable_s"] = elapsed
                figures["agent_processor_s"] = _processor_s(process.pid)
        await asyncio.sleep(POLL_S)
    await asyncio.sleep(IDLE_S)
    return figures | _memory(process.pid)


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> Figures:
    """Resident megabytes (10^6 bytes)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    kibibytes = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:]}
    return {"idle_rss_mb": kibibytes["Rss"] * 1024 / 1e6, "idle_pss_mb": kibibytes["Pss"] * 1024 / 1e6}


def _demo(tree: Tree) -> float:
    """Seconds until it has written more than the prompt."""
    began, shown = time.monotonic(), b""
    process = tree.start("edgeshard.cli.main", "demo", "--max-tokens", "8", "-p", PROMPT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        while len(shown.strip()) <= len(PROMPT):
            part = os.read(process.stdout.fileno(), 4096)
            if not part:
                raise RuntimeError(f"the demo of {tree.root} told nothing")
            shown += part
        took = time.monotonic() - began
        process.stdout.read()
        process.wait(LIMIT_S)
    finally:
        tree.stop()
    return took


def report(rows: dict[str, list[Figures]]) -> dict[str, Any]:
    def median(figures: list[Figures], name: str) -> float:
        return round(statistics.median(row[name] for row in figures), 3)

    medians = {tree: {name: median(figures, name) for name in figures[0]} for tree, figures in rows.items()}
    return {"medians": medians, "rounds": rows}


async def run(trees: dict[str, Tree], rounds: int, directory: Path) -> dict[str, list[Figures]]:
    rows: dict[str, list[Figures]] = {name: [] for name in trees}
    for number in range(sized(0, 1), rounds + 1):
        order = list(trees) if number % 2 == 0 else list(reversed(trees))
        for name in order:
            figures = await measure(trees[name], number, directory / name)
            shown = ", ".join(f"{key} {value:.2f}" for key, value in figures.items())
            print(f"{number}/{rounds} {name}: {shown}", file=sys.stderr, flush=True)
            if number:  # the first filled the caches
                rows[name].append(figures)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", metavar="DIR", help="another checkout, set up")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    roots = {"before": options.before} if options.before is not None else {}
    roots["after"] = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory(prefix="edgeshard-bench-start-") as scratch:
        places = {name: Path(scratch) / name for name in roots}
        for place in places.values():
            place.mkdir()
        trees = {name: Tree(root, places[name]) for name, root in roots.items()}
        try:
            text = json.dumps(report(asyncio.run(run(trees, options.rounds, Path(scratch)))), indent=1)
        finally:
            for tree in trees.values():
                tree.stop()
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
