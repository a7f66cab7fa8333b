"""Every process of the product that runs a module does not take what lies in the user's directory
for one."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.house.documents import ROOT

ROOMS = ("edgeshard", "agent", "coordinator")
STARTS = {
    "agent/edgeshard_agent/guides/guides.py",
    "agent/edgeshard_agent/measuring/measuring_process.py",
    "coordinator/edgeshard_coordinator/additions/adder.py",
    "edgeshard/chat/lane.py",
    "edgeshard/cpsat/solver_process.py",
    "edgeshard/local/child_daemons.py",
    "edgeshard/cli/commands/observing/debug.py",
}
"""All files that start one."""


def module_starts(source: str) -> Iterator[tuple[int, bool]]:
    """The line of each "-m" among the words of a command, and whether "-P" stands before it."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call | ast.List | ast.Tuple):
            continue
        words = node.args if isinstance(node, ast.Call) else node.elts
        texts = [word.value if isinstance(word, ast.Constant) else None for word in words]
        for place, text in enumerate(texts):
            if text == "-m":
                yield node.lineno, "-P" in texts[:place]


def test_the_look_finds_what_it_is_for() -> None:
    good, bad = '[sys.executable, "-P", "-m", module]', '(sys.executable, "-m", "x")'
    assert list(module_starts(f"run({good})\nPopen({bad})\nexec(python, '-m', 'y')")) == [
        (3, False),
        (1, True),
        (2, False),
    ]


def test_every_process_that_runs_a_module_leaves_the_users_directory_out() -> None:
    found: dict[str, list[tuple[int, bool]]] = {}
    for path in (path for room in ROOMS for path in Path(ROOT / room).rglob("*.py")):
        if starts := list(module_starts(path.read_text())):
            found[str(path.relative_to(ROOT))] = starts
    assert set(found) == STARTS
    assert all(guarded for starts in found.values() for _, guarded in starts), found


def test_the_install_does_not_lose_to_a_folder_of_its_name(tmp_path: Path) -> None:
    """In the folder that holds the clone, with a program of the user's next to it."""
    (tmp_path / "edgeshard").symlink_to(ROOT)
    program = tmp_path / "program.py"
    program.write_text(
        "from edgeshard import Client\nimport edgeshard_agent.settings, "
        "edgeshard_coordinator.settings\n"
    )
    for command in (
        [str(program)],
        ["-c", program.read_text()],
        ["-m", "edgeshard.cli.main", "version"],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
