"""olmo2: norms behind attention and MLP instead of before them, and over the whole rows of queries
and keys."""

from __future__ import annotations

from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import BEHIND_NORMS, llama_block, llama_style, row_norms
from edgeshard.architectures.record import Architecture, Fused, Library

ARCHITECTURE = Architecture(
    name="olmo2",
    defaults={
        "num_key_value_heads": "num_attention_heads",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50279,
    },
    flags=("attention_bias",),
    block=llama_block(bias="attention_bias", norm_names=BEHIND_NORMS, attention_norms=row_norms),
    library=Library("olmo2", "Olmo2"),
    runs=Fused(llama_style),
    gguf=Gguf(applies=lambda fields: fields.get("attention.sliding_window") is None),
)
