"""Ollama's template, system text and parameters of a model, as the small files that travel with
it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgeshard.importing.imported import Imported
from edgeshard.storage.checkpoint import StoredFile
from edgeshard.storage.forms import (
    GENERATION,
    TOKENIZER,
    TOKENIZER_SETTINGS,
    check_small_file,
    parse_json_object,
    token_id,
    unusable_defaults,
)

_DEFAULTS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "repeat_penalty": "repetition_penalty",
    "repetition_penalty": "repetition_penalty",
}
"""Ollama's parameters that generation_config.json has a name for."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a model: `template` is a Go template, `renderer` the name of code of Ollama's
    that replaces one.

    `left_out` are the kinds of further blobs, which EdgeShard does not use.
    """

    template: str = ""
    renderer: str = ""
    system: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    left_out: Sequence[str] = ()


def with_settings(imported: Imported, settings: Settings, scratch: Path) -> Imported:
    """The model with the settings as its defaults; notes name those that have no place.

    Files of `scratch` are written. Raises InvalidArgumentError for texts that a model's small files
    cannot hold.
    """
    notes = [f"its {kind} is left out" for kind in settings.left_out]
    files = {file.name: file for file in imported.checkpoint.files}
    if TOKENIZER not in files:
        return replace(imported, notes=(*imported.notes, *notes))
    tokenizer = _read(files, TOKENIZER)
    tokens = _read(files, TOKENIZER_SETTINGS)
    generation = _read(files, GENERATION)
    notes += _template_notes(tokens, settings)
    notes += _add_system(tokens, settings.system)
    notes += _add_parameters(generation, settings.parameters, tokenizer)
    for name, values in ((TOKENIZER_SETTINGS, tokens), (GENERATION, generation)):
        files[name] = _written(scratch, name, values)
    checkpoint = replace(imported.checkpoint, files=tuple(files.values()))
    return Imported(checkpoint, (*imported.notes, *notes))


def _read(files: Mapping[str, StoredFile], name: str) -> dict[str, Any]:
    return (
        parse_json_object(files[name].path.read_text(encoding="utf-8"), name)
        if name in files
        else {}
    )


def _written(scratch: Path, name: str, values: Mapping[str, Any]) -> StoredFile:
    data = json.dumps(values, ensure_ascii=False).encode("utf-8", "surrogatepass")
    check_small_file(name, data)
    path = scratch / name
    path.write_bytes(data)
    return StoredFile(name, path, len(data))


def _template_notes(tokens: Mapping[str, Any], settings: Settings) -> list[str]:
    """A note for a template or renderer of Ollama's: neither is run."""
    replaced = settings.renderer or ("template" if settings.template else "")
    if not replaced:
        return []
    if "chat_template" in tokens:
        return [f"Ollama's {replaced} is not run: the model's chat template is"]
    return [
        f"Ollama's {replaced} is not run, and the model has no chat template: it takes plain "
        "prompts"
    ]


def _add_system(tokens: dict[str, Any], system: str) -> list[str]:
    template = tokens.get("chat_template")
    if not system:
        return []
    if template is None:
        return ["its system text is left out: it has no chat template"]
    if isinstance(template, str):
        tokens["chat_template"] = _with_system(template, system)
    else:
        templates = [
            {**item, "template": _with_system(item["template"], system)} for item in template
        ]
        tokens["chat_template"] = templates
    return ["its system text is that of conversations without one"]


def _with_system(template: str, system: str) -> str:
    """The template, which gets a system message first if a conversation has none."""
    message = json.dumps({"role": "system", "content": system}, ensure_ascii=False)
    return (
        "{%- if not messages or messages[0].role != 'system' -%}"
        f"{{%- set messages = [{message}] + (messages | list) -%}}"
        "{%- endif -%}" + template
    )


def _add_parameters(
    generation: dict[str, Any], parameters: Mapping[str, Any], tokenizer: Mapping[str, Any]
) -> list[str]:
    notes = []
    values = {_DEFAULTS[name]: value for name, value in parameters.items() if name in _DEFAULTS}
    for why in unusable_defaults(values):
        notes.append(f"its parameters: {why}; this one is left out")
    generation |= values
    notes += _add_stops(generation, parameters.get("stop"), tokenizer)
    context = parameters.get("num_ctx")
    if context is not None:
        notes.append(
            f"its num_ctx of {str(context)[:20]} is left out: set --max-context for a deployment"
        )
    others = sorted(name for name in parameters if name not in {*_DEFAULTS, "stop", "num_ctx"})
    if others:
        notes.append(
            f"its parameters {', '.join(others)[:400]} are left out: requests may have them"
        )
    return notes


def _add_stops(
    generation: dict[str, Any], stops: object, tokenizer: Mapping[str, Any]
) -> list[str]:
    """Stop texts that are one token of the model end an answer as its own ends do."""
    texts = stops if isinstance(stops, list) else [stops]
    ends = generation.get("eos_token_id")
    tokens = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    others = []
    for text in texts:
        if not isinstance(text, str) or not text:
            continue
        token = token_id(dict(tokenizer), text)
        if token is None:
            others.append(text)
        else:
            tokens.add(token)
    if tokens:
        generation["eos_token_id"] = sorted(tokens)
    if not others:
        return []
    return [
        f"its stop texts {', '.join(map(repr, others))[:400]} are no tokens and are left out: "
        "requests may have them"
    ]
