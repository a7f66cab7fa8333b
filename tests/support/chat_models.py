"""The demo model with another chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
AS_IT_IS = (DEMO_MODEL / "chat_template.jinja").read_text(encoding="utf-8")


def demo_model_with(
    directory: Path, template: str | None = AS_IT_IS, generation: Mapping[str, Any] | None = None
) -> Path:
    """A directory with the demo model, this chat template (None for none), and these values in its
    generation_config.json."""
    directory.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (directory / name).write_bytes((DEMO_MODEL / name).read_bytes())
    values = json.loads((DEMO_MODEL / "generation_config.json").read_text(encoding="utf-8")) | dict(generation or {})
    (directory / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory
