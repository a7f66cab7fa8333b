"""Models of Ollama's store: a manifest names blobs by their sha256, for weights, template,
parameters and system text.

The store is that of Ollama 0.33, docs/gguf.md#models-of-other-programs. Nothing is written into it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeshard.domain.errors import (
    DataLossError,
    EdgeShardError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedModelError,
)
from edgeshard.importing.blocks import Width
from edgeshard.importing.gguf_file import GgufFile, read_gguf
from edgeshard.importing.gguf_model import open_gguf
from edgeshard.importing.imported import CHECKING, Imported, Progress
from edgeshard.importing.stores.access import SMALL_FILE_BYTES, not_readable
from edgeshard.importing.stores.ollama_settings import Settings, with_settings
from edgeshard.storage.forms import decode_text, malformed, parse_json_object

PROGRAM = "Ollama"
_HOST = "registry.ollama.ai"
_NAMESPACE = "library"
_TAG = "latest"
_MANIFEST_FOLDERS = ("manifests-v2", "manifests")
_PART = r"[A-Za-z0-9_][\w.-]{0,127}"
_NAME = re.compile(
    rf"(?:(?:(?P<host>{_PART}(?::\d{{1,5}})?)/)?(?P<namespace>{_PART})/)?(?P<model>{_PART})(?::(?P<tag>{_PART}))?"
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LAYER = "application/vnd.ollama.image."
_RUNNERS = ("ollama", "llamacpp", "")
_MAX_LAYERS = 4096
_CHUNK_BYTES = 4 << 20
_ONE_MODEL = 1
_TEXTS = ("template", "system", "params")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The place of a model's manifest, in the models folder `folder` of a store."""

    name: str
    path: Path
    folder: Path


@dataclass(frozen=True, slots=True)
class Layer:
    """A blob of a model: its kind, such as `model` or `template`, and its digest."""

    kind: str
    digest: str


@dataclass(frozen=True, slots=True)
class StoredOllamaModel:
    """A model of the store that EdgeShard may run: `weights` is its GGUF file at `path`.

    `file_type` is its quantisation as Ollama names it, such as `Q4_K_M`.
    """

    name: str
    weights: Layer
    path: Path
    settings: Settings
    file_type: str = ""


def models_folders() -> tuple[Path, ...]:
    """The folders in which Ollama keeps models: `$OLLAMA_MODELS`, or this user's and that of its
    system service."""
    folder = os.environ.get("OLLAMA_MODELS")
    if folder:
        return (Path(folder).expanduser(),)
    return Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")


def list_manifests(folder: Path) -> Iterator[Manifest]:
    """The manifests of a models folder by name. Raises DeniedError for one that this user may not
    read."""
    names = set[str]()
    for manifests in _MANIFEST_FOLDERS:
        for path in sorted(_files_below(folder, folder / manifests, depth=3)):
            name = _display_name(path.relative_to(folder / manifests).parts)
            if name not in names:
                names.add(name)
                yield Manifest(name, path, folder)


def find_manifest(name: str) -> Manifest:
    """The manifest of `[HOST/][NAMESPACE/]MODEL[:TAG]`, in any case.

    Raises InvalidArgumentError for a text of another form, and NotFoundError with a list of the
    models that are there. Raises DeniedError with the owner's name for a store that this user may
    not read.
    """
    parsed = _NAME.fullmatch(name)
    if parsed is None or ".." in name:
        raise InvalidArgumentError(
            f"ollama:{name[:200]}: name it as in `ollama list`, NAME:TAG", field="model"
        )
    parts = (
        parsed["host"] or _HOST,
        parsed["namespace"] or _NAMESPACE,
        parsed["model"],
        parsed["tag"] or _TAG,
    )
    display_name = _display_name(parts).lower()
    available: list[str] = []
    unreadable: EdgeShardError | None = None
    for folder in models_folders():
        try:
            for manifest in list_manifests(folder):
                if manifest.name.lower() == display_name:
                    return manifest
                available.append(manifest.name)
        except EdgeShardError as error:
            unreadable = error
    if unreadable is not None:
        raise unreadable
    listed = f"it has {', '.join(available)[:1000]}" if available else "no models are there"
    folders = " and ".join(map(str, models_folders()))
    what = (
        f"Ollama has no model {name[:200]} in {folders}: {listed}; OLLAMA_MODELS names another "
        "folder"
    )
    raise NotFoundError(what, field="model", reason="UNKNOWN_MODEL")


def read_model(manifest: Manifest) -> StoredOllamaModel:
    """The parts of a model. Only small blobs are read, and their digests checked.

    Raises UnsupportedModelError for a cloud model, for weights in another format than GGUF and for
    adapters, InvalidArgumentError for a malformed manifest, DataLossError for a blob with another
    digest.
    """
    values = _selected(
        manifest, _json_of(manifest, manifest.path, "the manifest", _digest_of_link(manifest.path))
    )
    config = _config_of(manifest, values)
    _check_remote(manifest, config)
    layers = _layers_of(manifest, values)
    kinds = [layer.kind for layer in layers]
    file_format = config.get("model_format") or values.get("format") or "gguf"
    if file_format != "gguf" or "tensor" in kinds:
        raise _unsupported(
            manifest, f"has its weights as {str(file_format)[:40]} (MLX), not as a GGUF file"
        )
    if "adapter" in kinds:
        raise _unsupported(
            manifest, "is an adapter over another model, which EdgeShard does not merge"
        )
    weights = [layer for layer in layers if layer.kind == "model"]
    if len(weights) != _ONE_MODEL:
        raise _unsupported(manifest, f"has {len(weights)} files of weights; one is read")
    texts = {
        layer.kind: _text_of(manifest, layer)
        for layer in layers
        if layer.kind in ("template", "system", "params")
    }
    settings = Settings(
        template=texts.get("template", ""),
        renderer=str(config.get("renderer") or "")[:80],
        system=texts.get("system", ""),
        parameters=_parameters(manifest, config, texts.get("params")),
        left_out=tuple(kind for kind in ("projector", "draft", "messages") if kind in kinds),
    )
    path = _blob(manifest, weights[0].digest)
    return StoredOllamaModel(
        manifest.name, weights[0], path, settings, str(config.get("file_type") or "")[:40]
    )


def read_header(name: str) -> GgufFile:
    """The header of a model's weights; nothing else of them is read. Raises as `find_manifest` and
    `read_model` do."""
    manifest = find_manifest(name)
    model = read_model(manifest)
    with _naming(manifest, model):
        return read_gguf(model.path)


def open_model(name: str, scratch: Path, width: Width, progress: Progress) -> Imported:
    """The model, ready to be added: its weights in place, its template, parameters and system text
    as defaults.

    Raises as `find_manifest`, `read_model` and `open_gguf` do; DataLossError for weights with
    another digest.
    """
    manifest = find_manifest(name)
    model = read_model(manifest)
    _check_weights(manifest, model, progress)
    with _naming(manifest, model):
        imported = open_gguf(model.path, scratch, width, progress, model.settings.template)
    notes = tuple(note.replace(model.path.name, f"ollama:{model.name}") for note in imported.notes)
    return with_settings(replace(imported, notes=notes), model.settings, scratch)


@contextmanager
def _naming(manifest: Manifest, model: StoredOllamaModel) -> Iterator[None]:
    """Put the model's name in place of its blob's into errors."""
    try:
        yield
    except EdgeShardError as error:
        message = error.message.replace(model.path.name, f"ollama:{model.name}")
        raise type(error)(message, field=error.field, reason=error.reason) from None
    except OSError as error:
        raise not_readable(PROGRAM, manifest.folder, model.path, error) from None


def _files_below(folder: Path, directory: Path, depth: int) -> Iterator[Path]:
    """The files `depth` levels below a directory, none if it does not exist."""
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise not_readable(PROGRAM, folder, directory, error) from None
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if depth and entry.is_dir(follow_symlinks=False):
            yield from _files_below(folder, Path(entry.path), depth - 1)
        elif not depth and not entry.is_dir(follow_symlinks=False):
            yield Path(entry.path)


def _display_name(parts: tuple[str, ...]) -> str:
    """The name as `ollama list` prints it, with its tag."""
    host, namespace, model, tag = parts
    before = (
        []
        if (host, namespace) == (_HOST, _NAMESPACE)
        else [namespace]
        if host == _HOST
        else [host, namespace]
    )
    return "/".join([*before, f"{model}:{tag}"])


def _read_small(manifest: Manifest, path: Path, what: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(SMALL_FILE_BYTES + 1)
    except OSError as error:
        raise not_readable(PROGRAM, manifest.folder, path, error) from None
    if len(data) > SMALL_FILE_BYTES:
        raise malformed(f"{what} of ollama:{manifest.name}", "is too large", "model")
    return data


def _json_of(manifest: Manifest, path: Path, what: str, digest: str = "") -> dict[str, Any]:
    data = _read_small(manifest, path, what)
    if digest:
        _check_digest(manifest, hashlib.sha256(data).hexdigest(), digest)
    name = f"{what} of ollama:{manifest.name}"
    return parse_json_object(decode_text(data, name), name)


def _selected(manifest: Manifest, values: dict[str, Any]) -> dict[str, Any]:
    """The manifest itself, or of a list of them the one of a GGUF file."""
    children = values.get("manifests")
    if not isinstance(children, list):
        return values
    for runner in _RUNNERS:
        for child in children:
            if not isinstance(child, dict) or str(child.get("runner") or "").lower() != runner:
                continue
            if child.get("format", "gguf") != "gguf":
                continue
            if "layers" in child:
                return child
            digest = _checked_digest(manifest, child.get("digest"))
            return child | _json_of(manifest, _blob(manifest, digest), "the manifest", digest)
    raise _unsupported(
        manifest, "is there for other programs only, such as MLX, and has no GGUF file"
    )


def _config_of(manifest: Manifest, values: dict[str, Any]) -> dict[str, Any]:
    config = values.get("config")
    if not isinstance(config, dict) or not config.get("digest"):
        return {}
    digest = _checked_digest(manifest, config["digest"])
    return _json_of(manifest, _blob(manifest, digest), "the configuration", digest)


def _check_remote(manifest: Manifest, config: Mapping[str, Any]) -> None:
    if config.get("remote_host") or config.get("remote_model"):
        host = str(config.get("remote_host") or "ollama.com")[:80]
        raise _unsupported(
            manifest, f"runs in the cloud at {host}; no weights of it are on this machine"
        )


def _layers_of(manifest: Manifest, values: dict[str, Any]) -> list[Layer]:
    layers = values.get("layers")
    if not isinstance(layers, list) or len(layers) > _MAX_LAYERS:
        raise malformed(
            f"the manifest of ollama:{manifest.name}", "has no list of layers", "layers"
        )
    result = []
    for layer in layers:
        media_type = layer.get("mediaType") if isinstance(layer, dict) else None
        if not isinstance(media_type, str):
            raise malformed(
                f"the manifest of ollama:{manifest.name}",
                "has a layer without a mediaType",
                "layers",
            )
        digest = _checked_digest(manifest, layer.get("digest"))
        result.append(Layer(media_type.removeprefix(_LAYER), digest))
    return result


def _checked_digest(manifest: Manifest, digest: object) -> str:
    text = digest.lower().replace("sha256-", "sha256:") if isinstance(digest, str) else ""
    if not _DIGEST.fullmatch(text):
        raise malformed(
            f"the manifest of ollama:{manifest.name}", "has a digest that is no sha256", "digest"
        )
    return text


def _digest_of_link(path: Path) -> str:
    """The digest that a manifest must have: newer stores link to its blob; "" for a manifest that
    is no link."""
    target = path.readlink().name if path.is_symlink() else ""
    digest = target.replace("sha256-", "sha256:")
    return digest if _DIGEST.fullmatch(digest) else ""


def _blob(manifest: Manifest, digest: str) -> Path:
    return manifest.folder / "blobs" / digest.replace(":", "-")


def _text_of(manifest: Manifest, layer: Layer) -> str:
    data = _read_small(manifest, _blob(manifest, layer.digest), f"the {layer.kind}")
    _check_digest(manifest, hashlib.sha256(data).hexdigest(), layer.digest)
    return decode_text(data, f"the {layer.kind} of ollama:{manifest.name}")


def _parameters(manifest: Manifest, config: Mapping[str, Any], text: str | None) -> dict[str, Any]:
    """The parameters of requests; the manifest's `params` override the configuration's defaults."""
    defaults = config.get("generation_defaults")
    parameters = dict(defaults) if isinstance(defaults, dict) else {}
    if text is not None:
        parameters |= parse_json_object(text, f"the params of ollama:{manifest.name}")
    return parameters


def _check_weights(manifest: Manifest, model: StoredOllamaModel, progress: Progress) -> None:
    hasher = hashlib.sha256()
    done = 0
    try:
        with model.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while chunk := file.read(_CHUNK_BYTES):
                hasher.update(chunk)
                done += len(chunk)
                progress(CHECKING, done, size)
    except OSError as error:
        raise not_readable(PROGRAM, manifest.folder, model.path, error) from None
    _check_digest(manifest, hasher.hexdigest(), model.weights.digest)


def _check_digest(manifest: Manifest, actual: str, digest: str) -> None:
    if f"sha256:{actual}" != digest:
        raise DataLossError(
            f"ollama:{manifest.name}: the blob {digest} has other bytes; run `ollama pull "
            f"{manifest.name}` again",
            field="model",
            reason="WRONG_SHA256",
        )


def _unsupported(manifest: Manifest, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"ollama:{manifest.name} {what}", field="model", reason="UNSUPPORTED_OLLAMA"
    )
