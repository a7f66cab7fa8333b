"""Numbers that no model has: refused by name in no time, wherever they stand."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from edgeshard.architectures import KNOWN_MODELS, parse_config
from edgeshard.architectures.limits import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_EXPERTS_IN_ALL,
    MAX_LAYERS,
    MAX_SIZE,
    MAX_VOCABULARY,
)
from edgeshard.domain.errors import UnsupportedModelError
from edgeshard.planning.inputs.shapes import model_from_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
MIXTURE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
ABSURD = (10**9, 2**31 - 1, 2**63, 10**400, -1, 0)


def refused(config: Mapping[str, Any]) -> UnsupportedModelError:
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(UnsupportedModelError) as caught:
        model_from_config("absurd", config)
    took = time.process_time() - began
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 0.5 and peak < 4 << 20
    assert len(caught.value.message) < 500
    return caught.value


@pytest.mark.parametrize("key", [key for key, value in LLAMA.items() if isinstance(value, int)])
@pytest.mark.parametrize(
    "value", ABSURD, ids=lambda value: f"{value:.1e}" if value < 10**300 else "1e400"
)
def test_each_number_is_refused_by_name(key: str, value: int) -> None:
    assert refused(LLAMA | {key: value}).field == key


@pytest.mark.parametrize(
    ("key", "most"),
    [
        ("num_hidden_layers", MAX_LAYERS),
        ("vocab_size", MAX_VOCABULARY),
        ("max_position_embeddings", MAX_CONTEXT),
        ("intermediate_size", MAX_SIZE),
    ],
)
def test_the_largest_number_is_taken_and_the_next_is_not(key: str, most: int) -> None:
    parse_config(LLAMA | {key: most})
    assert str(most) in refused(LLAMA | {key: most + 1}).message


def test_layers_times_experts_have_a_limit() -> None:
    """Each within its own, together a million tensors three times over: 40 s and 800 MB to list."""
    error = refused(MIXTURE | {"num_hidden_layers": MAX_LAYERS, "num_experts": MAX_EXPERTS})
    assert error.field == "num_experts"
    parse_config(MIXTURE | {"num_hidden_layers": 32, "num_experts": MAX_EXPERTS_IN_ALL // 32})
    refused(MIXTURE | {"num_hidden_layers": 33, "num_experts": MAX_EXPERTS_IN_ALL // 32})


def test_heads_times_their_width_have_a_limit() -> None:
    assert (
        refused(LLAMA | {"num_attention_heads": 2**14, "head_dim": 2**14}).field
        == "num_attention_heads"
    )


def _numbers(config: Mapping[str, Any]) -> Iterator[str]:
    yield from (
        key
        for key, value in config.items()
        if isinstance(value, int) and not isinstance(value, bool)
    )


@pytest.mark.parametrize("name", sorted(KNOWN_MODELS))
def test_no_number_of_any_family_takes_time_or_memory(name: str) -> None:
    """Those that mean nothing to us may have any value."""
    for key in _numbers(KNOWN_MODELS[name]):
        for value in (10**9, 10**400):
            began = time.process_time()
            try:
                parse_config(dict(KNOWN_MODELS[name]) | {key: value})
            except UnsupportedModelError as error:
                assert error.field
            assert time.process_time() - began < 0.5, key


@pytest.mark.parametrize("value", ["x" * 10**6, [[0] * 1000] * 1000, {"a" * 10**6: 1}, 10**4000])
@pytest.mark.parametrize(
    "key", ["model_type", "hidden_act", "hidden_size", "eos_token_id", "tie_word_embeddings"]
)
def test_a_message_quotes_no_more_than_a_line(key: str, value: object) -> None:
    if key == "eos_token_id" and isinstance(value, int):
        return  # beyond the vocabulary: never sampled
    refused(LLAMA | {key: value})
    refused(LLAMA | {"rope_scaling": {"rope_type": value, "k" * 10**5: 0}})
