"""Stages in our own blocks, for families of the Llama kind; nothing of transformers runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch

from edgeshard_agent.model.attention.attention import Rotary, StepAttention
from edgeshard_agent.model.attention.kv import KvPool
from edgeshard_agent.model.blocks import Block, BlockOptions, RmsNorm, Shapes, pieces_of
from edgeshard_agent.model.decoder import DecoderModules
from edgeshard_agent.model.modules import Batch, StageContext
from edgeshard_agent.model.projection import whole
from edgeshard_agent.model.rotary import RotaryFrequencies
from edgeshard_agent.ops.block_formats import Weight
from edgeshard_agent.ops.elementwise import rotary_angles
from edgeshard_agent.ops.fused_blocks import NativeBlock, NativePass, NativeRows, run_blocks
from edgeshard_agent.ops.kv_arena import NativeArena


class _Passing:
    """A micro-batch that passes through the blocks: `addend` [T, width] and the sum before it, if
    there is one."""

    __slots__ = ("_addend", "_native", "_residual", "_rotary", "step")

    def __init__(
        self, hidden: torch.Tensor, rotary: dict[str | None, Rotary | None], step: StepAttention
    ) -> None:
        self._addend = hidden
        self._residual: torch.Tensor | None = None
        self._native: NativePass | None = None
        self._rotary, self.step = rotary, step

    @property
    def result(self) -> torch.Tensor:
        if self._native is not None:
            return self._native.result
        return self._addend if self._residual is None else self._addend + self._residual

    def native(self, arena: NativeArena) -> NativePass | None:
        """The micro-batch as the native call takes it, None if its step runs block by block."""
        shared = self._rotary.get("")
        if (
            self._native is None
            and shared is not None
            and shared.query_factors is None
            and self.step.is_native
        ):
            self._native = self.step.native_pass(self.result, shared, arena)
        return self._native

    def run(self, blocks: Sequence[Block]) -> None:
        """Run through consecutive blocks, one operator after the other."""
        if self._native is not None:
            self._addend = self._native.result
            self._residual = None
            self._native = None
        for block in blocks:
            rotary = self._rotary[block.options.style.rotary]
            self._addend, self._residual = block(self._addend, self._residual, rotary, self.step)


class FusedModules(DecoderModules):
    """RMS norms, rotary grouped-query attention and gated MLPs, all in blocks of one kind."""

    rotary_emb: RotaryFrequencies

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._kinds: set[str | None] = {block.options.style.rotary for block in self._ordered}
        self._native: dict[Block, NativeBlock | None] = {}

    def run_sweep(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        passing = [
            _Passing(hidden[0], {kind: self._rotary(at[0], kind) for kind in self._kinds}, step)
            for hidden, at, step in batches
        ]
        for blocks in self._in_memory():
            self._run(blocks, passing)
        return [batch.result.unsqueeze(0) for batch in passing]

    def _run(self, blocks: Sequence[Block], passing: Sequence[_Passing]) -> None:
        """Run all micro-batches through consecutive blocks, in order; in one native call if
        possible."""
        native = self._native_blocks(blocks)
        arenas = (
            passing[0].step.native_arenas([block.layer_idx for block in blocks]) if native else []
        )
        pairs = [(batch, batch.native(arenas[0]) if arenas else None) for batch in passing]
        # A step may need keys that the one before it writes, so their order stays.
        for is_alone, together in groupby(pairs, lambda one: one[1] is None):
            if is_alone:
                for batch, _ in together:
                    batch.run(blocks)
            else:
                run_blocks(native, arenas, [one for _, one in together if one is not None])

    def native_rows(self, pool: KvPool, positions: int, most: int) -> NativeRows | None:
        """The blocks for rows of one request at a time, with `positions` positions; None if they
        have no native form.
        """
        blocks = [] if self.store is not None else self._native_blocks(self._ordered)
        arenas = [
            arena
            for block in self._ordered
            if isinstance(arena := pool.arena(block.layer_idx), NativeArena)
        ]
        rotary = (
            self._rotary(torch.arange(positions), "")
            if blocks and len(arenas) == len(blocks)
            else None
        )
        if rotary is None or rotary.query_factors is not None:
            return None
        return NativeRows(blocks, arenas, rotary.cos, rotary.sin, pool.block_tokens, most)

    def _block(self, index: int) -> Block:
        return Block(self._shapes(index), self._options(index), index)

    def _rotary_embedding(self) -> RotaryFrequencies:
        return RotaryFrequencies(self.context.decoder.rotations())

    def _final_norm(self) -> torch.nn.Module:
        return RmsNorm(
            self.context.shape.hidden_size,
            self._ends.eps,
            self._ends.unit_offset,
            self._ends.rounded_last,
        )

    def _shapes(self, layer: int) -> Shapes:
        """Shapes of a block's tensors, by their names in blocks of the Llama kind."""
        record = self.context.architecture
        shape = self.context.shape
        shapes = record.block(self.context.decoder.fields, shape, layer)
        return {
            record.place(name).parameter: record.matrix(name, size, shape.hidden_size)
            for name, size in shapes.items()
        }

    def _options(self, layer: int) -> BlockOptions:
        context, shape = self.context, self.context.shape
        runs: Any = context.architecture.runs
        own = shape.kv_of(layer)
        return BlockOptions(
            style=runs.style(context.decoder.fields, shape, layer),
            heads=shape.attention_heads,
            kv_heads=own.heads,
            head_dim=own.head_dim,
            hidden_size=shape.hidden_size,
            window=self._windows[layer],
            states=shape.states[layer] if shape.states else (),
            forms=context.block_forms(layer),
        )

    def _accept_in_block(self, index: str, name: str, value: Weight) -> None:
        block: Any = self.layers[index]
        parameter = self.context.architecture.place(name).parameter
        path, _, kind = parameter.rpartition(".")
        pieces = pieces_of(path, block)
        dtype = torch.float32 if self.context.architecture.keeps_float32(name) else None
        for piece in pieces:
            self._fill(
                block.get_submodule(piece.path), kind, piece.first_row, piece.of(value), dtype
            )
        if not pieces:  # a norm, or the decay of a state
            self._assign(
                (f"layers.{index}.{parameter.removeprefix('self_attn.')}",), whole(value), dtype
            )

    def _native_blocks(self, blocks: Sequence[Block]) -> list[NativeBlock]:
        """The blocks for a single native call; empty if any of them has no native form."""
        if len(self._kinds) > 1 or "" not in self._kinds:
            return []
        native = []
        for block in blocks:
            if block not in self._native:
                self._native[block] = block.native()
            if (compiled := self._native[block]) is None:
                return []
            native.append(compiled)
        return native

    def _rotary(self, positions: torch.Tensor, kind: str | None) -> Rotary | None:
        """The rotary embedding of the positions [T]; `kind` is the type of layer if the frequencies
        differ by it, else None.
        """
        if kind is None:
            return None
        frequencies, scaling = self.rotary_emb.of(kind)
        dtype = self.context.torch_dtype
        factors = self.rotary_emb.query_factors(positions, kind)
        if factors is not None:
            factors = factors.to(dtype).view(-1, 1, 1)
        return Rotary(*rotary_angles(positions, frequencies, scaling, dtype), factors)
