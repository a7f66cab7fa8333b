"""qwen3_5, its text part only: three layers in four have a gated delta rule. With text alone the
positions of its three rotary axes are equal, so that sections of a head's dimensions make no
difference."""

from __future__ import annotations

from edgeshard.architectures import gated_delta
from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import gated_mlp
from edgeshard.architectures.record import Architecture, Fused, Library, Shapes
from edgeshard.architectures.rope import SECTION_KEYS, Rope
from edgeshard.architectures.shape import ModelShape


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    block = gated_delta.mixer(fields, shape, layer, joined=False)
    return block | gated_mlp(shape, fields.size("intermediate_size"))


ARCHITECTURE = Architecture(
    name="qwen3_5",
    model_types=("qwen3_5_text",),
    nested={"qwen3_5": "qwen3_5_text"},
    defaults=gated_delta.DEFAULTS
    | {
        "vocab_size": 248_320,
        "num_key_value_heads": 4,
        "intermediate_size": 12_288,
        "partial_rotary_factor": 0.25,
    },
    flags=("attention_bias", gated_delta.TILED),
    sizes=("intermediate_size", *gated_delta.SIZES),
    checks=(gated_delta.check,),
    rope=Rope(partial=True, unread=SECTION_KEYS),
    prefixes=("model.", "language_model."),
    block=_block,
    kv=gated_delta.kv,
    states=gated_delta.states,
    library=Library(
        "qwen3_5", "Qwen3_5", config="Qwen3_5TextConfig", rotary="Qwen3_5TextRotaryEmbedding"
    ),
    runs=Fused(gated_delta.style, float32=gated_delta.FLOAT32),
    ends=gated_delta.ends,
    whole=gated_delta.WHOLE,
    gguf=Gguf(
        ("qwen35",), unit_norms=gated_delta.UNIT_NORMS, config=gated_delta.gguf(gated_delta.TILED)
    ),
)
