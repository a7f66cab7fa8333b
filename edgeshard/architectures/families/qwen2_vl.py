"""qwen2_vl, its text part only: qwen2. For text the three positions of a token are the same one.

Older files have the decoder's keys at the top, newer ones in `text_config`.
"""

from __future__ import annotations

from dataclasses import replace

from edgeshard.architectures.families.qwen2 import ARCHITECTURE as QWEN2
from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.record import Library
from edgeshard.architectures.rope import SECTION_KEYS, WITH_SECTIONS, Rope
from edgeshard.architectures.windows import Windows, from_layer

ARCHITECTURE = replace(
    QWEN2,
    name="qwen2_vl",
    model_types=("qwen2_vl", "qwen2_vl_text"),
    nested={"qwen2_vl": "qwen2_vl_text"},
    either_ties=frozenset({"qwen2_vl"}),
    defaults={
        "hidden_size": 8192,
        "intermediate_size": 29_568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 152_064,
        "max_position_embeddings": 32_768,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "eos_token_id": 151_645,
    },
    nested_defaults={},
    rope=Rope(kinds=WITH_SECTIONS, unread=SECTION_KEYS, theta=1_000_000.0),
    windows=Windows(4096, switch="use_sliding_window", sliding=from_layer(80, "max_window_layers")),
    prefixes=("model.", "language_model."),
    library=Library(
        "qwen2_vl",
        "Qwen2VL",
        config="Qwen2VLTextConfig",
        rotary="Qwen2VLRotaryEmbedding",
        norm="Qwen2RMSNorm",
    ),
    gguf=Gguf(("qwen2vl",)),
)
