"""The model architectures that EdgeShard runs: the meaning of their config.json, and the tensors of
each unit.

A family is one record in a file of `families/`. Pure and free of torch; the agent builds modules
from the record.
"""

from __future__ import annotations

from edgeshard.architectures.model_config import (
    EXPERT_WIDTHS,
    FORMATS,
    STORED_AS,
    Decoder,
    context_note,
    for_context,
    named_eos_tokens,
    parse_config,
    read_config,
)
from edgeshard.architectures.record import Architecture
from edgeshard.architectures.registry import ARCHITECTURES, KNOWN_MODELS, architecture_named
from edgeshard.architectures.shape import KvHeads, ModelShape, StateSize, name_of_experts
from edgeshard.architectures.tensors import (
    HEAD_WEIGHT,
    ExpectedTensor,
    canonical_name,
    expected_tensors,
    is_run,
    name_in_block,
    parts_of_joined,
    unit_of,
)
from edgeshard.architectures.weights import (
    check_manifest,
    check_names,
    check_quantisation,
    held_bytes,
    integers_of,
    is_transposed,
    keeps_float32,
    matrix_size,
    shares_embedding,
    stage_tensors,
    tensor_bytes,
)

__all__ = [
    "ARCHITECTURES",
    "EXPERT_WIDTHS",
    "FORMATS",
    "HEAD_WEIGHT",
    "KNOWN_MODELS",
    "STORED_AS",
    "Architecture",
    "Decoder",
    "ExpectedTensor",
    "KvHeads",
    "ModelShape",
    "StateSize",
    "architecture_named",
    "canonical_name",
    "check_manifest",
    "check_names",
    "check_quantisation",
    "context_note",
    "expected_tensors",
    "for_context",
    "held_bytes",
    "integers_of",
    "is_run",
    "is_transposed",
    "keeps_float32",
    "matrix_size",
    "name_in_block",
    "name_of_experts",
    "named_eos_tokens",
    "parse_config",
    "parts_of_joined",
    "read_config",
    "shares_embedding",
    "stage_tensors",
    "tensor_bytes",
    "unit_of",
]
