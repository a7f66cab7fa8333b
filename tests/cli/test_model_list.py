"""edgectl model list --found: models of other programs on this disk, and whether they fit the
site."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from edgeshard.cli.commands.deployments.model_inventory import fitting_context, largest_that_fits
from edgeshard.cli.main import app
from edgeshard.planning.inputs.shapes import model_from_config
from tests.support.gguf_files import DEMO, mixed, write_demo_gguf
from tests.support.model_stores import OllamaFolder

NAMES = (
    "OLLAMA_MODELS",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "LLAMA_CACHE",
    "XDG_CACHE_HOME",
)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a model of each program; returns it."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    weights = write_demo_gguf(tmp_path / "demo.gguf", mixed).read_bytes()
    ollama = OllamaFolder(tmp_path / ".ollama" / "models")
    ollama.add("tales/1b", weights, {"file_type": "Q4_K_M"})
    ollama.add("giant/latest", None, {"remote_host": "https://ollama.com"})
    for place in (
        ".lmstudio/models/ann/Tales-GGUF/tales-Q8_0.gguf",
        ".lmstudio/models/ann/Tales-GGUF/tales-Q4_0.gguf",
        ".lmstudio/models/ann/Tales-GGUF/mmproj.gguf",
        ".cache/huggingface/hub/models--ann--Tales-GGUF/snapshots/0123/tales-Q6_K.gguf",
        ".cache/llama.cpp/ann_tales-IQ4_XS.gguf",
    ):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(weights)
    snapshot = tmp_path / ".cache/huggingface/hub/models--ann--Old/snapshots/0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "unheard"}))
    (snapshot / "model.safetensors").write_bytes(b"x" * 100)
    return tmp_path


def rows(result: Any) -> dict[str, dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return {row["model"]: row for row in json.loads(result.stdout)}


def test_models_of_other_programs_are_listed_with_what_fits(
    disk: Path, edgectl: Callable[..., Any]
) -> None:
    found = rows(edgectl("model", "list", "--found", "-o", "json"))
    llama = str(disk / ".cache/llama.cpp/ann_tales-IQ4_XS.gguf")
    size = (disk / "demo.gguf").stat().st_size
    assert {name: (row["program"], row["type"]) for name, row in found.items()} == {
        "ollama:tales:1b": ("Ollama", "Q4_K_M"),
        "ollama:giant:latest": ("Ollama", ""),
        "lmstudio:ann/Tales-GGUF:Q8_0": ("LM Studio", "Q8_0"),
        "lmstudio:ann/Tales-GGUF:Q4_0": ("LM Studio", "Q4_0"),
        "ann/Tales-GGUF": ("Hub cache", "Q6_K"),
        "ann/Old": ("Hub cache", "safetensors"),
        llama: ("llama.cpp cache", "IQ4_XS"),
    }
    fitting = found.pop("ollama:tales:1b")
    assert fitting["fits"] is True and fitting["size_bytes"] == size and fitting["note"] == ""
    assert fitting["context"] == found["ann/Tales-GGUF"]["context"] > 0
    assert found["ollama:giant:latest"]["fits"] is None
    assert "runs in the cloud" in found["ollama:giant:latest"]["note"]
    assert "unheard" in found["ann/Old"]["note"]


def test_without_a_site_it_is_not_known_what_fits(disk: Path, free_port: int) -> None:
    arguments = ["--coordinator", f"127.0.0.1:{free_port}", "model", "list", "--found"]
    result = CliRunner().invoke(app, [*arguments, "-o", "json"])
    assert {row["fits"] for row in rows(result).values()} == {None}
    assert "no site answers, so it is not known what fits" in result.stderr
    table = CliRunner().invoke(app, arguments).stdout
    assert table.splitlines()[0].split() == [
        "MODEL",
        "PROGRAM",
        "SIZE",
        "TYPE",
        "FITS",
        "CONTEXT",
        "NOTE",
    ]


def test_an_empty_disk_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edgectl: Callable[..., Any]
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "nothing"))
    result = edgectl("model", "list", "--found")
    assert result.exit_code == 0 and "none" in result.stderr


def test_without_found_it_lists_the_store(edgectl: Callable[..., Any]) -> None:
    assert edgectl("model", "list").stdout == edgectl("get", "models").stdout


@dataclass(frozen=True)
class Facts:
    kind: str = "cpu"
    unified_memory: bool = True


@dataclass(frozen=True)
class MemoryNode:
    """The part of a node that the search reads."""

    name: str
    free_bytes: int
    facts: Facts = Facts()


def test_memory_bounds_the_context_and_nodes_add_up() -> None:
    config = json.loads((DEMO / "config.json").read_text()) | {"max_position_embeddings": 1 << 20}
    model = model_from_config("demo", config)

    def fitting(*sizes: int) -> int | None:
        nodes: Any = [MemoryNode(f"n{number}", size << 20) for number, size in enumerate(sizes)]
        return fitting_context(model, nodes)

    one = fitting(200)
    two = fitting(200, 200)
    assert one is not None and two is not None and 512 < one < two < 1 << 20
    assert fitting(8) is None
    assert fitting(1 << 20) == 1 << 20


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(10_000, 1000), (999, 992), (512, 512), (513, 512), (600, 592), (511, None)],
)
def test_the_longest_context_is_searched(limit: int, expected: int | None) -> None:
    assert largest_that_fits(512, 1000, lambda tokens: tokens <= limit) == expected
