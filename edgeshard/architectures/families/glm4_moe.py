"""glm4_moe: experts chosen by group behind a few dense blocks, with one more MLP that every token
uses.

Files may hold blocks for predicting further tokens behind the decoder's own; those are not run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf, GgufFields
from edgeshard.architectures.parts import (
    attention,
    expert_count,
    expert_groups,
    expert_mlps,
    gated_mlp,
    head_norms,
    linear,
    llama_style,
    norms,
)
from edgeshard.architectures.record import (
    Architecture,
    BlockStyle,
    Experts,
    Fused,
    Library,
    Routing,
    Shapes,
)
from edgeshard.architectures.rope import Rope
from edgeshard.architectures.shape import ModelShape

_EXPERTS = Experts(count=("n_routed_experts",))


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    block = norms(shape.hidden_size, "input_layernorm", "post_attention_layernorm")
    block |= attention(shape, input_bias=fields.flag("attention_bias"))
    if fields.flag("use_qk_norm"):
        block |= head_norms(shape)
    return block | dense_or_mixture(fields, shape, layer)


def dense_or_mixture(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    """The tensors of a block's MLP, or of its mixture with one more MLP that every token uses."""
    if layer < fields.count("first_k_dense_replace"):
        return gated_mlp(shape, fields.size("intermediate_size"))
    count, inner = expert_count(_EXPERTS, fields), fields.size("moe_intermediate_size")
    return (
        linear("mlp.gate", count, shape.hidden_size)
        | {"mlp.gate.e_score_correction_bias": (count,)}
        | expert_mlps(shape, count, inner)
        | gated_mlp(shape, inner * fields.size("n_shared_experts"), path="mlp.shared_experts")
    )


def _style(fields: ConfigFields, shape: ModelShape, layer: int) -> BlockStyle:
    routing = Routing(
        fields.size("num_experts_per_tok"),
        normalised=fields.flag("norm_topk_prob"),
        sigmoid=True,
        scale=fields.number("routed_scaling_factor"),
        groups=fields.size("n_group"),
        kept_groups=fields.size("topk_group"),
        float32=True,
    )
    return replace(llama_style(fields, shape, layer), routing=routing)


def _check(fields: ConfigFields, layer_count: int) -> None:
    fields.count("first_k_dense_replace")
    fields.count("num_nextn_predict_layers")


def _gguf(fields: GgufFields) -> dict[str, Any]:
    return {"first_k_dense_replace": fields.layers_with("ffn_gate_inp.weight").count(False)}


ARCHITECTURE = Architecture(
    name="glm4_moe",
    defaults={
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
    },
    flags=("attention_bias", "use_qk_norm", "norm_topk_prob"),
    sizes=(
        "intermediate_size",
        "moe_intermediate_size",
        "n_shared_experts",
        "n_group",
        "topk_group",
    ),
    numbers=("rms_norm_eps", "routed_scaling_factor"),
    checks=(expert_groups(_EXPERTS), _check),
    rope=Rope(partial=True),
    experts=_EXPERTS,
    further_blocks="num_nextn_predict_layers",
    block=_block,
    library=Library("glm4_moe", "Glm4Moe"),
    runs=Fused(
        _style,
        renames=(
            (r"^mlp\.gate\.e_score", "mlp.e_score"),
            (r"^mlp\.shared_experts\.", "mlp.shared_expert."),
        ),
        float32=r"mlp\.(gate\.weight|e_score_correction_bias)$",
    ),
    gguf=Gguf(("glm4moe",), config=_gguf),
)
