"""kimi_linear: a delta rule whose decay differs by channel in most layers, in the others attention
over keys and values that come of one narrow vector (MLA), without positions. Experts behind a few
dense blocks, beside an MLP that every token uses; sigmoid scores and a bias choose them.

Keys and values are kept as they come of that vector, each head's own; values are narrower and kept
as wide as keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeshard.architectures.fields import ConfigFields, shown
from edgeshard.architectures.gated_delta import LINEAR
from edgeshard.architectures.limits import MAX_LAYERS, MAX_SIZE
from edgeshard.architectures.parts import (
    LLAMA_NORMS,
    W_RENAMES,
    expert_count,
    expert_groups,
    expert_mlps,
    fixed_values,
    gated_mlp,
    linear,
    norms,
)
from edgeshard.architectures.record import (
    Architecture,
    Experts,
    Library,
    Place,
    Plugged,
    Shapes,
    SizeKeys,
)
from edgeshard.architectures.shape import KvHeads, ModelShape, StateSize
from edgeshard.architectures.windows import FULL

_EXPERTS = Experts(count=("num_local_experts",))
_PATH = "block_sparse_moe"
_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
_LINEAR_CONFIG = "linear_attn_config"
_LINEAR_NAMES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_LAYER_LISTS = ("full_attn_layers", "kda_layers")
_DENSE, _SPARSE = "dense", "sparse"


def _current(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values under the keys of transformers' class, where published files have others, with
    types of layers."""
    config = {key: value for key, value in values.items() if key not in _NAMES}
    config |= {_NAMES[key]: value for key, value in values.items() if key in _NAMES}
    layers = config.get("num_hidden_layers")
    count = min(layers, MAX_LAYERS) if type(layers) is int else 0
    own = config.get(_LINEAR_CONFIG)
    if isinstance(own, Mapping):
        config |= {_LINEAR_NAMES[key]: own[key] for key in _LINEAR_NAMES if key in own}
        full, delta = (own.get(key) for key in _LAYER_LISTS)
        if config.get("layer_types") is None and isinstance(full, list) and isinstance(delta, list):
            # These begin at 1. A layer in neither list has no type, which the check refuses.
            config["layer_types"] = [
                FULL if layer + 1 in full else LINEAR if layer + 1 in delta else None
                for layer in range(count)
            ]
    if config.get("layer_types") is None:
        config["layer_types"] = [
            FULL if layer and layer % 4 == 0 else LINEAR for layer in range(count)
        ]
    dense = config.get("first_k_dense_replace", 1)
    if config.get("mlp_layer_types") is None and type(dense) is int:
        config["mlp_layer_types"] = [_DENSE if layer < dense else _SPARSE for layer in range(count)]
    widths = (config.get("qk_nope_head_dim", 128), config.get("qk_rope_head_dim", 64))
    if all(type(width) is int for width in widths):
        config["qk_head_dim"] = sum(widths)
    return config


def _is_linear(fields: ConfigFields, layer: int) -> bool:
    return bool(fields.values["layer_types"][layer] == LINEAR)


def _kv(fields: ConfigFields, shape: ModelShape, layer: int) -> KvHeads:
    return KvHeads(0, 0) if _is_linear(fields, layer) else KvHeads(shape.kv_heads, shape.head_dim)


def _states(fields: ConfigFields, shape: ModelShape, layer: int) -> tuple[StateSize, ...]:
    """The convolutions' last inputs, and a matrix for each head."""
    if not _is_linear(fields, layer):
        return ()
    heads, dim = fields.size("linear_num_heads"), fields.size("linear_head_dim")
    tail = StateSize((fields.size("linear_conv_kernel_dim") - 1, 3 * heads * dim))
    return tail, StateSize((heads, dim, dim), float32=True)


def _delta(fields: ConfigFields, hidden: int) -> Shapes:
    heads, dim = fields.size("linear_num_heads"), fields.size("linear_head_dim")
    width = heads * dim
    block: Shapes = {}
    for name in ("q", "k", "v"):
        block |= linear(f"self_attn.{name}_proj", width, hidden)
        block |= {
            f"self_attn.{name}_conv1d.weight": (width, 1, fields.size("linear_conv_kernel_dim"))
        }
    for name in ("f", "g"):  # what is forgotten, and the gate of what comes out
        block |= linear(f"self_attn.{name}_a_proj", dim, hidden) | linear(
            f"self_attn.{name}_b_proj", width, dim
        )
    return (
        block
        | {"self_attn.A_log": (1, 1, heads, 1), "self_attn.dt_bias": (width,)}
        | linear("self_attn.b_proj", heads, hidden)
        | norms(dim, "self_attn.o_norm")
        | linear("self_attn.o_proj", hidden, width)
    )


def _attention(fields: ConfigFields, shape: ModelShape) -> Shapes:
    hidden = shape.hidden_size
    heads = shape.attention_heads
    bias = fields.flag("attention_bias")
    queries = heads * shape.head_dim
    rank = fields.size("kv_lora_rank")
    values = fields.size("v_head_dim")
    if fields.given("q_lora_rank"):
        narrow = fields.size("q_lora_rank")
        block = linear("self_attn.q_a_proj", narrow, hidden, bias) | norms(
            narrow, "self_attn.q_a_layernorm"
        )
        block |= linear("self_attn.q_b_proj", queries, narrow)
    else:
        block = linear("self_attn.q_proj", queries, hidden)
    return (
        block
        | linear(
            "self_attn.kv_a_proj_with_mqa", rank + fields.size("qk_rope_head_dim"), hidden, bias
        )
        | norms(rank, "self_attn.kv_a_layernorm")
        | linear("self_attn.kv_b_proj", heads * (fields.size("qk_nope_head_dim") + values), rank)
        | linear("self_attn.o_proj", hidden, heads * values, bias)
    )


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    hidden = shape.hidden_size
    mixer = _delta(fields, hidden) if _is_linear(fields, layer) else _attention(fields, shape)
    block = norms(hidden, *LLAMA_NORMS) | mixer
    if fields.values["mlp_layer_types"][layer] == _DENSE:
        return block | gated_mlp(shape, fields.size("intermediate_size"))
    count, inner = expert_count(_EXPERTS, fields), fields.size("moe_intermediate_size")
    return (
        block
        | linear(f"{_PATH}.gate", count, hidden)
        | {f"{_PATH}.gate.e_score_correction_bias": (count,)}
        | expert_mlps(shape, count, inner, f"{_PATH}.experts", ("w1", "w3", "w2"))
        | gated_mlp(shape, inner * fields.size("n_shared_experts"), path=f"{_PATH}.shared_experts")
    )


def _check(fields: ConfigFields, layer_count: int) -> None:
    for key, kinds in (("layer_types", (FULL, LINEAR)), ("mlp_layer_types", (_DENSE, _SPARSE))):
        types = fields.values.get(key)
        if (
            not isinstance(types, list | tuple)
            or len(types) != layer_count
            or any(kind not in kinds for kind in types)
        ):
            raise fields.refuse(
                key, f"must name {kinds[0]} or {kinds[1]} for each of the {layer_count} layers"
            )
    _check_linear(fields)
    heads = fields.size("num_attention_heads")
    if (kv_heads := fields.size("num_key_value_heads")) != heads:
        raise fields.refuse(
            "num_key_value_heads", f"is {kv_heads}; it must be num_attention_heads {heads}"
        )
    keys, values = fields.size("qk_head_dim"), fields.size("v_head_dim")
    if values > keys:
        raise fields.refuse(
            "v_head_dim",
            f"is {values}; it must be qk_nope_head_dim + qk_rope_head_dim {keys} at most",
        )
    if fields.given("q_lora_rank"):
        fields.size("q_lora_rank")
    fields.count("num_nextn_predict_layers")


def _check_linear(fields: ConfigFields) -> None:
    own = fields.values.get(_LINEAR_CONFIG)
    if own is not None:
        if not isinstance(own, Mapping):
            raise fields.refuse(_LINEAR_CONFIG, f"is {shown(own)}; it must be an object or null")
        for key in _LAYER_LISTS:
            if not isinstance(own.get(key), list) and any(other in own for other in _LAYER_LISTS):
                raise fields.refuse(
                    f"{_LINEAR_CONFIG}.{key}", "must be a list of layers, the first of which is 1"
                )
        for key, value in own.items():
            if (
                key not in (*_LINEAR_NAMES, *_LAYER_LISTS)
                and value is not None
                and value is not False
            ):
                raise fields.refuse(
                    f"{_LINEAR_CONFIG}.{key}", f"is {shown(value)}, which kimi_linear does not run"
                )
    heads, dim = fields.size("linear_num_heads"), fields.size("linear_head_dim")
    if 3 * heads * dim > MAX_SIZE:
        raise fields.refuse(
            "linear_num_heads",
            f"is {heads}, of {dim} numbers each; a third of {MAX_SIZE} is the most",
        )
    if fields.size("linear_conv_kernel_dim") < 2:
        raise fields.refuse("linear_conv_kernel_dim", "is 1; it must be 2 or more")


ARCHITECTURE = Architecture(
    name="kimi_linear",
    current=_current,
    defaults={
        "vocab_size": 163_840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_attention_heads": 32,
        "num_key_value_heads": "num_attention_heads",
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.446,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "max_position_embeddings": 1_048_576,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 163_586,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
    },
    keys=SizeKeys(head_dim="qk_head_dim"),
    activations=frozenset({"silu"}),
    flags=("attention_bias", "norm_topk_prob"),
    sizes=(
        "intermediate_size",
        "moe_intermediate_size",
        "n_shared_experts",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "linear_head_dim",
        "linear_num_heads",
        "linear_conv_kernel_dim",
    ),
    numbers=("rms_norm_eps", "routed_scaling_factor"),
    refused={
        "attn_res_block_size": "is given: attention over the outputs of earlier blocks is not run",
        "latent_moe_use_norm": "is set: experts in a narrower width are not run",
        "mla_use_output_gate": "is set, but a gate after attention is not supported",
        "routed_expert_hidden_size": "is given: experts in a narrower width are not run",
    },
    checks=(
        expert_groups(_EXPERTS),
        _check,
        fixed_values(
            mla_use_nope=True,
            moe_layer_freq=1,
            moe_router_activation_func="sigmoid",
            tie_word_embeddings=False,
            use_grouped_topk=True,
        ),
    ),
    rope=None,
    experts=_EXPERTS,
    # as transformers saves dense blocks
    aliases=((rf"^(layers\.\d+)\.{_PATH}\.(\w+_proj)\.", r"\1.mlp.\2."),),
    further_blocks="num_nextn_predict_layers",
    block=_block,
    kv=_kv,
    states=_states,
    library=Library("kimi_linear", "KimiLinear"),
    runs=Plugged(
        renames=(
            (rf"^{_PATH}\.", "mlp."),
            *W_RENAMES,
            (r"^self_attn\.(f_[ab]_proj\.|dt_bias$|A_log$)", r"self_attn.forget_gate.\1"),
        ),
        parts={
            f"self_attn.{name}_conv1d.weight": Place("self_attn.conv1d.weight", index)
            for index, name in enumerate("qkv")
        },
        experts="mlp.experts",
        float32=r"(A_log|dt_bias|e_score_correction_bias)$",
        mixers={"self_attn": "kimi_delta"},
    ),
)
