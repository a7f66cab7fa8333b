"""nemotron_h: each layer is one thing behind a norm, by a pattern: Mamba2, attention without
positions, an MLP of two matrices, or experts of two matrices beside an MLP that every token
uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeshard.architectures import mamba
from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf, GgufFields, ssm_head
from edgeshard.architectures.limits import MAX_LAYERS
from edgeshard.architectures.mamba import LINEAR, Mamba, MambaKeys
from edgeshard.architectures.parts import (
    attention,
    expert_count,
    expert_groups,
    fixed_values,
    linear,
    norms,
)
from edgeshard.architectures.record import (
    ACTIVATIONS,
    Architecture,
    Ends,
    Experts,
    Library,
    Plugged,
    Shapes,
)
from edgeshard.architectures.shape import KvHeads, ModelShape, StateSize
from edgeshard.architectures.windows import FULL
from edgeshard.domain.models.model import Part

_EXPERTS = Experts(count=("n_routed_experts",))
_KINDS = "layers_block_type"
_PATTERN = "hybrid_override_pattern"
_LATENT = "moe_latent_size"
_NAMES_OF_KINDS = {
    "M": LINEAR,
    "mamba": LINEAR,
    "*": FULL,
    "attention": FULL,
    "-": "mlp",
    "E": "moe",
}
_NAMES = {
    "attention_head_dim": "head_dim",
    "layer_types": _KINDS,
    "mamba_conv_bias": "use_conv_bias",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_n_groups": "n_groups",
}
_KEYS = MambaKeys(
    "mamba_num_heads",
    "n_groups",
    "ssm_state_size",
    "conv_kernel",
    "use_conv_bias",
    *["use_bias"] * 2,
)


def _current(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The layers' types for their pattern, whose length is the number of layers; names of today for
    older keys."""
    config = {_NAMES.get(key, key): value for key, value in values.items()}
    pattern = config.pop(_PATTERN, None)
    if config.get(_KINDS) is None and isinstance(pattern, str):
        config[_KINDS] = list(pattern[: MAX_LAYERS + 1])
    if isinstance(config.get(_KINDS), list):
        config["num_hidden_layers"] = len(config[_KINDS])
    return mamba.plain(config, _KINDS, _NAMES_OF_KINDS)


def _mamba(fields: ConfigFields) -> Mamba:
    return Mamba.read(fields, _KEYS, fields.size("mamba_head_dim"))


def _mlp(hidden: int, inner: int, path: str, bias: bool = False) -> Shapes:
    return linear(f"{path}.up_proj", inner, hidden, bias) | linear(
        f"{path}.down_proj", hidden, inner, bias
    )


def _mixture(fields: ConfigFields, hidden: int) -> Shapes:
    count = expert_count(_EXPERTS, fields)
    inner = fields.size("moe_intermediate_size")
    bias = fields.flag("mlp_bias")
    shared = fields.size("moe_shared_expert_intermediate_size")
    block = linear("mixer.gate", count, hidden) | {"mixer.gate.e_score_correction_bias": (count,)}
    block |= _mlp(hidden, shared, "mixer.shared_experts", bias)
    if fields.given(_LATENT):
        latent = fields.size(_LATENT)
        block |= linear("mixer.fc1_latent_proj", latent, hidden, bias)
        block |= linear("mixer.fc2_latent_proj", hidden, latent, bias)
        hidden = latent
    for expert in range(count):
        block |= _mlp(hidden, inner, f"mixer.experts.{expert}")
    return block


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    hidden, kind = shape.hidden_size, fields.values[_KINDS][layer]
    block = norms(hidden, "norm")
    if kind == LINEAR:
        return block | _mamba(fields).tensors(hidden, "mixer")
    if kind == FULL:
        sizes = attention(shape)
        return block | {name.replace("self_attn.", "mixer."): size for name, size in sizes.items()}
    if kind == "mlp":
        return block | _mlp(
            hidden, fields.size("intermediate_size"), "mixer", fields.flag("mlp_bias")
        )
    return block | _mixture(fields, hidden)


def _kv(fields: ConfigFields, shape: ModelShape, layer: int) -> KvHeads:
    return (
        KvHeads(shape.kv_heads, shape.head_dim)
        if fields.values[_KINDS][layer] == FULL
        else KvHeads(0, 0)
    )


def _states(fields: ConfigFields, shape: ModelShape, layer: int) -> tuple[StateSize, ...]:
    return _mamba(fields).states if fields.values[_KINDS][layer] == LINEAR else ()


def _check(fields: ConfigFields, layer_count: int) -> None:
    if not fields.given(_KINDS):
        raise fields.refuse(_PATTERN, "is missing; use the complete config.json of the checkpoint")
    mamba.check_kinds(fields, _KINDS, frozenset(_NAMES_OF_KINDS.values()), layer_count)
    mamba.check_limits(fields, layer_count)
    _mamba(fields)
    fields.choice("mamba_hidden_act", mamba.SILU)
    if fields.given(_LATENT):
        fields.size(_LATENT)


_KINDS_BY_TENSOR = {
    "ssm_in.weight": "mamba",
    "attn_q.weight": "attention",
    "ffn_gate_inp.weight": "moe",
    "ffn_up.weight": "mlp",
}


def _gguf(fields: GgufFields) -> dict[str, Any]:
    kinds = [""] * fields.layers
    for stem, kind in _KINDS_BY_TENSOR.items():
        for layer, present in enumerate(fields.layers_with(stem)):
            if present:
                kinds[layer] = kind
    return {_KINDS: kinds, "mamba_head_dim": ssm_head(fields)}


ARCHITECTURE = Architecture(
    name="nemotron_h",
    current=_current,
    defaults={
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "intermediate_size": 21_504,
        "mlp_hidden_act": "relu2",
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "layer_norm_epsilon": 1e-5,
        "eos_token_id": 2,
    },
    activation="mlp_hidden_act",
    activations=ACTIVATIONS | {"relu2"},
    flags=("mlp_bias", "norm_topk_prob"),
    sizes=("intermediate_size", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
    numbers=("layer_norm_epsilon", "routed_scaling_factor"),
    refused={"sliding_window": "is given, which nemotron_h does not run"},
    checks=(_check, expert_groups(_EXPERTS), fixed_values(attention_bias=False)),
    rope=None,
    experts=_EXPERTS,
    prefixes=("model.", "backbone."),
    embedding="embeddings.weight",
    outer_names={"norm_f.weight": Part.HEAD},
    outer=lambda fields, shape: norms(shape.hidden_size, "norm_f"),
    block=_block,
    kv=_kv,
    states=_states,
    library=Library("nemotron_h", "NemotronH", layer="NemotronHBlock"),
    runs=Plugged(
        experts="mixer.experts",
        float32=rf"{mamba.FLOAT32}|gate\.(weight|e_score_correction_bias)$",
        mixers={"mixer": mamba.MIXER},
    ),
    ends=lambda fields, shape: Ends(fields.number("layer_norm_epsilon")),
    gguf=Gguf(("nemotron_h", "nemotron_h_moe"), permuted=True, config=_gguf),
)
