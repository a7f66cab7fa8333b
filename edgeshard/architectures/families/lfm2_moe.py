"""lfm2_moe: lfm2 with experts behind a few dense blocks, chosen by sigmoid scores with a bias."""

from __future__ import annotations

from typing import Any

from edgeshard.architectures import short_convolution
from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf, GgufFields, attending
from edgeshard.architectures.parts import W_RENAMES, expert_count, expert_mlps, fixed_values, linear
from edgeshard.architectures.record import Architecture, Experts, Library, Plugged, Shapes
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import FULL

_EXPERTS = Experts(count=("num_experts",))
_PATH = "feed_forward.experts"


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    block = short_convolution.mixer(fields, shape, layer)
    if layer < fields.count("num_dense_layers"):
        return block | short_convolution.mlp(shape, fields.size("intermediate_size"))
    count = expert_count(_EXPERTS, fields)
    block |= linear("feed_forward.gate", count, shape.hidden_size)
    if fields.flag("use_expert_bias"):
        block |= {"feed_forward.expert_bias": (count,)}
    return block | expert_mlps(
        shape, count, fields.size("moe_intermediate_size"), _PATH, ("w1", "w3", "w2")
    )


def _check(fields: ConfigFields, layer_count: int) -> None:
    fields.count("num_dense_layers")


def _gguf(fields: GgufFields) -> dict[str, Any]:
    dense = fields.layers_with("ffn_gate_inp.weight").count(False)
    kinds = attending(fields, FULL, short_convolution.CONVOLUTION)
    return {"layer_types": kinds, "num_dense_layers": dense, "norm_topk_prob": True}


ARCHITECTURE = Architecture(
    name="lfm2_moe",
    current=short_convolution.current,
    defaults=short_convolution.DEFAULTS
    | {
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
    },
    activations=frozenset({"silu"}),
    flags=("conv_bias", "norm_topk_prob", "use_expert_bias"),
    sizes=("intermediate_size", "moe_intermediate_size", "conv_L_cache"),
    numbers=("norm_eps", "routed_scaling_factor"),
    checks=(short_convolution.check, _check, fixed_values(use_pos_enc=True)),
    experts=_EXPERTS,
    outer_names=short_convolution.OUTER_NAMES,
    outer=short_convolution.outer,
    block=_block,
    kv=short_convolution.kv,
    states=short_convolution.states,
    library=Library("lfm2_moe", "Lfm2Moe"),
    runs=Plugged(
        renames=W_RENAMES,
        experts=_PATH,
        float32=r"expert_bias$",
        mixers=short_convolution.MIXERS,
    ),
    ends=short_convolution.ends,
    gguf=Gguf(("lfm2moe",), config=_gguf),
)
