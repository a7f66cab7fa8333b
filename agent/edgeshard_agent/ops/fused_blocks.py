"""A step of few tokens through consecutive Llama blocks as one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_uint8, c_void_p

import numpy as np
import torch

from edgeshard.domain.errors import InternalError
from edgeshard_agent.ops import layouts, native
from edgeshard_agent.ops.attention import SpanTables
from edgeshard_agent.ops.kv_arena import NativeArena
from edgeshard_agent.ops.linear import PackedLinear


class NativeBlock:
    """A block as the native call takes it; made by `compile`. Keeps what the struct points to."""

    __slots__ = ("_kept", "_struct", "address")

    def __init__(self, struct: layouts.BlockStruct, *references: object) -> None:
        self._struct, self._kept = struct, references
        self.address = ctypes.addressof(struct)

    @property
    def width(self) -> int:
        """Of hidden states."""
        return int(self._struct.hidden)

    @classmethod
    def compile(
        cls, linears: Sequence[PackedLinear], norms: Sequence[torch.Tensor | None], **options: float
    ) -> NativeBlock | None:
        """A block: norm, q|k|v, (norms of queries and keys,) rotation, attention, output, norm,
        gate|up, silu, down.

        `linears`, `norms` and `options` are as `Block` of blocks.cpp names them, in its order; a
        `window` of 0 is full attention. None where there is no native library, or it lacks what
        this block needs.
        """
        there = [norm for norm in norms if norm is not None]
        addresses, dtype = [linear.native_address for linear in linears], there[0].dtype
        if native.active() is None or None in addresses or dtype not in native.ELEMENTS:
            return None
        if any(norm.dtype is not dtype or not norm.is_cpu for norm in there):
            return None
        pointers = [None if norm is None else norm.data_ptr() for norm in norms]
        hidden, inner = linears[0].in_features, linears[-1].in_features
        element = native.ELEMENTS[dtype]
        struct = layouts.BlockStruct(
            *addresses, *pointers, hidden=hidden, inner=inner, element=element, **options
        )
        return cls(struct, linears, norms)


class NativePass:
    """A step on its way through native blocks: hidden states [T, width], T rows of spans as
    `attend` takes them.

    Cosines and sines are as `rotary_` takes them, contiguous. `arena` is any of the blocks'.
    """

    __slots__ = ("_kept", "addend", "began", "residual", "struct")

    def __init__(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        spans: SpanTables,
        arena: NativeArena,
    ) -> None:
        self.addend = hidden.clone(memory_format=torch.contiguous_format)
        self.residual = torch.empty_like(self.addend)
        self.began = False
        self._kept = cos, sin, spans  # the struct points to them
        self.struct = layouts.StepStruct(
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            block_tables=spans.blocks.data_ptr(),
            lengths=spans.lengths.data_ptr(),
            first_rows=spans.first_rows.data_ptr(),
            table_stride=spans.blocks.stride(0),
            rows=len(hidden),
            spans=spans.span_count,
            rotary_dim=cos.shape[1],
            block_tokens=spans.block_tokens,
            table_blocks=spans.blocks.shape[1],
            arena_blocks=arena.slots // spans.block_tokens,
            kv_element=arena.element,
            threads=torch.get_num_threads(),
        )

    @property
    def result(self) -> torch.Tensor:
        """Hidden states [T, width] behind the blocks it went through."""
        return self.addend + self.residual if self.began else self.addend


def run_blocks(
    blocks: Sequence[NativeBlock], arenas: Sequence[NativeArena], passes: Sequence[NativePass]
) -> None:
    """Steps through the next blocks, which have these arenas, in one call: all through one block
    before the next.

    A row's result depends on that row and its request alone, bit for bit.
    """
    library = native.active()
    assert library is not None
    of_blocks = c_void_p * len(blocks)
    of_steps = c_void_p * len(passes)
    of_flags = c_uint8 * len(passes)
    refused = library.edgeshard_blocks(
        of_blocks(*(block.address for block in blocks)),
        of_blocks(*(arena.keys.data_ptr() for arena in arenas)),
        of_blocks(*(arena.values.data_ptr() for arena in arenas)),
        len(blocks),
        of_steps(*(ctypes.addressof(step.struct) for step in passes)),
        of_steps(*(step.addend.data_ptr() for step in passes)),
        of_steps(*(step.residual.data_ptr() for step in passes)),
        of_flags(*(step.began for step in passes)),
        len(passes),
    )
    if refused >= 0:
        step, span = refused >> 32, refused & 0xFFFF_FFFF
        raise InternalError(
            f"the length or a block of span {span} of step {step} lies outside its table or the "
            "arena"
        )
    for one in passes:
        one.began = True


class BlockTable:
    """The blocks of a request, in order, as the native call takes them."""

    __slots__ = ("_kept", "address", "count")

    def __init__(self, blocks: Sequence[int]) -> None:
        self._kept = np.array(blocks, dtype=np.int32)
        self.address, self.count = self._kept.ctypes.data, len(blocks)


class NativeRows:
    """Rows of one request at a time through native blocks, which have these arenas: a step as
    `NativePass` and `run_blocks` make it, but for what is the same each time.

    `cos` and `sin` [positions, rotary_dim] are those of all positions; a step has `most` rows at
    most.
    """

    def __init__(
        self,
        blocks: Sequence[NativeBlock],
        arenas: Sequence[NativeArena],
        cos: torch.Tensor,
        sin: torch.Tensor,
        block_tokens: int,
        most: int,
    ) -> None:
        library = native.active()
        assert library is not None
        self._function = library.edgeshard_blocks
        addend = torch.empty(most, blocks[0].width, dtype=cos.dtype)
        residual = torch.empty_like(addend)
        self._inputs = [addend[:rows] for rows in range(most + 1)]
        self._last = [(addend[row : row + 1], residual[row : row + 1]) for row in range(most)]
        self._lengths, self._first_rows = np.zeros(1, np.int32), np.zeros(2, np.int32)
        self._rotation = cos.contiguous(), sin.contiguous()
        self._cos, self._sin = (part.data_ptr() for part in self._rotation)
        self._row_bytes = cos.shape[1] * cos.itemsize
        self._struct = layouts.StepStruct(
            lengths=self._lengths.ctypes.data,
            first_rows=self._first_rows.ctypes.data,
            spans=1,
            rotary_dim=cos.shape[1],
            block_tokens=block_tokens,
            arena_blocks=arenas[0].slots // block_tokens,
            kv_element=arenas[0].element,
        )
        pointers = c_void_p * len(blocks)
        self._kept = blocks, arenas  # the call points to them
        self._call = (
            pointers(*(block.address for block in blocks)),
            pointers(*(arena.keys.data_ptr() for arena in arenas)),
            pointers(*(arena.values.data_ptr() for arena in arenas)),
            len(blocks),
            (c_void_p * 1)(ctypes.addressof(self._struct)),
            (c_void_p * 1)(addend.data_ptr()),
            (c_void_p * 1)(residual.data_ptr()),
            (c_uint8 * 1)(0),
            1,
        )

    def run(self, hidden: torch.Tensor, table: BlockTable, first: int) -> torch.Tensor:
        """[1, width] behind the last of hidden states [T, width], of positions from `first` on.
        Keys and values of a request are in the blocks of its `table`, in order."""
        rows, step = len(hidden), self._struct
        self._inputs[rows].copy_(hidden)
        self._lengths[0], self._first_rows[1] = first + rows, rows
        step.rows, step.threads = rows, torch.get_num_threads()
        step.cos = self._cos + first * self._row_bytes
        step.sin = self._sin + first * self._row_bytes
        step.block_tables = table.address
        step.table_stride = table.count
        step.table_blocks = table.count
        if self._function(*self._call) >= 0:
            raise InternalError(
                f"positions up to {first + rows} or a block lie outside the request's table or the "
                "arena"
            )
        addend, residual = self._last[rows - 1]
        return addend + residual
