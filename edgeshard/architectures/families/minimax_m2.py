"""minimax_m2: experts in every block, chosen by sigmoid scores with a bias; norms over the whole
rows of queries and keys, and a rotary embedding of a part of each head.

Files may hold blocks for predicting further tokens behind the decoder's own; those are not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf, GgufFields
from edgeshard.architectures.parts import (
    W_RENAMES,
    attention,
    expert_count,
    expert_mlps,
    fixed_values,
    linear,
    llama_style,
    norms,
    row_norms,
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

_EXPERTS = Experts(count=("num_local_experts",))
_PATH = "block_sparse_moe"
_HEAD_DIM = 128
_ROTARY, _SHARE = "rotary_dim", "partial_rotary_factor"


def _current(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values with the rotary share of a head, for which published files have the number of its
    dimensions."""
    dims = values.get(_ROTARY)
    head_dim = values.get("head_dim") or _HEAD_DIM
    if (
        _SHARE in values
        or type(dims) is not int
        or type(head_dim) is not int
        or not 0 < dims <= head_dim
    ):
        return values
    return {**values, _SHARE: dims / head_dim}


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    count, inner = expert_count(_EXPERTS, fields), fields.size("intermediate_size")
    return (
        norms(shape.hidden_size, "input_layernorm", "post_attention_layernorm")
        | attention(shape)
        | row_norms(shape)
        | linear(f"{_PATH}.gate", count, shape.hidden_size)
        | {f"{_PATH}.e_score_correction_bias": (count,)}
        | expert_mlps(shape, count, inner, f"{_PATH}.experts", ("w1", "w3", "w2"))
    )


def _style(fields: ConfigFields, shape: ModelShape, layer: int) -> BlockStyle:
    routing = Routing(fields.size("num_experts_per_tok"), sigmoid=True)
    return replace(llama_style(fields, shape, layer), routing=routing)


def _check(fields: ConfigFields, layer_count: int) -> None:
    fields.count("num_mtp_modules")
    head_dim = fields.size("head_dim")
    if (rotary := fields.size(_ROTARY, head_dim)) > head_dim or rotary % 2:
        raise fields.refuse(
            _ROTARY, f"is {rotary}; it must be even and at most head_dim {head_dim}"
        )
    kinds = fields.values.get("attn_type_list")
    if kinds is not None and (
        not isinstance(kinds, list | tuple) or any(kind != 1 for kind in kinds)
    ):
        raise fields.refuse(
            "attn_type_list",
            "has other layers than 1, full attention, which minimax_m2 does not run",
        )


def _gguf(fields: GgufFields) -> dict[str, Any]:
    """The width of an expert, which files have under the key of mixtures."""
    return {
        "intermediate_size": fields.size(
            "expert_feed_forward_length", fields.size("feed_forward_length")
        )
    }


ARCHITECTURE = Architecture(
    name="minimax_m2",
    current=_current,
    defaults={
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": _HEAD_DIM,
        "vocab_size": 200_064,
        "max_position_embeddings": 196_608,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "eos_token_id": 200_020,
    },
    flags=(),
    checks=(
        _check,
        fixed_values(
            scoring_func="sigmoid",
            use_qk_norm=True,
            qk_norm_type="per_layer",
            use_routing_bias=True,
            shared_intermediate_size=0,
        ),
    ),
    rope=Rope(partial=True, theta=5_000_000.0),
    experts=_EXPERTS,
    further_blocks="num_mtp_modules",
    block=_block,
    library=Library("minimax_m2", "MiniMaxM2"),
    runs=Fused(
        _style,
        renames=(
            (rf"^{_PATH}\.", "mlp."),
            *W_RENAMES,
        ),
        float32=r"e_score_correction_bias$",
    ),
    gguf=Gguf(("minimax-m2",), config=_gguf),
)
