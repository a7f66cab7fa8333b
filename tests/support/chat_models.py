"""The demo model with another chat template, as a directory and as a `ChatModel`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeshard.chat.chat_model import ChatModel

DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
AS_IT_IS = (DEMO_MODEL / "chat_template.jinja").read_text(encoding="utf-8")


def demo_model_with(
    directory: Path, template: str | None = AS_IT_IS, generation: Mapping[str, Any] | None = None
) -> Path:
    """A directory with the demo model, this chat template (None if it has none), and these values
    in its generation_config.json."""
    directory.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (directory / name).write_bytes((DEMO_MODEL / name).read_bytes())
    values = json.loads((DEMO_MODEL / "generation_config.json").read_text(encoding="utf-8")) | dict(
        generation or {}
    )
    (directory / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


def model_with(
    settings: dict[str, Any] | None = None,
    template: str = "",
    special: tuple[str, ...] = (),
    **more: Any,
) -> ChatModel:
    """The chat side of the demo model with these settings of its tokenizer, this chat template,
    these special tokens besides its own, and `more` in its generation_config.json."""
    tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    for number, text in enumerate(special):
        token = {"id": 4096 + number, "content": text, "special": True}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append(token | flags)
    files = {"tokenizer.json": json.dumps(tokenizer).encode()}
    if settings is not None:
        files["tokenizer_config.json"] = json.dumps(settings).encode()
    if template:
        files["chat_template.jinja"] = template.encode()
    if more:
        files["generation_config.json"] = json.dumps(more).encode()
    return ChatModel.from_files(files)
