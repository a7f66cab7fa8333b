"""Ollama's store: names, manifests, digests, settings, and what is refused by name."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edgeshard.chat.chat_model import ChatModel
from edgeshard.domain.errors import (
    DataLossError,
    DeniedError,
    EdgeShardError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedModelError,
)
from edgeshard.domain.requests.conversation import Conversation
from edgeshard.importing.blocks import Width
from edgeshard.importing.imported import CHECKING, Imported
from edgeshard.importing.model_sources import Source, opened, parse_source
from edgeshard.importing.outlook import config_of
from edgeshard.storage.checkpoint import build_manifest
from tests.support.gguf_files import mixed, write_demo_gguf
from tests.support.imports import nothing
from tests.support.model_stores import OllamaFolder

GO = "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_gguf(tmp_path_factory.mktemp("demo") / "demo.gguf", mixed)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OllamaFolder:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return OllamaFolder(tmp_path / "models")


def files_of(imported: Imported) -> dict[str, bytes]:
    return {file.name: file.path.read_bytes() for file in imported.checkpoint.files}


def prompt_of(imported: Imported, *messages: dict[str, Any]) -> str:
    model = ChatModel.from_files(files_of(imported))
    return model.render(Conversation(json.dumps(messages)))[0]


def test_a_model_of_the_store_is_the_file_that_it_was_made_of(
    store: OllamaFolder, demo: Path
) -> None:
    store.add("tales/1b", demo.read_bytes())
    source = parse_source("ollama:tales:1b")
    assert source.name == "tales-1b" and str(source) == "ollama:tales:1b"
    steps: list[str] = []
    with (
        opened(source, Width.INT8, lambda what, done, total: steps.append(what)) as imported,
        opened(Source(path=demo), Width.INT8, nothing) as by_path,
    ):
        assert (
            build_manifest("m", imported.checkpoint).digest()
            == build_manifest("m", by_path.checkpoint).digest()
        )
        assert imported.notes == by_path.notes == ()
        assert {
            tensor.file.parent for tensor in imported.checkpoint.tensors if tensor.file.suffix == ""
        } == {store.folder / "blobs"}, "tensors that need no change lie in the store's own blob"
    assert steps[0] == CHECKING
    assert config_of(source, Width.INT8) == config_of(Source(path=demo), Width.INT8)


@pytest.mark.parametrize(
    ("path", "name", "stored_as"),
    [
        ("registry.ollama.ai/library/tales/latest", "tales", "tales"),
        ("registry.ollama.ai/library/tales/latest", "Tales:latest", "tales"),
        ("registry.ollama.ai/ann/tales/q8", "ann/tales:Q8", "tales-q8"),
        ("hf.co/Ann/Tales-GGUF/Q4_K_M", "hf.co/Ann/Tales-GGUF:Q4_K_M", "tales-gguf-q4_k_m"),
        ("localhost:5000/library/tales/latest", "localhost:5000/library/tales", "tales"),
    ],
)
def test_names_are_those_of_ollama(
    store: OllamaFolder, path: str, name: str, stored_as: str
) -> None:
    store.write(path, store.manifest(b"GGUF", {}))
    assert parse_source(f"ollama:{name}").name == stored_as


def test_an_unknown_name_lists_what_is_there(store: OllamaFolder) -> None:
    with pytest.raises(
        NotFoundError, match=r"no model tales in .*models: no models are there; OLLAMA_MODELS"
    ):
        parse_source("ollama:tales")
    store.add("tales/1b", b"GGUF")
    with pytest.raises(NotFoundError, match=r"it has tales:1b; OLLAMA_MODELS names another folder"):
        parse_source("ollama:tales")
    for text in ("", "a b", "../x", "a/b/c/d", "a:b:c"):
        with pytest.raises(InvalidArgumentError, match="name it as in `ollama list`"):
            parse_source(f"ollama:{text}")


def test_the_newer_manifests_are_links_and_lists(store: OllamaFolder, demo: Path) -> None:
    child = store.manifest(demo.read_bytes(), {}) | {"runner": "llamacpp", "format": "gguf"}
    reference = {
        "digest": store.blob(json.dumps(child).encode()),
        "runner": "llamacpp",
        "format": "gguf",
    }
    mlx = {"digest": "sha256:" + "0" * 64, "runner": "mlx", "format": "safetensors"}
    listed = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.ollama.manifest.list.v2+json",
        "manifests": [],
    }
    digest = store.blob(json.dumps({**listed, "manifests": [mlx, reference]}).encode())
    link = store.folder / "manifests-v2/registry.ollama.ai/library/tales/latest"
    link.parent.mkdir(parents=True)
    link.symlink_to(store.folder / "blobs" / digest.replace(":", "-"))
    with opened(parse_source("ollama:tales"), Width.INT8, nothing) as imported:
        assert len(imported.checkpoint.tensors) > 10
    (store.folder / "blobs" / digest.replace(":", "-")).write_text(
        json.dumps({**listed, "manifests": [mlx]})
    )
    with (
        pytest.raises(DataLossError, match="run `ollama pull tales:latest` again"),
        opened_model("tales"),
    ):
        pass
    store.write("registry.ollama.ai/library/apple/latest", {**listed, "manifests": [mlx]})
    with pytest.raises(
        UnsupportedModelError,
        match="ollama:apple:latest is there for other programs only, such as MLX",
    ):
        opened_model("apple").__enter__()


@contextmanager
def opened_model(name: str) -> Iterator[Imported]:
    with opened(parse_source(f"ollama:{name}"), Width.INT8, nothing) as imported:
        yield imported


@pytest.mark.parametrize(
    ("config", "texts", "message"),
    [
        (
            {"remote_host": "https://ollama.com:443", "remote_model": "big"},
            {},
            "runs in the cloud at https://ollama",
        ),
        (
            {"model_format": "safetensors"},
            {"tensor": "x"},
            r"has its weights as safetensors \(MLX\), not as a GGUF",
        ),
        ({}, {"adapter": "GGUF"}, "is an adapter over another model"),
        ({}, {"model": "GGUF"}, "has 2 files of weights"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(
    store: OllamaFolder, config: dict[str, Any], texts: dict[str, str], message: str
) -> None:
    store.add("tales/latest", b"GGUF", config, **texts)
    with (
        pytest.raises(UnsupportedModelError, match=f"ollama:tales:latest {message}"),
        opened_model("tales"),
    ):
        pass


def test_bytes_that_are_not_those_of_the_digest_are_refused(
    store: OllamaFolder, demo: Path
) -> None:
    path = store.add("tales/latest", demo.read_bytes(), system="Be brief.")
    layers = json.loads(path.read_text())["layers"]
    for layer in layers:
        blob = store.folder / "blobs" / layer["digest"].replace(":", "-")
        data = blob.read_bytes()
        blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with (
            pytest.raises(
                DataLossError, match=r"other bytes; run `ollama pull tales:latest` again"
            ),
            opened_model("tales"),
        ):
            pass
        blob.write_bytes(data)
        blob.rename(blob.with_suffix(".gone"))
        with pytest.raises(NotFoundError, match="fetch the model again"), opened_model("tales"):
            pass
        blob.with_suffix(".gone").rename(blob)


@pytest.mark.parametrize(
    "manifest",
    [
        [],
        {"layers": "x"},
        {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../x"}]},
        {"layers": [{"digest": "sha256:" + "0" * 64}]},
        {"layers": [], "config": {"digest": 5}},
    ],
)
def test_a_malformed_manifest_is_refused(store: OllamaFolder, manifest: Any) -> None:
    store.write("registry.ollama.ai/library/tales/latest", manifest)
    with pytest.raises(InvalidArgumentError, match="ollama:tales:latest"), opened_model("tales"):
        pass


def test_an_error_in_the_weights_names_the_model(store: OllamaFolder) -> None:
    store.add("tales/latest", b"GGML" + bytes(30))
    with pytest.raises(
        InvalidArgumentError, match=r"^ollama:tales:latest does not begin as a GGUF file does"
    ):
        opened_model("tales").__enter__()


def test_system_text_and_parameters_become_defaults(store: OllamaFolder, demo: Path) -> None:
    params = {
        "temperature": 0.5,
        "top_k": 7,
        "repeat_penalty": 1.25,
        "stop": ["</s>", "User:"],
        "num_ctx": 4096,
        "mirostat": 1,
    }
    config = {"generation_defaults": {"top_p": 0.75, "temperature": 1.0}}
    system = 'Say "so", \\ and 🙂.\n'
    store.add(
        "tales/latest",
        demo.read_bytes(),
        config,
        params=json.dumps({**params, "mirostat": 1}),
        system=system,
        template=GO,
    )
    with opened_model("tales") as imported:
        assert imported.notes == (
            "Ollama's template is not run: the model's chat template is",
            "its system text is that of conversations without one",
            "its stop texts 'User:' are no tokens and are left out: requests may have them",
            "its num_ctx of 4096 is left out: set --max-context for a deployment",
            "its parameters mirostat are left out: requests may have them",
        )
        model = ChatModel.from_files(files_of(imported))
        assert model.defaults.given() == {
            "temperature": 0.5, "top_k": 7, "top_p": 0.75, "repetition_penalty": 1.25,
        }  # fmt: skip
        user = {"role": "user", "content": "Hello"}
        assert prompt_of(imported, user) == f"{system}Hello"
        assert prompt_of(imported, {"role": "system", "content": "Mine."}, user) == "Mine.Hello"
        generation = json.loads(files_of(imported)["generation_config.json"])
        assert generation["eos_token_id"] == [2]


def test_a_parameter_that_no_request_may_have_is_left_out(store: OllamaFolder, demo: Path) -> None:
    store.add("tales/latest", demo.read_bytes(), params=json.dumps({"temperature": "hot"}))
    with opened_model("tales") as imported:
        assert imported.notes == (
            "its parameters: temperature is 'hot'; it must be a number; this one is left out",
        )
        assert ChatModel.from_files(files_of(imported)).defaults.given() == {}


def test_pictures_and_drafts_beside_the_weights_are_left_out(
    store: OllamaFolder, demo: Path
) -> None:
    store.add("tales/latest", demo.read_bytes(), projector="x", draft="y", license="free")
    with opened_model("tales") as imported:
        assert imported.notes == ("its projector is left out", "its draft is left out")


def test_a_file_without_a_template_uses_the_one_of_its_form(
    store: OllamaFolder, tmp_path: Path
) -> None:
    path = write_demo_gguf(tmp_path / "plain.gguf", mixed, None)
    store.add("tales/latest", path.read_bytes(), template=GO)
    with opened_model("tales") as imported:
        assert imported.notes == (
            "ollama:tales:latest has no chat template: EdgeShard's own for ChatML is used",
            "Ollama's template is not run: the model's chat template is",
        )
        text = prompt_of(imported, {"role": "user", "content": "Hello"})
        assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    store.add("other/latest", path.read_bytes(), {"renderer": "tales-v1"})
    with opened_model("other") as imported:
        assert (
            "Ollama's tales-v1 is not run, and the model has no chat template" in imported.notes[0]
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root acts as another user")
def test_a_store_of_another_user_names_the_owner_and_the_remedy(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path(tempfile.mkdtemp(prefix="ollama-", dir="/tmp"))
    try:
        base.chmod(0o755)
        folder = base / "private" / "models"
        store = OllamaFolder(folder)
        store.add("tales/latest", demo.read_bytes())
        monkeypatch.setenv("OLLAMA_MODELS", str(folder))
        (base / "private").chmod(0o700)
        with as_another_user(), pytest.raises(DeniedError) as caught:
            parse_source("ollama:tales")
        assert caught.value.message == (
            f"{base}/private belongs to the user root, and nobody may not read it: to read "
            "Ollama's models in place, "
            f"run `sudo setfacl -m u:nobody:x {base}/private && sudo setfacl -R -m u:nobody:rX "
            f"{folder}`"
        )
        (base / "private").chmod(0o755)
        blob = next(path for path in (folder / "blobs").iterdir() if path.stat().st_size > 1000)
        blob.chmod(0o600)
        with as_another_user():
            source = parse_source("ollama:tales")
            with pytest.raises(
                DeniedError,
                match=rf"{blob} belongs .* run `sudo setfacl -R -m u:nobody:rX {folder}`",
            ):
                opened(source, Width.INT8, nothing).__enter__()
        blob.chmod(0o644)
        with as_another_user(), opened(source, Width.INT8, nothing) as imported:
            assert blob in {tensor.file for tensor in imported.checkpoint.tensors}
    finally:
        shutil.rmtree(base)


@contextmanager
def as_another_user() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_names_of_the_store_are_no_paths(store: OllamaFolder) -> None:
    with pytest.raises(EdgeShardError):
        parse_source("ollama:/etc/passwd")
