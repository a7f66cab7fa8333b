"""qwen3: norms of each head's query and key, and heads of 128 unless config.json says otherwise."""

from __future__ import annotations

from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import head_norms, llama_block, llama_style
from edgeshard.architectures.record import Architecture, Fused, Library
from edgeshard.architectures.windows import Windows, from_layer

ARCHITECTURE = Architecture(
    name="qwen3",
    nested={"internvl": "qwen3"},
    defaults={"head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6},
    windows=Windows(4096, switch="use_sliding_window", sliding=from_layer(28, "max_window_layers")),
    prefixes=("model.", "language_model."),
    block=llama_block(bias="attention_bias", attention_norms=head_norms),
    library=Library("qwen3", "Qwen3"),
    runs=Fused(llama_style),
    gguf=Gguf(),
)
