"""The table of tiny models that every test of equivalence goes through: a row or more for each
family.

A row is a configuration of transformers with the family's options switched on; adding it is all the
testing a new family needs. The mutants read their data of a row from its record.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import transformers

from edgeshard.architectures import Decoder, read_config
from edgeshard.architectures.record import Plugged
from edgeshard.domain.models.model import LayerRange

LAYERS = 4
WINDOW = 6

_BASE = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 3,
    "pad_token_id": None,
}
_GPT2 = {
    "n_layer": LAYERS,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": 61,
    "n_positions": 64,
    "initializer_range": 0.15,
}
_OPT = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_dim": 40,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "init_std": 0.15,
    "bos_token_id": None,
}
_ROPE = {"rope_theta": 500.0, "rope_type": "default"}
_LLAMA3 = _ROPE | {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = _ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_experts": 4}
_GEMMA = {
    "head_dim": 12,
    "sliding_window": WINDOW,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ],
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
    },
}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.5,
}
_MINISTRAL = _YARN | {
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 8,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_STEP = {
    "pad_token_id": 5,
    "head_dim": 12,
    "num_sliding_attention_heads": 6,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "share_expert_dim": 20,
    "moe_router_scaling_factor": 2.5,
    "swiglu_limits": [0.0, 0.0, 0.1, None],
    "swiglu_limits_shared": [0.2, 0.0, 0.0, 0.1],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": _LLAMA3 | {"rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    },
}
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 3,
}
_SCAN: dict[str, Any] = {
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "ssm_state_size": 12,
    "n_groups": 2,
    "conv_kernel": 3,
    "chunk_size": 8,
    # transformers' form for prompts has no shorter step than this, that for single tokens has any.
    "time_step_min": 1e-9,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 8,
}
_MAMBA2: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 12,
    "n_groups": 2,
    "conv_kernel": 3,
    "chunk_size": 8,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 3,
    "pad_token_id": None,
}
_FALCON: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.6,
    "mlp_multipliers": [0.9, 0.5],
    "ssm_multipliers": [0.4, 1.2, 0.5, 0.6, 1.5],
}
_KIMI: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "linear_head_dim": 8,
    "linear_num_heads": 3,
    "linear_conv_kernel_dim": 3,
    "moe_intermediate_size": 24,
}
_LLAMA4: dict[str, Any] = {
    "head_dim": 12,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "attention_chunk_size": 16,
    "floor_scale": 5,
    "attn_scale": 0.5,
}
_ALTERNATING = ["full_attention", "sliding_attention"] * 2


@dataclass(frozen=True)
class Variant:
    """One configuration: the transformers config class and its options; how the checkpoint is
    saved.

    `strip` is a prefix taken off every stored name, as checkpoints of the bare model have it.
    `wrap` makes the config of a model that nests this one, and `auto` is then its auto class.
    `joined` has the experts of a layer in tensors as published, if transformers writes others.
    """

    config_class: str
    options: dict[str, Any]
    sharded: bool = False
    strip: str = ""
    wrap: Callable[[Any], Any] | None = None
    auto: str = "AutoModelForCausalLM"
    joined: bool = False

    def library_config(self) -> Any:
        """A new transformers config."""
        config = getattr(transformers, self.config_class)(**json.loads(json.dumps(self.options)))
        return config if self.wrap is None else self.wrap(config)


def _with_pictures(text: Any) -> Any:
    vision = transformers.SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    return transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision.to_dict(), initializer_range=0.15
    )


def _with_pixels(text: Any) -> Any:
    vision = transformers.PixtralVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    return transformers.Mistral3Config(
        text_config=text.to_dict(), vision_config=vision.to_dict(), tie_word_embeddings=False
    )


def with_patches(text: Any) -> Any:
    vision = {
        "width": 16,
        "layers": 1,
        "heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "mlp_ratio": 2.0,
    }
    made: Any = transformers.Step3p7Config
    tied = text.to_dict().get("tie_word_embeddings", False)
    return made(text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=tied)


def _with_frames(text: Any, family: str = "Qwen3VL") -> Any:
    vision: dict[str, Any] = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
    }
    vision |= {"num_position_embeddings": 16}
    if "VL" in family:
        vision["deepstack_visual_indexes"] = [0]
    tied = text.to_dict().get("tie_word_embeddings", False)
    made: Any = getattr(transformers, f"{family}Config")
    return made(text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=tied)


def _with_frames_of(text: Any, family: str) -> Any:
    """As `_with_frames`, for Qwen's earlier models for pictures."""
    vision: dict[str, Any] = {"depth": 1, "embed_dim": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {
        "hidden_size": 32 if family == "Qwen2VL" else 16,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [0],
    }
    made: Any = getattr(transformers, f"{family}Config")
    tied = text.to_dict().get("tie_word_embeddings", False)
    return made(text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=tied)


def _with_tiles(text: Any) -> Any:
    vision: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 16,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
    }
    tied = text.to_dict().get("tie_word_embeddings", False)
    return transformers.Llama4Config(
        text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=tied
    )


def _with_patch_grids(text: Any) -> Any:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"num_patches": 16, "patch_size": 2}
    made: Any = transformers.Lfm2VlConfig
    tied = text.to_dict().get("tie_word_embeddings", False)
    return made(
        text_config=text.to_dict(),
        vision_config=vision,
        projector_hidden_size=16,
        tie_word_embeddings=tied,
    )


def _rotary(config_class: str, *, sharded: bool = False, **options: Any) -> Variant:
    return Variant(config_class, _BASE | {"rope_parameters": dict(_ROPE)} | options, sharded)


VARIANTS = {
    "llama-plain": _rotary("LlamaConfig", head_dim=16),
    "llama-options": _rotary(
        "LlamaConfig",
        sharded=True,
        rope_parameters=_LLAMA3,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        head_dim=10,
    ),
    "llama-linear": _rotary(
        "LlamaConfig",
        rope_parameters=_ROPE | {"rope_type": "linear", "factor": 2.0},
        num_key_value_heads=4,
    ),
    "llama-yarn": _rotary(
        "LlamaConfig", rope_parameters=_YARN, hidden_act="gelu", num_key_value_heads=1
    ),
    "mistral-window": _rotary("MistralConfig", sharded=True, sliding_window=WINDOW, head_dim=16),
    "mistral-nested": Variant(
        "MistralConfig",
        _BASE | {"rope_parameters": _ROPE, "sliding_window": None, "head_dim": 12},
        sharded=True,
        wrap=_with_pixels,
        auto="AutoModelForImageTextToText",
    ),
    "mistral-full": _rotary("MistralConfig", sliding_window=None, tie_word_embeddings=True),
    "qwen2-windows": _rotary(
        "Qwen2Config",
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
        head_dim=16,
    ),
    "qwen2-tied": _rotary("Qwen2Config", sharded=True, tie_word_embeddings=True),
    "qwen3-windows": _rotary(
        "Qwen3Config",
        sharded=True,
        head_dim=12,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
    ),
    "qwen3-tied": _rotary("Qwen3Config", head_dim=16, tie_word_embeddings=True),
    "qwen3_moe-dense-layer": _rotary(
        "Qwen3MoeConfig",
        sharded=True,
        **_MOE,
        head_dim=12,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        use_sliding_window=True,
        sliding_window=WINDOW,
        attention_bias=True,
    ),
    "qwen3_moe-sparse-step": _rotary(
        "Qwen3MoeConfig",
        **_MOE,
        decoder_sparse_step=2,
        norm_topk_prob=False,
        tie_word_embeddings=True,
    ),
    "mixtral-window": _rotary(
        "MixtralConfig", sharded=True, num_local_experts=4, sliding_window=WINDOW
    ),
    "mixtral-tied": _rotary(
        "MixtralConfig", num_local_experts=3, tie_word_embeddings=True, head_dim=12
    ),
    "gemma3-text": Variant("Gemma3TextConfig", _BASE | _GEMMA | {"final_logit_softcapping": 4.0}),
    "gemma3-untied": Variant(
        "Gemma3TextConfig",
        _BASE | _GEMMA | {"attention_bias": True, "tie_word_embeddings": False},
        sharded=True,
    ),
    "gemma3-nested": Variant(
        "Gemma3TextConfig",
        _BASE | _GEMMA,
        sharded=True,
        wrap=_with_pictures,
        auto="AutoModelForImageTextToText",
    ),
    "phi3-partial": _rotary(
        "Phi3Config",
        sharded=True,
        sliding_window=WINDOW,
        rope_parameters=_ROPE | {"partial_rotary_factor": 0.5},
    ),
    "phi3-tied": _rotary("Phi3Config", num_key_value_heads=4, tie_word_embeddings=True),
    "olmo2-plain": _rotary("Olmo2Config"),
    "olmo2-options": _rotary(
        "Olmo2Config",
        sharded=True,
        rope_parameters=_YARN,
        attention_bias=True,
        tie_word_embeddings=True,
        head_dim=12,
        num_key_value_heads=4,
    ),
    "qwen2_moe-windows": _rotary(
        "Qwen2MoeConfig",
        sharded=True,
        **_MOE,
        shared_expert_intermediate_size=28,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=4,
    ),
    "qwen2_moe-options": _rotary(
        "Qwen2MoeConfig",
        **_MOE | {"num_experts_per_tok": 3},
        shared_expert_intermediate_size=28,
        decoder_sparse_step=2,
        norm_topk_prob=True,
        qkv_bias=False,
        tie_word_embeddings=True,
        head_dim=12,
    ),
    "granite-options": _rotary(
        "GraniteConfig",
        sharded=True,
        **_GRANITE,
        attention_bias=True,
        mlp_bias=True,
        head_dim=12,
    ),
    "granite-tied": Variant(
        "GraniteConfig",
        _BASE
        | {
            "rope_theta": 500.0,
            "tie_word_embeddings": True,
            "embedding_multiplier": 2,
            "logits_scaling": 4,
        },
    ),
    "smollm3-interval": _rotary(
        "SmolLM3Config",
        sharded=True,
        rope_parameters=_LLAMA3 | {"factor": 2.0},
        no_rope_layer_interval=3,
        attention_bias=True,
        mlp_bias=True,
        head_dim=12,
    ),
    "smollm3-windows": _rotary(
        "SmolLM3Config",
        no_rope_layers=[1, 0, 1, 0],
        use_sliding_window=True,
        sliding_window=WINDOW,
        tie_word_embeddings=False,
    ),
    "starcoder2-window": _rotary("Starcoder2Config", sharded=True, sliding_window=WINDOW),
    "starcoder2-untied": _rotary(
        "Starcoder2Config",
        use_bias=False,
        tie_word_embeddings=False,
        norm_epsilon=1e-3,
        head_dim=12,
    ),
    "olmo3-windows": _rotary(
        "Olmo3Config",
        sliding_window=WINDOW,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": _YARN | {"rope_theta": 5000.0},
        },
    ),
    "olmo3-options": Variant(
        "Olmo3Config",
        _BASE
        | {
            "rope_theta": 5000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 8,
                "attention_factor": 1.2,
                "beta_fast": 32,
                "beta_slow": 1,
            },
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 12,
        },
        sharded=True,
    ),
    "exaone4-windows": _rotary(
        "Exaone4Config",
        sharded=True,
        rope_parameters=_LLAMA3,
        sliding_window=WINDOW,
        sliding_window_pattern=3,
        head_dim=12,
    ),
    "exaone4-full": _rotary(
        "Exaone4Config",
        sliding_window=None,
        layer_types=["full_attention"] * LAYERS,
        tie_word_embeddings=True,
    ),
    "granitemoe-options": _rotary(
        "GraniteMoeConfig",
        sharded=True,
        **_GRANITE,
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_bias=True,
    ),
    "granitemoeshared-options": _rotary(
        "GraniteMoeSharedConfig",
        sharded=True,
        **_GRANITE,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=20,
    ),
    "granitemoe-tied": _rotary(
        "GraniteMoeConfig",
        num_local_experts=3,
        num_experts_per_tok=2,
        residual_multiplier=0.22,
        tie_word_embeddings=True,
        head_dim=12,
    ),
    "ministral3-plain": _rotary("Ministral3Config", rope_parameters=_MINISTRAL, head_dim=12),
    "ministral3-window": _rotary(
        "Ministral3Config",
        rope_parameters=_MINISTRAL
        | {
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 4,
            "factor": 16.0,
            "mscale_all_dim": 0.0,
        },
        sliding_window=WINDOW,
        tie_word_embeddings=True,
        head_dim=16,
    ),
    "ministral3-nested": Variant(
        "Ministral3Config",
        _BASE | {"rope_parameters": _MINISTRAL, "head_dim": 12},
        sharded=True,
        wrap=_with_pixels,
        auto="AutoModelForImageTextToText",
    ),
    "glm4-plain": _rotary("Glm4Config", head_dim=16),
    "glm4-options": Variant(
        "Glm4Config",
        _BASE
        | {
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.25,
            "head_dim": 16,
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
        sharded=True,
    ),
    "gemma2-capped": _rotary(
        "Gemma2Config",
        head_dim=12,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=1.0,
        final_logit_softcapping=4.0,
    ),
    "gemma2-options": _rotary(
        "Gemma2Config",
        sharded=True,
        head_dim=12,
        sliding_window=WINDOW,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
        layer_types=_ALTERNATING,
        tie_word_embeddings=False,
    ),
    "gpt_oss-yarn": _rotary(
        "GptOssConfig",
        sharded=True,
        # truncate is visible only if the ramp begins between two frequencies.
        rope_parameters=_YARN
        | {
            "rope_theta": 1000.0,
            "truncate": False,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 64,
        },
        head_dim=12,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        swiglu_limit=1.0,
    ),
    "gpt_oss-options": _rotary(
        "GptOssConfig",
        head_dim=16,
        sliding_window=WINDOW,
        num_local_experts=3,
        num_experts_per_tok=3,
        attention_bias=False,
        layer_types=_ALTERNATING,
        tie_word_embeddings=True,
    ),
    "glm4_moe-groups": _rotary(
        "Glm4MoeConfig",
        sharded=True,
        rope_parameters=_ROPE | {"partial_rotary_factor": 0.5},
        head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        moe_intermediate_size=24,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "glm4_moe-options": Variant(
        "Glm4MoeConfig",
        _BASE
        | {
            "rope_theta": 500.0,
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "dots1-windows": _rotary(
        "Dots1Config",
        sharded=True,
        head_dim=12,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        norm_topk_prob=True,
        attention_bias=True,
        sliding_window=WINDOW,
        max_window_layers=2,
    ),
    "glm4v_moe-nested": Variant(
        "Glm4vMoeTextConfig",
        _BASE
        | {
            "rope_parameters": _ROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
            "head_dim": 16,
        }
        | {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
        },
        sharded=True,
        wrap=partial(_with_frames, family="Glm4vMoe"),
        auto="AutoModelForImageTextToText",
    ),
    "gemma-plain": _rotary("GemmaConfig", sharded=True, head_dim=12),
    "qwen2_vl-nested": Variant(
        "Qwen2VLTextConfig",
        _BASE | {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}},
        sharded=True,
        wrap=partial(_with_frames_of, family="Qwen2VL"),
        auto="AutoModelForImageTextToText",
    ),
    "qwen2_5_vl-windows": Variant(
        "Qwen2_5_VLTextConfig",
        _BASE
        | {"rope_parameters": _YARN | {"mrope_section": [2, 1, 1]}, "tie_word_embeddings": True}
        | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
        wrap=partial(_with_frames_of, family="Qwen2_5_VL"),
        auto="AutoModelForImageTextToText",
    ),
    "minimax_m2-partial": _rotary(
        "MiniMaxM2Config",
        sharded=True,
        head_dim=12,
        rotary_dim=6,
        num_local_experts=6,
        num_experts_per_tok=2,
    ),
    "minimax_m2-tied": _rotary(
        "MiniMaxM2Config",
        rope_parameters=_YARN,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=3,
        tie_word_embeddings=True,
    ),
    "qwen3_vl-nested": Variant(
        "Qwen3VLTextConfig",
        _BASE
        | {
            "rope_parameters": _ROPE | {"mrope_section": [2, 2, 2], "mrope_interleaved": True},
            "head_dim": 12,
        },
        sharded=True,
        wrap=_with_frames,
        auto="AutoModelForImageTextToText",
    ),
    "qwen3_vl-tied": Variant(
        "Qwen3VLTextConfig",
        _BASE
        | {
            "rope_parameters": _YARN,
            "head_dim": 16,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        wrap=_with_frames,
        auto="AutoModelForImageTextToText",
    ),
    "step3p5-clamped": Variant(
        "Step3p7TextConfig", _BASE | _STEP, True, "", with_patches, "AutoModelForImageTextToText"
    ),
    "step3p5-full": Variant(
        "Step3p7TextConfig",
        _BASE
        | {
            "pad_token_id": 5,
            "sliding_window": WINDOW,
            "head_dim": 16,
            "n_routed_experts": 3,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
        }
        | {
            "share_expert_dim": 20,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 9,
        },
        wrap=with_patches,
        auto="AutoModelForImageTextToText",
    ),
    "seed_oss-plain": _rotary("SeedOssConfig", head_dim=12),
    "seed_oss-options": _rotary(
        "SeedOssConfig",
        sharded=True,
        rope_parameters=_YARN,
        head_dim=16,
        attention_bias=False,
        attention_out_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "hunyuan_v1_dense-alpha": _rotary(
        "HunYuanDenseV1Config",
        sharded=True,
        rope_parameters=_ROPE | {"rope_type": "dynamic", "alpha": 20.0, "factor": 1.0},
        head_dim=12,
    ),
    "hunyuan_v1_dense-options": _rotary(
        "HunYuanDenseV1Config",
        head_dim=16,
        attention_bias=True,
        tie_word_embeddings=True,
        num_key_value_heads=1,
    ),
    "hunyuan_v1_moe-alpha": _rotary(
        "HunYuanMoEV1Config",
        sharded=True,
        rope_parameters=_ROPE | {"rope_type": "dynamic", "alpha": 20.0, "factor": 1.0},
        head_dim=12,
        num_experts=4,
        moe_topk=2,
    ),
    "hunyuan_v1_moe-options": _rotary(
        "HunYuanMoEV1Config",
        head_dim=8,
        attention_bias=True,
        tie_word_embeddings=True,
        num_experts=3,
        moe_topk=[3] * LAYERS,
    ),
    "ernie4_5-plain": _rotary("Ernie4_5Config", head_dim=12, use_bias=True),
    "ernie4_5-untied": _rotary(
        "Ernie4_5Config",
        sharded=True,
        rope_parameters=_LLAMA3,
        head_dim=16,
        tie_word_embeddings=False,
    ),
    "ernie4_5_moe-plain": _rotary(
        "Ernie4_5_MoeConfig", sharded=True, moe_num_experts=5, moe_k=2, moe_intermediate_size=24
    ),
    "ernie4_5_moe-options": _rotary(
        "Ernie4_5_MoeConfig",
        rope_parameters=_YARN,
        head_dim=12,
        moe_num_experts=3,
        moe_k=3,
        moe_intermediate_size=24,
        moe_num_shared_experts=0,
        moe_layer_start_index=0,
        moe_layer_end_index=2,
        moe_layer_interval=2,
        moe_norm_min=2.0,
        tie_word_embeddings=False,
    ),
    "cohere2-windows": _rotary(
        "Cohere2Config", sharded=True, sliding_window=WINDOW, logit_scale=0.25
    ),
    "cohere2-options": _rotary(
        "Cohere2Config",
        rope_parameters=_YARN,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        attention_bias=True,
        tie_word_embeddings=False,
        logit_scale=0.3,
        layer_norm_eps=1e-3,
        num_key_value_heads=4,
    ),
    "olmoe-clipped": _rotary(
        "OlmoeConfig",
        sharded=True,
        num_experts=6,
        num_experts_per_tok=2,
        clip_qkv=1.0,
        norm_topk_prob=True,
    ),
    "olmoe-options": _rotary(
        "OlmoeConfig",
        rope_parameters=_YARN,
        num_experts=3,
        num_experts_per_tok=3,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "arcee-yarn": _rotary("ArceeConfig", sharded=True, rope_parameters=_YARN, head_dim=12),
    "arcee-options": _rotary(
        "ArceeConfig",
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        hidden_act="gelu",
    ),
    "apertus-llama3": _rotary(
        "ApertusConfig", sharded=True, rope_parameters=_LLAMA3, dtype="float32"
    ),
    "apertus-options": _rotary(
        "ApertusConfig",
        head_dim=12,
        attention_bias=True,
        tie_word_embeddings=True,
        hidden_act="relu",
    ),
    "exaone_moe-windows": _rotary(
        "ExaoneMoeConfig",
        sharded=True,
        rope_parameters=_LLAMA3,
        sliding_window=WINDOW,
        head_dim=12,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        n_group=4,
        topk_group=2,
        num_shared_experts=2,
    ),
    "exaone_moe-options": _rotary(
        "ExaoneMoeConfig",
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        mlp_layer_types=["sparse", "dense", "sparse", "dense"],
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
        tie_word_embeddings=True,
    ),
    "gemma4-dense": Variant(
        "Gemma4TextConfig",
        _BASE
        | {
            "head_dim": 12,
            "global_head_dim": 20,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma4-experts": Variant(
        "Gemma4TextConfig",
        _BASE
        | {
            "head_dim": 16,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "sliding_window": WINDOW,
            "attention_bias": True,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 500.0,
                },
            },
        },
        sharded=True,
    ),
    "qwen3_next-dense-layer": _rotary(
        "Qwen3NextConfig",
        sharded=True,
        **_MOE,
        **_DELTA,
        shared_expert_intermediate_size=28,
        mlp_only_layers=[1],
        attention_bias=True,
        layer_types=["linear_attention", "full_attention"] * 2,
    ),
    "qwen3_next-sparse-step": _rotary(
        "Qwen3NextConfig",
        **_MOE,
        **_DELTA | {"linear_num_value_heads": 2},
        shared_expert_intermediate_size=28,
        decoder_sparse_step=2,
        norm_topk_prob=False,
        tie_word_embeddings=True,
        rope_parameters=_ROPE | {"partial_rotary_factor": 0.5},
    ),
    "qwen3_5-text": _rotary("Qwen3_5TextConfig", **_DELTA, tie_word_embeddings=True),
    "qwen3_5-options": _rotary(
        "Qwen3_5TextConfig",
        sharded=True,
        **_DELTA | {"linear_num_value_heads": 6},
        attention_bias=True,
        layer_types=["full_attention", "linear_attention"] * 2,
        rope_parameters=_ROPE
        | {"mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.25},
    ),
    "qwen3_5_moe-joined": Variant(
        "Qwen3_5MoeTextConfig",
        _BASE | _MOE | _DELTA | {"rope_parameters": _ROPE, "shared_expert_intermediate_size": 28},
        wrap=partial(_with_frames, family="Qwen3_5Moe"),
        auto="AutoModelForImageTextToText",
        joined=True,
    ),
    "qwen3_5_moe-options": _rotary(
        "Qwen3_5MoeTextConfig",
        sharded=True,
        **_MOE | {"num_experts": 5, "num_experts_per_tok": 3},
        **_DELTA | {"linear_num_value_heads": 6},
        shared_expert_intermediate_size=20,
        attention_bias=True,
        tie_word_embeddings=True,
        layer_types=["full_attention", "linear_attention"] * 2,
        rope_parameters=_ROPE
        | {"mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.25},
    ),
    "qwen3_vl_moe-nested": Variant(
        "Qwen3VLMoeTextConfig",
        _BASE
        | _MOE
        | {
            "rope_parameters": _ROPE | {"mrope_section": [2, 2, 2], "mrope_interleaved": True},
            "head_dim": 12,
        }
        | {"mlp_only_layers": [1], "tie_word_embeddings": False},
        wrap=partial(_with_frames, family="Qwen3VLMoe"),
        auto="AutoModelForImageTextToText",
        joined=True,
    ),
    "qwen3_vl_moe-tied": Variant(
        "Qwen3VLMoeTextConfig",
        _BASE
        | {
            "rope_parameters": _YARN,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 16,
        }
        | {
            "num_experts": 3,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "decoder_sparse_step": 2,
        },
        wrap=partial(_with_frames, family="Qwen3VLMoe"),
        auto="AutoModelForImageTextToText",
        joined=True,
    ),
    "nemotron_h-groups": Variant(
        "NemotronHConfig",
        _BASE
        | _SCAN
        | {
            "layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention"],
            "head_dim": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 20,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
        sharded=True,
    ),
    "nemotron_h-latent": Variant(
        "NemotronHConfig",
        _BASE
        | _SCAN
        | {
            "layers_block_type": ["linear_attention", "mlp", "moe", "full_attention"],
            "head_dim": 16,
            "n_routed_experts": 3,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 20,
            "moe_latent_size": 12,
            "norm_topk_prob": False,
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
            "mlp_hidden_act": "silu",
        },
    ),
    "bamba-partial": _rotary(
        "BambaConfig",
        sharded=True,
        **_MAMBA,
        mamba_d_head=8,
        attn_layer_indices=[1, 3],
        head_dim=16,
    ),
    "bamba-options": _rotary(
        "BambaConfig",
        **_MAMBA | {"mamba_n_heads": 4, "mamba_conv_bias": False},
        attn_layer_indices=[2],
        mamba_expand=3,
        mamba_proj_bias=True,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        time_step_limit=[0.3, 0.9],
    ),
    "falcon_h1-norm-first": _rotary(
        "FalconH1Config", sharded=True, **_MAMBA, **_FALCON, mamba_d_ssm=48, mamba_rms_norm=True
    ),
    "falcon_h1-gate-first": _rotary(
        "FalconH1Config",
        **_MAMBA | {"mamba_conv_bias": False},
        mamba_d_ssm=None,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        mamba_proj_bias=True,
        tie_word_embeddings=True,
        head_dim=12,
    ),
    "falcon_h1-bare": _rotary(
        "FalconH1Config",
        **_MAMBA | {"mamba_n_groups": 1},
        **_FALCON,
        mamba_d_ssm=72,
        projectors_bias=True,
        attention_bias=True,
        mlp_bias=True,
    ),
    "granitemoehybrid-experts": Variant(
        "GraniteMoeHybridConfig",
        _BASE
        | _GRANITE
        | _MAMBA
        | {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
            "position_embedding_type": "nope",
            "head_dim": 12,
        },
        sharded=True,
    ),
    "granitemoehybrid-dense": _rotary(
        "GraniteMoeHybridConfig",
        **_GRANITE,
        **_MAMBA | {"mamba_conv_bias": False},
        layer_types=["full_attention", "linear_attention"] * 2,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=28,
        position_embedding_type="rope",
        mamba_proj_bias=True,
        attention_bias=True,
        tie_word_embeddings=True,
        time_step_limit=[0.3, 0.9],
    ),
    "mamba2-tied": Variant("Mamba2Config", _MAMBA2 | {"tie_word_embeddings": True}, sharded=True),
    "mamba2-options": Variant(
        "Mamba2Config",
        _MAMBA2
        | {"n_groups": 1, "use_bias": True, "use_conv_bias": False, "time_step_limit": [0.3, 0.9]},
    ),
    "lfm2-adjusted": _rotary(
        "Lfm2Config",
        layer_types=["conv", "conv", "full_attention", "conv"],
        block_multiple_of=6,
        block_ffn_dim_multiplier=1.5,
        head_dim=12,
    ),
    "lfm2-options": _rotary(
        "Lfm2Config",
        sharded=True,
        rope_parameters=_LLAMA3,
        full_attn_idxs=[0, 2],
        conv_bias=True,
        conv_L_cache=4,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
    ),
    "lfm2-nested": Variant(
        "Lfm2Config",
        _BASE | {"rope_parameters": _ROPE, "layer_types": ["full_attention", "conv"] * 2},
        sharded=True,
        wrap=_with_patch_grids,
        auto="AutoModelForImageTextToText",
    ),
    "lfm2_moe-dense-layer": _rotary(
        "Lfm2MoeConfig",
        sharded=True,
        **_MOE,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        num_dense_layers=1,
        head_dim=12,
    ),
    "lfm2_moe-options": _rotary(
        "Lfm2MoeConfig",
        **_MOE | {"num_experts_per_tok": 4},
        rope_parameters=_YARN,
        layer_types=["conv", "conv", "conv", "full_attention"],
        conv_bias=True,
        conv_L_cache=2,
        num_dense_layers=0,
        use_expert_bias=False,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
        tie_word_embeddings=False,
    ),
    "kimi_linear-groups": Variant(
        "KimiLinearConfig",
        _BASE
        | _KIMI
        | {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
        },
        sharded=True,
    ),
    "kimi_linear-options": Variant(
        "KimiLinearConfig",
        _BASE
        | _KIMI
        | {
            "layer_types": [
                "full_attention",
                "linear_attention",
                "linear_attention",
                "linear_attention",
            ],
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "q_lora_rank": 14,
            "v_head_dim": 16,
            "attention_bias": True,
            "norm_topk_prob": False,
            "linear_num_heads": 5,
            "linear_conv_kernel_dim": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "llama4-nested": Variant(
        "Llama4TextConfig",
        _BASE
        | _LLAMA4
        | {"rope_parameters": _LLAMA3, "no_rope_layer_interval": 2, "num_experts_per_tok": 2},
        sharded=True,
        wrap=_with_tiles,
        auto="AutoModelForImageTextToText",
    ),
    "llama4-options": Variant(
        "Llama4TextConfig",
        _BASE
        | _LLAMA4
        | {
            "rope_parameters": _ROPE,
            "no_rope_layers": [0, 1, 1, 1],
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 1,
            "use_qk_norm": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "gpt2-plain": Variant("GPT2Config", _GPT2, sharded=True),
    "gpt2-options": Variant(
        "GPT2Config",
        _GPT2
        | {"n_inner": 40, "scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"},
        strip="transformer.",
    ),
    "gpt2-untied": Variant(
        "GPT2Config", _GPT2 | {"tie_word_embeddings": False, "scale_attn_weights": False}
    ),
    "opt-plain": Variant("OPTConfig", _OPT, sharded=True),
    "opt-350m": Variant(
        "OPTConfig", _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 16}
    ),
    "opt-bare": Variant(
        "OPTConfig",
        _OPT
        | {
            "_remove_final_layer_norm": True,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "word_embed_proj_dim": 24,
            "tie_word_embeddings": False,
        },
        strip="model.",
    ),
}


WITHOUT_A_CLASS = frozenset({"exaone"})
"""Families that transformers has not; the test of their published config.json uses another family's
class."""


@cache
def decoder_of(name: str) -> Decoder:
    """The decoder of a row's config.json."""
    return read_config(json.loads(VARIANTS[name].library_config().to_json_string(use_diff=False)))


def family_of(name: str) -> str:
    return decoder_of(name).architecture.name


def windowed() -> list[str]:
    """The rows with a sliding window on any layer."""
    return [name for name in VARIANTS if any(decoder_of(name).windows())]


def _turns(name: str) -> bool:
    decoder = decoder_of(name)
    return decoder.architecture.rope is not None and decoder.architecture.rope.turns(decoder.fields)


def rotary() -> list[str]:
    """For each family with a rotary embedding, its rows without windows, or its first row: a window
    hides far positions.
    """
    narrow = set(windowed())
    chosen = []
    for family in dict.fromkeys(map(family_of, VARIANTS)):
        rows = [name for name in VARIANTS if family_of(name) == family and _turns(name)]
        chosen += [name for name in rows if name not in narrow] or rows[:1]
    return chosen


def attends(name: str) -> bool:
    """Whether any layer of a row has attention."""
    shape = decoder_of(name).shape
    return any(own.heads for own in shape.kv_in(LayerRange(0, LAYERS)))


def first_rows() -> list[str]:
    """One row of each family."""
    return list({family_of(name): name for name in reversed(VARIANTS)}.values())


def keeping_float32() -> list[str]:
    """One row of each family with tensors that keep full precision in any dtype."""
    runs = {name: decoder_of(name).architecture.runs for name in first_rows()}
    return [name for name, how in runs.items() if isinstance(how, Plugged) and how.float32]


def has_experts(name: str) -> bool:
    """Whether any block of a row is a mixture of experts."""
    decoder = decoder_of(name)
    record = decoder.architecture
    return any(
        record.is_expert(tensor)
        for layer in range(LAYERS)
        for tensor in record.block(decoder.fields, decoder.shape, layer)
    )
