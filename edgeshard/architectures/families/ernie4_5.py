"""ernie4_5: the Llama kind with a rotary embedding of neighbours, in full precision; one flag for
all biases."""

from __future__ import annotations

from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import llama_block, never_null
from edgeshard.architectures.record import Architecture, Library, Plugged

ARCHITECTURE = Architecture(
    name="ernie4_5",
    defaults={
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
    flags=("use_bias",),
    checks=(never_null("num_key_value_heads", "head_dim"),),
    block=llama_block(bias="use_bias", mlp_bias="use_bias"),
    library=Library("ernie4_5", "Ernie4_5"),
    runs=Plugged(),
    gguf=Gguf(),
)
