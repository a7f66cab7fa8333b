"""Typed reading of a config.json: a value that is missing or wrong raises UnsupportedModelError naming its field."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from edgeshard.errors import UnsupportedModelError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma3", "phi3", "gpt2", "opt")
"""The allow-list. `gemma3` stands for both `gemma3_text` and a nested `gemma3`, of which only the text part runs."""

_LARGEST = 2**31 - 1


def refuse(field: str, why: str, reason: str = "") -> UnsupportedModelError:
    """The error for `field`; `why` says what is wrong and what to do."""
    return UnsupportedModelError(f"config.json: {field} {why}", field=field, reason=reason)


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """The part of a config.json that describes the decoder. `prefix` is put before a field's name in errors."""

    architecture: str
    values: Mapping[str, Any]
    prefix: str = ""

    def name(self, key: str) -> str:
        return self.prefix + key

    def refuse(self, key: str, why: str) -> UnsupportedModelError:
        return refuse(self.name(key), why)

    def given(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer. Null counts as missing, which is an error without a default."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.refuse(key, "is missing; use the complete config.json of the checkpoint")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(key, f"is {value!r}; it must be a positive integer")
        if not 0 < value <= _LARGEST:
            raise self.refuse(key, f"is {value}; it must be between 1 and {_LARGEST}")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive finite number."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(key, f"is {value!r}; it must be a positive number")
        if not (math.isfinite(value) and value > 0):
            raise self.refuse(key, f"is {value}; it must be a positive finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, f"is {value!r}; it must be true or false")
        return value

    def choice(self, key: str, default: str, choices: Collection[str]) -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or value not in choices:
            raise self.refuse(key, f"is {value!r}; EdgeShard runs {', '.join(sorted(choices))}")
        return value

    def layer_list(self, key: str, layer_count: int) -> tuple[int, ...]:
        """A list of distinct block indices, empty when missing."""
        value = self.values.get(key)
        if value is None:
            return ()
        valid = isinstance(value, list | tuple) and all(
            isinstance(item, int) and not isinstance(item, bool) and 0 <= item < layer_count for item in value
        )
        if not valid:
            raise self.refuse(key, f"is {value!r}; it must be a list of layers below {layer_count}")
        return tuple(value)


def decoder_fields(config: Mapping[str, Any]) -> ConfigFields:
    """The decoder's part of a config.json, for an architecture on the allow-list."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise refuse("model_type", "is missing; use the complete config.json of the checkpoint")
    if model_type == "gemma3":
        nested = config.get("text_config")
        if not isinstance(nested, Mapping):
            raise refuse("text_config", "is missing or not an object; a gemma3 checkpoint needs it")
        inner = nested.get("model_type", "gemma3_text")
        if inner != "gemma3_text":
            raise refuse("text_config.model_type", f"is {inner!r}; it must be gemma3_text")
        return ConfigFields("gemma3", nested, "text_config.")
    architecture = "gemma3" if model_type == "gemma3_text" else model_type
    if architecture not in ARCHITECTURES:
        raise refuse("model_type", f"{model_type!r} is not supported; use one of {', '.join(ARCHITECTURES)}")
    return ConfigFields(architecture, config)
