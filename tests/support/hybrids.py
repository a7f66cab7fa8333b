"""Small random models, such as one whose requests have states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.agent.model.families import VARIANTS


def save_random(path: Path, row: str, **options: Any) -> Any:
    """Write a checkpoint of a row of families.py in float32, with other `options` of its config;
    transformers' model of it."""
    torch.manual_seed(3)
    variant = VARIANTS[row]
    config = replace(
        variant, options=variant.options | {"initializer_range": 0.15} | options
    ).library_config()
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    model.save_pretrained(path)
    return model


def save_hybrid(path: Path, **options: Any) -> Any:
    """The same of a model whose requests have states: of its four layers three have linear
    attention."""
    return save_random(path, "qwen3_5-text", **options)


def likeliest(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """The likeliest tokens after the prompt and after each of the answer's tokens except the last,
    by one pass over all. They equal the answer if each of its tokens is the likeliest."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer[:-1]]]), use_cache=False).logits[0]
    return [int(token) for token in logits[len(prompt) - 1 :].argmax(-1)]
