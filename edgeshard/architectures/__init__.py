"""The model architectures EdgeShard runs: what their config.json means and which tensors each unit of them needs.

Pure and free of torch. The modules themselves are built by the agent (`edgeshard_agent.model.adapters`).
"""

from __future__ import annotations

from edgeshard.architectures.config import ModelShape, parse_config
from edgeshard.architectures.fields import ARCHITECTURES
from edgeshard.architectures.manifest import check_manifest, stage_tensors
from edgeshard.architectures.tensors import ExpectedTensor, canonical_name, expected_tensors, unit_of
from edgeshard.architectures.weights import check_quantisation, held_bytes, is_quantised, tensor_bytes
from edgeshard.architectures.windows import layer_windows

__all__ = [
    "ARCHITECTURES",
    "ExpectedTensor",
    "ModelShape",
    "canonical_name",
    "check_manifest",
    "check_quantisation",
    "expected_tensors",
    "held_bytes",
    "is_quantised",
    "layer_windows",
    "parse_config",
    "stage_tensors",
    "tensor_bytes",
    "unit_of",
]
