"""gemma: the Llama kind with norms that multiply by 1 + weight and a scaled embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import gemma_ends, llama_block, llama_style
from edgeshard.architectures.record import Architecture, BlockStyle, Fused, Library
from edgeshard.architectures.shape import ModelShape

_TANH = "gelu_pytorch_tanh"


def _current(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values with the activation of the published models, which the first files call gelu."""
    return {**values, "hidden_act": _TANH} if values.get("hidden_act") == "gelu" else values


def _style(fields: ConfigFields, shape: ModelShape, layer: int) -> BlockStyle:
    return replace(llama_style(fields, shape, layer), unit_offset=True)


ARCHITECTURE = Architecture(
    name="gemma",
    current=_current,
    defaults={
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "hidden_act": _TANH,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
    flags=("attention_bias",),
    refused={"use_bidirectional_attention": "is set; EdgeShard runs causal models only"},
    block=llama_block(bias="attention_bias"),
    library=Library("gemma", "Gemma"),
    runs=Fused(_style),
    ends=gemma_ends(unit_offset=True),
    gguf=Gguf(unit_norms=r"norm\.weight$"),
)
