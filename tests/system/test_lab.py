"""The lab: real processes that pretend. How near a prediction comes is for bench/; here it must
run, and never be faster than the emulated nodes and links could be."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.running import EDGECTL, wrong_modules

LAB = """
source = "a"
[[device]]
name = "a"
memory_bytes = 8e9
bandwidth_bytes_per_s = 100e9
flops = 2e12
[[device]]
name = "b"
memory_bytes = 8e9
bandwidth_bytes_per_s = 100e9
flops = 2e12
[[link]]
bandwidth_bps = 20e6
latency_s = 0.01
[model]
dtype = "bfloat16"
[workload]
prompt_tokens = 16
new_tokens = 8
[lab]
model = "config.json"
[[lab.run]]
layers = "a=0:3,b=3:6"
[[lab.run]]
layers = "a=0:2,b=2:6"
mode = "no-bubbles"
streams = 2
"""
CONFIG = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "max_position_embeddings": 512,
}


async def edgectl(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        EDGECTL, *arguments, cwd=cwd,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(200):
        stdout, stderr = await process.communicate()
    return process.returncode or 0, stdout.decode(), stderr.decode()


def pids_of(lab_file: Path) -> list[int]:
    return json.loads((lab_file.parent / ".edgeshard-lab" / "lab.json").read_text())["pids"]  # type: ignore[no-any-return]


def is_alive(pid: int) -> bool:
    try:
        return b"edgeshard" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.fixture
def lab_file(tmp_path: Path) -> Path:
    wrong_modules(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "lab.toml"
    path.write_text(LAB)
    return path


@pytest.mark.long
async def test_a_lab_is_never_faster_than_what_it_emulates(lab_file: Path) -> None:

    async def both_runs() -> list[dict[str, Any]]:
        code, stdout, stderr = await edgectl(
            "lab", "run", str(lab_file), "-o", "json", cwd=lab_file.parent
        )
        assert code == 0, stderr
        rows: list[dict[str, Any]] = json.loads(stdout)
        assert [(row["placement"], row["mode"], row["streams"]) for row in rows] == [
            ("a=0:3,b=3:6", "sequential", 1),
            ("a=0:2,b=2:6", "no-bubbles", 2),
        ]
        alone = rows[0]
        # 2.4 GB of blocks at 100 GB/s, and the hop's 8 KiB at 20 Mb/s: the emulated device cannot
        # do a token in less.
        assert alone["predicted_time_per_token_s"] > 0.024
        # The rate of the whole request: between tokens there is less time if the first is noticed
        # late.
        assert alone["measured_throughput_tps"] <= 1.01 * alone["predicted_throughput_tps"]
        return rows

    for _ in range(4):  # Other work of this machine may stop the second run for any time.
        alone, together = await both_runs()
        if together["measured_throughput_tps"] > alone["measured_throughput_tps"]:
            return
    pytest.fail("two nodes do not work at once")


@pytest.mark.long
async def test_up_run_down(lab_file: Path) -> None:
    code, address, _ = await edgectl("lab", "up", str(lab_file), cwd=lab_file.parent)
    assert code == 0
    try:
        assert (await edgectl("lab", "up", str(lab_file), cwd=lab_file.parent))[0] == 1, (
            "it is up already"
        )
        code, stdout, _ = await edgectl(
            "lab", "run", str(lab_file), "-o", "name", cwd=lab_file.parent
        )
        assert code == 0 and stdout.split() == ["a=0:3,b=3:6", "a=0:2,b=2:6"]
        assert await planned_time_s(address.strip(), lab_file.parent) > 0.024, (
            "as slow as the emulated nodes"
        )
    finally:
        pids = pids_of(lab_file)
        assert (await edgectl("lab", "down", str(lab_file), cwd=lab_file.parent))[0] == 0
    async with asyncio.timeout(60):
        while any(is_alive(pid) for pid in pids):  # noqa: ASYNC110 (they are not this process's children)
            await asyncio.sleep(0.05)
    assert (await edgectl("lab", "down", str(lab_file), cwd=lab_file.parent))[0] == 3, (
        "nothing is up"
    )


async def planned_time_s(address: str, directory: Path) -> float:
    """Time per token of a plan for the lab as a site that was measured."""
    on_site = ("--coordinator", address, "--model", "stand-in")
    code, _, stderr = await edgectl("profile", *on_site, cwd=directory)
    assert code == 0, stderr
    workload = ("--prompt-tokens", "16", "--new-tokens", "8")
    code, stdout, stderr = await edgectl(
        "plan", *on_site, "--source", "a", *workload, "-o", "json", cwd=directory
    )
    assert code == 0, stderr
    return float(json.loads(stdout)["time_per_token_s"])


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('model = "config.json"', "", "lab.model"),
        ('model = "config.json"', 'model = "nowhere.json"', "nowhere.json"),
        ("a=0:3,b=3:6", "a=0:3,b=4:6", "layers"),
        ("a=0:3,b=3:6", "a=0:3,z=3:6", "lab.run.layers"),
        ('mode = "no-bubbles"', 'mode = "fast"', "lab.run.mode"),
        ("streams = 2", "streams = 0", "lab.run.streams"),
        ("streams = 2", "colour = 2", "lab.run.colour"),
        ("20e6", "-1", "bandwidth_bps"),
        ('source = "a"', 'source = "q"', "source"),
    ],
)
@pytest.mark.one_in(3)
async def test_a_wrong_lab_file_names_its_key(
    lab_file: Path, old: str, new: str, field: str
) -> None:
    lab_file.write_text(LAB.replace(old, new, 1))
    code, _, stderr = await edgectl("lab", "run", str(lab_file), cwd=lab_file.parent)
    assert code == 2 and field in stderr, stderr
