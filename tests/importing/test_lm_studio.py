"""LM Studio's folder: names, settings, quantisations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeshard.domain.errors import InvalidArgumentError, NotFoundError
from edgeshard.importing.model_sources import Source, parse_source


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def add(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(b"GGUF")
    return folder


def test_a_name_is_a_file_of_the_folder(home: Path) -> None:
    models = home / ".lmstudio" / "models"
    tales = add(
        models / "ann" / "Tales-GGUF", "mmproj-F16.gguf", "tales-Q4_K_M.gguf", "tales-Q8_0.gguf"
    )
    for text in ("ann/Tales-GGUF", "Tales-GGUF", "ANN/tales-gguf:q4_k_m"):
        assert parse_source(f"lmstudio:{text}") == Source(path=tales / "tales-Q4_K_M.gguf")
    assert parse_source("lmstudio:tales-gguf:Q8_0").path == tales / "tales-Q8_0.gguf"
    with pytest.raises(
        NotFoundError, match="lmstudio:ann/Tales-GGUF has no Q2_K; it has Q4_K_M, Q8_0"
    ):
        parse_source("lmstudio:Tales-GGUF:Q2_K")
    with pytest.raises(
        NotFoundError, match=r"LM Studio has no model other in .*: it has ann/Tales-GGUF"
    ):
        parse_source("lmstudio:other")
    add(models / "bob" / "Tales-GGUF", "tales.gguf")
    with pytest.raises(
        InvalidArgumentError, match="several publishers: name one of ann/Tales-GGUF, bob/Tales-GGUF"
    ):
        parse_source("lmstudio:Tales-GGUF")
    checkpoint = add(models / "bob" / "MLX", "config.json", "model.safetensors")
    assert parse_source("lmstudio:bob/MLX").path == checkpoint


def test_the_folder_is_that_of_the_settings(home: Path) -> None:
    with pytest.raises(NotFoundError, match=r"in .*/\.lmstudio/models: no models are there"):
        parse_source("lmstudio:tales")
    elsewhere = home / "elsewhere"
    file = add(home / "big" / "ann" / "tales", "tales.gguf") / "tales.gguf"
    elsewhere.mkdir()
    (home / ".lmstudio-home-pointer").write_text(f"{elsewhere}\n")
    (elsewhere / "settings.json").write_text(json.dumps({"downloadsFolder": str(home / "big")}))
    assert parse_source("lmstudio:tales").path == file
    (elsewhere / "settings.json").write_text("not JSON")
    add(elsewhere / "models" / "ann" / "other", "other.gguf")
    assert parse_source("lmstudio:other").name == "other"
