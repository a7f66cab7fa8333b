"""gpt_oss: attention with a sink for each head, every other block with a window, experts with
biases in all blocks.

Experts are stored with the matrices transposed, rows of gate and up in turn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf, GgufFields, rope_parameters
from edgeshard.architectures.parts import (
    TRANSPOSED_RENAMES,
    attention,
    expert_count,
    joined_transposed,
    linear,
    llama_style,
    norms,
    transposed_mlps,
)
from edgeshard.architectures.record import (
    Architecture,
    BlockStyle,
    Clamp,
    Ends,
    Experts,
    Fused,
    Library,
    Routing,
    Shapes,
)
from edgeshard.architectures.rope import Rope
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import Windows, all_but_every

_EXPERTS = Experts(count=("num_local_experts",), joined=joined_transposed(), transposed=True)


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    hidden, bias = shape.hidden_size, fields.flag("attention_bias")
    count, inner = expert_count(_EXPERTS, fields), fields.size("intermediate_size")
    return (
        norms(hidden, "input_layernorm", "post_attention_layernorm")
        | attention(shape, input_bias=bias, output_bias=bias)
        | {"self_attn.sinks": (shape.attention_heads,)}
        | linear("mlp.router", count, hidden, bias=True)
        | transposed_mlps(shape, count, inner, bias=True)
    )


def _style(fields: ConfigFields, shape: ModelShape, layer: int) -> BlockStyle:
    return replace(
        llama_style(fields, shape, layer),
        rounded_last=True,
        clamp=Clamp(fields.number("swiglu_alpha"), fields.number("swiglu_limit")),
        routing=Routing(fields.size("num_experts_per_tok")),
    )


def _ends(fields: ConfigFields, shape: ModelShape) -> Ends:
    return Ends(fields.number("rms_norm_eps"), rounded_last=True)


def _gguf(fields: GgufFields) -> dict[str, Any]:
    """The keys of config.json: windows take turns by the family's rule, and frequencies of yarn are
    not rounded."""
    entry = rope_parameters(fields)
    if entry["rope_type"] == "yarn":
        entry["truncate"] = False
    return {
        "rope_parameters": entry,
        "intermediate_size": fields.size("expert_feed_forward_length"),
        "sliding_window": fields.size("attention.sliding_window"),
    }


ARCHITECTURE = Architecture(
    name="gpt_oss",
    defaults={
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "max_position_embeddings": 131_072,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    flags=("attention_bias",),
    numbers=("rms_norm_eps", "swiglu_alpha", "swiglu_limit"),
    rope=Rope(
        theta=150_000.0,
        assumed={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    windows=Windows(128, sliding=all_but_every(2)),
    experts=_EXPERTS,
    block=_block,
    library=Library("gpt_oss", "GptOss"),
    runs=Fused(_style, renames=((r"^mlp\.router\.", "mlp.gate."), *TRANSPOSED_RENAMES)),
    ends=_ends,
    whole=r"router\.weight$",
    gguf=Gguf(("gpt-oss",), in_turn=True, config=_gguf),
)
