"""mistral: one window for all blocks, 4096 where config.json leaves it out. Of models for pictures the text runs."""

from __future__ import annotations

from edgeshard.architectures.parts import llama_block, llama_style
from edgeshard.architectures.record import Architecture, Fused, Library
from edgeshard.architectures.windows import Windows

ARCHITECTURE = Architecture(
    name="mistral",
    nested={"mistral3": "mistral"},
    defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6, "eos_token_id": 2},
    windows=Windows(default=4096),
    prefixes=("model.", "language_model."),
    block=llama_block(),
    library=Library("mistral", "Mistral"),
    runs=Fused(llama_style),
)
