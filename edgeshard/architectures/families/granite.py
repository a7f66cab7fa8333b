"""granite: the Llama kind with multipliers of embeddings, residual branches, attention's scores and
logits."""

from __future__ import annotations

from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import llama_block, multiplied_style, scaled_ends
from edgeshard.architectures.record import Architecture, Fused, Library

ARCHITECTURE = Architecture(
    name="granite",
    defaults={
        "num_key_value_heads": "num_attention_heads",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
        "eos_token_id": 2,
    },
    numbers=(
        "rms_norm_eps",
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
    ),
    block=llama_block(bias="attention_bias", mlp_bias="mlp_bias"),
    library=Library("granite", "Granite"),
    runs=Fused(multiplied_style),
    ends=scaled_ends,
    gguf=Gguf(permuted=True),
)
