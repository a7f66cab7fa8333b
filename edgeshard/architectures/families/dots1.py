"""dots1: qwen3's attention with the mixtures of glm4_moe, and windows from a layer on."""

from __future__ import annotations

from typing import Any

from edgeshard.architectures.families.glm4_moe import ARCHITECTURE as GLM4_MOE
from edgeshard.architectures.families.glm4_moe import dense_or_mixture
from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf, GgufFields, sliding
from edgeshard.architectures.parts import LLAMA_NORMS, attention, head_norms, norms
from edgeshard.architectures.record import Architecture, Library, Shapes
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import Windows, from_layer


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    bias = fields.flag("attention_bias")
    return (
        norms(shape.hidden_size, *LLAMA_NORMS)
        | attention(shape, input_bias=bias, output_bias=bias)
        | head_norms(shape)
        | dense_or_mixture(fields, shape, layer)
    )


def _gguf(fields: GgufFields) -> dict[str, Any]:
    dense = fields.layers_with("ffn_gate_inp.weight").count(False)
    return sliding(fields) | {"first_k_dense_replace": dense}


ARCHITECTURE = Architecture(
    name="dots1",
    defaults={
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 152_064,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    flags=("attention_bias", "norm_topk_prob"),
    sizes=GLM4_MOE.sizes,
    numbers=GLM4_MOE.numbers,
    checks=GLM4_MOE.checks,
    windows=Windows(4096, sliding=from_layer(62, "max_window_layers")),
    experts=GLM4_MOE.experts,
    block=_block,
    library=Library("dots1", "Dots1"),
    runs=GLM4_MOE.runs,
    gguf=Gguf(config=_gguf),
)
