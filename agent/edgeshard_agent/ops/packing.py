"""Weights in the order the native kernels read them (`Linear` in kernels.h), in memory that streams fast."""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch
from torch.nn.functional import pad

from edgeshard_agent.ops.quantize import QuantizedWeight, Scheme

PANEL = 32
_HUGE_PAGE = 2 << 20
# Only touched pages count, so that the unused end of a chunk costs less than one huge page.
_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64


class _Arena:
    """Hands out pieces of large chunks made of huge pages, with which one core reads weights a fifth faster.

    A chunk goes back to the system when the last tensor in it is gone.
    """

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()  # agents in one process share it, and each packs in a thread of its own

    def take(self, size: int) -> torch.Tensor:
        """`size` bytes, aligned to a cache line."""
        rounded = -(-size // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if rounded > self._free.numel():
                self._free = _huge_pages(max(rounded, _CHUNK_BYTES))
            taken, self._free = self._free[:size], self._free[rounded:]
        return taken


def _huge_pages(size: int) -> torch.Tensor:
    memory = mmap.mmap(-1, size + _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them; ordinary pages do
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + size]


_arena = _Arena()


def pack_float(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The bytes of a weight [out, in] as fp32 [panel][in][32] or bf16 [panel][in / 2][32][2]."""
    step, dtype = (1, torch.float32) if scheme is Scheme.FLOAT32 else (2, torch.bfloat16)
    missing = (0, -weight.shape[1] % step, 0, -weight.shape[0] % PANEL)
    padded = pad(weight.to(dtype), missing) if any(missing) else weight.to(dtype)  # pad copies even where it adds none
    panels = padded.view(-1, PANEL, padded.shape[1] // step, step).transpose(1, 2)
    packed = _arena.take(padded.numel() * padded.element_size())
    packed.view(dtype).view(panels.shape).copy_(panels)
    return packed


def float_rows(packed: torch.Tensor, scheme: Scheme, in_padded: int, indices: torch.Tensor) -> torch.Tensor:
    """Rows [n, in_padded] of what `pack_float` packed, by their indices [n]."""
    step, dtype = (1, torch.float32) if scheme is Scheme.FLOAT32 else (2, torch.bfloat16)
    panels = packed.view(dtype).view(-1, in_padded // step, PANEL, step)
    return panels[indices // PANEL, :, indices % PANEL].reshape(len(indices), in_padded)


def pack_quantized(weight: QuantizedWeight, scheme: Scheme) -> torch.Tensor:
    """The bytes of a quantised weight: for each panel and group its scales, then its values, offset to be unsigned."""
    rows = -weight.values.shape[0] % PANEL
    scales = pad(weight.scales, (0, 0, 0, rows)).view(-1, PANEL, weight.scales.shape[1])
    panels, _, groups = scales.shape
    values = pad(weight.values, (0, 0, 0, rows)).view(panels, PANEL, groups, -1)
    if scheme is Scheme.INT8:
        unsigned = (values.to(torch.int16) + 128).to(torch.uint8).view(panels, PANEL, groups, -1, 4)
        chunks = unsigned.permute(0, 2, 3, 1, 4)
    else:
        unsigned = (values + 8).to(torch.uint8).view(panels, PANEL, groups, -1, 2, 4)
        chunks = (unsigned[..., 0, :] | (unsigned[..., 1, :] << 4)).permute(0, 2, 3, 1, 4)
    body = chunks.reshape(panels, groups, -1)
    head = scales.transpose(1, 2).contiguous().view(torch.uint8)
    packed = _arena.take(head.numel() + body.numel())
    torch.cat((head, body), dim=2, out=packed.view(panels, groups, -1))
    return packed
