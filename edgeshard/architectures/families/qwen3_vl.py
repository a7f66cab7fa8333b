"""qwen3_vl, its text part only: qwen3 without windows. For text the three positions of a token are
the same one."""

from __future__ import annotations

from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import head_norms, llama_block, llama_style
from edgeshard.architectures.record import Architecture, Fused, Library
from edgeshard.architectures.rope import SECTION_KEYS, Rope

ARCHITECTURE = Architecture(
    name="qwen3_vl",
    model_types=("qwen3_vl_text",),
    nested={"qwen3_vl": "qwen3_vl_text"},
    defaults={
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 128_000,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
    },
    flags=("attention_bias",),
    rope=Rope(unread=SECTION_KEYS, theta=500_000.0),
    prefixes=("model.", "language_model."),
    block=llama_block(bias="attention_bias", attention_norms=head_norms),
    library=Library("qwen3_vl", "Qwen3VLText"),
    runs=Fused(llama_style),
    gguf=Gguf(("qwen3vl",)),
)
