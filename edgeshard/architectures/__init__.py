"""The model architectures EdgeShard runs: what their config.json means and which tensors each unit of them needs.

Pure and free of torch. The modules themselves are built by the agent (`edgeshard_agent.model.adapters`).
"""

from __future__ import annotations

from edgeshard.architectures.config import ModelShape, parse_config
from edgeshard.architectures.fields import ARCHITECTURES
from edgeshard.architectures.manifest import check_manifest, stage_tensors
from edgeshard.architectures.tensors import ExpectedTensor, canonical_name, expected_tensors, unit_of

__all__ = [
    "ARCHITECTURES",
    "ExpectedTensor",
    "ModelShape",
    "canonical_name",
    "check_manifest",
    "expected_tensors",
    "parse_config",
    "stage_tensors",
    "unit_of",
]
