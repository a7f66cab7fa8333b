"""A small random model whose requests have states: of its four layers three have linear attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.agent.model.families import VARIANTS


def save_hybrid(path: Path, **sizes: int) -> Any:
    """Write a checkpoint in float32; transformers' model of it. `sizes` are keys of its config."""
    torch.manual_seed(3)
    config = VARIANTS["qwen3_5-text"].library_config()
    for name, size in {"initializer_range": 0.15, **sizes}.items():
        setattr(config, name, size)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    model.save_pretrained(path)
    return model


def answer_alone(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """The likeliest tokens, each from one pass over all before it."""
    ids = list(prompt)
    for _ in range(new_tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]
