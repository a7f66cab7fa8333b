"""A second chance for a few failed tests, on a small suite of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "retest.py"
OPTION = """
def pytest_addoption(parser):
    parser.addoption("--long", action="store_true")
"""
SUITE = """
from pathlib import Path
import pytest

@pytest.mark.{mark}
@pytest.mark.parametrize("number", range({failing}))
def test_fails(number):
    assert {passes_later} and Path("later").exists()

def test_passes():
    Path("ran").touch()
"""


def run_suite(
    directory: Path, *, failing: int, passes_later: bool, mark: str = "timing", order: bool = False
) -> subprocess.CompletedProcess[str]:
    """A first run that fails, then the tool's; `later` and `ran` are its later failures and its
    commands."""
    (directory / "pytest.ini").touch()  # this directory is the root, whatever lies above it
    (directory / "conftest.py").write_text(OPTION)
    suite = SUITE.format(failing=failing, passes_later=passes_later, mark=mark)
    suite += "\npytestmark = pytest.mark.in_order\n" if order else ""
    (directory / "test_suite.py").write_text(suite)
    first = subprocess.run(
        [sys.executable, "-m", "pytest"], cwd=directory, capture_output=True, timeout=120
    )
    assert first.returncode == 1
    (directory / "later").touch()
    (directory / "ran").unlink()
    return subprocess.run(
        [sys.executable, str(TOOL)], cwd=directory, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("failing", "passes_later", "code"), [(1, True, 0), (6, True, 0), (1, False, 1), (7, True, 1)]
)
@pytest.mark.one_in(4)
def test_a_few_failures_are_run_again(
    tmp_path: Path, failing: int, passes_later: bool, code: int
) -> None:
    result = run_suite(tmp_path, failing=failing, passes_later=passes_later)
    assert result.returncode == code
    named = {f"test_suite.py::test_fails[{number}]" in result.stdout for number in range(failing)}
    assert named == {failing <= 6}, "who runs it hears which tests are flaky"
    assert not (tmp_path / "ran").exists(), "what had passed was run again"


def test_tests_that_build_on_each_other_run_together(tmp_path: Path) -> None:
    result = run_suite(tmp_path, failing=1, passes_later=True, order=True)
    assert result.returncode == 0 and "test_fails[0]" in result.stdout
    assert (tmp_path / "ran").exists(), "the file was not run as a whole"


def test_what_uses_neither_processes_nor_clocks_is_not_run_again(tmp_path: Path) -> None:
    result = run_suite(tmp_path, failing=1, passes_later=True, mark="other")
    assert (
        result.returncode == 1 and "test_fails[0]" in result.stderr and "flaky" not in result.stdout
    )


def test_a_run_that_left_no_record_stays_failed(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(TOOL)], cwd=tmp_path, capture_output=True, timeout=120
    )
    assert result.returncode == 1 and b"0 failures" in result.stderr
