"""The lock covers pyproject.toml, every entry has hashes, nothing else stands there, and pip
refuses anything else."""

from __future__ import annotations

import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import lock as tool
from tools.lock import Locked, LockError, installable, problems, read_lock, write_lock

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "constraints.lock").read_text()
SETUP = runpy.run_path(str(ROOT / "tools" / "setup_environment.py"))


@pytest.fixture
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_lock_covers_every_requirement_within_its_range(project: dict[str, Any]) -> None:
    """By the list that set-up installs, not by the tool's own."""
    entries = read_lock(TEXT)
    wanted = [Requirement(text) for text in SETUP["requirements"](project, *SETUP["LEVELS"])]
    assert {"hatchling", "grpcio", "torch", "pip", "uv", "pytest"} <= {
        requirement.name for requirement in wanted
    }
    for requirement in wanted:
        assert requirement.specifier.contains(
            entries[canonicalize_name(requirement.name)].version
        ), requirement
    assert problems(project, TEXT) == []
    project["build-system"]["requires"] = ["attrs"]
    assert "attrs" in SETUP["requirements"](project, "runtime"), (
        "what builds the project is fetched beside the lock"
    )


def test_every_entry_has_a_hash_and_the_file_nothing_but_entries() -> None:
    entries = read_lock(TEXT)
    assert len(entries) > 100
    assert all(
        entry.hashes and len(set(entry.hashes)) == len(entry.hashes) for entry in entries.values()
    )
    assert sum(line.startswith("    --hash=sha256:") for line in TEXT.splitlines()) == sum(
        len(entry.hashes) for entry in entries.values()
    )
    newest = TEXT.splitlines()[1].rpartition(" ")[2].removesuffix(".")
    assert write_lock(entries.values(), newest) == TEXT


def test_torch_may_be_the_build_with_cuda_or_the_one_without() -> None:
    """A wheel of each for each Python and machine, at the least."""
    entries = read_lock(TEXT)
    assert len(entries["torch"].hashes) >= 2 * len(tool.TARGETS)
    assert "torch" in entries["cuda-toolkit"].via


@pytest.mark.parametrize(
    "line",
    [
        "--index-url file:///somewhere",
        "attrs",
        "attrs==26.1.0",
        "attrs>=26 \\",
        "attrs @ file:///somewhere/attrs.whl",
        "    --hash=sha256:" + "0" * 64,
        "    --hash=md5:" + "0" * 32,
        "pip==1.0 \\",
        "# a remark",
        "",
    ],
)
def test_a_line_that_no_lock_has_is_refused(line: str, project: dict[str, Any]) -> None:
    with pytest.raises(LockError, match=r"line \d+.*does not belong there"):
        read_lock(f"{TEXT}{line}\n    # via pyproject.toml\n")
    assert problems(project, f"{TEXT}{line}\n    # via pyproject.toml\n")


def test_an_entry_without_a_hash_or_without_its_end_is_refused() -> None:
    with pytest.raises(LockError, match="does not belong there"):
        read_lock("attrs==26.1.0 \\\n    # via pyproject.toml\n")
    with pytest.raises(LockError, match="ends within"):
        read_lock(f"attrs==26.1.0 \\\n    --hash=sha256:{'0' * 64} \\\n")


def test_a_lock_behind_pyproject_is_a_problem_with_a_remedy(project: dict[str, Any]) -> None:
    project["project"]["dependencies"] += ["attrs>=25"]
    project["dependency-groups"]["dev"] += ["pytest<2"]
    found = problems(project, TEXT)
    assert len(found) == 2 and all(text.endswith("run `make lock`") for text in found)
    assert "lacks attrs" in found[0] and "pytest<2" in found[1]


def test_a_package_that_nobody_asks_for_is_a_problem(project: dict[str, Any]) -> None:
    stray = Locked("attrs", "26.1.0", "", (f"sha256:{'0' * 64}",), ("something-else",))
    found = problems(
        project, write_lock([*read_lock(TEXT).values(), stray], "2026-11-23T00:00:00Z")
    )
    assert found == ["constraints.lock: nobody in it asks for attrs; run `make lock`"]


def test_only_what_some_machine_may_install_is_locked() -> None:
    assert not installable("sys_platform == 'win32'")
    assert not installable("python_full_version < '3.11'")
    assert installable(
        "sys_platform == 'linux' and platform_machine == 'aarch64' and python_full_version >= "
        "'3.14'"
    )
    assert installable("")
    assert all(installable(entry.marker) for entry in read_lock(TEXT).values())


def test_hashes_of_other_builds_of_torch_stay_while_its_version_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an index that lists only CUDA builds, as the default one does."""

    def entry(version: str, *digits: str) -> Locked:
        return Locked(
            "torch",
            version,
            "",
            tuple(f"sha256:{digit * 64}" for digit in digits),
            ("pyproject.toml",),
        )

    path = tmp_path / "constraints.lock"
    path.write_text(write_lock([entry("2.0", "a", "c")], "2026-11-01T00:00:00Z"))
    monkeypatch.setattr(tool, "LOCK", path)
    monkeypatch.delenv("TORCH_INDEX_URL", raising=False)
    monkeypatch.setattr(tool, "resolve", lambda newest: {"torch": entry("2.0", "a", "b")})
    made = tool.make_lock(upgrade=False)
    assert read_lock(made)["torch"] == entry("2.0", "a", "b", "c")
    assert "newer than 2026-11-01T00:00:00Z." in made, "another date gives other versions"

    monkeypatch.setattr(tool, "resolve", lambda newest: {"torch": entry("2.1", "d")})
    assert read_lock(tool.make_lock(upgrade=False))["torch"] == entry("2.1", "d")
    monkeypatch.setenv("TORCH_INDEX_URL", "file:///somewhere")
    monkeypatch.setattr(tool, "torch_builds", lambda version, index: {f"sha256:{'e' * 64}"})
    made = tool.make_lock(upgrade=True)
    assert read_lock(made)["torch"] == entry("2.1", "d", "e")
    assert "2026-11-01" not in made


def held_install(folder: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Install from wheels in this folder, held to the lock as set-up holds pip to it."""
    options = (
        "--no-index",
        "--find-links",
        str(folder),
        "--no-deps",
        "--target",
        str(folder / "target"),
    )
    command = (
        sys.executable,
        "-m",
        "pip",
        "--isolated",
        "install",
        *SETUP["HELD"],
        *options,
        *names,
    )
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def made_wheel(folder: Path, name: str, version: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        info = f"{name}-{version}.dist-info"
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_pip_refuses_a_file_that_is_not_the_locked_one(tmp_path: Path) -> None:
    made_wheel(tmp_path, "structlog", read_lock(TEXT)["structlog"].version)
    result = held_install(tmp_path, "structlog>=25,<27")
    assert result.returncode != 0 and "DO NOT MATCH THE HASHES" in result.stderr
    assert not (tmp_path / "target").exists()


def test_pip_refuses_a_package_that_is_not_locked(tmp_path: Path) -> None:
    made_wheel(tmp_path, "unlocked", "1.0")
    result = held_install(tmp_path, "unlocked")
    assert result.returncode != 0 and "must have their versions pinned" in result.stderr
    assert not (tmp_path / "target").exists()
