"""Models whose weights must be converted, of any size: a Llama in FP8 with random weights."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from edgeshard.architectures import expected_tensors
from tests.support.chat_models import DEMO_MODEL

_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
_CHUNK = 1 << 24


def write_fp8_model(directory: Path, layers: int = 2, hidden: int = 512) -> int:
    """Write a checkpoint into a new directory; the bytes of its weights. With `hidden` 2,048 a
    layer has 55 MB."""
    config: dict[str, Any] = json.loads((DEMO_MODEL / "config.json").read_text())
    config |= {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    config |= {
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "head_dim": 64,
    }
    directory.mkdir(parents=True)
    settings = {"quantization_config": {"quant_method": "fp8"}}
    (directory / "config.json").write_text(json.dumps(config | settings))
    for name in _COPIED:
        (directory / name).write_bytes((DEMO_MODEL / name).read_bytes())
    entries: dict[str, tuple[str, tuple[int, ...]]] = {}
    for tensor in expected_tensors(config).values():
        is_matrix = len(tensor.shape) == 2 and "embed" not in tensor.name
        entries[f"model.{tensor.name}"] = ("F8_E4M3" if is_matrix else "F32", tensor.shape)
        if is_matrix:
            entries[f"model.{tensor.name}_scale"] = ("F32", (1,))
    return _write_safetensors(directory / "model.safetensors", entries)


def _write_safetensors(path: Path, entries: dict[str, tuple[str, tuple[int, ...]]]) -> int:
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in entries.items():
        size = math.prod(shape) * (1 if dtype.startswith("F8") else 4)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    random = np.random.default_rng(7).integers(0, 0x70, _CHUNK, np.uint8)  # no NaN
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for number, (dtype, shape) in enumerate(entries.values()):
            random[:4] = number % 0x70, number // 0x70, 1, 1  # no two tensors are the same
            left = math.prod(shape)
            while left:
                values = random[: min(left, _CHUNK)]
                numbers = values if dtype.startswith("F8") else (values / 1000).astype("<f4")
                file.write(numbers.tobytes())
                left -= len(values)
    return end
