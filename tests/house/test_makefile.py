"""The ways in: make's targets, the set-up script's decisions, and the script continuous integration calls."""

from __future__ import annotations

import configparser
import copy
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TARGETS = (
    "help",
    "fuzz",
    "setup",
    "demo",
    "test",
    "retest",
    "check",
    "proto",
    "proto-baseline",
    "phases",
    "bench",
    "bench-plan",
    "soak",
    "chaos",
    "chaos-long",
    "chaos-quick",
    "sim",
    "format",
)


@pytest.fixture
def setup_environment() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_environment", ROOT / "tools" / "setup_environment.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_make_alone_lists_every_target() -> None:
    result = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    listed = [line.split()[1] for line in result.stdout.splitlines()]
    assert sorted(listed) == sorted(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_has_a_recipe(target: str) -> None:
    result = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_bench_runs_what_the_suite_leaves_out(project: dict[str, Any]) -> None:
    """Both are pytest files, so that pytest-benchmark measures; only the one target names them."""
    assert project["tool"]["pytest"]["ini_options"]["testpaths"] == ["tests"]
    result = subprocess.run(["make", "--dry-run", "bench"], cwd=ROOT, capture_output=True, text=True, timeout=30)
    for path in sorted((ROOT / "bench").glob("test_*.py")):
        assert f"bench/{path.name}" in result.stdout
    assert "bench.engine --quick" in result.stdout and "--llama-cpp" not in result.stdout


def test_setup_is_done_again_only_for_what_is_installed(setup_environment: ModuleType, project: dict[str, Any]) -> None:
    before = setup_environment.fingerprint(project)
    lint_only, dependency, group = (copy.deepcopy(project) for _ in range(3))
    lint_only["tool"]["ruff"]["line-length"] = 80
    dependency["project"]["dependencies"].append("attrs")
    group["dependency-groups"]["dev"].append("attrs")
    assert setup_environment.fingerprint(copy.deepcopy(project)) == before
    assert setup_environment.fingerprint(lint_only) == before
    assert setup_environment.fingerprint(dependency) != before
    assert setup_environment.fingerprint(group) != before


def test_setup_takes_torch_at_the_pinned_version(setup_environment: ModuleType, project: dict[str, Any]) -> None:
    assert setup_environment.torch_requirement(project).startswith("torch==")


def test_a_finished_setup_does_nothing_and_an_interrupted_one_is_not_taken_for_finished(tmp_path: Path) -> None:
    """With a fake pip that records its calls: the first run installs, the second not, a failed one leaves no stamp."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "setup_environment.py", tmp_path / "tools")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@" >> calls\n[ ! -e broken ]\n')
    python.chmod(0o755)

    def setup(**extra: str) -> int:
        command = [sys.executable, str(tmp_path / "tools" / "setup_environment.py")]
        environment = {key: value for key, value in os.environ.items() if key != "TORCH_INDEX_URL"} | extra
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60).returncode

    calls, stamp = tmp_path / "calls", tmp_path / ".venv" / ".setup-stamp"
    (tmp_path / "broken").touch()
    assert setup() == 1
    assert not stamp.exists()

    (tmp_path / "broken").unlink()
    calls.unlink()
    assert setup() == 0
    assert "--editable" in calls.read_text() and "torch" not in calls.read_text()
    calls.unlink()
    assert setup() == 0
    assert calls.read_text() == "hatch_build.py\n", "a finished set-up was done again, not only the kernels looked at"

    stamp.unlink()
    assert setup(TORCH_INDEX_URL="file:///somewhere") == 0
    torch_calls = [line for line in calls.read_text().splitlines() if "--index-url file:///somewhere" in line]
    assert len(torch_calls) == 1 and torch_calls[0].endswith("torch==2.13.0")


def test_continuous_integration_runs_set_up_check_and_test_in_order() -> None:
    path = ROOT / ".ci" / "run"
    assert os.access(path, os.X_OK)
    assert subprocess.run(["bash", "-n", str(path)], timeout=60).returncode == 0
    lines = path.read_text().splitlines()
    assert lines[0].endswith("bash")
    assert "set -euo pipefail" in lines
    steps = [line.partition("#")[0].strip() for line in lines if line.startswith("make ")]
    assert steps == ["make setup", "make check", "make demo", "make test || make retest"]


def test_every_hook_before_a_commit_is_a_part_of_make_check() -> None:
    """So that no hook asks for more than `make check`, and none goes to the network for a tool."""
    check = subprocess.run(["make", "--dry-run", "check"], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    hooks = [
        hook
        for repository in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
        for hook in repository["hooks"]
        if repository["repo"] == "local"
    ]
    assert len(hooks) >= 5
    for hook in hooks:
        assert (hook["language"], hook["pass_filenames"]) == ("system", False), hook["id"]
        assert hook["entry"] in check.splitlines(), f"{hook['id']}: {hook['entry']!r} is no line of `make check`"


def test_no_hook_comes_from_elsewhere() -> None:
    configuration = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {repository["repo"] for repository in configuration["repos"]} == {"local"}


def test_editors_are_told_what_the_formatter_holds(project: dict[str, Any]) -> None:
    parser = configparser.ConfigParser()
    parser.read_string("[DEFAULT]\n" + (ROOT / ".editorconfig").read_text())
    assert parser["*.{py,pyi,cpp,h}"]["max_line_length"] == str(project["tool"]["ruff"]["line-length"])
    assert parser["Makefile"]["indent_style"] == "tab"
