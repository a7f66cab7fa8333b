"""The kernels' structs and functions for ctypes. Written by tools/generate_native.py; do not
edit."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p


class LinearStruct(ctypes.Structure):
    """`Linear` of kernels.h."""

    _fields_ = (
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("scheme", c_int32),
        ("group", c_int32),
        ("in_features", c_int32),
        ("in_padded", c_int32),
        ("out_features", c_int32),
        ("panels", c_int32),
        ("half_scales", c_int32),
        ("next", c_void_p),
        ("table", c_void_p),
    )


class AttentionStruct(ctypes.Structure):
    """`Attention` of kernels.h."""

    _fields_ = (
        ("query", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("new_keys", c_void_p),
        ("new_values", c_void_p),
        ("block_tables", c_void_p),
        ("lengths", c_void_p),
        ("first_rows", c_void_p),
        ("sinks", c_void_p),
        ("out", c_void_p),
        ("query_stride", c_int64),
        ("out_stride", c_int64),
        ("new_stride", c_int64),
        ("table_stride", c_int64),
        ("spans", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_tokens", c_int32),
        ("table_blocks", c_int32),
        ("arena_blocks", c_int32),
        ("window", c_int32),
        ("element", c_int32),
        ("kv_element", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("units", c_void_p),
        ("unit_count", c_int32),
        ("head_run", c_int32),
        ("parts", c_int32),
        ("partials", c_void_p),
        ("partial_tiles", c_int32),
        ("partial_stride", c_int32),
    )


class ConvolutionStruct(ctypes.Structure):
    """`Convolution` of kernels.h."""

    _fields_ = (
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("tails", c_void_p),
        ("out", c_void_p),
        ("slots", c_void_p),
        ("first_rows", c_void_p),
        ("row_slots", c_void_p),
        ("x_stride", c_int64),
        ("spans", c_int32),
        ("slot_count", c_int32),
        ("channels", c_int32),
        ("taps", c_int32),
        ("activated", c_int32),
        ("element", c_int32),
    )


class DeltaRuleStruct(ctypes.Structure):
    """`DeltaRule` of kernels.h."""

    _fields_ = (
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("log_decay", c_void_p),
        ("beta", c_void_p),
        ("states", c_void_p),
        ("out", c_void_p),
        ("slots", c_void_p),
        ("first_rows", c_void_p),
        ("row_slots", c_void_p),
        ("query_stride", c_int64),
        ("key_stride", c_int64),
        ("value_stride", c_int64),
        ("spans", c_int32),
        ("slot_count", c_int32),
        ("key_heads", c_int32),
        ("value_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("by_channel", c_int32),
        ("element", c_int32),
    )


class SelectiveScanStruct(ctypes.Structure):
    """`SelectiveScan` of kernels.h."""

    _fields_ = (
        ("x", c_void_p),
        ("b", c_void_p),
        ("c", c_void_p),
        ("step", c_void_p),
        ("step_bias", c_void_p),
        ("log_rate", c_void_p),
        ("skip", c_void_p),
        ("states", c_void_p),
        ("out", c_void_p),
        ("slots", c_void_p),
        ("first_rows", c_void_p),
        ("row_slots", c_void_p),
        ("x_stride", c_int64),
        ("b_stride", c_int64),
        ("c_stride", c_int64),
        ("step_stride", c_int64),
        ("least_step", c_float),
        ("most_step", c_float),
        ("spans", c_int32),
        ("slot_count", c_int32),
        ("groups", c_int32),
        ("heads", c_int32),
        ("head_dim", c_int32),
        ("state_dim", c_int32),
        ("element", c_int32),
    )


class GatedNormStruct(ctypes.Structure):
    """`GatedNorm` of kernels.h."""

    _fields_ = (
        ("x", c_void_p),
        ("gate", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("gate_stride", c_int64),
        ("eps", c_float),
        ("rows", c_int32),
        ("width", c_int32),
        ("groups", c_int32),
        ("gate_first", c_int32),
        ("element", c_int32),
    )


class AnglesStruct(ctypes.Structure):
    """`Angles` of kernels.h."""

    _fields_ = (
        ("positions", c_void_p),
        ("frequencies", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("rows", c_int32),
        ("pairs", c_int32),
        ("scaling", c_float),
        ("element", c_int32),
    )


class RoutingStruct(ctypes.Structure):
    """`Routing` of kernels.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("correction", c_void_p),
        ("places", c_void_p),
        ("shares", c_void_p),
        ("scale", c_float),
        ("rows", c_int32),
        ("experts", c_int32),
        ("chosen", c_int32),
        ("groups", c_int32),
        ("kept_groups", c_int32),
        ("sigmoid", c_int32),
        ("normalised", c_int32),
        ("element", c_int32),
    )


class ChoiceStruct(ctypes.Structure):
    """`Choice` of kernels.h."""

    _fields_ = (
        ("temperature", c_double),
        ("top_p", c_double),
        ("penalty", c_double),
        ("reach", c_double),
        ("seed", c_uint64),
        ("seen", c_void_p),
        ("moved", c_void_p),
        ("offsets", c_void_p),
        ("top_k", c_int32),
        ("logprobs", c_int32),
        ("top_logprobs", c_int32),
        ("moved_count", c_int32),
    )


class SampledStruct(ctypes.Structure):
    """`Sampled` of kernels.h."""

    _fields_ = (
        ("logprob", c_double),
        ("top_logprobs", c_void_p),
        ("top_tokens", c_void_p),
        ("token", c_int32),
    )


class SampledRowsStruct(ctypes.Structure):
    """`SampledRows` of kernels.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        ("choices", c_void_p),
        ("positions", c_void_p),
        ("out", c_void_p),
        ("vocab", c_int32),
        ("element", c_int32),
    )


class BlockStruct(ctypes.Structure):
    """`Block` of blocks.cpp."""

    _fields_ = (
        ("qkv", c_void_p),
        ("output", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("inner", c_int32),
        ("window", c_int32),
        ("element", c_int32),
        ("eps", c_float),
        ("scale", c_float),
    )


class StepStruct(ctypes.Structure):
    """`Step` of blocks.cpp."""

    _fields_ = (
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("block_tables", c_void_p),
        ("lengths", c_void_p),
        ("first_rows", c_void_p),
        ("table_stride", c_int64),
        ("rows", c_int32),
        ("spans", c_int32),
        ("rotary_dim", c_int32),
        ("block_tokens", c_int32),
        ("table_blocks", c_int32),
        ("arena_blocks", c_int32),
        ("kv_element", c_int32),
        ("threads", c_int32),
    )


SIGNATURES = {
    "edgeshard_sources": (c_char_p, ()),
    "edgeshard_kernel_set": (c_char_p, ()),
    "edgeshard_kernels": (c_char_p, (c_int32,)),
    "edgeshard_cpu_kernels": (c_char_p, (c_int32,)),
    "edgeshard_requested_kernels": (c_char_p, ()),
    "edgeshard_use_kernels": (None, (c_int32,)),
    "edgeshard_idle_spin": (None, (c_int32, c_int64)),
    "edgeshard_linear": (
        None,
        (c_void_p, c_void_p, c_int64, c_int32, c_void_p, c_int64, c_int32, c_int32),
    ),
    "edgeshard_rms_norm": (
        None,
        (
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
            c_int32,
            c_int32,
            c_float,
            c_int32,
            c_int32,
        ),
    ),
    "edgeshard_gated_head_norm": (
        None,
        (
            c_void_p,
            c_void_p,
            c_int64,
            c_void_p,
            c_void_p,
            c_int32,
            c_int32,
            c_int32,
            c_float,
            c_int32,
        ),
    ),
    "edgeshard_sigmoid_gate": (None, (c_void_p, c_void_p, c_int64, c_int32, c_int32, c_int32)),
    "edgeshard_swiglu": (None, (c_void_p, c_void_p, c_int32, c_int32, c_int32)),
    "edgeshard_geglu": (None, (c_void_p, c_void_p, c_int32, c_int32, c_int32)),
    "edgeshard_clamped_swiglu": (
        None,
        (c_void_p, c_void_p, c_int32, c_int32, c_float, c_float, c_int32),
    ),
    "edgeshard_activate": (
        None,
        (c_void_p, c_int64, c_void_p, c_int32, c_int32, c_int32, c_float, c_int32),
    ),
    "edgeshard_route": (None, (c_void_p, c_int32)),
    "edgeshard_angles": (None, (c_void_p,)),
    "edgeshard_rotary": (
        None,
        (
            c_void_p,
            c_int64,
            c_int32,
            c_int32,
            c_int32,
            c_int32,
            c_void_p,
            c_void_p,
            c_int32,
            c_int32,
        ),
    ),
    "edgeshard_attention": (c_int32, (c_void_p, c_int32)),
    "edgeshard_convolution": (c_int32, (c_void_p, c_int32)),
    "edgeshard_delta_rule": (c_int32, (c_void_p, c_int32)),
    "edgeshard_selective_scan": (c_int32, (c_void_p, c_int32)),
    "edgeshard_gated_norm": (None, (c_void_p, c_int32)),
    "edgeshard_delta_gates": (
        None,
        (
            c_void_p,
            c_void_p,
            c_int64,
            c_void_p,
            c_void_p,
            c_void_p,
            c_void_p,
            c_int32,
            c_int32,
            c_int32,
        ),
    ),
    "edgeshard_crc32c": (c_uint32, (c_void_p, c_int64)),
    "edgeshard_read_rate": (c_double, (c_int64,)),
    "edgeshard_fma_rate": (c_double, ()),
    "edgeshard_sample": (None, (c_void_p, c_int32, c_int32)),
    "edgeshard_blocks": (
        c_int64,
        (c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p, c_int32),
    ),
}
"""By name: the type of the result, and the types of the arguments."""
