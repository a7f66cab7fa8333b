"""Settings of a tokenizer that older checkpoints keep in other files than tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeshard.storage.forms import decode_text, malformed, parse_json_object, special_tokens_of
from edgeshard.storage.model_directory import ModelDirectory, open_regular

SPECIAL_TOKENS, TEMPLATE = "special_tokens_map.json", "chat_template.json"
OLDER_FILES = (SPECIAL_TOKENS, TEMPLATE)
LIMIT_BYTES = 1 << 20


def older_settings(
    model: ModelDirectory, settings: Mapping[str, Any], has_template: bool
) -> dict[str, Any]:
    """Return the keys that older files add to tokenizer_config.json, `settings`, which wins; empty
    if they add nothing.

    A null in `settings` counts as absent. `has_template` is whether the model has a
    chat_template.jinja. Raises InvalidArgumentError naming a file that is no JSON object, and as
    `ModelDirectory.file` does.
    """
    added: dict[str, Any] = {}
    if model.has(SPECIAL_TOKENS):
        tokens = special_tokens_of(_read(model, SPECIAL_TOKENS))
        added |= {name: text for name, text in tokens.items() if settings.get(name) is None}
    if not has_template and settings.get("chat_template") is None and model.has(TEMPLATE):
        template = _read(model, TEMPLATE).get("chat_template")
        if isinstance(template, str):
            added["chat_template"] = template
    return added


def _read(model: ModelDirectory, name: str) -> dict[str, Any]:
    with open_regular(model.file(name), name) as file:
        data = file.read(LIMIT_BYTES + 1)
    if len(data) > LIMIT_BYTES:
        raise malformed(name, f"has more than the {LIMIT_BYTES} bytes that are accepted")
    return parse_json_object(decode_text(data, name), name)
