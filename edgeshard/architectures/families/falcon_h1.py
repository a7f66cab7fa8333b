"""falcon_h1: attention and Mamba2 side by side in every layer, and multipliers of nearly
everything."""

from __future__ import annotations

from typing import Any

from edgeshard.architectures import mamba
from edgeshard.architectures.fields import ConfigFields, shown
from edgeshard.architectures.gguf import Gguf, GgufFields, ssm_head
from edgeshard.architectures.mamba import Mamba, MambaKeys
from edgeshard.architectures.parts import attention, fixed_values, gated_mlp, never_null, norms
from edgeshard.architectures.record import Architecture, Ends, Library, Plugged, Shapes
from edgeshard.architectures.shape import ModelShape
from edgeshard.domain.models.model import Part

_KEYS = MambaKeys(output_bias="projectors_bias")
_MULTIPLIERS = (
    "embedding_multiplier",
    "lm_head_multiplier",
    "key_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)


def _mamba(fields: ConfigFields) -> Mamba:
    return Mamba.read(fields, _KEYS, mamba.expanded_head_dim(fields), fields.flag("mamba_rms_norm"))


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    bias = fields.flag("attention_bias")
    return (
        norms(shape.hidden_size, "input_layernorm", "pre_ff_layernorm")
        | attention(shape, input_bias=bias, output_bias=bias)
        | _mamba(fields).tensors(shape.hidden_size, "mamba")
        | gated_mlp(
            shape,
            fields.size("intermediate_size"),
            path="feed_forward",
            bias=fields.flag("mlp_bias"),
        )
    )


def _check(fields: ConfigFields, layer_count: int) -> None:
    _mamba(fields)
    for key, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
        listed = fields.values.get(key)
        if listed is not None and not (
            isinstance(listed, list)
            and len(listed) == count
            and all(type(one) in (int, float) for one in listed)
        ):
            raise fields.refuse(key, f"is {shown(listed)}; it must be a list of {count} numbers")


def _ends(fields: ConfigFields, shape: ModelShape) -> Ends:
    return Ends(
        fields.number("rms_norm_eps"),
        embedding_scale=fields.number("embedding_multiplier"),
        logit_divisor=1.0 / fields.number("lm_head_multiplier"),
    )


def _gguf(fields: GgufFields) -> dict[str, Any]:
    """The keys of config.json: llama.cpp's converter multiplies the weights by all multipliers."""
    ones = dict.fromkeys(_MULTIPLIERS, 1.0)
    lists = {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5}
    return (
        ones
        | lists
        | {"mamba_d_head": ssm_head(fields), "mamba_rms_norm": fields.has("ssm_norm.weight")}
    )


ARCHITECTURE = Architecture(
    name="falcon_h1",
    current=mamba.plain,
    defaults=mamba.DEFAULTS
    | {
        "vocab_size": 128_000,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "intermediate_size": 14_336,
        "mamba_d_ssm": 1024,
        "mamba_norm_before_gate": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
    },
    activations=mamba.SILU,
    flags=("attention_bias", "mlp_bias", "mamba_rms_norm", "mamba_norm_before_gate"),
    numbers=("rms_norm_eps", *_MULTIPLIERS),
    refused={"attn_layer_indices": "is given, but falcon_h1 attends in every layer"},
    checks=(
        _check,
        mamba.check_limits,
        never_null(*_MULTIPLIERS),
        fixed_values(mamba_use_mlp=True),
    ),
    outer_names={"final_layernorm.weight": Part.HEAD},
    outer=lambda fields, shape: norms(shape.hidden_size, "final_layernorm"),
    block=_block,
    states=lambda fields, shape, layer: _mamba(fields).states,
    library=Library("falcon_h1", "FalconH1"),
    runs=Plugged(float32=mamba.FLOAT32, mixers={"mamba": mamba.MIXER}),
    ends=_ends,
    gguf=Gguf(("falcon-h1",), config=_gguf),
)
