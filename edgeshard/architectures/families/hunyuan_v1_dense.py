"""hunyuan_v1_dense: the Llama kind with norms of each head's query and key behind the rotary
embedding, whose base an `alpha` makes larger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import LLAMA_NORMS, attention, gated_mlp, norms
from edgeshard.architectures.record import Architecture, Library, Plugged, Shapes
from edgeshard.architectures.rope import STATIC, Rope
from edgeshard.architectures.shape import ModelShape

ROPE = Rope(kinds=STATIC | {"dynamic"})
"""The type is called dynamic, though a fixed alpha makes it none."""


def with_head_dim(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values with the heads' size under the key of transformers' class, where a file has
    another one."""
    return {**values, "head_dim": values.get("head_dim") or values.get("attention_head_dim")}


def attention_part(fields: ConfigFields, shape: ModelShape) -> Shapes:
    """Norms and attention of a block."""
    bias = fields.flag("attention_bias")
    return (
        norms(shape.hidden_size, *LLAMA_NORMS)
        | attention(shape, input_bias=bias, output_bias=bias)
        | norms(shape.head_dim, "self_attn.query_layernorm", "self_attn.key_layernorm")
    )


def check_alpha(fields: ConfigFields, layer_count: int) -> None:
    """Refuse a rotary embedding that depends on the requests seen, and heads without a size."""
    fields.size("head_dim")  # transformers computes none
    for key in ("rope_scaling", "rope_parameters"):
        entry = fields.values.get(key)
        if not isinstance(entry, Mapping) or "dynamic" not in (
            entry.get("type"),
            entry.get("rope_type"),
        ):
            continue
        if not isinstance(entry.get("alpha"), int | float):
            raise fields.refuse(
                f"{key}.alpha", "is missing: without it frequencies depend on the requests seen"
            )


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    return attention_part(fields, shape) | gated_mlp(shape, fields.size("intermediate_size"))


ARCHITECTURE = Architecture(
    name="hunyuan_v1_dense",
    current=with_head_dim,
    defaults={
        "num_key_value_heads": "num_attention_heads",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
    },
    flags=("attention_bias",),
    refused={
        "mlp_bias": "is set, which hunyuan_v1_dense does not run",
        "use_cla": "is set, which is not run",
    },
    checks=(check_alpha,),
    rope=ROPE,
    block=_block,
    library=Library("hunyuan_v1_dense", "HunYuanDenseV1"),
    runs=Plugged(),
    gguf=Gguf(("hunyuan-dense",)),
)
