"""edgectl debug: the state and recent actions of a site's processes in one file, and the replay of
such a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from edgeshard.cli.commands.command_options import argument, option, switch
from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import human_bytes, show_text, writing
from edgeshard.debugging.dump import ProcessDump, site_document, site_parts
from edgeshard.domain.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
)

app = typer.Typer(help="Dump the state of a site's processes and replay it.", no_args_is_help=True)

STDOUT = Path("-")


@app.command(short_help="Write the state and newest events of all processes to a file.")
def dump(
    context: typer.Context,
    output: Annotated[
        Path | None,
        option(
            "FILE",
            "Write to this file (default: a name with date and time); - is stdout.",
            "--output",
            "-o",
        ),
    ] = None,
    force: Annotated[bool, switch("--force", "Replace the file if it exists.")] = False,
    timeout: Annotated[
        float, option("SECONDS", "Wait at most SECONDS for the coordinator.", min=0)
    ] = 60.0,
) -> None:
    """Write the state, newest events, versions and settings of the coordinator and of every node to
    a JSON file. The file contains no prompts, tokens, generated text or keys. It contains names and
    addresses of nodes, names and configs of models, and file paths. It also names each node that
    did not answer.
    """
    now = datetime.now(UTC)
    path = output or Path(f"edgeshard-{now:%Y%m%d-%H%M%S}.json")
    _check_output(path, force)
    dumps = ask(context, lambda client: client.dump(timeout))
    text = json.dumps(site_document(dumps, now.isoformat(timespec="seconds")), indent=1)
    if path == STDOUT:
        show_text(text)
    else:
        _write(path, text, force)
        show_text(
            f"{path}: {human_bytes(path.stat().st_size)}, of the coordinator and {_nodes(dumps)}"
        )
    for failed in (item for item in dumps if item.failure is not None):
        assert failed.failure is not None
        show_text(f"node {failed.node} is missing: {failed.failure.message}", err=True)


@app.command(short_help="Replay the events of a dump and compare the resulting state.")
def replay(
    file: Annotated[Path, argument("FILE", "Read this file of `edgectl debug dump`; - is stdin.")],
) -> None:
    """Replay the events of a dump on each process's earlier state, and compare the result with the
    state in the dump. If they differ, the process ran another version, or its state changed without
    an event.
    """
    coordinator, nodes = site_parts(_read(file))
    results = _replayed("edgeshard_coordinator.replay", {"coordinator": coordinator})
    agents = _replayed("edgeshard_agent.replay", nodes)
    for name, result in (
        *results.items(),
        *((f"node {name}", result) for name, result in agents.items()),
    ):
        what = "; ".join(result["differs"][:5])
        show_text(
            f"{name}: {result['events']} events, "
            f"{f'differs: {what}' if what else 'the state is the same'}"
        )
    if any(result["differs"] for result in (*results.values(), *agents.values())):
        raise FailedPreconditionError(
            "the replay does not lead to the state of the dump", reason="REPLAY_DIFFERS"
        )


def _nodes(dumps: tuple[ProcessDump, ...]) -> str:
    count = sum(1 for item in dumps if item.node and item.failure is None)
    return f"{count} {'node' if count == 1 else 'nodes'}"


def _check_output(path: Path, force: bool) -> None:
    """Check before the user waits for a dump that could not be saved."""
    if path == STDOUT:
        return
    if not path.parent.is_dir():
        raise InvalidArgumentError(
            f"cannot write --output {path}: there is no such directory", field="output"
        )
    if path.exists() and not force:
        raise AlreadyExistsError(
            f"--output {path}: there is such a file; give --force to replace it",
            field="output",
            reason="FILE_EXISTS",
        )


def _write(path: Path, text: str, force: bool) -> None:
    """Write the file whole or not at all, readable only by its owner."""
    with writing("--output", path):
        # Made with mode 0600.
        descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            if force:
                Path(scratch).replace(path)
            else:
                os.link(scratch, path)
        finally:
            Path(scratch).unlink(missing_ok=True)


def _read(path: Path) -> Any:
    try:
        return json.loads(sys.stdin.read() if path == STDOUT else path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgumentError(f"cannot read {path}: {error.strerror}", field="file") from None
    except ValueError:
        raise InvalidArgumentError(f"{path} is not JSON", field="file", reason="NO_DUMP") from None


def _replayed(module: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    """The state machines are the daemons': each replays in a process of its own package."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", module],
        input=json.dumps(parts),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise FailedPreconditionError(
            f"{module} ended with exit code {done.returncode}", reason="REPLAY_FAILED"
        )
    results: dict[str, Any] = json.loads(done.stdout)
    return results
