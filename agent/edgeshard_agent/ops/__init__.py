"""The CPU's compute operators: packed linear layers, norms, rotary embedding, paged attention and sampling.

Each has a native kernel (`kernels.cpp`, built when EdgeShard is installed and chosen for the CPU at run time) and a
fallback in plain torch, for sampling in numpy, that gives the same numbers up to the order of summation.
"""

from edgeshard_agent.ops.attention import Scoring, SpanTables, attend
from edgeshard_agent.ops.elementwise import rms_norm, rotary_, swiglu
from edgeshard_agent.ops.fingerprint import bits_fingerprint
from edgeshard_agent.ops.fused_blocks import BlockParts, NativeBlock, NativePass, run_blocks
from edgeshard_agent.ops.idle_spin import idle_spin
from edgeshard_agent.ops.kv_arena import KvArena, NativeArena, PanelArena, RowArena, check_int4, make_arena, zeroed
from edgeshard_agent.ops.kv_int4 import Int4Arena
from edgeshard_agent.ops.linear import PackedForm, PackedLinear
from edgeshard_agent.ops.native import native_available
from edgeshard_agent.ops.quantize import QuantizedWeight, Scheme
from edgeshard_agent.ops.sampling import RequestSampler, require_finite, sample_rows
from edgeshard_agent.ops.sampling_reference import LikelyTokens

__all__ = [
    "BlockParts",
    "Int4Arena",
    "KvArena",
    "LikelyTokens",
    "NativeArena",
    "NativeBlock",
    "NativePass",
    "PackedForm",
    "PackedLinear",
    "PanelArena",
    "QuantizedWeight",
    "RequestSampler",
    "RowArena",
    "Scheme",
    "Scoring",
    "SpanTables",
    "attend",
    "bits_fingerprint",
    "check_int4",
    "idle_spin",
    "make_arena",
    "native_available",
    "require_finite",
    "rms_norm",
    "rotary_",
    "run_blocks",
    "sample_rows",
    "swiglu",
    "zeroed",
]
