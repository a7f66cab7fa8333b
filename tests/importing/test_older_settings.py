"""Settings of a tokenizer in files that older checkpoints have, and what generation_config.json
recommends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.importing.blocks import Width
from edgeshard.importing.imported import Imported
from edgeshard.importing.model_sources import open_directory
from tests.support.imports import nothing
from tests.support.stores import MakeCheckpoint


def added(directory: Path, files: dict[str, Any], scratch: Path) -> Imported:
    """The model of the directory with these files of JSON besides."""
    for name, values in files.items():
        (directory / name).write_text(json.dumps(values))
    scratch.mkdir()
    return open_directory(directory, scratch, Width.INT8, nothing)


def settings_of(imported: Imported) -> dict[str, Any]:
    """The tokenizer_config.json that goes into the store."""
    (path,) = (
        file.path for file in imported.checkpoint.files if file.name == "tokenizer_config.json"
    )
    settings: dict[str, Any] = json.loads(path.read_text())
    return settings


def test_special_tokens_of_the_older_file_are_read_and_the_newer_one_wins(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    older = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    newer = {"bos_token": "<begin>", "pad_token": None, "model_max_length": 7}
    files = {"special_tokens_map.json": older, "tokenizer_config.json": newer}
    imported = added(make_checkpoint(), files, tmp_path / "scratch")
    expected = {
        "bos_token": "<begin>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": 7,
    }
    assert settings_of(imported) == expected


def test_a_newer_file_that_has_everything_stays_as_it_is(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    directory = make_checkpoint()
    files = {
        "special_tokens_map.json": {"bos_token": "</s>"},
        "tokenizer_config.json": {"bos_token": "<s>"},
    }
    imported = added(directory, files, tmp_path / "scratch")
    assert {file.path.parent for file in imported.checkpoint.files} == {directory}


@pytest.mark.parametrize("jinja", [True, False])
def test_the_template_of_a_processor_is_read_if_there_is_no_other(
    jinja: bool, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    directory = make_checkpoint()
    if jinja:
        (directory / "chat_template.jinja").write_text("newer")
    files = {
        "chat_template.json": {"chat_template": "older"},
        "tokenizer_config.json": {"bos_token": "<s>"},
    }
    found = settings_of(added(directory, files, tmp_path / "scratch"))
    assert found == {"bos_token": "<s>"} | ({} if jinja else {"chat_template": "older"})


def test_an_older_file_that_is_none_is_refused_by_name(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        added(make_checkpoint(), {"special_tokens_map.json": []}, tmp_path / "scratch")
    assert caught.value.field == "special_tokens_map.json"


def test_recommendations_that_cannot_be_used_are_noted(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    recommended = {"do_sample": True, "temperature": "0.7", "top_p": 1.5, "top_k": 20}
    imported = added(
        make_checkpoint(), {"generation_config.json": recommended}, tmp_path / "scratch"
    )
    first, second = imported.notes
    assert (
        first
        == "generation_config.json: temperature is '0.7'; it must be a number; this recommendation "
        "is left out"
    )
    assert second.startswith("generation_config.json: top_p")
