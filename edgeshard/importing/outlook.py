"""The config.json that a model would have in the store, from its own or its file's header: no
weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from edgeshard.architectures import STORED_AS, parse_config
from edgeshard.domain.errors import InvalidArgumentError, NotFoundError
from edgeshard.domain.models.dtypes import WHOLE_HEAD, IntegerFormat, Quantisation
from edgeshard.importing import gguf_config, hub
from edgeshard.importing.blocks import Width
from edgeshard.importing.gguf_file import GgufFile, read_gguf
from edgeshard.importing.gguf_model import stored_types
from edgeshard.importing.imported import named_further_notes, tensor_notes
from edgeshard.importing.model_sources import Source
from edgeshard.importing.quantised import check_method, checked_quantisation, without_quantisation
from edgeshard.importing.stored_as import with_stored
from edgeshard.importing.stores import ollama
from edgeshard.importing.stores.ollama_forms import llama_cpp_form
from edgeshard.storage.checkpoint import read_config, stored_tensors
from edgeshard.storage.inputs import read_json
from edgeshard.storage.model_directory import ModelDirectory


def config_of(source: Source, width: Width) -> dict[str, Any]:
    """The config.json that the model would have in the store. Raises as adding it does, as far as
    can be told."""
    path = source.path
    if source.ollama:
        return _of_gguf(ollama.read_header(source.ollama), width)
    if path is None:
        with hub.gguf_header(source.repository, source.revision, source.tag) as header:
            if header is not None:
                return _of_gguf(header, width)
        config = hub.config_of(source.repository, source.revision)
    elif path.is_dir():
        config = read_config(path)
    elif path.suffix.lower() == ".gguf":
        return _of_gguf(read_gguf(path), width)
    else:
        config = read_json(path, str(path), "model")
        if not isinstance(config, dict):
            raise InvalidArgumentError(f"{path}: holds no object", field="model")
    settings = checked_quantisation(config)
    plain = without_quantisation(config)
    parse_config(plain)
    return plain if settings is None else _stored(plain, _expected(settings, width))


def _of_gguf(header: GgufFile, width: Width) -> dict[str, Any]:
    file, _ = llama_cpp_form(header)
    config = gguf_config.config_of(file)
    return with_stored(config, stored_types(file, config, width))


def further_notes(source: Source, config: Mapping[str, Any]) -> tuple[str, ...]:
    """A note of the blocks that predict further tokens, with their size where the source is a
    directory of weights.

    Their headers are read. Raises as `stored_tensors` does, but for a directory that has none.
    """
    if source.path is not None and source.path.is_dir():
        with suppress(NotFoundError):
            return tensor_notes(config, stored_tensors(ModelDirectory.at(source.path)))
    return named_further_notes(config)


def _stored(config: dict[str, Any], stored_as: Quantisation | None) -> dict[str, Any]:
    return config if stored_as is None else {**config, STORED_AS: stored_as.value}


def _expected(settings: Mapping[str, Any], width: Width) -> Quantisation | None:
    """The form in which weights of this `quantization_config` would be stored; nearly all of them
    have a whole head."""
    kind = _integers(check_method(settings), settings, width)
    return None if kind is None else Quantisation.of(kind, WHOLE_HEAD)


def _integers(method: str, settings: Mapping[str, Any], width: Width) -> IntegerFormat | None:
    if method == "awq":
        return IntegerFormat.INT8 if settings.get("zero_point", True) else IntegerFormat.INT4
    if method == "gptq":
        if settings.get("desc_act"):
            return width.integers
        small = settings.get("bits") == 4 and settings.get("sym", True)
        return IntegerFormat.INT4 if small else IntegerFormat.INT8
    if method == "compressed-tensors":
        groups = settings.get("config_groups")
        first: object = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
        weights = first.get("weights") if isinstance(first, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("type") == "int":
            small = weights.get("num_bits") == 4 and weights.get("symmetric", True)
            return IntegerFormat.INT4 if small else IntegerFormat.INT8
    return IntegerFormat.INT8 if method == "mxfp4" else width.integers
