"""step3p5: windows in three of four blocks, which have more heads, a gate on each head's output,
norms that multiply by 1 + weight, and experts beside an MLP that every token uses, both with
clamped activations. Of step3p7 the text runs.

Files may hold blocks for predicting further tokens behind the decoder's own; those are not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeshard.architectures.fields import ConfigFields, refuse, shown
from edgeshard.architectures.parts import (
    even_split,
    expert_count,
    expert_mlps,
    fixed_values,
    gated_mlp,
    head_norms,
    linear,
    norms,
)
from edgeshard.architectures.record import Architecture, Experts, Joined, Library, Plugged, Shapes
from edgeshard.architectures.rope import Rope
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import FULL, SLIDING, Windows

_EXPERTS = Experts(
    count=("n_routed_experts",),
    joined=tuple(
        Joined(f"moe.{name}.weight", (f"moe.experts.{{}}.{name}.weight",))
        for name in ("gate_proj", "up_proj", "down_proj")
    ),
)
_NAMES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
_BY_LAYER = ("layer_types", "mlp_layer_types", "rope_theta", "partial_rotary_factors")
_LIMITS = ("swiglu_limits", "swiglu_limits_shared")
_OTHER = "attention_other_setting"
_WINDOWS = Windows(sliding=lambda fields, layer_count: [False] * layer_count)


def _current(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values under the keys of transformers' class, for those that published files have
    instead.

    Lists by layer lose their entries of further blocks, rotary embeddings become those of each
    layer type.
    """
    config = {_NAMES.get(key, key): value for key, value in values.items()}
    layers, further = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if type(layers) is int and type(further) is int:
        for key in (*_BY_LAYER, *_LIMITS):
            if isinstance(config.get(key), list) and len(config[key]) == layers + further:
                config[key] = config[key][:layers]
    if isinstance(other := config.get(_OTHER), Mapping) and "num_attention_heads" in other:
        config.setdefault("num_sliding_attention_heads", other["num_attention_heads"])
    if (
        isinstance(listed := config.pop("moe_layers_enum", None), str | list | tuple)
        and type(layers) is int
    ):
        sparse_layers = {
            str(item).strip() for item in (listed.split(",") if isinstance(listed, str) else listed)
        }
        kinds = [
            "sparse" if str(layer) in sparse_layers else "dense"
            for layer in range(min(layers, 1024))
        ]
        config["mlp_layer_types"] = config.get("mlp_layer_types") or kinds
    return (
        config if config.get("rope_parameters") else config | {"rope_parameters": _rotary(config)}
    )


def _rotary(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary embedding of each layer type, of lists by layer, which this takes out."""
    types = config.get("layer_types") or [FULL]
    thetas, shares = config.pop("rope_theta", None), config.pop("partial_rotary_factors", None)
    scaling = config.pop("rope_scaling", None)
    entries: dict[str, Any] = {}
    for kind in (
        sorted({kind for kind in types if isinstance(kind, str)}) if isinstance(types, list) else ()
    ):
        entry: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
        for key, setting, name in (
            ("rope_theta", thetas, "rope_theta"),
            ("partial_rotary_factor", shares, "partial_rotary_factors"),
        ):
            if setting is None:
                continue
            of_kind = [setting]
            if isinstance(setting, list):
                of_kind = [
                    value for value, other in zip(setting, types, strict=False) if other == kind
                ]
                if len(setting) != len(types) or any(value != of_kind[0] for value in of_kind):
                    raise refuse(
                        name, f"must be a number for each layer, the same for all of {kind}"
                    )
            entry[key] = of_kind[0]
        if kind == FULL and isinstance(scaling, Mapping):
            entry |= scaling
        entries[kind] = entry
    return entries


def _heads(fields: ConfigFields, shape: ModelShape, layer: int) -> int:
    sliding = _WINDOWS.layer_types(fields, shape.layer_count)[layer] == SLIDING
    return fields.size("num_sliding_attention_heads") if sliding else shape.attention_heads


def _is_mixture(fields: ConfigFields, layer: int) -> bool:
    kinds = fields.values.get("mlp_layer_types")
    return layer >= 3 if kinds is None else kinds[layer] == "sparse"


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    hidden = shape.hidden_size
    bias = fields.flag("attention_bias")
    head_dim = shape.head_dim
    heads = _heads(fields, shape, layer)
    block = (
        norms(hidden, "input_layernorm", "post_attention_layernorm")
        | linear("self_attn.q_proj", heads * head_dim, hidden, bias)
        | linear("self_attn.k_proj", shape.kv_heads * head_dim, hidden, bias)
        | linear("self_attn.v_proj", shape.kv_heads * head_dim, hidden, bias)
        | linear("self_attn.o_proj", hidden, heads * head_dim, bias)
        | linear("self_attn.g_proj", heads, hidden)
        | head_norms(shape)
    )
    if not _is_mixture(fields, layer):
        return block | gated_mlp(
            shape, fields.size("intermediate_size"), bias=fields.flag("mlp_bias")
        )
    count, inner = expert_count(_EXPERTS, fields), fields.size("moe_intermediate_size")
    shared = gated_mlp(
        shape, fields.size("share_expert_dim"), path="share_expert", bias=fields.flag("mlp_bias")
    )
    router = linear("moe.gate", count, hidden) | {"moe.router_bias": (count,)}
    return block | router | expert_mlps(shape, count, inner, "moe.experts") | shared


def _check(fields: ConfigFields, layer_count: int) -> None:
    fields.count("num_nextn_predict_layers")
    heads, kv_heads = fields.size("num_sliding_attention_heads"), fields.size("num_key_value_heads")
    even_split(fields, "num_sliding_attention_heads", heads, "num_key_value_heads", kv_heads)
    other = fields.values.get(_OTHER)
    for key, same in (("num_attention_groups", kv_heads), ("head_dim", fields.size("head_dim"))):
        if isinstance(other, Mapping) and other.get(key) not in (None, same):
            why = (
                f"is {shown(other[key])}, not {same}; EdgeShard's KV pool has one size for all "
                "blocks"
            )
            raise fields.refuse(f"{_OTHER}.{key}", why)
    types = _WINDOWS.layer_types(fields, layer_count)
    sliding = {
        str(layer): {"num_attention_heads": heads}
        for layer, kind in enumerate(types)
        if kind == SLIDING
    }
    own = fields.values.get("per_layer_config")
    if own is not None and own != sliding:
        raise fields.refuse(
            "per_layer_config", "must have num_sliding_attention_heads for sliding layers only"
        )
    kinds = fields.values.get("mlp_layer_types")
    if kinds is not None and not (
        isinstance(kinds, list)
        and len(kinds) == layer_count
        and all(kind in ("dense", "sparse") for kind in kinds)
    ):
        raise fields.refuse(
            "mlp_layer_types", f"must name dense or sparse for each of the {layer_count} layers"
        )
    for key in _LIMITS:
        limits = fields.values.get(key)
        if limits is not None and not (
            isinstance(limits, list)
            and len(limits) == layer_count
            and all(
                limit is None or (type(limit) in (int, float) and limit >= 0) for limit in limits
            )
        ):
            raise fields.refuse(
                key, f"must have null or a number of 0 or more for each of the {layer_count} layers"
            )


ARCHITECTURE = Architecture(
    name="step3p5",
    nested={"step3p7": "step3p5"},
    current=_current,
    defaults={
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_sliding_attention_heads": "num_attention_heads",
        "head_dim": 128,
        "vocab_size": 128_815,
        "max_position_embeddings": 128_000,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1280,
        "n_routed_experts": 288,
        "num_experts_per_tok": 8,
        "share_expert_dim": 1280,
        "moe_router_scaling_factor": 1.0,
        "query_pre_attn_scalar": "head_dim",
    },
    flags=("attention_bias", "mlp_bias"),
    sizes=(
        "intermediate_size",
        "moe_intermediate_size",
        "share_expert_dim",
        "query_pre_attn_scalar",
    ),
    numbers=("rms_norm_eps", "moe_router_scaling_factor"),
    refused={
        "use_bidirectional_attention": "is set; EdgeShard runs causal models only",
        "sink": "is set, which step3p5 does not run",
    },
    checks=(
        _check,
        fixed_values(
            hidden_act="silu",
            moe_router_activation="sigmoid",
            norm_expert_weight=True,
            use_head_wise_attn_gate=True,
            use_moe_router_bias=True,
            use_qk_norm=True,
            use_rope_layers=[],
            yarn_only_types=[FULL],
            zero_centered=True,
        ),
    ),
    rope=Rope(partial=True, by_layer_type=True),
    windows=_WINDOWS,
    experts=_EXPERTS,
    prefixes=("model.", "language_model."),
    further_blocks="num_nextn_predict_layers",
    block=_block,
    library=Library("step3p7", "Step3p7", config="Step3p7TextConfig"),
    runs=Plugged(
        renames=(
            (r"^moe\.router_bias$", "mlp.gate.e_score_correction_bias"),
            (r"^moe\.gate\.", "mlp.gate."),
            (r"^moe\.experts\.", "mlp.experts."),
            (r"^share_expert\.", "mlp.shared_experts."),
        ),
        experts="mlp.experts",
        float32=r"mlp\.gate\.",
    ),
)
