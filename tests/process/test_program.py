"""The standard streams, the search path and the Ctrl-C of an installed program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgeshard.process.programs import installed_first

ROOT = Path(__file__).resolve().parents[2]
CLOSED = "error: cannot write standard output: it is closed; send it to a file, or to /dev/null\n"
FULL = "error: cannot write standard output: No space left on device\n"

EDGECTL = "from edgeshard.cli.entry import main; main()"
AGENT = "from edgeshard_agent.entry import main; main()"
COORDINATOR = "from edgeshard_coordinator.entry import main; main()"
PROGRAMS = pytest.mark.parametrize(
    "program", [EDGECTL, AGENT, COORDINATOR], ids=["edgectl", "agent", "coordinator"]
)


def run(
    program: str, *arguments: str, redirect: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python text with these redirections of the shell."""
    command = [
        "sh",
        "-c",
        f'exec "$0" "$@" {redirect}',
        sys.executable,
        "-P",
        "-c",
        program,
        *arguments,
    ]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def in_program(body: str) -> str:
    """A program whose body is this line."""
    return f"from edgeshard.process.programs import program\nwith program():\n    {body}\n"


@PROGRAMS
@pytest.mark.parametrize(
    ("redirect", "message"), [(">&-", CLOSED), (">/dev/full", FULL)], ids=["closed", "full"]
)
def test_lost_output_is_one_line_and_an_exit_code(
    program: str, redirect: str, message: str
) -> None:
    done = run(program, "--help", redirect=redirect)
    assert (done.returncode, done.stderr) == (1, message)


@PROGRAMS
def test_a_reader_that_has_gone_ends_a_program_quietly(program: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        command = [sys.executable, "-P", "-c", program, "--help"]
        done = subprocess.run(
            command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full"])
def test_lost_messages_change_no_exit_code_and_no_output(redirect: str) -> None:
    body = (
        "import sys; sys.stderr.write('x' * 9000); sys.stderr.flush(); print('done'); sys.exit(3)"
    )
    done = run(in_program(body), redirect=redirect)
    assert (done.returncode, done.stdout) == (3, "done\n")


def test_output_is_complete_though_a_file_is_opened_after_the_streams_were_closed(
    tmp_path: Path,
) -> None:
    """Otherwise the file gets the descriptor of a closed stream, and receives the printed
    output."""
    path = tmp_path / "kept"
    body = (
        f"import os; file = open({str(path)!r}, 'w'); file.write('text'); os.write(2, "
        "b'message'); file.close()"
    )
    done = run(in_program(body), redirect="<&- >&- 2>&-")
    assert done.returncode == 0
    assert path.read_text() == "text"


def test_a_failure_of_another_file_stays_what_it_is() -> None:
    done = run(in_program("open('/dev/full', 'w').write('x' * 9000)"))
    assert done.stderr.endswith("OSError: [Errno 28] No space left on device\n")
    assert done.returncode == 1


def test_ctrl_c_outside_a_command_is_no_traceback() -> None:
    done = run(in_program("raise KeyboardInterrupt"))
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "")


def test_folders_of_pythonpath_come_last() -> None:
    environment = {"PYTHONPATH": os.pathsep.join(["/old/packages", "/more/", ""])}
    path = ["", "/old/packages", "/more", "/lib/python3", "/venv/site-packages"]
    ordered = ["", "/lib/python3", "/venv/site-packages", "/old/packages", "/more"]
    assert installed_first(path, environment) == ordered
    assert installed_first(path, {}) == path


def test_a_checkout_on_pythonpath_keeps_its_place() -> None:
    folders = [str(ROOT), str(ROOT / "agent"), str(ROOT / "coordinator")]
    path = [*folders, "/venv/site-packages"]
    assert installed_first(path, {"PYTHONPATH": os.pathsep.join(folders)}) == path


@PROGRAMS
def test_old_packages_on_pythonpath_do_not_shadow_installed_ones(
    program: str, tmp_path: Path
) -> None:
    for name in ("typer", "click", "structlog", "grpc", "pydantic", "cryptography"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('an old package')\n")
    done = run(program, "--help", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.lower().startswith("usage: ")
