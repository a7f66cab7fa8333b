"""exaone_moe: exaone4's windows and positions with norms before attention and MLP, and experts
chosen by group behind a few dense blocks, beside an MLP that every token uses."""

from __future__ import annotations

from typing import Any

from edgeshard.architectures.families.exaone4 import ARCHITECTURE as EXAONE4
from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf, GgufFields, sliding
from edgeshard.architectures.parts import (
    LLAMA_NORMS,
    attention,
    expert_count,
    expert_groups,
    expert_mlps,
    fixed_values,
    gated_mlp,
    head_norms,
    linear,
    norms,
)
from edgeshard.architectures.record import Architecture, Experts, Library, Plugged, Shapes
from edgeshard.architectures.shape import ModelShape

_EXPERTS = Experts()
_KINDS = "mlp_layer_types"


def _is_mixture(fields: ConfigFields, layer: int) -> bool:
    kinds = fields.values.get(_KINDS)
    return (
        layer >= fields.count("first_k_dense_replace")
        if kinds is None
        else kinds[layer] == "sparse"
    )


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    block = norms(shape.hidden_size, *LLAMA_NORMS) | attention(shape) | head_norms(shape)
    if not _is_mixture(fields, layer):
        return block | gated_mlp(shape, fields.size("intermediate_size"))
    count, inner = expert_count(_EXPERTS, fields), fields.size("moe_intermediate_size")
    return (
        block
        | linear("mlp.gate", count, shape.hidden_size)
        | {"mlp.e_score_correction_bias": (count,)}
        | expert_mlps(shape, count, inner)
        | gated_mlp(shape, inner * fields.size("num_shared_experts"), path="mlp.shared_experts")
    )


def _check(fields: ConfigFields, layer_count: int) -> None:
    fields.count("first_k_dense_replace")
    kinds = fields.values.get(_KINDS)
    if kinds is not None and not (
        isinstance(kinds, list)
        and len(kinds) == layer_count
        and all(kind in ("dense", "sparse") for kind in kinds)
    ):
        raise fields.refuse(
            _KINDS, f"must name dense or sparse for each of the {layer_count} layers"
        )
    mixtures = [_is_mixture(fields, layer) for layer in range(layer_count)]
    listed = fields.values.get("is_moe_layer")
    if listed is not None and listed != mixtures:
        raise fields.refuse(
            "is_moe_layer", f"differs from {_KINDS} or first_k_dense_replace; make them agree"
        )


def _gguf(fields: GgufFields) -> dict[str, Any]:
    mixtures = fields.layers_with("ffn_gate_inp.weight")
    return sliding(fields) | {_KINDS: ["sparse" if mixture else "dense" for mixture in mixtures]}


ARCHITECTURE = Architecture(
    name="exaone_moe",
    defaults={
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "eos_token_id": 53,
    },
    flags=("norm_topk_prob",),
    sizes=("intermediate_size", "moe_intermediate_size", "num_shared_experts"),
    numbers=("rms_norm_eps", "routed_scaling_factor"),
    checks=(*EXAONE4.checks, expert_groups(_EXPERTS), _check, fixed_values(scoring_func="sigmoid")),
    windows=EXAONE4.windows,
    experts=_EXPERTS,
    block=_block,
    library=Library("exaone_moe", "ExaoneMoe"),
    runs=Plugged(
        renames=((r"^mlp\.e_score_correction_bias$", "mlp.gate.e_score_correction_bias"),),
        experts="mlp.experts",
        float32=r"e_score_correction_bias$",
    ),
    gguf=Gguf(("exaone-moe",), config=_gguf),
)
