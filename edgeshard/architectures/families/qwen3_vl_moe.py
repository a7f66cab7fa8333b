"""qwen3_vl_moe, its text part only: qwen3_moe without windows, all experts of a block in two
tensors. For text the three positions of a token are the same one.

Published files have the experts' matrices transposed, those that transformers 5 saves have them
not."""

from __future__ import annotations

from edgeshard.architectures.families.qwen3_moe import ARCHITECTURE as QWEN3_MOE
from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import (
    TRANSPOSED_RENAMES,
    expert_count,
    fixed_values,
    joined_transposed,
    mixture_style,
    transposed_mlps,
)
from edgeshard.architectures.record import Architecture, Experts, Fused, Library, Shapes
from edgeshard.architectures.rope import SECTION_KEYS, Rope
from edgeshard.architectures.shape import ModelShape

_EXPERTS = Experts(joined=joined_transposed(), transposed=True, both_layouts=True)


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    block = QWEN3_MOE.block(fields, shape, layer)
    non_experts = {name: size for name, size in block.items() if not QWEN3_MOE.is_expert(name)}
    if len(non_experts) == len(block):
        return block
    return non_experts | transposed_mlps(
        shape, expert_count(_EXPERTS, fields), fields.size("moe_intermediate_size")
    )


def _check(fields: ConfigFields, layer_count: int) -> None:
    hidden, inner = fields.size("hidden_size"), fields.size("moe_intermediate_size")
    if hidden in (inner, 2 * inner):
        why = (
            f"is {inner}: experts have square matrices for hidden_size {hidden}, which do not "
            "show their layout"
        )
        raise fields.refuse("moe_intermediate_size", why)


ARCHITECTURE = Architecture(
    name="qwen3_vl_moe",
    model_types=("qwen3_vl_moe_text",),
    nested={"qwen3_vl_moe": "qwen3_vl_moe_text"},
    defaults={
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 151_936,
        "max_position_embeddings": 128_000,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "tie_word_embeddings": True,
    },
    flags=("attention_bias",),
    sizes=("intermediate_size", "moe_intermediate_size", "decoder_sparse_step"),
    checks=(*QWEN3_MOE.checks, _check, fixed_values(norm_topk_prob=True)),
    rope=Rope(unread=SECTION_KEYS, theta=500_000.0),
    experts=_EXPERTS,
    prefixes=("model.", "language_model."),
    block=_block,
    library=Library("qwen3_vl_moe", "Qwen3VLMoeText"),
    runs=Fused(mixture_style(normalised=True), renames=TRANSPOSED_RENAMES),
    gguf=Gguf(("qwen3vlmoe",)),
)
