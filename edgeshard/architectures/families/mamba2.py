"""mamba2: every layer is Mamba2 behind a norm, so that requests keep states alone, whatever their
length."""

from __future__ import annotations

from typing import Any

from edgeshard.architectures import mamba
from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf, GgufFields, ssm_head
from edgeshard.architectures.mamba import Mamba, MambaKeys
from edgeshard.architectures.parts import norms
from edgeshard.architectures.record import Architecture, Ends, Library, Plugged, SizeKeys
from edgeshard.architectures.shape import KvHeads
from edgeshard.domain.models.model import Part

_KEYS = MambaKeys(
    "num_heads", "n_groups", "state_size", "conv_kernel", "use_conv_bias", "use_bias", "use_bias"
)


def _mamba(fields: ConfigFields) -> Mamba:
    return Mamba.read(fields, _KEYS, fields.size("head_dim"))


def _check(fields: ConfigFields, layer_count: int) -> None:
    inner, expanded = _mamba(fields).inner, fields.size("expand") * fields.size("hidden_size")
    if inner != expanded:
        raise fields.refuse(
            "expand",
            f"makes the inner width {expanded}, but num_heads and head_dim make it {inner}",
        )


def _gguf(fields: GgufFields) -> dict[str, Any]:
    expand = fields.size("ssm.inner_size") // fields.size("embedding_length")
    return {"head_dim": ssm_head(fields), "expand": expand}


ARCHITECTURE = Architecture(
    name="mamba2",
    current=mamba.plain,
    defaults={
        "num_heads": 128,
        "head_dim": 64,
        "vocab_size": 32_768,
        "hidden_size": 4096,
        "state_size": 128,
        "num_hidden_layers": 64,
        "layer_norm_epsilon": 1e-5,
        "eos_token_id": 2,
        "expand": 2,
        "conv_kernel": 4,
        "n_groups": 8,
        "use_conv_bias": True,
        "hidden_act": "silu",
        # The class has no such key, for nothing in the model ends there. Mamba-Codestral was tried
        # up to this length.
        "max_position_embeddings": 262_144,
    },
    keys=SizeKeys(heads="num_heads", kv_heads="num_heads"),
    activations=mamba.SILU,
    flags=(),
    sizes=(),
    numbers=("layer_norm_epsilon",),
    checks=(_check, mamba.check_limits),
    rope=None,
    prefixes=("model.", "backbone."),
    embedding="embeddings.weight",
    outer_names={"norm_f.weight": Part.HEAD},
    outer=lambda fields, shape: norms(shape.hidden_size, "norm_f"),
    block=lambda fields, shape, layer: (
        norms(shape.hidden_size, "norm") | _mamba(fields).tensors(shape.hidden_size, "mixer")
    ),
    kv=lambda fields, shape, layer: KvHeads(0, 0),
    states=lambda fields, shape, layer: _mamba(fields).states,
    library=Library("mamba2", "Mamba2", layer="Mamba2Block"),
    runs=Plugged(float32=mamba.FLOAT32, mixers={"mixer": mamba.MIXER}),
    ends=lambda fields, shape: Ends(fields.number("layer_norm_epsilon")),
    gguf=Gguf(config=_gguf),
)
