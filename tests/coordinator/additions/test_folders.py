"""The folders of models: their listing, and that no file outside of them is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from edgeshard_coordinator.additions import folders
from edgeshard_coordinator.additions.folders import ModelFolders

from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError, NotFoundError


def model_at(directory: Path, weights: int = 10) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(weights))
    return directory


def found(listings: list[folders.FolderListing]) -> list[tuple[str, int]]:
    return [(model.name, model.weight_bytes) for listing in listings for model in listing.models]


def test_models_are_found_in_each_form(tmp_path: Path) -> None:
    root = tmp_path / "models"
    model_at(root / "Plain-1B", 100)
    model_at(root / "owner" / "nested", 200)
    model_at(root / "models--big--Hub-7B" / "snapshots" / "0123abcd", 300)
    (root / "single.Q4_K.gguf").write_bytes(bytes(40))
    (root / "split-00001-of-00002.gguf").write_bytes(bytes(5))
    (root / "split-00002-of-00002.gguf").write_bytes(bytes(6))
    model_at(root / ".hidden")
    model_at(root / "a" / "b" / "c" / "too-deep")
    (root / "notes.txt").write_text("no model")
    listings = ModelFolders([root]).list()
    assert found(listings) == [
        ("plain-1b", 100),
        ("hub-7b", 300),
        ("nested", 200),
        ("single.q4_k", 40),
        ("split", 11),
    ]
    assert not listings[0].is_cut and not listings[0].problem


def test_a_folder_that_is_a_model_is_listed(tmp_path: Path) -> None:
    assert found(ModelFolders([model_at(tmp_path / "one")]).list()) == [("one", 10)]


def test_a_folder_that_cannot_be_read_has_a_reason(tmp_path: Path) -> None:
    model_at(tmp_path / "there" / "one")
    missing, there = ModelFolders([tmp_path / "missing", tmp_path / "there"]).list()
    assert "create it" in missing.problem and found([there]) == [("one", 10)]


def test_a_search_ends_at_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        model_at(tmp_path / f"m{number}")
    monkeypatch.setattr(folders, "MAX_MODELS", 3)
    (listing,) = ModelFolders([tmp_path]).list()
    assert len(listing.models) == 3 and listing.is_cut
    monkeypatch.setattr(folders, "MAX_MODELS", 200)
    monkeypatch.setattr(folders, "MAX_ENTRIES", 4)
    (listing,) = ModelFolders([tmp_path]).list()
    assert len(listing.models) < 5 and listing.is_cut


def test_links_out_of_the_folder_are_neither_listed_nor_taken(tmp_path: Path) -> None:
    root, outside = tmp_path / "models", model_at(tmp_path / "outside")
    model_at(root / "inside")
    (root / "out").symlink_to(outside)
    (root / "in").symlink_to(root / "inside")
    (root / "loop").symlink_to(root)
    searched = ModelFolders([root])
    names = {name for name, _ in found(searched.list())}
    assert names == {"inside"}, "of a link the model behind it has the name"
    assert searched.check(str(root / "in")) == root / "inside"
    assert refusal(searched, root / "out") == "OUTSIDE_FOLDERS"


OUTSIDE: dict[str, Callable[[Path], object]] = {
    "another folder": lambda root: root.parent / "outside",
    "a parent": lambda root: root / "inside" / ".." / ".." / "outside",
    "a folder whose name begins the same": lambda root: f"{root}-more",
    "nothing outside": lambda root: root.parent / "missing",
    "a relative path": lambda root: "inside",
    "no path": lambda root: "",
    "a zero byte": lambda root: f"{root}/\0",
    "a lone surrogate": lambda root: f"{root}/\udcff",
    "a long text": lambda root: f"{root}/{'x' * 100_000}",
    "a repository": lambda root: "owner/name",
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_a_path_outside_is_refused_whether_or_not_it_exists(tmp_path: Path, what: str) -> None:
    model_at(tmp_path / "models" / "inside")
    model_at(tmp_path / "outside")
    model_at(tmp_path / "models-more")
    searched = ModelFolders([tmp_path / "models"])
    assert refusal(searched, OUTSIDE[what](tmp_path / "models")) == "OUTSIDE_FOLDERS"


def test_a_model_with_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    """Also in the form of the Hub's cache, whose links into its own `blobs` are followed."""
    root = tmp_path / "models"
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (model_at(root / "one") / "tokenizer.json").symlink_to(secret)
    assert refusal(ModelFolders([root]), root / "one") == "OUTSIDE_FOLDERS"
    (root / "single.gguf").write_bytes(b"x")
    (root / "other").symlink_to(secret)
    assert ModelFolders([root]).check(str(root / "single.gguf")) == root / "single.gguf", (
        "only itself is read"
    )
    (root / "parts-00001-of-00002.gguf").write_bytes(b"x")
    (root / "parts-00002-of-00002.gguf").symlink_to(secret)
    assert refusal(ModelFolders([root]), root / "parts-00001-of-00002.gguf") == "OUTSIDE_FOLDERS"
    snapshot = model_at(root / "models--o--n" / "snapshots" / "rev")
    (root / "models--o--n" / "blobs").mkdir()
    (root / "models--o--n" / "blobs" / "x").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/x")
    assert ModelFolders([root]).check(str(snapshot)) == snapshot
    assert refusal(ModelFolders([snapshot]), snapshot) == "OUTSIDE_FOLDERS", (
        "its blobs are not in the folder"
    )


def test_a_model_that_is_gone_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="list the folders again"):
        ModelFolders([tmp_path]).check(str(tmp_path / "gone"))


def test_a_name_that_is_no_text_is_not_listed(tmp_path: Path) -> None:
    """It could not be sent to a browser."""
    model_at(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")))
    model_at(tmp_path / "good")
    assert found(ModelFolders([tmp_path]).list()) == [("good", 10)]


def refusal(searched: ModelFolders, path: object) -> str:
    with pytest.raises(InvalidArgumentError) as refused:
        searched.check(str(path))
    error: EdgeShardError = refused.value
    assert error.field == "source" and "--model-folder" in error.message
    return error.reason
