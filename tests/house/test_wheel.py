"""The bare wheel, really installed into an empty environment: light, complete, and clear about the
extras."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from edgeshard.domain.errors import extra_line
from tools.lock import LOCK, read_lock, write_lock

ROOT = Path(__file__).resolve().parents[2]
# An installation fetches the bare dependencies through the machine's own pip configuration.
pytestmark = [pytest.mark.timeout(1500), pytest.mark.network, pytest.mark.long]

HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "ortools", "fastapi")
DEMO_MODEL_LIMIT_BYTES = 20_000_000


def run(
    *command: str | Path, cwd: Path, timeout_s: float = 250
) -> subprocess.CompletedProcess[str]:
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTHON", "EDGESHARD__"))
    }
    words = [str(word) for word in command]
    return subprocess.run(
        words,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def checked(*command: str | Path, cwd: Path, timeout_s: float = 250) -> str:
    result = run(*command, cwd=cwd, timeout_s=timeout_s)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as `pip install .` would build it."""
    out = tmp_path_factory.mktemp("dist")
    # All instruction sets are compiled: two minutes of two cores, which other tests share.
    checked(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "wheel",
        "-d",
        out,
        cwd=ROOT,
        timeout_s=1200,
    )
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The scripts of an environment that has only the wheel and its requirements."""
    home = tmp_path_factory.mktemp("clean")
    checked(sys.executable, "-m", "venv", home / "venv", cwd=home)
    scripts = home / "venv" / "bin"
    install: list[str | Path] = [
        scripts / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        wheel,
    ]
    checked(*install, cwd=home, timeout_s=540)
    yield scripts


def test_the_wheel_holds_what_it_must_and_no_more(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    tops = {name.split("/")[0] for name in sizes}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "edgeshard",
        "edgeshard_agent",
        "edgeshard_coordinator",
    }
    protocol = [path.stem for path in (ROOT / "proto/edgeshard/proto/v1").glob("*.proto")]
    assert len(protocol) >= 7
    for name in protocol:
        assert f"edgeshard/proto/v1/{name}_pb2.py" in sizes
        assert f"edgeshard/proto/v1/{name}_pb2_grpc.py" in sizes
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert sizes[f"edgeshard/demo_model/{name}"] > 0
    assert sizes["edgeshard/demo_model/model.safetensors"] <= DEMO_MODEL_LIMIT_BYTES
    assert any(name.endswith("licenses/LICENSE") for name in sizes)


def test_the_wheel_installs_held_to_the_lock(wheel: Path, tmp_path: Path) -> None:
    """As docs/install.md says it: every file is a locked one, and the wheel's own hash stands in
    the command."""
    own = f"edgeshard @ {wheel.as_uri()}#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}"
    look = ("--dry-run", "--quiet", "--ignore-installed", "--report", "report.json")
    pip = (sys.executable, "-m", "pip", "install", *look, "--only-binary", ":all:")
    checked(*pip, "--constraint", LOCK, own, cwd=tmp_path)
    entries = read_lock(LOCK.read_text())
    files = {
        item["metadata"]["name"]: item
        for item in json.loads((tmp_path / "report.json").read_text())["install"]
    }
    assert files.pop("edgeshard") and len(files) > 10
    for name, item in files.items():
        entry = entries[canonicalize_name(name)]
        assert item["metadata"]["version"] == entry.version
        assert f"sha256:{item['download_info']['archive_info']['hashes']['sha256']}" in entry.hashes

    other = replace(entries["structlog"], hashes=(f"sha256:{'0' * 64}",))
    tampered = tmp_path / "tampered.lock"
    tampered.write_text(
        write_lock((entries | {"structlog": other}).values(), "2026-11-23T00:00:00Z")
    )
    refused = run(*pip, "--constraint", tampered, own, cwd=tmp_path)
    assert refused.returncode != 0 and "DO NOT MATCH THE HASHES" in refused.stderr


def test_imports_without_torch(clean: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.util, sys, edgeshard, edgeshard.client, edgeshard.cli.main\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules or "
        "importlib.util.find_spec(name)])\n"
        "print(edgeshard.__file__)"
    )
    heavy, where = checked(clean / "python", "-c", code, cwd=tmp_path).splitlines()
    assert heavy == "[]"
    assert Path(where).is_relative_to(clean.parent), "the checkout was imported, not the wheel"


def test_edgectl_help(clean: Path, tmp_path: Path) -> None:
    text = checked(clean / "edgectl", "--help", cwd=tmp_path)
    for word in ("Usage", "demo", "deploy", "generate", "get"):
        assert word in text


def test_edgectl_plans_offline(clean: Path, tmp_path: Path) -> None:
    """Fifteen nodes, from data sheets: no daemon, no weights, and no extra, solvers' included."""
    shutil.copy(ROOT / "deploy" / "examples" / "paper-testbed.toml", tmp_path)
    command: list[str | Path] = [
        clean / "edgectl",
        "plan",
        "--cluster",
        "paper-testbed.toml",
        "--model",
        "llama2-7b",
    ]
    compare = ("--objective", "latency", "--compare", "-o", "json")
    rows = {row["strategy"]: row for row in json.loads(checked(*command, *compare, cwd=tmp_path))}
    assert rows["edgeshard"]["feasible"] and rows["edgeshard"]["gap"] == 0
    assert rows["edgeshard"]["time_per_token_s"] < 0.6 * rows["edge-solo"]["time_per_token_s"]
    refused = run(*command, "--source", "nobody", cwd=tmp_path)
    assert refused.returncode == 2 and "nobody" in refused.stderr


@pytest.mark.parametrize("name", ["agent", "coordinator"])
def test_a_missing_extra_is_named_exactly(name: str, clean: Path, tmp_path: Path) -> None:
    result = run(clean / f"edgeshard-{name}", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == f"edgeshard-{name} needs the {name} extra: {extra_line(name)}\n"
    assert f"pip install '.[{name}]' in a checkout" in result.stderr, (
        "no index has the package by its name"
    )


def test_the_library_does_not_load_torch_where_it_is_installed(tmp_path: Path) -> None:
    code = (
        "import sys, edgeshard, edgeshard.client, edgeshard.cli.main, edgeshard.local.cluster\n"
        "import edgeshard.cli.commands.site.demo\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert checked(sys.executable, "-c", code, cwd=tmp_path).strip() == "[]"
