"""The library of native kernels: found, loaded, and called by address.

It has a plain C interface and knows nothing of torch, so it outlives torch's upgrades. `hatch_build.py` compiles it
when EdgeShard is installed, for every instruction set of the machine's family; which of them runs is decided when it is
loaded. Set the environment variable EDGESHARD_NATIVE_OPS to 0 to do without, and EDGESHARD_BF16_PRODUCTS to 0 to leave
out the kernels of AVX512-BF16.
"""

from __future__ import annotations

import ctypes
import logging
import os
from ctypes import c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache

import numpy as np
import torch

from edgeshard_agent.ops import sources

LIBRARY = sources.LIBRARY
SWITCH = "EDGESHARD_NATIVE_OPS"
# The numbers of `Element` in kernels.h.
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}
INT4 = 2
# `NORM_...` of kernels.h.
NORM_PLAIN, NORM_UNIT_OFFSET, NORM_ROUNDED_LAST = range(3)
# `ACTIVATION_...` of kernels.h.
ACTIVATION_GELU, ACTIVATION_QUICK_GELU, ACTIVATION_SOFTCAP = range(3)
# `MOST_EXPERTS` of kernels.h.
MAX_EXPERTS = 1024

_NANOSECONDS = 1_000_000_000
_STREAM_BYTES = 128 << 20
"""More than the caches of the machines that people own."""

_log = logging.getLogger(__name__)


class LinearStruct(ctypes.Structure):
    """`Linear` of kernels.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("weights", "bias")),
        *((name, c_int32) for name in ("scheme", "group", "in_features", "in_padded", "out_features", "panels")),
        ("half_scales", c_int32),
        *((name, c_void_p) for name in ("next", "table")),
    )


class AttentionStruct(ctypes.Structure):
    """`Attention` of kernels.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "keys", "values", "new_keys", "new_values")),
        *((name, c_void_p) for name in ("block_tables", "lengths", "first_rows", "sinks", "out")),
        *((name, c_int64) for name in ("query_stride", "out_stride", "new_stride", "table_stride")),
        *((name, c_int32) for name in ("spans", "heads", "kv_heads", "head_dim", "block_tokens", "table_blocks")),
        *((name, c_int32) for name in ("arena_blocks", "window", "element", "kv_element")),
        *((name, c_float) for name in ("scale", "softcap")),
        # What the library fills in for its threads.
        ("units", c_void_p),
        *((name, c_int32) for name in ("unit_count", "head_run", "parts")),
        ("partials", c_void_p),
        *((name, c_int32) for name in ("partial_tiles", "partial_stride")),
    )


class ChoiceStruct(ctypes.Structure):
    """`Choice` of kernels.h."""

    _fields_ = (
        *((name, c_double) for name in ("temperature", "top_p", "penalty", "reach")),
        ("seed", c_uint64),
        *((name, c_void_p) for name in ("seen", "moved", "offsets")),
        *((name, c_int32) for name in ("top_k", "logprobs", "top_logprobs", "moved_count")),
    )


class SampledStruct(ctypes.Structure):
    """`Sampled` of kernels.h."""

    _fields_ = (("logprob", c_double), ("top_logprobs", c_void_p), ("top_tokens", c_void_p), ("token", c_int32))


class SampledRowsStruct(ctypes.Structure):
    """`SampledRows` of kernels.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("stride", c_int64),
        *((name, c_void_p) for name in ("choices", "positions", "out")),
        *((name, c_int32) for name in ("vocab", "element")),
    )


class ConvolutionStruct(ctypes.Structure):
    """`Convolution` of kernels.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "bias", "tails", "out", "slots", "first_rows", "row_slots")),
        ("x_stride", c_int64),
        *((name, c_int32) for name in ("spans", "slot_count", "channels", "taps", "activated", "element")),
    )


class DeltaRuleStruct(ctypes.Structure):
    """`DeltaRule` of kernels.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "key", "value", "log_decay", "beta", "states", "out")),
        *((name, c_void_p) for name in ("slots", "first_rows", "row_slots")),
        *((name, c_int64) for name in ("query_stride", "key_stride", "value_stride")),
        *((name, c_int32) for name in ("spans", "slot_count", "key_heads", "value_heads", "key_dim", "value_dim")),
        *((name, c_int32) for name in ("by_channel", "element")),
    )


class SelectiveScanStruct(ctypes.Structure):
    """`SelectiveScan` of kernels.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "b", "c", "step", "step_bias", "log_rate", "skip", "states", "out")),
        *((name, c_void_p) for name in ("slots", "first_rows", "row_slots")),
        *((name, c_int64) for name in ("x_stride", "b_stride", "c_stride", "step_stride")),
        *((name, c_float) for name in ("least_step", "most_step")),
        *((name, c_int32) for name in ("spans", "slot_count", "groups", "heads", "head_dim", "state_dim", "element")),
    )


class GatedNormStruct(ctypes.Structure):
    """`GatedNorm` of kernels.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "gate", "weight", "out")),
        ("gate_stride", c_int64),
        ("eps", c_float),
        *((name, c_int32) for name in ("rows", "width", "groups", "gate_first", "element")),
    )


class AnglesStruct(ctypes.Structure):
    """`Angles` of kernels.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("positions", "frequencies", "cos", "sin")),
        *((name, c_int32) for name in ("rows", "pairs")),
        ("scaling", c_float),
        ("element", c_int32),
    )


class RoutingStruct(ctypes.Structure):
    """`Routing` of kernels.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "correction", "places", "shares")),
        ("scale", c_float),
        *((name, c_int32) for name in ("rows", "experts", "chosen", "groups", "kept_groups")),
        *((name, c_int32) for name in ("sigmoid", "normalised", "element")),
    )


# `MOST_TAPS`, `MOST_KEY_DIM` and `MOST_STATE_DIM` of kernels.h.
MOST_TAPS, MOST_KEY_DIM, MOST_STATE_DIM = 8, 512, 512

# What `Sampled` has instead of a token; kernels.h says why.
NOT_FINITE, NOT_TAKEN = -1, -2

_POINTER, _INT, _LONG = c_void_p, c_int32, c_int64
SIGNATURES = {
    "edgeshard_sources": (c_char_p, ()),
    "edgeshard_kernels": (c_char_p, (_INT,)),
    "edgeshard_cpu_kernels": (c_char_p, (_INT,)),
    "edgeshard_use_kernels": (None, (_INT,)),
    "edgeshard_idle_spin": (None, (_INT, _LONG)),
    "edgeshard_linear": (None, (_POINTER, _POINTER, _LONG, _INT, _POINTER, _LONG, _INT, _INT)),
    "edgeshard_rms_norm": (None, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT, c_float, _INT, _INT)),
    "edgeshard_gated_head_norm": (
        None,
        (_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _INT, _INT, _INT, c_float, _INT),
    ),
    "edgeshard_sigmoid_gate": (None, (_POINTER, _POINTER, _LONG, _INT, _INT, _INT)),
    "edgeshard_swiglu": (None, (_POINTER, _POINTER, _INT, _INT, _INT)),
    "edgeshard_geglu": (None, (_POINTER, _POINTER, _INT, _INT, _INT)),
    "edgeshard_clamped_swiglu": (None, (_POINTER, _POINTER, _INT, _INT, c_float, c_float, _INT)),
    "edgeshard_activate": (None, (_POINTER, _LONG, _POINTER, _INT, _INT, _INT, c_float, _INT)),
    "edgeshard_route": (None, (_POINTER, _INT)),
    "edgeshard_angles": (None, (_POINTER,)),
    "edgeshard_rotary": (None, (_POINTER, _LONG, _INT, _INT, _INT, _INT, _POINTER, _POINTER, _INT, _INT)),
    "edgeshard_blocks": (c_int64, (_POINTER, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _POINTER, _POINTER, _INT)),
    "edgeshard_attention": (_INT, (_POINTER, _INT)),
    "edgeshard_convolution": (_INT, (_POINTER, _INT)),
    "edgeshard_delta_rule": (_INT, (_POINTER, _INT)),
    "edgeshard_delta_gates": (
        None,
        (_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT),
    ),
    "edgeshard_selective_scan": (_INT, (_POINTER, _INT)),
    "edgeshard_gated_norm": (None, (_POINTER, _INT)),
    "edgeshard_crc32c": (c_uint32, (_POINTER, _LONG)),
    "edgeshard_read_rate": (c_double, (_LONG,)),
    "edgeshard_fma_rate": (c_double, ()),
    "edgeshard_sample": (None, (_POINTER, _INT, _INT)),
}


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None, after one warning, where it was not built, does not load or is of other sources."""
    slow = "native kernels are not in use, so layers on the CPU run several times slower:"
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        _log.warning("%s %s. Install a C++ compiler (on Debian: g++) and install EdgeShard again.", slow, error)
        return None
    try:
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
        is_ours = loaded.edgeshard_sources() == sources.digest().encode()
    except AttributeError:
        is_ours = False
    if not is_ours:  # its structs may be laid out otherwise
        _log.warning("%s %s is of other sources; install EdgeShard again, or run hatch_build.py.", slow, LIBRARY.name)
        return None
    names = sources.kernel_names(loaded)
    if not sources.is_allowed(names[0]):
        loaded.edgeshard_use_kernels(next(index for index, name in enumerate(names) if sources.is_allowed(name)))
    return loaded


def active() -> ctypes.CDLL | None:
    """The library where it is to be used, or None."""
    return None if os.environ.get(SWITCH) == "0" else library()


def native_available() -> bool:
    """Whether what is packed and called from now on runs in the native kernels."""
    return active() is not None


def kernel_names() -> tuple[str, ...]:
    """The kernels that this process may run on this CPU, the best (and default) first."""
    loaded = library()
    return () if loaded is None else tuple(filter(sources.is_allowed, sources.kernel_names(loaded)))


def best_kernel_name() -> str:
    """Name of the best instruction set that this CPU can run, compiled or not; "" without the native library."""
    loaded = library()
    name = None if loaded is None else loaded.edgeshard_cpu_kernels(0)
    return "" if name is None else name.decode()


def use_kernels(name: str) -> None:
    """Run the kernels of this name from now on, in the whole process; for tests and benchmarks."""
    loaded = library()
    assert loaded is not None
    loaded.edgeshard_use_kernels(sources.kernel_names(loaded).index(name))


def read_rate_gb_per_s(stream_bytes: int = _STREAM_BYTES) -> float:
    """GB/s at which one thread reads `stream_bytes` bytes of memory in order; 0.0 without the native library.

    It takes 0.1 to 0.3 s and returns 0.0 if the system has no memory for them.
    """
    loaded = active()
    if loaded is None:
        return 0.0
    rate: float = loaded.edgeshard_read_rate(stream_bytes)
    return rate


def fma_rate_gflop_per_s() -> float:
    """GFLOP/s of float32 multiply-adds of one thread, by the kernels in use; 0.0 without the native library.

    It takes about 0.03 s.
    """
    loaded = active()
    if loaded is None:
        return 0.0
    rate: float = loaded.edgeshard_fma_rate()
    return rate


def crc32c(data: memoryview) -> int | None:
    """CRC32C of contiguous bytes, not copied; None without the native library. Other threads run meanwhile."""
    loaded = active()
    if loaded is None:
        return None
    checksum: int = loaded.edgeshard_crc32c(np.frombuffer(data, np.uint8).ctypes.data, len(data))
    return checksum


def idle_spin(seconds: float, cores: int) -> None:
    """Keep so many cores from halting for so long from now on: between the steps of a generation.

    A node waits for the others for most of a token, too short to sleep: a core that halts meanwhile comes back with its
    clock down and its caches gone, and on a virtual machine it was given to somebody else. Threads of the system's idle
    priority spin there, and give way to everything else at once. Without the native library, or on a system that is
    not Linux, nothing happens.
    """
    loaded = active()
    if loaded is not None:
        loaded.edgeshard_idle_spin(cores, int(seconds * _NANOSECONDS))
