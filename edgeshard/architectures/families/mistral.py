"""mistral: one window for all blocks, 4096 where config.json leaves it out. Of models for pictures
the text runs."""

from __future__ import annotations

from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import llama_block, llama_style
from edgeshard.architectures.record import Architecture, Fused, Library
from edgeshard.architectures.windows import Windows

ARCHITECTURE = Architecture(
    name="mistral",
    nested={"mistral3": "mistral", "llava": "mistral"},
    either_ties=frozenset({"llava"}),
    defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6, "eos_token_id": 2},
    nested_defaults={
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32_000,
        "max_position_embeddings": 131_072,
    },
    windows=Windows(default=4096),
    prefixes=("model.", "language_model."),
    block=llama_block(),
    library=Library("mistral", "Mistral"),
    runs=Fused(llama_style),
    gguf=Gguf(("mistral3",), permuted=True, config=lambda fields: {"sliding_window": None}),
)
