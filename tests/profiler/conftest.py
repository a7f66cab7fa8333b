"""A configuration that takes no time to measure."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def tiny_config() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
