"""hunyuan_v1_moe: hunyuan_v1_dense with experts in all blocks, beside an MLP that every token
uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeshard.architectures.families.hunyuan_v1_dense import (
    ROPE,
    attention_part,
    check_alpha,
    with_head_dim,
)
from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import expert_count, expert_mlps, fixed_values, gated_mlp, linear
from edgeshard.architectures.record import Architecture, Experts, Library, Plugged, Shapes
from edgeshard.architectures.shape import ModelShape

_EXPERTS = Experts(count=("num_experts",), top_k="moe_topk")
_NAMES = {"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"}
_BY_LAYER = ("moe_topk", "num_experts", "moe_intermediate_size", "num_shared_expert")


def _current(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Lists by layer as the one number that they repeat."""
    config = {_NAMES.get(key, key): value for key, value in with_head_dim(values).items()}
    for key in _BY_LAYER:
        listed = config.get(key)
        if isinstance(listed, list) and listed and all(item == listed[0] for item in listed):
            config[key] = listed[0]
    return config


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    count, inner = expert_count(_EXPERTS, fields), fields.size("intermediate_size")
    return (
        attention_part(fields, shape)
        | linear("mlp.gate.wg", count, shape.hidden_size)
        | expert_mlps(shape, count, inner)
        | gated_mlp(shape, inner, path="mlp.shared_mlp")
    )


def _check(fields: ConfigFields, layer_count: int) -> None:
    inner = fields.size("intermediate_size")
    if (of_experts := fields.size("moe_intermediate_size", inner)) != inner:
        raise fields.refuse(
            "moe_intermediate_size", f"is {of_experts}; it must be intermediate_size {inner}"
        )


ARCHITECTURE = Architecture(
    name="hunyuan_v1_moe",
    current=_current,
    defaults={
        "num_key_value_heads": "num_attention_heads",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "num_experts": 1,
        "moe_topk": 1,
        "eos_token_id": 2,
    },
    flags=("attention_bias",),
    checks=(
        check_alpha,
        _check,
        fixed_values(
            mlp_bias=False,
            moe_layer_num_skipped=0,
            norm_topk_prob=True,
            norm_type="rms",
            num_shared_expert=1,
            use_cla=False,
            use_mixed_mlp_moe=True,
            use_qk_norm=True,
            use_rotary_pos_emb=True,
        ),
    ),
    rope=ROPE,
    experts=_EXPERTS,
    block=_block,
    library=Library("hunyuan_v1_moe", "HunYuanMoEV1"),
    runs=Plugged(experts="mlp.experts", float32=r"gate\.wg\.weight$"),
    whole=r"gate\.wg\.weight$",
    gguf=Gguf(("hunyuan-moe",)),
)
