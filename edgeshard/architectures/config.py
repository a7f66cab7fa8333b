"""What a config.json says of a model, and the refusal of everything the agent's adapters would run wrongly.

Defaults are those of transformers' configuration classes, for keys that real checkpoints leave out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeshard.architectures.fields import ConfigFields, decoder_fields, refuse
from edgeshard.dtypes import DType
from edgeshard.model import LayerRange

_ACTIVATIONS = frozenset({"silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu"})
_STATIC_ROPE = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Rotary types whose frequencies depend on the config alone, with the keys each needs."""
_EOS_DEFAULT = {"llama": 2, "mistral": 2, "mixtral": 2, "gemma3": 1, "phi3": 32000, "gpt2": 50256, "opt": 2}
_TIED_DEFAULT = frozenset({"gemma3", "gpt2", "opt"})
_WINDOW_ON_ALL_LAYERS = frozenset({"mistral", "mixtral", "phi3", "qwen3_moe"})
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

MAX_EXPERTS = 1024
"""Of one mixture layer; the largest published models have a few hundred."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers that placement, KV pools and frames need.

    `max_context` is in tokens. `tied` says that the embedding is the LM head too. `frame_width` is the width of the
    hidden states between two stages. `eos_tokens` are the ids config.json names that the vocabulary holds.
    """

    architecture: str
    layer_count: int
    hidden_size: int
    vocab_size: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    tied: bool
    eos_tokens: tuple[int, ...]
    frame_width: int

    def kv_bytes_per_token(self, layers: LayerRange, dtype: DType) -> int:
        """Bytes of keys and values one token takes in these layers."""
        return 2 * len(layers) * self.kv_heads * self.head_dim * dtype.itemsize


def parse_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape of the model that `config` (a decoded config.json) describes.

    Raises UnsupportedModelError, its `field` the key at fault, for an architecture or an option that is not run, and
    for a key that is missing or ill-typed.
    """
    _check_general(config)
    fields = decoder_fields(config)
    if fields.architecture == "gpt2":
        return _gpt2_shape(config, fields)
    if fields.architecture == "opt":
        return _opt_shape(config, fields)
    return _rotary_shape(config, fields)


def _check_general(config: Mapping[str, Any]) -> None:
    if config.get("auto_map"):
        raise refuse("auto_map", "asks for code from the checkpoint, which is never run; remove it from config.json")
    for part, prefix in ((config, ""), (config.get("text_config"), "text_config.")):
        if not isinstance(part, Mapping):
            continue
        for key in ("quantization_config", "compression_config"):
            if part.get(key):
                raise refuse(prefix + key, "is given; use the checkpoint that is not quantised")
        for key in ("is_encoder_decoder", "add_cross_attention"):
            if part.get(key):
                raise refuse(prefix + key, "is set; EdgeShard runs decoder-only models")


def is_tied(config: Mapping[str, Any], fields: ConfigFields) -> bool:
    """Whether the embedding is the LM head too; a nested config may say it at either level."""
    top = ConfigFields(fields.architecture, config)
    default = fields.architecture in _TIED_DEFAULT
    tied = top.flag("tie_word_embeddings", fields.flag("tie_word_embeddings", default))
    if fields.given("tie_word_embeddings") and fields.flag("tie_word_embeddings", default) != tied:
        raise refuse("tie_word_embeddings", "differs from the one in text_config; make the two agree")
    return tied


def _eos_tokens(config: Mapping[str, Any], fields: ConfigFields, vocab_size: int) -> tuple[int, ...]:
    default = _EOS_DEFAULT.get(fields.architecture)
    value = config["eos_token_id"] if "eos_token_id" in config else fields.values.get("eos_token_id", default)
    items = value if isinstance(value, list | tuple) else [] if value is None else [value]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise refuse("eos_token_id", f"is {value!r}; it must be a token id, a list of them or null")
    # An id beyond the vocabulary, as a class default in a small model, can never be sampled.
    return tuple(item for item in items if item < vocab_size)


def _even_split(fields: ConfigFields, total_key: str, total: int, parts_key: str, parts: int) -> int:
    if total % parts:
        raise fields.refuse(total_key, f"is {total}, which is not a multiple of {parts_key} {parts}")
    return total // parts


def _gpt2_shape(config: Mapping[str, Any], fields: ConfigFields) -> ModelShape:
    hidden, heads, vocab = fields.size("n_embd"), fields.size("n_head"), fields.size("vocab_size")
    if fields.flag("reorder_and_upcast_attn", False):
        raise fields.refuse("reorder_and_upcast_attn", "is set, which is not supported; set it to false")
    fields.flag("scale_attn_weights", True)
    fields.flag("scale_attn_by_inverse_layer_idx", False)
    fields.choice("activation_function", "gelu_new", _ACTIVATIONS)
    fields.number("layer_norm_epsilon", 1e-5)
    fields.size("n_inner", 4 * hidden)
    return ModelShape(
        architecture="gpt2",
        layer_count=fields.size("n_layer"),
        hidden_size=hidden,
        vocab_size=vocab,
        attention_heads=heads,
        kv_heads=heads,
        head_dim=_even_split(fields, "n_embd", hidden, "n_head", heads),
        max_context=fields.size("n_positions"),
        tied=is_tied(config, fields),
        eos_tokens=_eos_tokens(config, fields, vocab),
        frame_width=hidden,
    )


def _opt_shape(config: Mapping[str, Any], fields: ConfigFields) -> ModelShape:
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    vocab = fields.size("vocab_size")
    fields.choice("activation_function", "relu", _ACTIVATIONS)
    fields.size("ffn_dim")
    fields.size("word_embed_proj_dim", hidden)
    for key, default in (("do_layer_norm_before", True), ("_remove_final_layer_norm", False)):
        fields.flag(key, default)
    for key in ("enable_bias", "layer_norm_elementwise_affine"):
        fields.flag(key, True)
    return ModelShape(
        architecture="opt",
        layer_count=fields.size("num_hidden_layers"),
        hidden_size=hidden,
        vocab_size=vocab,
        attention_heads=heads,
        kv_heads=heads,
        head_dim=_even_split(fields, "hidden_size", hidden, "num_attention_heads", heads),
        max_context=fields.size("max_position_embeddings"),
        tied=is_tied(config, fields),
        eos_tokens=_eos_tokens(config, fields, vocab),
        frame_width=hidden,
    )


def _rotary_shape(config: Mapping[str, Any], fields: ConfigFields) -> ModelShape:
    gemma = fields.architecture == "gemma3"
    hidden, layer_count = fields.size("hidden_size"), fields.size("num_hidden_layers")
    heads = fields.size("num_attention_heads", 8 if gemma else None)
    # Only these two families leave the KV heads out of config.json when there is no grouping.
    kv_default = 4 if gemma else heads if fields.architecture in ("llama", "phi3") else None
    kv_heads = fields.size("num_key_value_heads", kv_default)
    _even_split(fields, "num_attention_heads", heads, "num_key_value_heads", kv_heads)
    vocab = fields.size("vocab_size", 262_208 if gemma else None)
    fields.size("intermediate_size")
    fields.choice("hidden_activation" if gemma else "hidden_act", "silu", _ACTIVATIONS)
    fields.number("rms_norm_eps", 1e-6)
    fields.flag("attention_bias", False)
    fields.flag("mlp_bias", False)
    _check_windows(fields, layer_count)
    _check_rope(fields)
    if gemma:
        _check_gemma3(fields)
    if fields.architecture in ("mixtral", "qwen3_moe"):
        _check_experts(fields, layer_count)
    return ModelShape(
        architecture=fields.architecture,
        layer_count=layer_count,
        hidden_size=hidden,
        vocab_size=vocab,
        attention_heads=heads,
        kv_heads=kv_heads,
        head_dim=_rotary_head_dim(fields, hidden, heads),
        max_context=fields.size("max_position_embeddings", 131_072 if gemma else None),
        tied=is_tied(config, fields),
        eos_tokens=_eos_tokens(config, fields, vocab),
        frame_width=hidden,
    )


def _rotary_head_dim(fields: ConfigFields, hidden: int, heads: int) -> int:
    default = {"gemma3": 256, "qwen3": 128}.get(fields.architecture)
    if fields.given("head_dim") or default is not None:
        head_dim = fields.size("head_dim", default)
    else:
        head_dim = _even_split(fields, "hidden_size", hidden, "num_attention_heads", heads)
    if head_dim % 2:
        raise fields.refuse("head_dim", f"is {head_dim}; a rotary embedding needs an even number")
    return head_dim


def _check_windows(fields: ConfigFields, layer_count: int) -> None:
    if fields.architecture == "llama":
        return
    uses_window = fields.flag("use_sliding_window", not fields.architecture.startswith("qwen"))
    if fields.given("sliding_window"):
        fields.size("sliding_window")
    if not fields.given("layer_types"):
        return
    types = fields.values["layer_types"]
    if not isinstance(types, list | tuple) or len(types) != layer_count or not _LAYER_TYPES.issuperset(types):
        raise fields.refuse(
            "layer_types", f"must name full_attention or sliding_attention for each of the {layer_count} layers"
        )
    slides = "sliding_attention" in types
    if fields.architecture in _WINDOW_ON_ALL_LAYERS and len(set(types)) > 1:
        raise fields.refuse("layer_types", f"differs by layer, which {fields.architecture} does not support; remove it")
    defaulted = "sliding_window" not in fields.values and fields.architecture == "gemma3"
    if slides and not defaulted and not (uses_window and fields.given("sliding_window")):
        raise fields.refuse("sliding_window", "is not in use, yet layer_types has sliding_attention; make them agree")


def _check_gemma3(fields: ConfigFields) -> None:
    if fields.values.get("use_bidirectional_attention"):
        raise fields.refuse("use_bidirectional_attention", "is set; EdgeShard runs causal models only")
    if fields.given("attn_logit_softcapping"):
        raise fields.refuse("attn_logit_softcapping", "is given, which gemma3 does not apply; set it to null")
    fields.number("final_logit_softcapping", 1.0)
    fields.number("query_pre_attn_scalar", 256)
    fields.size("sliding_window_pattern", 6)


def _check_experts(fields: ConfigFields, layer_count: int) -> None:
    experts = expert_count(fields)
    if experts > MAX_EXPERTS:  # before anything is listed by expert
        raise fields.refuse("num_experts", f"is {experts}; EdgeShard runs at most {MAX_EXPERTS}")
    default = 8 if fields.architecture == "qwen3_moe" else 2
    chosen = fields.size("num_experts_per_tok", default)
    if chosen > experts:
        raise fields.refuse("num_experts_per_tok", f"is {chosen}, more than the {experts} experts there are")
    if fields.architecture == "qwen3_moe":
        fields.size("moe_intermediate_size")
        fields.flag("norm_topk_prob", False)
        fields.size("decoder_sparse_step", 1)
        fields.layer_list("mlp_only_layers", layer_count)


def expert_count(fields: ConfigFields) -> int:
    """Experts of one mixture layer; checkpoints use either of two names."""
    return fields.size("num_experts" if fields.given("num_experts") else "num_local_experts")


def _check_rope(fields: ConfigFields) -> None:
    fields.number("rope_theta", 10_000.0)
    fields.number("rope_local_base_freq", 10_000.0)
    partial = fields.number("partial_rotary_factor", 1.0)
    _check_partial(fields, "partial_rotary_factor", partial)
    for key in ("rope_scaling", "rope_parameters"):
        value = fields.values.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise fields.refuse(key, f"is {value!r}; it must be an object or null")
        nested = [name for name in value if name in _LAYER_TYPES]
        if nested and fields.architecture != "gemma3":
            raise fields.refuse(key, f"differs by layer type, which {fields.architecture} does not support")
        for name in nested:
            if value[name] is None:
                continue
            if not isinstance(value[name], Mapping):
                raise fields.refuse(f"{key}.{name}", "must be an object or null")
            _check_rope_entry(fields, f"{key}.{name}", value[name])
        if nested or not value:
            continue
        if fields.architecture == "gemma3" and key == "rope_parameters":
            raise fields.refuse(key, "must be given for each layer type")
        _check_rope_entry(fields, key, value)


def _check_rope_entry(fields: ConfigFields, path: str, entry: Mapping[str, Any]) -> None:
    for key in ("rope_type", "type"):
        kind = entry.get(key, "default")
        static = set(_STATIC_ROPE) if fields.architecture != "phi3" else {"default"}
        if not isinstance(kind, str) or kind not in static:
            raise fields.refuse(
                f"{path}.{key}",
                f"is {kind!r}, whose frequencies are unknown or depend on the requests seen; "
                f"use a checkpoint with {', '.join(sorted(static))}",
            )
    for key, number in entry.items():
        if isinstance(number, bool | str) or number is None:
            continue
        if not isinstance(number, int | float) or not math.isfinite(number) or number <= 0:
            raise fields.refuse(f"{path}.{key}", f"is {number!r}; it must be a positive finite number")
    for key in _STATIC_ROPE[entry.get("rope_type", entry.get("type", "default"))]:
        if entry.get(key) is None:
            raise fields.refuse(f"{path}.{key}", "is missing; use the complete config.json of the checkpoint")
    _check_partial(fields, f"{path}.partial_rotary_factor", entry.get("partial_rotary_factor") or 1.0)


def _check_partial(fields: ConfigFields, path: str, factor: object) -> None:
    if not isinstance(factor, int | float) or isinstance(factor, bool):
        raise fields.refuse(path, f"is {factor!r}; it must be a number")
    if factor > 1 or (factor != 1 and fields.architecture != "phi3"):
        raise fields.refuse(path, f"is {factor}, which {fields.architecture} does not support; it must be 1")
