"""bamba: Mamba2 in most layers, attention with a rotary embedding of half a head in the others; a
gated MLP in all."""

from __future__ import annotations

from typing import Any

from edgeshard.architectures import mamba
from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf, GgufFields
from edgeshard.architectures.mamba import Mamba, MambaKeys
from edgeshard.architectures.parts import attention, fixed_values, gated_mlp, norms
from edgeshard.architectures.record import Architecture, Library, Plugged, Shapes
from edgeshard.architectures.rope import Rope
from edgeshard.architectures.shape import KvHeads, ModelShape, StateSize
from edgeshard.domain.models.model import Part

_KEYS = MambaKeys()


def _mamba(fields: ConfigFields) -> Mamba:
    return Mamba.read(fields, _KEYS, mamba.expanded_head_dim(fields))


def _attends(fields: ConfigFields, shape: ModelShape, layer: int) -> bool:
    return layer in fields.layer_list("attn_layer_indices", shape.layer_count)


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    block = norms(shape.hidden_size, "input_layernorm", "pre_ff_layernorm")
    block |= gated_mlp(
        shape, fields.size("intermediate_size"), path="feed_forward", bias=fields.flag("mlp_bias")
    )
    if not _attends(fields, shape, layer):
        return block | _mamba(fields).tensors(shape.hidden_size, "mamba")
    bias = fields.flag("attention_bias")
    return block | attention(shape, input_bias=bias, output_bias=bias)


def _kv(fields: ConfigFields, shape: ModelShape, layer: int) -> KvHeads:
    return (
        KvHeads(shape.kv_heads, shape.head_dim) if _attends(fields, shape, layer) else KvHeads(0, 0)
    )


def _states(fields: ConfigFields, shape: ModelShape, layer: int) -> tuple[StateSize, ...]:
    return () if _attends(fields, shape, layer) else _mamba(fields).states


def _check(fields: ConfigFields, layer_count: int) -> None:
    _mamba(fields)
    fields.layer_list("attn_layer_indices", layer_count)


def _is_gguf(fields: GgufFields) -> bool:
    """Whether a GGUF file is of this family: llama.cpp writes granitemoehybrid, which has
    multipliers, as this one."""
    return fields.get("embedding_scale") is None


def _gguf(fields: GgufFields) -> dict[str, Any]:
    attends = fields.layers_with("attn_q.weight")
    return {
        "attn_layer_indices": [layer for layer, attending in enumerate(attends) if attending],
        "mamba_expand": fields.size("ssm.inner_size") // fields.size("embedding_length"),
    }


ARCHITECTURE = Architecture(
    name="bamba",
    current=mamba.plain,
    defaults=mamba.DEFAULTS
    | {
        "vocab_size": 128_000,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262_144,
        "intermediate_size": 14_336,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
    },
    activations=mamba.SILU,
    checks=(_check, mamba.check_limits, fixed_values(partial_rotary_factor=0.5)),
    rope=Rope(partial=True),
    outer_names={"final_layernorm.weight": Part.HEAD},
    outer=lambda fields, shape: norms(shape.hidden_size, "final_layernorm"),
    block=_block,
    kv=_kv,
    states=_states,
    library=Library("bamba", "Bamba"),
    runs=Plugged(float32=mamba.FLOAT32, mixers={"mamba": mamba.MIXER}),
    gguf=Gguf(("granitehybrid",), _is_gguf, permuted=True, config=_gguf),
)
