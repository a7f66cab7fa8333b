"""mixtral: experts in all blocks, under names of their own; one window for all."""

from __future__ import annotations

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf, has_experts
from edgeshard.architectures.parts import (
    W_RENAMES,
    attention,
    expert_count,
    expert_mlps,
    linear,
    mixture_style,
    norms,
)
from edgeshard.architectures.record import Architecture, Experts, Fused, Library, Shapes
from edgeshard.architectures.rope import Rope
from edgeshard.architectures.shape import ModelShape
from edgeshard.architectures.windows import Windows

_EXPERTS = Experts()
_PATH = "block_sparse_moe"


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    count, inner = expert_count(_EXPERTS, fields), fields.size("intermediate_size")
    return (
        norms(shape.hidden_size, "input_layernorm", "post_attention_layernorm")
        | attention(shape)
        | linear(f"{_PATH}.gate", count, shape.hidden_size)
        | expert_mlps(shape, count, inner, f"{_PATH}.experts", ("w1", "w3", "w2"))
    )


ARCHITECTURE = Architecture(
    name="mixtral",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "num_experts_per_tok": 2,
    },
    rope=Rope(theta=1_000_000.0),
    windows=Windows(),
    experts=_EXPERTS,
    block=_block,
    library=Library("mixtral", "Mixtral"),
    runs=Fused(
        mixture_style(normalised=True),
        renames=(
            (rf"^{_PATH}\.", "mlp."),
            *W_RENAMES,
        ),
    ),
    gguf=Gguf(("llama",), has_experts, permuted=True),
)
