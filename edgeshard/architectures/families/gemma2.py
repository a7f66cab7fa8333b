"""gemma2: capped scores and logits, every other block with a window, four norms a block that
multiply by 1 + weight, a scaled embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf, GgufFields, sliding
from edgeshard.architectures.parts import (
    SANDWICH_NORMS,
    even_split,
    gemma_ends,
    llama_block,
    scalar_style,
)
from edgeshard.architectures.record import Architecture, BlockStyle, Fused, Library
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import Windows, all_but_every


def _style(fields: ConfigFields, shape: ModelShape, layer: int) -> BlockStyle:
    return replace(scalar_style(fields), softcap=fields.optional_number("attn_logit_softcapping"))


def _check(fields: ConfigFields, layer_count: int) -> None:
    fields.optional_number("attn_logit_softcapping")
    fields.optional_number("final_logit_softcapping")
    # transformers asks for it even where head_dim is given.
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    even_split(fields, "hidden_size", hidden, "num_attention_heads", heads)


_LAYERS_OF_27B = 46


def _gguf(fields: GgufFields) -> dict[str, Any]:
    """The windows, and the scale of queries. No file has that: llama.cpp knows the one model with
    one of its own."""
    head_dim = fields.size("attention.key_length", 256)
    shared = fields.size("embedding_length") // fields.size("attention.head_count")
    return {
        "query_pre_attn_scalar": shared if fields.layers == _LAYERS_OF_27B else head_dim,
        **sliding(fields),
    }


ARCHITECTURE = Architecture(
    name="gemma2",
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    },
    activation="hidden_activation",
    flags=("attention_bias",),
    numbers=("rms_norm_eps", "query_pre_attn_scalar"),
    refused={"use_bidirectional_attention": "is set; EdgeShard runs causal models only"},
    checks=(_check,),
    windows=Windows(4096, sliding=all_but_every(2)),
    block=llama_block(bias="attention_bias", norm_names=SANDWICH_NORMS),
    library=Library("gemma2", "Gemma2"),
    runs=Fused(_style),
    ends=gemma_ends(unit_offset=True),
    gguf=Gguf(unit_norms=r"norm\.weight$", config=_gguf),
)
