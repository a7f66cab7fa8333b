"""The Hub, of which a small server plays the part: what is fetched, what goes wrong, and what is
never fetched."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from edgeshard.domain.errors import (
    DataLossError,
    DeniedError,
    EdgeShardError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
    UnsupportedModelError,
)
from edgeshard.importing import hub as hub_module
from edgeshard.importing.blocks import Width
from edgeshard.importing.hub import fetch
from edgeshard.importing.model_sources import Source, opened, parse_source
from edgeshard.storage.checkpoint import build_manifest
from tests.support.hub_server import COMMIT, HubServer, point_at, serving
from tests.support.imports import nothing
from tests.support.stores import llama_config, llama_tensors

NAME = "someone/Tiny-Llama"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Of two shards, with what nobody asked for beside them."""
    directory = tmp_path / "repository"
    directory.mkdir()
    config = llama_config(2, 64, 128)
    tensors = llama_tensors(config, 0)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}}))
    (directory / "generation_config.json").write_text("{}")
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in (1, 2):
        file = f"model-{shard:05}-of-00002.safetensors"
        part = {name: tensors[name] for name in names[shard - 1 :: 2]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "modeling_tiny.py").write_text("raise SystemExit")
    (directory / "pytorch_model.bin").write_bytes(b"pickled")
    (directory / "consolidated.safetensors").write_bytes(b"the same once more")
    return directory


@pytest.fixture
def hub(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serving() as server:
        server.repositories[NAME] = repository
        point_at(server.address, tmp_path / "cache", monkeypatch)
        yield server


def test_a_snapshot_is_used_where_the_cache_has_it(
    hub: HubServer, repository: Path, tmp_path: Path
) -> None:
    shown: list[tuple[str, int, int]] = []
    with opened(
        parse_source(f"{NAME}@main"), Width.INT8, lambda *step: shown.append(step)
    ) as imported:
        manifest = build_manifest("tiny", imported.checkpoint)
        assert manifest.parameter_count == sum(
            tensor.size for tensor in llama_tensors(llama_config(2, 64, 128), 0).values()
        )
        assert {tensor.file.parent.name for tensor in imported.checkpoint.tensors} == {"blobs"}
    assert imported.checkpoint.directory.name == COMMIT
    assert set(hub.served) == {
        "config.json", "tokenizer.json", "generation_config.json", "model.safetensors.index.json",
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    }  # fmt: skip
    assert shown[-1][1] == shown[-1][2] and {step[0] for step in shown} == {"downloading"}
    before = dict(hub.served)
    assert fetch(NAME, COMMIT, nothing) == imported.checkpoint.directory and hub.served == before


def test_code_that_a_config_names_is_not_fetched_and_a_note_says_so(
    hub: HubServer, repository: Path
) -> None:
    config = json.loads((repository / "config.json").read_text())
    auto_map = {"AutoModelForCausalLM": "modeling_tiny.Tiny"}
    (repository / "config.json").write_text(json.dumps(config | {"auto_map": auto_map}))
    with opened(parse_source(NAME), Width.INT8, nothing) as imported:
        assert (
            "(auto_map), which is neither fetched nor run" in imported.notes[0]
            and len(imported.notes) == 1
        )
    assert not any(name.endswith(".py") for name in hub.served)


def test_files_of_older_checkpoints_are_fetched(hub: HubServer, repository: Path) -> None:
    (repository / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    with opened(parse_source(NAME), Width.INT8, nothing) as imported:
        (settings,) = (
            file for file in imported.checkpoint.files if file.name == "tokenizer_config.json"
        )
        assert json.loads(settings.path.read_text()) == {"bos_token": "<s>"}


def test_a_layout_that_is_not_read_is_refused_before_its_weights(
    hub: HubServer, repository: Path
) -> None:
    index = repository / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    places = values["weight_map"]
    places["model.layers.0.mlp.up_proj.weight.absmax"] = places["model.layers.0.mlp.up_proj.weight"]
    index.write_text(json.dumps(values))
    with pytest.raises(UnsupportedModelError, match="bitsandbytes"):
        fetch(NAME, "", nothing)
    assert not any(name.endswith(".safetensors") for name in hub.served)


def test_a_broken_download_goes_on_where_it_stopped(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = "model-00001-of-00002.safetensors"
    size = (hub.repositories[NAME] / shard).stat().st_size
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.cut_after[shard] = 20_000
    fetch(NAME, "", nothing)
    assert [begin for name, begin in hub.ranges if name == shard] == [0, 20_000]
    assert hub.served[shard] == size


def test_a_model_that_the_caches_disk_has_no_room_for_is_refused_before_its_weights(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeshard.storage.files.free_bytes", lambda path: 1000)
    with pytest.raises(
        ResourceExhaustedError, match=r"needs \d+ bytes .* where 1000 bytes are free; .* HF_HOME"
    ):
        fetch(NAME, "", nothing)
    assert not any(file.endswith(".safetensors") for file in hub.served)


def test_a_file_that_is_not_what_the_hub_says_is_refused_and_removed(hub: HubServer) -> None:
    shard = "model-00002-of-00002.safetensors"
    hub.damaged.add(shard)
    with pytest.raises(DataLossError, match="differs from the Hub's") as caught:
        fetch(NAME, "", nothing)
    assert caught.value.field == shard
    hub.damaged.clear()
    before = dict(hub.served)
    assert (fetch(NAME, "", nothing) / shard).is_file()
    again = {name for name, count in hub.served.items() if count != before[name]}
    assert again == {shard}, "what was whole and right is kept"


def test_a_gated_repository_says_what_to_do(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.gated.add(NAME)
    with pytest.raises(
        DeniedError, match=rf"accept its terms at {hub.address}/{NAME}, then give a token.*HF_TOKEN"
    ):
        fetch(NAME, "", nothing)
    assert not any(name.endswith("safetensors") for name in hub.served)
    monkeypatch.setenv("HF_TOKEN", "hf_allowed")
    assert fetch(NAME, "", nothing).is_dir()


def test_pickled_weights_are_refused_before_a_byte_of_them(
    hub: HubServer, repository: Path
) -> None:
    for path in repository.glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(
        UnsupportedModelError, match=r"pytorch_model\.bin only, a format that can run code"
    ):
        fetch(NAME, "", nothing)
    assert not hub.served


@pytest.mark.parametrize(
    "file", ["config.json", "chat_template.jinja", "model.safetensors.index.json"]
)
def test_a_file_that_would_not_be_read_is_not_fetched(
    hub: HubServer, repository: Path, file: str
) -> None:
    with (repository / file).open("ab") as grown:
        grown.truncate(33 << 20)
    with pytest.raises(InvalidArgumentError) as caught:
        fetch(NAME, "", nothing)
    assert (caught.value.field, caught.value.reason) == (file, "FILE_TOO_LARGE")
    assert not hub.served


def test_a_model_that_is_not_run_is_refused_before_its_weights(
    hub: HubServer, repository: Path
) -> None:
    (repository / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(UnsupportedModelError, match="model_type"):
        fetch(NAME, "", nothing)
    assert set(hub.served) == {"config.json"}


def test_a_tokenizer_of_tiktokens_is_fetched_where_it_is_the_only_one(
    hub: HubServer, repository: Path
) -> None:
    (repository / "tiktoken.model").write_bytes(b"IQ== 0\n")
    fetch(NAME, "", nothing)
    assert "tiktoken.model" not in hub.served


def test_a_tokenizer_of_an_unknown_pattern_is_refused_before_the_weights(
    hub: HubServer, repository: Path
) -> None:
    (repository / "tokenizer.json").unlink()
    (repository / "tiktoken.model").write_bytes(b"IQ== 0\n")
    (repository / "tokenizer_config.json").write_text('{"tokenizer_class": "Other"}')
    with pytest.raises(
        UnsupportedModelError, match=r"tiktoken\.model nor .* names the pattern that splits text"
    ):
        fetch(NAME, "", nothing)
    assert set(hub.served) == {"config.json", "tokenizer_config.json"}
    (repository / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "TikTokenTokenizer", "x": 1}'
    )
    hub.repositories["someone/Other"] = repository
    assert (fetch("someone/Other", "", nothing) / "tiktoken.model").is_file()


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "someone/nothing",
            NotFoundError,
            "check its name; a private one needs a token in HF_TOKEN",
        ),
        (f"{NAME}@v9", NotFoundError, "has no revision v9"),
    ],
)
def test_what_is_not_there_says_what_to_do(
    hub: HubServer, text: str, error: type[EdgeShardError], message: str
) -> None:
    source = parse_source(text)
    with pytest.raises(error, match=message):
        fetch(source.repository, source.revision, nothing)


def test_without_the_hub_the_cached_snapshot_is_taken(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        UnavailableError, match=r"cannot be reached and .* is not wholly in its cache: go online"
    ):
        fetch(NAME, "", nothing)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    directory = fetch(NAME, "", nothing)
    point_at("http://127.0.0.1:1", tmp_path / "cache", monkeypatch)
    assert fetch(NAME, "", nothing) == directory


def test_without_the_package_it_says_which_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(EdgeShardError, match=r"of the models extra"):
        hub_module.fetch(NAME, "", nothing)


def test_what_a_text_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "local").mkdir(parents=True)
    (tmp_path / "a.GGUF").write_bytes(b"")
    (tmp_path / "a.zip").write_bytes(b"")
    assert parse_source("owner/local") == Source(path=Path("owner/local"))
    assert parse_source("owner/other@v1.0") == Source(repository="owner/other", revision="v1.0")
    assert (
        parse_source("./a.GGUF").name == "a"
        and parse_source("Owner/My--Model_2").name == "my--model_2"
    )
    for text in (
        "./nothing",
        "nothing",
        "a/b/c",
        "../x",
        "x.gguf",
        "ow ner/x",
        "x" * 5000,
        "~nobody-here/x",
        "a\0b",
    ):
        with pytest.raises(EdgeShardError):
            parse_source(text)
    with (
        pytest.raises(EdgeShardError, match=r"a\.zip is a file, but no \.gguf"),
        opened(parse_source("./a.zip"), Width.INT8, nothing),
    ):
        pass
