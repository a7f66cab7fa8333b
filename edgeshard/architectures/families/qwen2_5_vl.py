"""qwen2_5_vl, its text part only: as of qwen2_vl."""

from __future__ import annotations

from dataclasses import replace

from edgeshard.architectures.families.qwen2_vl import ARCHITECTURE as QWEN2_VL
from edgeshard.architectures.record import Library

ARCHITECTURE = replace(
    QWEN2_VL,
    name="qwen2_5_vl",
    model_types=("qwen2_5_vl", "qwen2_5_vl_text"),
    nested={"qwen2_5_vl": "qwen2_5_vl_text"},
    either_ties=frozenset({"qwen2_5_vl"}),
    library=Library("qwen2_5_vl", "Qwen2_5_VL", config="Qwen2_5_VLTextConfig", norm="Qwen2RMSNorm"),
)
