"""phi3: queries, keys and values in one tensor, gate and up in another; a rotary embedding of a part of each head."""

from __future__ import annotations

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.parts import linear, llama_style, norms
from edgeshard.architectures.record import Architecture, Fused, Library, Shapes
from edgeshard.architectures.rope import Rope
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import Windows


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    hidden, inner = shape.hidden_size, fields.size("intermediate_size")
    query, key_value = shape.attention_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return (
        norms(hidden, "input_layernorm", "post_attention_layernorm")
        | linear("self_attn.qkv_proj", query + 2 * key_value, hidden)
        | linear("self_attn.o_proj", hidden, query)
        | linear("mlp.gate_up_proj", 2 * inner, hidden)
        | linear("mlp.down_proj", hidden, inner)
    )


ARCHITECTURE = Architecture(
    name="phi3",
    defaults={
        "num_key_value_heads": "num_attention_heads",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "eos_token_id": 32000,
    },
    # longrope picks its factors by the longest position of all requests in a step.
    rope=Rope(kinds=frozenset({"default"}), partial=True),
    windows=Windows(),
    block=_block,
    library=Library("phi3", "Phi3"),
    runs=Fused(llama_style),
)
