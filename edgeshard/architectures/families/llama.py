"""llama: the family that the others are compared with. Of llava the text runs."""

from __future__ import annotations

from typing import Any

from edgeshard.architectures.gguf import Gguf, GgufFields, has_experts
from edgeshard.architectures.parts import llama_block, llama_style
from edgeshard.architectures.record import Architecture, Fused, Library


def _is_dense(fields: GgufFields) -> bool:
    """Whether a GGUF file is of llama, or of an older mistral: llama.cpp writes mixtral as `llama`,
    too.

    mistral differs in its window only, which llama.cpp ignores.
    """
    return not has_experts(fields)


def _llama2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 32_000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


ARCHITECTURE = Architecture(
    name="llama",
    nested={"llava": "llama"},
    either_ties=frozenset({"llava"}),
    defaults={
        "num_key_value_heads": "num_attention_heads",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "eos_token_id": 2,
    },
    nested_defaults={
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32_000,
        "max_position_embeddings": 2048,
    },
    prefixes=("model.", "language_model."),
    block=llama_block(bias="attention_bias", mlp_bias="mlp_bias"),
    library=Library("llama", "Llama"),
    runs=Fused(llama_style),
    gguf=Gguf(applies=_is_dense, permuted=True),
    # The paper's models (Touvron et al. 2023, table of sizes; the published config.json files).
    models={
        "llama2-7b": _llama2(4096, 11_008, 32, 32, 32),
        "llama2-13b": _llama2(5120, 13_824, 40, 40, 40),
        "llama2-70b": _llama2(8192, 28_672, 80, 64, 8),
    },
)
