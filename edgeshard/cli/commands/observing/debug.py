"""edgectl debug: the state and recent actions of a site's processes in one file, and the replay of such a file."""

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

from edgeshard.cli.commands.options import argument, option, switch
from edgeshard.cli.connect import ask
from edgeshard.cli.render.output import human_bytes, show_text, writing
from edgeshard.debugging.dump import ProcessDump, site_document, site_parts
from edgeshard.domain.errors import AlreadyExistsError, FailedPreconditionError, InvalidArgumentError

app = typer.Typer(help="Dump what a site's processes know, and replay it.", no_args_is_help=True)

STDOUT = Path("-")


@app.command(short_help="Write what coordinator and nodes know and did lately to one file.")
def dump(
    context: typer.Context,
    output: Annotated[
        Path | None, option("FILE", "Where to; - is stdout. By default a name with date and time.", "--output", "-o")
    ] = None,
    force: Annotated[bool, switch("--force", "Replace the file if there is one.")] = False,
    timeout: Annotated[float, option("SECONDS", "Longest wait for the coordinator.", min=0)] = 60.0,
) -> None:
    """Write the state, the newest events, the versions and the settings of the coordinator and of every node as JSON.

    The file has no prompts, tokens, generated text or keys. It has names and addresses of nodes, names and configs of
    models, and paths of files. A node that does not answer is named in it.
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
        show_text(f"{path}: {human_bytes(path.stat().st_size)}, of the coordinator and {_nodes(dumps)}")
    for failed in (item for item in dumps if item.failure is not None):
        assert failed.failure is not None
        show_text(f"node {failed.node} is missing: {failed.failure.message}", err=True)


@app.command(short_help="Apply a dump's events again and compare what comes of them.")
def replay(file: Annotated[Path, argument("FILE", "Of `edgectl debug dump`; - is stdin.")]) -> None:
    """Apply the events of a dump to the state before them, for each process, and compare with the state that it had.

    Exit code 1 when one differs: the process ran another version than this one, or its state changed past its events.
    """
    coordinator, nodes = site_parts(_read(file))
    results = _replayed("edgeshard_coordinator.replay", {"coordinator": coordinator})
    agents = _replayed("edgeshard_agent.replay", nodes)
    for name, result in (*results.items(), *((f"node {name}", result) for name, result in agents.items())):
        what = "; ".join(result["differs"][:5])
        show_text(f"{name}: {result['events']} events, {f'differs: {what}' if what else 'the state is the same'}")
    if any(result["differs"] for result in (*results.values(), *agents.values())):
        raise FailedPreconditionError("the replay does not lead to the state of the dump", reason="REPLAY_DIFFERS")


def _nodes(dumps: tuple[ProcessDump, ...]) -> str:
    count = sum(1 for item in dumps if item.node and item.failure is None)
    return f"{count} {'node' if count == 1 else 'nodes'}"


def _check_output(path: Path, force: bool) -> None:
    """Before anybody waits for a dump that could not be kept."""
    if path == STDOUT:
        return
    if not path.parent.is_dir():
        raise InvalidArgumentError(f"cannot write --output {path}: there is no such directory", field="output")
    if path.exists() and not force:
        raise AlreadyExistsError(
            f"--output {path}: there is such a file; give --force to replace it", field="output", reason="FILE_EXISTS"
        )


def _write(path: Path, text: str, force: bool) -> None:
    """Write all of it or nothing, readable only by this user."""
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
        [sys.executable, "-P", "-m", module], input=json.dumps(parts), stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise FailedPreconditionError(f"{module} ended with exit code {done.returncode}", reason="REPLAY_FAILED")
    results: dict[str, Any] = json.loads(done.stdout)
    return results
