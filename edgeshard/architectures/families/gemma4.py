"""gemma4, its text part only: gemma3's four norms and two rotary bases.

Blocks without a window have heads of their own. Values are normed, and of these blocks may be the
keys as they were before norm and rotation. A block ends in a factor, and experts run beside the MLP
where config.json asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgeshard.architectures.fields import ConfigFields, shown
from edgeshard.architectures.gguf import Gguf, GgufFields, has_experts, sliding
from edgeshard.architectures.limits import MAX_SIZE
from edgeshard.architectures.parts import (
    SANDWICH_NORMS,
    attention,
    chosen_experts,
    even_split,
    expert_count,
    expert_mlps,
    gated_mlp,
    gemma_ends,
    head_norms,
    joined_mlps,
    linear,
    norms,
)
from edgeshard.architectures.record import (
    ACTIVATIONS,
    Architecture,
    BlockStyle,
    Experts,
    Fused,
    Library,
    Routing,
    Shapes,
)
from edgeshard.architectures.rope import STATIC, Rope
from edgeshard.architectures.shape import KvHeads, ModelShape
from edgeshard.architectures.windows import FULL, SLIDING, Windows

_EXPERTS = Experts(
    count=("num_experts",),
    top_k="top_k_experts",
    switch="enable_moe_block",
    joined=joined_mlps("experts"),
)
_EXPERT_NORMS = (
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
    "pre_feedforward_layernorm_2",
)
_GLOBAL_HEAD_DIM = 512


def _sliding(fields: ConfigFields, layer_count: int) -> list[bool]:
    return [(layer + 1) % 6 != 0 and layer + 1 < layer_count for layer in range(layer_count)]


_WINDOWS = Windows(512, sliding=_sliding)


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    hidden = shape.hidden_size
    bias = fields.flag("attention_bias")
    own = shape.at(layer)
    block = (
        norms(hidden, *SANDWICH_NORMS)
        | attention(own, input_bias=bias, output_bias=bias)
        | head_norms(own)
        | gated_mlp(shape, fields.size("intermediate_size"))
        | {"layer_scalar": (1,)}
    )
    if (
        fields.flag("attention_k_eq_v")
        and _WINDOWS.layer_types(fields, shape.layer_count)[layer] == FULL
    ):
        block = {
            name: size for name, size in block.items() if not name.startswith("self_attn.v_proj.")
        }
    if (count := expert_count(_EXPERTS, fields)) == 0:
        return block
    return (
        block
        | norms(hidden, *_EXPERT_NORMS)
        | linear("router.proj", count, hidden)
        | {"router.scale": (hidden,), "router.per_expert_scale": (count,)}
        | expert_mlps(shape, count, fields.size("moe_intermediate_size"), "experts")
    )


def _style(fields: ConfigFields, shape: ModelShape, layer: int) -> BlockStyle:
    style = BlockStyle(
        eps=fields.number("rms_norm_eps"),
        scaling=1.0,
        activation=fields.choice("hidden_activation", ACTIVATIONS),
        rotary=_WINDOWS.layer_types(fields, shape.layer_count)[layer],
        rounded_last=True,
        values_normed=True,
    )
    return (
        replace(style, routing=Routing(chosen_experts(_EXPERTS, fields)))
        if expert_count(_EXPERTS, fields)
        else style
    )


def _check(fields: ConfigFields, layer_count: int) -> None:
    fields.optional_number("final_logit_softcapping")
    # that of pictures alone
    if fields.values.get("use_bidirectional_attention") not in (
        None,
        "vision",
    ):
        raise fields.refuse(
            "use_bidirectional_attention", "is set for text; EdgeShard runs causal models only"
        )
    if expert_count(_EXPERTS, fields):
        fields.size("moe_intermediate_size")
    if (
        width := fields.values.get(
            "hidden_size_per_layer_input", fields.defaults["hidden_size_per_layer_input"]
        )
    ) != 0:
        raise fields.refuse(
            "hidden_size_per_layer_input",
            f"is {shown(width)}: every block reads vectors made from token ids, which only the "
            "first "
            "stage has; use a checkpoint in which it is 0",
        )
    if fields.count("num_kv_shared_layers"):
        raise fields.refuse(
            "num_kv_shared_layers",
            "is not 0: the last blocks attend over keys and values of earlier ones, which another "
            "stage "
            "may hold; use a checkpoint in which it is 0",
        )
    types = _WINDOWS.layer_types(fields, layer_count)
    if types[-1] != FULL:
        raise fields.refuse(
            "layer_types", "ends in sliding_attention; the last layer must have full_attention"
        )
    if "per_layer_config" in fields.values:
        own, usual = _own_heads(fields), fields.size("head_dim")
        widths = {
            (kind, own.get(layer, {}).get("head_dim", usual)) for layer, kind in enumerate(types)
        }
        if len(widths) > len(set(types)):  # they have one rotary embedding
            raise fields.refuse(
                "per_layer_config", "gives layers of one type heads of different head_dim"
            )
    _check_rope(fields, types)


def _kv(fields: ConfigFields, shape: ModelShape, layer: int) -> KvHeads:
    """The heads of a block: those of config.json's `per_layer_config`, or of all blocks without a
    window."""
    own: Mapping[str, Any] = {}
    if "per_layer_config" in fields.values:
        own = _own_heads(fields).get(layer, {})
    elif _WINDOWS.layer_types(fields, shape.layer_count)[layer] == FULL:
        own = {"head_dim": fields.size("global_head_dim", _GLOBAL_HEAD_DIM)}
        if fields.flag("attention_k_eq_v") and fields.given("num_global_key_value_heads"):
            own |= {"num_key_value_heads": fields.size("num_global_key_value_heads")}
    kv_heads = KvHeads(
        own.get("num_key_value_heads", shape.kv_heads), own.get("head_dim", shape.head_dim)
    )
    key = f"the num_key_value_heads of layer {layer}"
    even_split(fields, "num_attention_heads", shape.attention_heads, key, kv_heads.heads)
    if kv_heads.head_dim % 2 or shape.attention_heads * kv_heads.head_dim > MAX_SIZE:
        raise fields.refuse(
            "head_dim",
            f"of layer {layer} is {kv_heads.head_dim}; it must be even, and all heads together "
            f"have {MAX_SIZE} at most",
        )
    return kv_heads


def _own_heads(fields: ConfigFields) -> dict[int, dict[str, int]]:
    """The sizes that `per_layer_config` gives to layers. Raises UnsupportedModelError naming it."""
    layers = fields.values["per_layer_config"]
    if not isinstance(layers, Mapping) or not all(
        isinstance(entry, Mapping) for entry in layers.values()
    ):
        raise fields.refuse("per_layer_config", "must be an object with an object for each layer")
    sizes: dict[int, dict[str, int]] = {}
    for layer, entry in layers.items():
        if not str(layer).isdecimal():
            raise fields.refuse("per_layer_config", f"has {shown(layer)}, which is not a layer")
        inner = ConfigFields(entry, fields.name(f"per_layer_config.{layer}."), family=fields.family)
        for key in entry:
            if key not in ("head_dim", "num_key_value_heads"):
                raise inner.refuse(
                    str(key), "is unknown; a layer may have head_dim and num_key_value_heads"
                )
        sizes[int(layer)] = {key: inner.size(key) for key in entry}
    return sizes


def _check_rope(fields: ConfigFields, types: tuple[str, ...]) -> None:
    parameters = fields.values.get("rope_parameters")
    if parameters is None:
        return
    for kind in sorted(set(types)):
        for key in ("rope_type", "rope_theta"):
            if not isinstance(parameters.get(kind), Mapping) or parameters[kind].get(key) is None:
                raise fields.refuse(
                    f"rope_parameters.{kind}.{key}", "is missing; use the checkpoint's config.json"
                )


def _gguf(fields: GgufFields) -> dict[str, Any]:
    """The keys of config.json: layers without a window have heads of their own, and frequencies
    that do not turn."""
    config = sliding(fields)
    full_dim = fields.size("attention.key_length")
    sliding_dim = fields.size("attention.key_length_swa")
    kv_heads = fields.get("attention.head_count_kv")
    values = fields.layers_with("attn_v.weight")
    full = [layer for layer, kind in enumerate(config.get("layer_types", ())) if kind == FULL]
    slides = [layer for layer in range(fields.layers) if layer not in full]
    if isinstance(kv_heads, list) and len(kv_heads) >= fields.layers:
        config["num_key_value_heads"] = kv_heads[slides[0]] if slides else kv_heads[0]
        config["num_global_key_value_heads"] = kv_heads[full[0]] if full else None
    turning = [factor for factor in fields.rope_factors if factor == 1.0]
    entry = {
        "rope_type": "proportional",
        "rope_theta": fields.number("rope.freq_base"),
        "partial_rotary_factor": 2 * len(turning) / full_dim if fields.rope_factors else 1.0,
    }
    windowed = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10_000.0)}
    cap = fields.get("final_logit_softcapping")
    return (
        config
        | {
            "head_dim": sliding_dim,
            "global_head_dim": full_dim,
            "attention_k_eq_v": any(not values[layer] for layer in full),
            "enable_moe_block": has_experts(fields),
            "hidden_size_per_layer_input": fields.get("embedding_length_per_layer_input") or 0,
            "num_kv_shared_layers": fields.get("attention.shared_kv_layers") or 0,
            "final_logit_softcapping": None
            if cap is None
            else fields.number("final_logit_softcapping"),
            "rope_parameters": {FULL: entry, SLIDING: windowed},
        }
        | (
            {"moe_intermediate_size": fields.size("expert_feed_forward_length")}
            if has_experts(fields)
            else {}
        )
    )


ARCHITECTURE = Architecture(
    name="gemma4",
    model_types=("gemma4_text",),
    nested={"gemma4": "gemma4_text"},
    defaults={
        "vocab_size": 262_144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "hidden_size_per_layer_input": 256,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
    activation="hidden_activation",
    flags=("attention_bias", "attention_k_eq_v", "enable_moe_block"),
    refused={
        "rope_scaling": "is given, which gemma4 does not read; give rope_parameters for each layer "
        "type"
    },
    checks=(_check,),
    rope=Rope(
        kinds=STATIC | {"proportional"},
        partial=True,
        by_layer_type=True,
        assumed={
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
        },
    ),
    windows=_WINDOWS,
    experts=_EXPERTS,
    prefixes=("model.", "language_model."),
    block=_block,
    kv=_kv,
    library=Library("gemma4", "Gemma4Text", norm="Gemma4RMSNorm"),
    runs=Fused(
        _style,
        renames=(
            (r"^experts\.", "beside.experts."),
            (r"^router\.proj\.", "beside.router."),
            (r"^router\.scale$", "beside.input_scale"),
            (r"^router\.per_expert_scale$", "beside.expert_scale"),
            (r"^pre_feedforward_layernorm_2\.", "beside.input_norm."),
            (r"^post_feedforward_layernorm_2\.", "beside.output_norm."),
            (r"^post_feedforward_layernorm_1\.", "beside.mlp_norm."),
        ),
    ),
    ends=gemma_ends(rounded_last=True),
    whole=r"router\.proj\.weight$",
    gguf=Gguf(config=_gguf),
)
