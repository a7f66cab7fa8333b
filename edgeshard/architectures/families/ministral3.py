"""ministral3: mistral with queries that grow with their position beyond the trained context.

Published checkpoints nest the decoder in the `text_config` of a model for pictures; only the
decoder runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.gguf import Gguf, GgufFields, rope_parameters
from edgeshard.architectures.parts import llama_block, llama_style
from edgeshard.architectures.record import Architecture, Fused, Library
from edgeshard.architectures.rope import Rope
from edgeshard.architectures.windows import Windows

_BETA = "llama_4_scaling_beta"


def _check(fields: ConfigFields, layer_count: int) -> None:
    # Older files have the old key, which comes first where there are both; without either there are
    # defaults.
    path = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    entry = fields.values.get(path)
    if entry is None:
        return
    for key in (_BETA, "original_max_position_embeddings"):
        if not isinstance(entry, Mapping) or not isinstance(entry.get(key), int | float):
            raise fields.refuse(
                f"{path}.{key}", "is missing; use the complete config.json of the checkpoint"
            )


def _is_gguf(fields: GgufFields) -> bool:
    """Whether a GGUF file is of this family: llama.cpp writes newer mistral under the same name."""
    return fields.get("attention.temperature_scale") is not None


def _gguf(fields: GgufFields) -> dict[str, Any]:
    entry = rope_parameters(fields)
    entry[_BETA] = fields.number("attention.temperature_scale")
    for key in ("mscale", "mscale_all_dim"):
        entry[key] = fields.get("rope.scaling.yarn_log_multiplier")
    return {"rope_parameters": entry, "sliding_window": None}


ARCHITECTURE = Architecture(
    name="ministral3",
    nested={"mistral3": "ministral3"},
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 131_072,
        "max_position_embeddings": 262_144,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
    },
    flags=(),
    checks=(_check,),
    # Without scaling of queries the published ones have a beta of 0.
    rope=Rope(
        zeros=frozenset({_BETA, "mscale", "mscale_all_dim"}),
        growth=_BETA,
        assumed={
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            _BETA: 0.1,
        },
    ),
    windows=Windows(),
    prefixes=("model.", "language_model."),
    block=llama_block(),
    library=Library("ministral3", "Ministral3"),
    runs=Fused(llama_style),
    gguf=Gguf(("mistral3",), _is_gguf, permuted=True, config=_gguf),
)
