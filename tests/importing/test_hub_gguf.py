"""GGUF repositories of the Hub, of which a small server plays the part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
from gguf import GGMLQuantizationType as Type

from edgeshard.domain.errors import DataLossError, DeniedError, NotFoundError, UnsupportedModelError
from edgeshard.importing.blocks import Width
from edgeshard.importing.imported import DOWNLOADING
from edgeshard.importing.model_sources import Source, opened, parse_source
from edgeshard.importing.outlook import config_of
from edgeshard.storage.checkpoint import build_manifest
from tests.importing.test_gguf import COMMON, config_from, split
from tests.support.gguf_files import everywhere, mixed, write_demo_gguf
from tests.support.hub_server import COMMIT, HubServer, point_at, serving
from tests.support.imports import nothing

NAME = "someone/Tiny-GGUF"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository: two quantisations, one in a folder in parts, and files that are no models."""
    directory = tmp_path_factory.mktemp("repository")
    write_demo_gguf(directory / "tiny-Q4_K_M.gguf", mixed)
    whole = write_demo_gguf(directory / "whole.gguf", everywhere(Type.Q8_0))
    (directory / "big").mkdir()
    for part in split(whole, 2, directory / "big"):
        part.rename(part.with_name(part.name.replace("demo-", "tiny-Q8_0-")))
    whole.unlink()
    (directory / "mmproj-F16.gguf").write_bytes(b"pictures")
    (directory / "README.md").write_text("A model.")
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def hub(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving() as server:
        server.repositories[NAME] = files
        point_at(server.address, tmp_path / "cache", monkeypatch)
        yield server


@pytest.mark.parametrize(
    ("text", "served", "name"),
    [
        (NAME, {"tiny-Q4_K_M.gguf"}, "tiny-gguf"),
        (f"{NAME}:q4_k_m@main", {"tiny-Q4_K_M.gguf"}, "tiny-gguf-q4_k_m"),
        (
            f"{NAME}:Q8_0",
            {f"tiny-Q8_0-{part:05}-of-00002.gguf" for part in (1, 2)},
            "tiny-gguf-q8_0",
        ),
    ],
)
def test_a_quantisation_is_fetched_and_is_the_file_by_path(
    hub: HubServer, files: Path, text: str, served: set[str], name: str
) -> None:
    source = parse_source(text)
    assert source.name == name
    steps: list[tuple[str, int, int]] = []
    with opened(source, Width.INT8, lambda *step: steps.append(step)) as imported:
        digest = build_manifest("m", imported.checkpoint).digest()
        assert imported.notes == ()
    local = min(path for path in files.rglob("*.gguf") if path.name in served)
    with opened(Source(path=local), Width.INT8, nothing) as by_path:
        assert build_manifest("m", by_path.checkpoint).digest() == digest
    assert set(hub.served) == served
    size = sum(path.stat().st_size for path in files.rglob("*") if path.name in served)
    assert [step for step in steps if step[0] == DOWNLOADING][-1] == (DOWNLOADING, size, size)
    before = dict(hub.served)
    with opened(source, Width.INT8, nothing):
        assert hub.served == before, "the cache has it"


def test_an_unknown_quantisation_lists_what_is_there(hub: HubServer) -> None:
    with (
        pytest.raises(NotFoundError, match=f"{NAME} has no Q2_K; it has Q8_0, Q4_K_M"),
        opened(parse_source(f"{NAME}:Q2_K"), Width.INT8, nothing),
    ):
        pass
    assert not hub.served


def test_a_plan_reads_the_header_only(hub: HubServer, files: Path) -> None:
    expected = config_of(Source(path=files / "tiny-Q4_K_M.gguf"), Width.INT8)
    assert config_of(parse_source(NAME), Width.INT8) == expected
    parts = config_of(parse_source(f"{NAME}:Q8_0"), Width.INT8)
    assert parts["num_hidden_layers"] == expected["num_hidden_layers"]
    assert not hub.served, "no file is fetched for a plan"


def test_a_model_that_is_not_run_is_refused_before_its_weights(
    hub: HubServer, tmp_path: Path
) -> None:
    directory = tmp_path / "mamba"
    directory.mkdir()
    writer = gguf.GGUFWriter(directory / "x-Q8_0.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    hub.repositories["someone/Mamba"] = directory
    with (
        pytest.raises(UnsupportedModelError, match="'mamba'"),
        opened(parse_source("someone/Mamba"), Width.INT8, nothing),
    ):
        pass
    assert not hub.served


def test_a_gated_repository_names_the_remedy(hub: HubServer) -> None:
    hub.gated.add(NAME)
    with (
        pytest.raises(DeniedError, match="accept its terms at"),
        opened(parse_source(NAME), Width.INT8, nothing),
    ):
        pass


def test_a_damaged_file_is_refused(hub: HubServer) -> None:
    hub.damaged.add("tiny-Q4_K_M.gguf")
    with (
        pytest.raises(DataLossError, match="differs from the Hub's"),
        opened(parse_source(NAME), Width.INT8, nothing),
    ):
        pass


def test_without_the_hub_the_cached_file_is_taken(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(parse_source(f"{NAME}:Q8_0"), Width.INT8, nothing) as imported:
        digest = build_manifest("m", imported.checkpoint).digest()
    point_at("http://127.0.0.1:1", tmp_path / "cache", monkeypatch)
    for text in (NAME, f"{NAME}:Q8_0", f"{NAME}:Q8_0@{COMMIT}"):
        with opened(parse_source(text), Width.INT8, nothing) as imported:
            assert build_manifest("m", imported.checkpoint).digest() == digest
    with (
        pytest.raises(NotFoundError, match="in the Hub's cache has no Q4_K_M; it has Q8_0"),
        opened(parse_source(f"{NAME}:Q4_K_M"), Width.INT8, nothing),
    ):
        pass
    assert config_of(parse_source(NAME), Width.INT8)["vocab_size"] > 0


def test_a_plan_of_a_header_has_its_rotary_factors(hub: HubServer, tmp_path: Path) -> None:
    directory = tmp_path / "llama3"
    directory.mkdir()
    tensors = {"token_embd.weight": (64, 256), "rope_freqs.weight": (32,)}
    config = config_from(directory / "x-Q8_0.gguf", "llama", tensors, **COMMON)
    hub.repositories["someone/Llama3"] = directory
    planned = config_of(parse_source("someone/Llama3"), Width.INT8)
    assert (
        planned["rope_parameters"] == config["rope_parameters"]
        and config["rope_parameters"]["factor"] == 8.0
    )
