"""granitemoehybrid: granite with Mamba2 in most layers, an MLP that every token uses and, mostly,
experts beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeshard.architectures import mamba
from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf, GgufFields, attending, has_experts
from edgeshard.architectures.mamba import LINEAR, Mamba, MambaKeys
from edgeshard.architectures.parts import (
    LLAMA_NORMS,
    attention,
    expert_count,
    expert_mlps,
    fixed_values,
    joined_mlps,
    linear,
    never_null,
    norms,
    scaled_ends,
)
from edgeshard.architectures.record import Architecture, Experts, Library, Plugged, Shapes
from edgeshard.architectures.rope import Rope
from edgeshard.architectures.shape import KvHeads, ModelShape, StateSize
from edgeshard.architectures.windows import FULL

_KINDS = "layer_types"
_PATH = "block_sparse_moe"
_SWITCH = "has_experts"
_EXPERTS = Experts(
    count=("num_local_experts",),
    switch=_SWITCH,
    joined=joined_mlps(
        f"{_PATH}.experts", f"{_PATH}.input_linear.weight", f"{_PATH}.output_linear.weight"
    ),
)
_MULTIPLIERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
)
_NAMES_OF_KINDS = {"mamba": LINEAR, "attention": FULL}
_KEYS = MambaKeys()


def _current(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """With a flag of our own, for no experts at all is a count of 0."""
    config = {_KINDS if key == "layers_block_type" else key: value for key, value in values.items()}
    return mamba.plain(config, _KINDS, _NAMES_OF_KINDS) | {
        _SWITCH: config.get("num_local_experts") != 0
    }


def _mamba(fields: ConfigFields) -> Mamba:
    return Mamba.read(fields, _KEYS, mamba.expanded_head_dim(fields))


def _attends(fields: ConfigFields, layer: int) -> bool:
    kinds = fields.values.get(_KINDS)
    return kinds is not None and bool(kinds[layer] == FULL)


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    hidden = shape.hidden_size
    shared = fields.size("shared_intermediate_size")
    bias = fields.flag("attention_bias")
    block = (
        norms(hidden, *LLAMA_NORMS)
        | linear("shared_mlp.input_linear", 2 * shared, hidden)
        | linear("shared_mlp.output_linear", hidden, shared)
    )
    if count := expert_count(_EXPERTS, fields):
        block |= linear(f"{_PATH}.router.layer", count, hidden)
        block |= expert_mlps(shape, count, fields.size("intermediate_size"), f"{_PATH}.experts")
    if _attends(fields, layer):
        return block | attention(shape, input_bias=bias, output_bias=bias)
    return block | _mamba(fields).tensors(hidden, "mamba")


def _kv(fields: ConfigFields, shape: ModelShape, layer: int) -> KvHeads:
    return KvHeads(shape.kv_heads, shape.head_dim) if _attends(fields, layer) else KvHeads(0, 0)


def _states(fields: ConfigFields, shape: ModelShape, layer: int) -> tuple[StateSize, ...]:
    return () if _attends(fields, layer) else _mamba(fields).states


def _check(fields: ConfigFields, layer_count: int) -> None:
    mamba.check_kinds(fields, _KINDS, frozenset({LINEAR, FULL}), layer_count)
    _mamba(fields)


def _gguf(fields: GgufFields) -> dict[str, Any]:
    inner = fields.size("feed_forward_length")
    turns = fields.get("rope.scaling.finetuned") is not False
    return {
        _KINDS: attending(fields, "attention", "mamba"),
        "position_embedding_type": "rope" if turns else "nope",
        "mamba_expand": fields.size("ssm.inner_size") // fields.size("embedding_length"),
    } | ({} if has_experts(fields) else {"num_local_experts": 0, "shared_intermediate_size": inner})


ARCHITECTURE = Architecture(
    name="granitemoehybrid",
    current=_current,
    defaults=mamba.DEFAULTS
    | {
        "num_key_value_heads": "num_attention_heads",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "eos_token_id": 2,
    }
    | dict.fromkeys(_MULTIPLIERS, 1.0),
    activations=mamba.SILU,
    flags=("attention_bias", _SWITCH),
    sizes=("intermediate_size", "shared_intermediate_size"),
    numbers=("rms_norm_eps", *_MULTIPLIERS),
    checks=(
        _check,
        mamba.check_limits,
        never_null(*_MULTIPLIERS),
        fixed_values(normalization_function="rmsnorm"),
    ),
    rope=Rope(switch=("position_embedding_type", "rope")),
    experts=_EXPERTS,
    block=_block,
    kv=_kv,
    states=_states,
    library=Library("granitemoehybrid", "GraniteMoeHybrid"),
    runs=Plugged(
        renames=((r"\.router\.layer\.", ".router."),),
        experts=f"{_PATH}.experts",
        float32=mamba.FLOAT32,
        mixers={"mamba": mamba.MIXER},
    ),
    ends=scaled_ends,
    whole=r"router\.layer\.weight$",
    gguf=Gguf(("granitehybrid",), permuted=True, config=_gguf),
)
