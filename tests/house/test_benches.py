"""Every program of bench/ still runs, in its tiny form (`bench/sizes.py`), and ends the processes
it started."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from edgeshard.storage.forms import EXPERT_TABLE

pytestmark = pytest.mark.timing

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
LIBRARY = ROOT / "agent/edgeshard_agent/ops/libedgeshard_ops.so"
TIMEOUT_S = 280
TEXT = "tests/data/fairy-tales.valid.txt"
ENGINE_CASE = "no-bubbles-bf16-s1-m1-c512 x1"

RUNS = [
    ["dashboard --rounds 1 --seconds 1 -o {tmp}/dashboard.json"],
    ["edgeshard_paper --output {tmp} --pictures {tmp}"],
    [
        "engine --quick -o {tmp}/engine.json",
        "engine --limit -o {tmp}/engine.json",
        "engine_report {tmp}/engine.json {tmp}/page.md",
    ],
    [f"engine_trees {{root}} --rounds 1 --case '{ENGINE_CASE}'"],
    ["engine_worker stage 0:1 1 4 2"],
    ["flexgen_paper --check --pictures {tmp}"],
    ["gateway --streams 2 --tokens 5 --slow 2"],
    ["gguf_mixtures --turns 1 -o {tmp}/gguf.json"],
    ["gguf_two_nodes -o {tmp}/two_nodes.json"],
    ["guides --schemas 1 --rounds 1"],
    ["hop --rounds 1 --tokens 4"],
    ["hpipe_paper --check --pictures {tmp}", "hpipe_paper --measure --output {tmp}"],
    ["hybrids --quick"],
    [
        "kernels --quick",
        "kernels --quick --linear --rows 3 --library {library} -o {tmp}/kernels.json",
    ],
    ["lab --rounds 1 --new-tokens 2"],
    ["loading {tmp} --rounds 1"],
    ["many_boxes --nodes 3 --seconds 1 -o {tmp}/nodes.json"],
    ["mtls --rounds 1 --streams 2"],
    ["one_core --turns 1 -o {tmp}/one_core.json"],
    ["promises --quick --rounds 1"],
    ["quantisation --bytes 200"],
    ["real_models --check"],
    ["replicas --rounds 1 --streams 2"],
    ["saturation"],
    [
        "speculation --quick",
        "speculation --quick --draft",
        "speculation --quick --together --models tales",
    ],
    ["soak --minutes 0.01 --gap 0.1 --every 1"],
    ["streaming {tmp} --budgets 50 --sweeps 1 --steps 1"],
    ["test_planner_exact"],
    ["test_planner_plans"],
    ["test_planner_speed"],
    ["token_budget --rounds 1"],
    ["token_cost --rounds 1 --stages 2 --streams 1"],
]
"""Programs with the arguments of their tiny form; what stands in one list runs one after the
other."""
OTHERS = {"llama_cpp_logits"}
"""Programs for another interpreter, which `gguf_mixtures` runs if there is one."""
LIMITS = {"lab", "promises", "saturation"}
"""They exit with 1 if measured and predicted are too far apart, which may happen in the tiny
form."""


def programs() -> list[str]:
    """Modules and packages that `python -m bench.NAME` runs, and files that pytest does."""
    modules = [
        path.stem
        for path in BENCH.glob("*.py")
        if path.stem.startswith("test_") or _is_program(path)
    ]
    return sorted([*modules, *(path.parent.name for path in BENCH.glob("*/__main__.py"))])


def _is_program(path: Path) -> bool:
    return path.stem not in OTHERS and 'if __name__ == "__main__":' in path.read_text()


def why_not(name: str) -> str:
    """The requirement that this machine lacks for it; '' if it can run."""
    needs_two = name in (
        "engine",
        "engine_trees",
        "gguf_two_nodes",
        "promises",
        "replicas",
        "token_budget",
        "token_cost",
    )
    if needs_two and (len(os.sched_getaffinity(0)) < 2 or shutil.which("taskset") is None):
        return "needs two cores, and taskset"
    return ""


def run(line: str, directory: Path) -> None:
    name, *words = shlex.split(line.format(tmp=directory, root=ROOT, library=LIBRARY))
    command = (
        ["pytest", "-q", f"bench/{name}.py"] if name.startswith("test_") else [f"bench.{name}"]
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    ended = subprocess.run(
        [sys.executable, "-m", *command, *words],
        cwd=ROOT,
        env={**environment, "EDGESHARD_BENCH_TINY": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    allowed = (0, 1) if name in LIMITS and "Traceback" not in ended.stderr else (0,)
    assert ended.returncode in allowed, (
        f"{' '.join(ended.args)}\n{ended.stdout[-1000:]}\n{ended.stderr[-3000:]}"
    )


def test_every_program_has_a_tiny_form() -> None:
    assert sorted({line.split()[0] for lines in RUNS for line in lines}) == programs()


@pytest.mark.long
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("lines", RUNS, ids=lambda lines: lines[0].split()[0])
def test_a_program_runs(lines: list[str], tmp_path: Path) -> None:
    name = lines[0].split()[0]
    if reason := why_not(name):
        pytest.skip(reason)
    (tmp_path / "page.md").touch()
    for line in lines:
        run(line, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S)
def test_the_table_of_experts_is_learned(tmp_path: Path) -> None:
    shutil.copytree(BENCH / "mixture_model", tmp_path / "mixture")
    run(f"training.measure_experts table {{tmp}}/mixture --text {TEXT} --bytes 500", tmp_path)
    assert (tmp_path / "mixture" / EXPERT_TABLE).exists()


@pytest.mark.long
def test_a_program_that_is_told_to_end_takes_its_site_along() -> None:
    command = [sys.executable, "-m", "bench.hop", "--rounds", "1000"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        command, cwd=ROOT, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        process.stderr.readline()  # a round is over
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 3, "the coordinator and two agents"
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    _, left = psutil.wait_procs(children, timeout=10)
    for child in left:
        child.kill()
    assert not left and process.returncode == 128 + signal.SIGTERM
