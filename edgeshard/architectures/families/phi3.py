"""phi3: queries, keys and values in one tensor, gate and up in another; a rotary embedding of a
part of each head, with factors that depend on the deployment's context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf, GgufFields
from edgeshard.architectures.limits import MAX_CONTEXT
from edgeshard.architectures.parts import linear, llama_style, norms
from edgeshard.architectures.record import Architecture, Fused, Library, Shapes
from edgeshard.architectures.rope import WITH_FACTORS, Rope
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import Windows

_TRAINED = "original_max_position_embeddings"


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


def _check(fields: ConfigFields, layer_count: int) -> None:
    """Refuse a context of the first training without a logarithm, and lists without a factor for
    each frequency."""
    if fields.size(_TRAINED, most=MAX_CONTEXT) < 2:
        raise fields.refuse(_TRAINED, "is 1; it must be 2 or more")
    head_dim = fields.size("hidden_size") // fields.size("num_attention_heads")
    for path in ("rope_scaling", "rope_parameters"):
        entry = fields.values.get(path)
        if not isinstance(entry, Mapping):
            continue
        share = entry.get("partial_rotary_factor") or fields.number("partial_rotary_factor")
        pairs = int(head_dim * share) // 2
        for key in ("short_factor", "long_factor"):
            if entry.get(key) is not None and len(entry[key]) != pairs:
                raise fields.refuse(
                    f"{path}.{key}", f"has {len(entry[key])} factors; it must have {pairs}"
                )


def _gguf(fields: GgufFields) -> dict[str, Any]:
    """The window, and the factors of frequencies, which are tensors in a file."""
    config: dict[str, Any] = {_TRAINED: fields.size("rope.scaling.original_context_length", 4096)}
    config["sliding_window"] = fields.get("attention.sliding_window") or None
    if fields.long_factors:
        heads = fields.size("attention.head_count")
        head_dim = fields.size(
            "attention.key_length", max(1, fields.size("embedding_length") // heads)
        )
        share = fields.size("rope.dimension_count") / head_dim
        config["rope_parameters"] = {
            "rope_type": "longrope",
            "rope_theta": fields.number("rope.freq_base", 10_000.0),
            "long_factor": list(fields.long_factors),
            "short_factor": list(fields.short_factors),
            "partial_rotary_factor": share,
        }
    return config


ARCHITECTURE = Architecture(
    name="phi3",
    defaults={
        "num_key_value_heads": "num_attention_heads",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "eos_token_id": 32000,
        _TRAINED: 4096,
    },
    checks=(_check,),
    rope=Rope(kinds=WITH_FACTORS, partial=True),
    windows=Windows(),
    block=_block,
    library=Library("phi3", "Phi3"),
    runs=Fused(llama_style),
    gguf=Gguf(config=_gguf),
)
