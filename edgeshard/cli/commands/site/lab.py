"""edgectl lab: nodes you have not bought yet, as real processes that pretend."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeshard.cli.commands.command_options import argument, option
from edgeshard.cli.connect import run as run_async
from edgeshard.cli.render.output import Column, Output, OutputOption, show_list, show_text
from edgeshard.domain.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from edgeshard.process.extras import check_extras
from edgeshard.storage.inputs import read_json, read_toml

if TYPE_CHECKING:
    from edgeshard.local.lab_site import Comparison
    from edgeshard.planning.simulation.lab import Lab, LabRun

app = typer.Typer(help="Emulate nodes and links on this machine.", no_args_is_help=True)

LabFile = Annotated[Path, argument("LAB.toml", "Read this cluster file with a [lab] table.")]
Directory = Annotated[
    Path,
    option("DIR", "Keep the state and logs of a running lab in this directory.", "--directory"),
]
DEFAULT_DIRECTORY = Path(".edgeshard-lab")


@app.command("run")
def run_lab(
    lab_file: LabFile, directory: Directory = DEFAULT_DIRECTORY, output: OutputOption = Output.TABLE
) -> None:
    """Deploy, generate, and compare measured with predicted speed. Uses the lab that
    `edgectl lab up` started in DIR; if there is none, starts one for this run. The file's
    [[lab.run]] tables define the runs; without any, the planner's placement runs with one and with
    several streams.
    """
    lab = read_lab(lab_file)
    rows = run_async(_compare_all(lab, lab_file, _running_at(directory)))
    show_list(rows, output, _COLUMNS, lambda row: row.placement, [row.as_row() for row in rows])


@app.command()
def up(lab_file: LabFile, directory: Directory = DEFAULT_DIRECTORY) -> None:
    """Start the lab's processes and leave them running."""
    lab = read_lab(lab_file)
    if _state_file(directory).exists():
        raise AlreadyExistsError(
            f"directory: a lab is up in {directory}; end it with edgectl lab down, or give another "
            "--directory",
            field="directory",
        )
    check_extras("edgectl lab", "agent", "coordinator")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    address = run_async(_up(lab, lab_file, directory.absolute()))
    show_text(address)
    sys.stdout.flush()
    # At once, because asyncio would end the children together with their objects.
    os._exit(0)


@app.command()
def down(lab_file: LabFile, directory: Directory = DEFAULT_DIRECTORY) -> None:
    """Stop the processes that `edgectl lab up` started in DIR."""
    read_lab(lab_file)
    path = _state_file(directory)
    try:
        pids = json.loads(path.read_text(encoding="utf-8"))["pids"]
    except (OSError, ValueError, KeyError):
        raise NotFoundError(f"directory: no lab is up in {directory}", field="directory") from None
    for pid in pids:
        if _is_ours(pid):
            os.kill(pid, signal.SIGTERM)
    path.unlink()


def read_lab(path: Path) -> Lab:
    """The lab of a TOML file. Raises InvalidArgumentError naming the file or the key at fault."""
    from edgeshard.planning.simulation.lab import parse_lab

    def read_config(name: str) -> dict[str, Any]:
        config: dict[str, Any] = read_json(
            path.parent / name, f"{path}: lab.model {name}", "lab.model"
        )
        return config

    return parse_lab(read_toml(path, str(path), "lab"), read_config)


def runs_of(lab: Lab) -> tuple[LabRun, ...]:
    """The file's runs, or only the planner's placement with one and with several streams.

    Several are `workload.concurrency`, or one for every stage. Raises InvalidArgumentError when
    nothing fits.
    """
    from edgeshard.planning.search.plan import plan
    from edgeshard.planning.simulation.lab import planned_runs

    if lab.runs:
        return lab.runs
    planned = plan(lab.problem(), alternatives=0)
    if not planned.stages:
        raise InvalidArgumentError(
            "no placement fits the lab's nodes; edgectl plan shows what is short", field="lab"
        )
    stages = [(stage.node, stage.layers) for stage in planned.stages]
    return planned_runs(stages, lab.cluster.workload.concurrency or len(stages))


def _running_at(directory: Path) -> str | None:
    """The coordinator's address of the lab that is up in `directory`, None without one."""
    try:
        return str(json.loads(_state_file(directory).read_text(encoding="utf-8"))["address"])
    except FileNotFoundError:
        return None


async def _compare_all(lab: Lab, lab_file: Path, running_at: str | None) -> list[Comparison]:
    from edgeshard.client import Client
    from edgeshard.local.lab_site import compare, lab_cluster, make_stand_in

    runs = runs_of(lab)
    if running_at is not None:
        async with Client(running_at, plaintext=True) as client:
            return [await compare(client, lab, run) for run in runs]
    check_extras("edgectl lab", "agent", "coordinator")
    with tempfile.TemporaryDirectory(prefix="edgeshard-lab-") as scratch:
        make_stand_in(lab, Path(scratch) / "stand-in")
        show_text(f"starting {len(lab.cluster.nodes)} emulated nodes", err=True)
        async with lab_cluster(lab, lab_file, Path(scratch)) as site, site.client() as client:
            await client.add_model(Path(scratch) / "stand-in", "stand-in")
            rows = []
            for run in runs:
                show_text(f"measuring {run.placement}, {run.mode}, {run.streams} at once", err=True)
                rows.append(await compare(client, lab, run))
            return rows


async def _up(lab: Lab, lab_file: Path, directory: Path) -> str:
    from edgeshard.local.lab_site import lab_cluster, make_stand_in

    make_stand_in(lab, directory / "stand-in")
    site = lab_cluster(lab, lab_file, directory, stays=True)
    try:
        await site.start()
        async with site.client() as client:
            await client.add_model(directory / "stand-in", "stand-in")
    except BaseException:
        await site.stop()
        raise
    pids = [daemon.pid for daemon in (*site.agents.values(), site.coordinator)]
    state = {"address": site.address, "pids": pids}
    _state_file(directory).write_text(json.dumps(state), encoding="utf-8")
    return site.address


def _state_file(directory: Path) -> Path:
    return directory / "lab.json"


def _is_ours(pid: int) -> bool:
    """Whether the process is still one of a lab's; its number may belong to another process by
    now."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"edgeshard_agent" in command or b"edgeshard_coordinator" in command


def _percent(value: float) -> str:
    return f"{100 * value:+.1f} %"


_COLUMNS: list[Column[Comparison]] = [
    Column("PLACEMENT", lambda row: row.placement),
    Column("MODE", lambda row: row.mode),
    Column("STREAMS", lambda row: str(row.streams)),
    Column("MS/TOKEN", lambda row: f"{1000 * row.measured.time_per_token_s:.1f}"),
    Column("PREDICTED", lambda row: _percent(row.deviation["time_per_token_s"])),
    Column("TOKENS/S", lambda row: f"{row.measured.throughput_tps:.2f}"),
    Column("PREDICTED", lambda row: _percent(row.deviation["throughput_tps"])),
    Column("TTFT", lambda row: f"{row.measured.ttft_s:.3f} s"),
    Column("PREDICTED", lambda row: _percent(row.deviation["ttft_s"])),
]
