"""granitemoeshared: granitemoe with one more MLP, which every token uses, in each block."""

from __future__ import annotations

from dataclasses import replace

from edgeshard.architectures.families.granitemoe import ARCHITECTURE as GRANITEMOE
from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf
from edgeshard.architectures.parts import linear
from edgeshard.architectures.record import Fused, Library, Shapes
from edgeshard.architectures.shape import ModelShape

_SHARED = "shared_intermediate_size"


def _block(fields: ConfigFields, shape: ModelShape, layer: int) -> Shapes:
    block, hidden = GRANITEMOE.block(fields, shape, layer), shape.hidden_size
    if inner := fields.count(_SHARED):
        block |= linear("shared_mlp.input_linear", 2 * inner, hidden)
        block |= linear("shared_mlp.output_linear", hidden, inner)
    return block


def _check(fields: ConfigFields, layer_count: int) -> None:
    fields.count(_SHARED)


assert isinstance(GRANITEMOE.runs, Fused)
ARCHITECTURE = replace(
    GRANITEMOE,
    name="granitemoeshared",
    checks=(*GRANITEMOE.checks, _check),
    block=_block,
    library=Library("granitemoeshared", "GraniteMoeShared"),
    runs=replace(
        GRANITEMOE.runs,
        renames=(
            *GRANITEMOE.runs.renames,
            (r"^shared_mlp\.input_linear\.", "mlp.shared_expert.gate_up_proj."),
            (r"^shared_mlp\.output_linear\.", "mlp.shared_expert.down_proj."),
        ),
    ),
    gguf=Gguf(
        ("granitemoe",),
        lambda fields: fields.has("ffn_gate_shexp.weight"),
        permuted=True,
        config=lambda fields: {
            "shared_intermediate_size": fields.size("expert_shared_feed_forward_length")
        },
    ),
)
