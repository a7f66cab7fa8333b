"""glm4v_moe, its text part only: glm4_moe without norms of queries and keys. For text the three
positions of a token are the same one."""

from __future__ import annotations

from dataclasses import replace

from edgeshard.architectures.families.glm4_moe import ARCHITECTURE as GLM4_MOE
from edgeshard.architectures.parts import fixed_values
from edgeshard.architectures.record import Library
from edgeshard.architectures.rope import SECTION_KEYS, Rope

ARCHITECTURE = replace(
    GLM4_MOE,
    name="glm4v_moe",
    model_types=("glm4v_moe_text",),
    nested={"glm4v_moe": "glm4v_moe_text"},
    either_ties=frozenset({"glm4v_moe"}),
    defaults={
        **GLM4_MOE.defaults,
        "vocab_size": 151_424,
        "max_position_embeddings": 65_536,
        "attention_bias": True,
    },
    checks=(*GLM4_MOE.checks, fixed_values(use_qk_norm=False)),
    rope=Rope(partial=True, unread=SECTION_KEYS),
    prefixes=("model.", "language_model."),
    library=Library("glm4v_moe", "Glm4vMoeText"),
)
