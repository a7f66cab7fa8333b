"""Assignments of several values and inner comprehensions on several lines are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.lint_shape import ROOT, findings

INNER = """
rows = [
    [
        cell.strip()
        for cell in line
    ]
    for line in table
]
"""


@pytest.mark.parametrize(
    ("code", "line"), [("a = 1\nb, c, d = 1, 2, 3", 2), ("a, b = (\n 1,\n 2,\n)", 1), (INNER, 3)]
)
def test_code_that_a_reader_takes_in_pieces_is_found(code: str, line: int) -> None:
    ((at, _),) = findings(code)
    assert at == line


@pytest.mark.parametrize(
    "code",
    [
        "a, b = 1, 2",
        "a, b, c = f()",
        "rows = [[cell.strip() for cell in line] for line in table]",
        "rows = [\n    [cell for cell in line]\n    for line in table\n]",
        "rows = [\n    cell\n    for cell in line\n]",
    ],
)
def test_code_that_is_read_at_once_is_not_found(code: str) -> None:
    assert not list(findings(code))


def test_a_line_of_more_than_100_characters_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--config",
        str(ROOT / "pyproject.toml"),
        str(path),
    ]
    for length, refused in ((100, False), (101, True)):
        path.write_text("a = " + "1" * (length - 4) + "\n")
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ("E501" in run.stdout) == refused, run.stdout
