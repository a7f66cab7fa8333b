"""llama.cpp's names of tensors and of metadata, and what config.json and checkpoints call the same.
Pure.

A name in a file has several names in checkpoints, by family. The tensors that a family expects
decide between them, so a family needs no table of its own. Source: gguf-py/gguf/constants.py of
https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from edgeshard.architectures.gguf import GgufFields


@dataclass(frozen=True, slots=True)
class Half:
    """A half of a checkpoint's tensor that a file has in two: its gate (0) or what the gate
    multiplies (1)."""

    name: str
    number: int


_MIXERS = ("mixer.", "mamba.", "linear_attn.")
_MLPS = ("mlp.", "feed_forward.", "mixer.")
_SHARED = (
    "mlp.shared_expert.",
    "mlp.shared_experts.",
    "mlp.shared_mlp.",
    "feed_forward.shared_expert.",
    "mixer.shared_experts.",
)


def _each(paths: tuple[str, ...], *names: str) -> tuple[str, ...]:
    """Each of `names` under each of `paths`."""
    return tuple(f"{path}{name}" for path in paths for name in names)


BLOCK: Mapping[str, tuple[str | Half, ...]] = {
    "attn_norm": ("input_layernorm", "operator_norm", "norm"),
    "ffn_norm": (
        "pre_feedforward_layernorm",
        "pre_ff_layernorm",
        "ffn_norm",
        "post_attention_layernorm",
    ),
    "post_attention_norm": ("post_self_attn_layernorm", "post_attention_layernorm"),
    "pre_ffw_norm_2": ("pre_feedforward_layernorm_2",),
    "post_ffw_norm_1": ("post_feedforward_layernorm_1",),
    "post_ffw_norm_2": ("post_feedforward_layernorm_2",),
    "layer_output_scale.weight": ("layer_scalar",),
    "post_ffw_norm": ("post_mlp_layernorm", "post_feedforward_layernorm"),
    "attn_q": ("self_attn.q_proj", "mixer.q_proj"),
    "attn_k": ("self_attn.k_proj", "mixer.k_proj"),
    "attn_v": ("self_attn.v_proj", "mixer.v_proj"),
    "attn_output": ("self_attn.o_proj", "self_attn.out_proj", "mixer.o_proj"),
    "attn_qkv": ("self_attn.qkv_proj", "linear_attn.in_proj_qkv"),
    "attn_gate": ("linear_attn.in_proj_z",),
    "attn_q_norm": ("self_attn.q_norm", "self_attn.q_layernorm", "self_attn.query_layernorm"),
    "attn_k_norm": ("self_attn.k_norm", "self_attn.k_layernorm", "self_attn.key_layernorm"),
    "attn_sinks.weight": ("self_attn.sinks",),
    "ffn_gate": (*_each(_MLPS, "gate_proj", "w1"), Half("shared_mlp.input_linear", 0)),
    "ffn_up": (
        *_each(_MLPS, "up_proj", "w3"),
        "mlp.gate_up_proj",
        "mlp.c_fc",
        Half("shared_mlp.input_linear", 1),
    ),
    "ffn_down": (*_each(_MLPS, "down_proj", "w2"), "mlp.c_proj", "shared_mlp.output_linear"),
    "ffn_gate_shexp": (*_each(_SHARED, "gate_proj"), Half("shared_mlp.input_linear", 0)),
    "ffn_up_shexp": (*_each(_SHARED, "up_proj"), Half("shared_mlp.input_linear", 1)),
    "ffn_down_shexp": (*_each(_SHARED, "down_proj"), "shared_mlp.output_linear"),
    "ffn_gate_inp_shexp": ("mlp.shared_expert_gate",),
    "ffn_gate_inp": (
        "mlp.gate",
        "mlp.gate.wg",
        "mlp.router",
        "block_sparse_moe.gate",
        "block_sparse_moe.router.layer",
        "feed_forward.gate",
        "feed_forward.router",
        "mixer.gate",
        "router.proj",
    ),
    "ffn_gate_inp.scale": ("router.scale",),
    "ffn_down_exps.scale": ("router.per_expert_scale",),
    "exp_probs_b.bias": (
        "mlp.gate.e_score_correction_bias",
        "mlp.e_score_correction_bias",
        "mlp.moe_statics.e_score_correction_bias",
        "block_sparse_moe.e_score_correction_bias",
        "feed_forward.expert_bias",
        "mixer.gate.e_score_correction_bias",
    ),
    "ssm_in": _each(_MIXERS, "in_proj"),
    "ssm_out": _each(_MIXERS, "out_proj"),
    "ssm_conv1d": _each(_MIXERS, "conv1d"),
    "ssm_norm": _each(_MIXERS, "norm"),
    "ssm_a": _each(_MIXERS, "A_log"),
    "ssm_d": _each(_MIXERS, "D"),
    "ssm_dt.bias": _each(_MIXERS, "dt_bias"),
    "ssm_alpha": ("linear_attn.in_proj_a",),
    "ssm_beta": ("linear_attn.in_proj_b",),
    "ssm_ba": ("linear_attn.in_proj_ba",),
    "shortconv.conv": ("conv.conv",),
    "shortconv.in_proj": ("conv.in_proj",),
    "shortconv.out_proj": ("conv.out_proj",),
}
"""Names in a block, without `.weight` and `.bias` unless these differ too; the one that the family
expects counts."""

_EXPERTS = (
    "mlp.experts.{}.",
    "block_sparse_moe.experts.{}.",
    "feed_forward.experts.{}.",
    "mixer.experts.{}.",
    "experts.{}.",
)
EXPERTS: Mapping[str, tuple[str | Half, ...]] = {
    "ffn_gate_exps.weight": (
        *_each(_EXPERTS, "gate_proj.weight", "w1.weight"),
        Half("mlp.experts.{}.gate_up_proj", 0),
        Half("feed_forward.experts.{}.gate_up_proj", 0),
    ),
    "ffn_up_exps.weight": (
        *_each(_EXPERTS, "up_proj.weight", "w3.weight"),
        Half("mlp.experts.{}.gate_up_proj", 1),
        Half("feed_forward.experts.{}.gate_up_proj", 1),
    ),
    "ffn_down_exps.weight": (
        *_each(_EXPERTS, "down_proj.weight", "w2.weight"),
        "mlp.experts.{}.down_proj",
        "feed_forward.experts.{}.down_proj",
    ),
    "ffn_gate_exps.bias": (Half("mlp.experts.{}.gate_up_proj_bias", 0),),
    "ffn_up_exps.bias": (Half("mlp.experts.{}.gate_up_proj_bias", 1),),
    "ffn_down_exps.bias": ("mlp.experts.{}.down_proj_bias",),
}
"""Names of tensors that hold all experts of a block, one after the other; `{}` is for the expert's
index."""

GATES_AND_UPS = "ffn_gate_up_exps.weight"
"""The tensor in which files may have gates of all experts and what they multiply: both of an
expert, then the next."""

Read = Callable[[GgufFields, str], Any]


def _count(fields: GgufFields, key: str) -> Any:
    value = fields.get(key)
    return value if type(value) is int and value >= 0 else fields.size(key)


def _flag(fields: GgufFields, key: str) -> bool:
    return fields.get(key) is True


_SIZE: Read = GgufFields.size
_NUMBER: Read = GgufFields.number
KEYS: Mapping[str, tuple[str, Read]] = {
    "intermediate_size": ("feed_forward_length", _SIZE),
    "moe_intermediate_size": ("expert_feed_forward_length", _SIZE),
    "shared_expert_intermediate_size": ("expert_shared_feed_forward_length", _SIZE),
    "moe_shared_expert_intermediate_size": ("expert_shared_feed_forward_length", _SIZE),
    "shared_intermediate_size": ("expert_shared_feed_forward_length", _SIZE),
    "n_shared_experts": ("expert_shared_count", _SIZE),
    "num_shared_experts": ("expert_shared_count", _SIZE),
    "moe_num_shared_experts": ("expert_shared_count", _SIZE),
    "first_k_dense_replace": ("leading_dense_block_count", _count),
    "num_dense_layers": ("leading_dense_block_count", _count),
    "moe_layer_start_index": ("leading_dense_block_count", _count),
    "n_group": ("expert_group_count", _SIZE),
    "topk_group": ("expert_group_used_count", _SIZE),
    "norm_topk_prob": ("expert_weights_norm", _flag),
    "routed_scaling_factor": ("expert_weights_scale", _NUMBER),
    "embedding_multiplier": ("embedding_scale", _NUMBER),
    "residual_multiplier": ("residual_scale", _NUMBER),
    "attention_multiplier": ("attention.scale", _NUMBER),
    "logits_scaling": ("logit_scale", _NUMBER),
    "logit_scale": ("logit_scale", _NUMBER),
    "attn_logit_softcapping": ("attn_logit_softcapping", _NUMBER),
    "final_logit_softcapping": ("final_logit_softcapping", _NUMBER),
    "conv_L_cache": ("shortconv.l_cache", _SIZE),
    "interleave_moe_layer_step": ("interleave_moe_layer_step", _SIZE),
    "full_attention_interval": ("full_attention_interval", _SIZE),
    "linear_conv_kernel_dim": ("ssm.conv_kernel", _SIZE),
    "linear_key_head_dim": ("ssm.state_size", _SIZE),
    "linear_num_key_heads": ("ssm.group_count", _SIZE),
    "linear_num_value_heads": ("ssm.time_step_rank", _SIZE),
    "mamba_d_conv": ("ssm.conv_kernel", _SIZE),
    "conv_kernel": ("ssm.conv_kernel", _SIZE),
    "mamba_d_state": ("ssm.state_size", _SIZE),
    "ssm_state_size": ("ssm.state_size", _SIZE),
    "state_size": ("ssm.state_size", _SIZE),
    "mamba_n_groups": ("ssm.group_count", _SIZE),
    "n_groups": ("ssm.group_count", _SIZE),
    "mamba_n_heads": ("ssm.time_step_rank", _SIZE),
    "mamba_num_heads": ("ssm.time_step_rank", _SIZE),
    "num_heads": ("ssm.time_step_rank", _SIZE),
    "mamba_d_ssm": ("ssm.inner_size", _SIZE),
}
"""Keys of config.json, with the key of the metadata without its prefix and how it is read. A family
has those that its record reads."""

FLAGS: Mapping[str, str] = {
    "attention_bias": "attn_q.bias",
    "qkv_bias": "attn_q.bias",
    "use_bias": "attn_q.bias",
    "attention_out_bias": "attn_output.bias",
    "mlp_bias": "ffn_up.bias",
    "conv_bias": "shortconv.conv.bias",
    "mamba_conv_bias": "ssm_conv1d.bias",
    "use_conv_bias": "ssm_conv1d.bias",
    "use_expert_bias": "exp_probs_b.bias",
    "use_qk_norm": "attn_q_norm.weight",
}
"""Flags of config.json that a file shows by a tensor that some block has."""


def known_keys(fields: GgufFields, read: Container[str]) -> dict[str, Any]:
    """The keys among those that a family reads for which the file has the metadata or the
    tensor."""
    config = {}
    for key, (name, how) in KEYS.items():
        if key in read and fields.get(name) is not None:
            config[key] = how(fields, name)
    for key, stem in FLAGS.items():
        if key in read:
            config[key] = fields.has(stem)
    return config
