"""`python -m edgeshard_agent.measuring`: measure this node for a model, which needs only its
config.json."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError, extra_line
from edgeshard.domain.nodes.profile import Effort
from edgeshard.process.extras import missing
from edgeshard.process.private import keep_private
from edgeshard.rpc.environment import settle_grpc
from edgeshard.storage.inputs import read_json
from edgeshard_agent.measuring.measuring_worker import MeasuringJob, measured

if TYPE_CHECKING:
    from edgeshard.domain.nodes.profile import ComputeProfile

_FIRST = "the fewest points, once, without disk and power: what a deployment has measured first"


def main() -> None:
    if missing("agent"):
        sys.stderr.write(f"edgeshard-agent needs the agent extra: {extra_line('agent')}\n")
        sys.exit(1)
    settle_grpc()
    keep_private()
    try:
        _run(_parser().parse_args())
    except EdgeShardError as error:
        sys.stderr.write(f"error: {error.message}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted; no result was saved\n")
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m edgeshard_agent.measuring", description=__doc__
    )
    parser.add_argument(
        "--config", type=Path, required=True, help="config.json of a model, or the folder it is in"
    )
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32")
    parser.add_argument("--quantise", help="int8 or int4: the weights as small integers")
    parser.add_argument(
        "--head-quantisation", help="of the LM head then: int8 (default), int4 or none"
    )
    parser.add_argument("--device", default="cpu", help="device to compute on: cpu, cuda or cuda:N")
    parser.add_argument(
        "--threads", type=_count, help="cores that computing may use; all of them when absent"
    )
    parser.add_argument(
        "--state-dir", type=Path, help="the agent's, to keep the profile in and to find it again"
    )
    less = parser.add_mutually_exclusive_group()
    for effort, what in (
        (Effort.QUICK, "fewer points and repeats: seconds, and less exact"),
        (Effort.FIRST, _FIRST),
    ):
        less.add_argument(
            f"--{effort}", dest="effort", action="store_const", const=effort, help=what
        )
    parser.set_defaults(effort=Effort.FULL)
    parser.add_argument(
        "--again", action="store_true", help="measure even when a profile of this node is kept"
    )
    parser.add_argument("--json", action="store_true", help="print the profile itself on stdout")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 1024:
        raise ValueError(text)
    return value


def _run(options: argparse.Namespace) -> None:
    from edgeshard.architectures import parse_config
    from edgeshard.domain.models.dtypes import DType, parse_quantisation
    from edgeshard.domain.nodes.profile import config_hash
    from edgeshard.process.control_groups import cpu_quota
    from edgeshard.process.machine_facts import compute_threads
    from edgeshard.profiles.report import profile_lines, profile_text
    from edgeshard_agent.measuring.compute import fingerprint
    from edgeshard_agent.measuring.disk import EXTENTS, measure_disk
    from edgeshard_agent.measuring.facts import read_facts
    from edgeshard_agent.measuring.profile_store import ProfileStore

    config, dtype = _read_config(options.config), DType.parse(options.dtype)
    quantisation = parse_quantisation(options.quantise, options.head_quantisation)
    parse_config(config)
    facts = read_facts(options.device, None)
    threads = options.threads or compute_threads(facts.cores, cpu_quota())
    store = None if options.state_dir is None else ProfileStore(options.state_dir)
    profile = None
    if store is not None and not options.again:
        profile = store.find(
            fingerprint(facts, threads), config_hash(config), dtype, quantisation, options.effort
        )
    if profile is None:
        profile = _measured(
            MeasuringJob(config, dtype, options.device, threads, options.effort, None, quantisation)
        )
        if store is not None:
            profile = replace(
                profile, disk=measure_disk(options.state_dir, EXTENTS[options.effort])
            )
            store.keep(profile)
    sys.stdout.write(
        (profile_text(profile) if options.json else "\n".join(profile_lines(profile))) + "\n"
    )


def _measured(job: MeasuringJob) -> ComputeProfile:
    """Measure, and show how far it is. Raises what `Profiler.run` raises."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<40}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        return measured(job, show)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    values = read_json(file, f"--config {file}", "config")
    if not isinstance(values, dict):
        raise InvalidArgumentError(f"--config {file} holds no object", field="config")
    return values


if __name__ == "__main__":
    main()
