"""gemma3, its text part only: two rotary bases and windows by layer, four norms a block that
multiply by 1 + weight, a scaled embedding. Larger ones nest the decoder in `text_config`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf, GgufFields, rope_parameters
from edgeshard.architectures.parts import (
    SANDWICH_NORMS,
    gemma_ends,
    head_norms,
    llama_block,
    scalar_style,
)
from edgeshard.architectures.record import Architecture, BlockStyle, Fused, Library
from edgeshard.architectures.rope import Rope
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import Windows, all_but_every

_WINDOWS = Windows(4096, sliding=all_but_every(6, key="sliding_window_pattern"))


def _style(fields: ConfigFields, shape: ModelShape, layer: int) -> BlockStyle:
    return replace(
        scalar_style(fields), rotary=_WINDOWS.layer_types(fields, shape.layer_count)[layer]
    )


_LAYERS_OF_27B = 62


def _gguf(fields: GgufFields) -> dict[str, Any]:
    """The keys of config.json for a GGUF file.

    No GGUF file has the scale of queries: llama.cpp knows the one model that has another than the
    heads' width.
    """
    layers, hidden, heads = (
        fields.size(key) for key in ("block_count", "embedding_length", "attention.head_count")
    )
    head_dim = fields.size("attention.key_length", 256)
    cap = fields.get("final_logit_softcapping")
    sliding = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10_000.0)}
    return {
        "head_dim": head_dim,
        "final_logit_softcapping": None
        if cap is None
        else fields.number("final_logit_softcapping"),
        "query_pre_attn_scalar": hidden // heads if layers == _LAYERS_OF_27B else head_dim,
        "sliding_window": fields.size("attention.sliding_window"),
        "rope_parameters": {
            "full_attention": rope_parameters(fields),
            "sliding_attention": sliding,
        },
    }


def _check(fields: ConfigFields, layer_count: int) -> None:
    fields.size("sliding_window_pattern", 6)
    fields.optional_number("final_logit_softcapping")


ARCHITECTURE = Architecture(
    name="gemma3",
    model_types=("gemma3_text",),
    nested={"gemma3": "gemma3_text"},
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
    activation="hidden_activation",
    flags=("attention_bias",),
    numbers=("rms_norm_eps", "query_pre_attn_scalar"),
    refused={
        "use_bidirectional_attention": "is set; EdgeShard runs causal models only",
        "attn_logit_softcapping": "is given, which gemma3 does not apply; set it to null",
    },
    checks=(_check,),
    rope=Rope(by_layer_type=True, theta=1_000_000.0),
    windows=_WINDOWS,
    prefixes=("model.", "language_model."),
    block=llama_block(bias="attention_bias", norm_names=SANDWICH_NORMS, attention_norms=head_norms),
    library=Library("gemma3", "Gemma3", config="Gemma3TextConfig"),
    runs=Fused(_style),
    gguf=Gguf(unit_norms=r"norm\.weight$", config=_gguf),
    ends=gemma_ends(unit_offset=True),
)
