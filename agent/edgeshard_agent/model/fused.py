"""Stages in our own blocks, for families of the Llama kind; nothing of transformers runs."""

from __future__ import annotations

from typing import Any

import torch

from edgeshard_agent.model.attention import Rotary, StepAttention
from edgeshard_agent.model.blocks import Block, BlockOptions, Shapes, make_norm, place_of
from edgeshard_agent.model.decoder import DecoderModules
from edgeshard_agent.model.modules import StageContext
from edgeshard_agent.model.projection import whole
from edgeshard_agent.model.rotary import RotaryFrequencies
from edgeshard_agent.ops import NativeBlock, QuantizedWeight


class FusedModules(DecoderModules):
    """RMS norms, rotary grouped-query attention and gated MLPs, all in blocks of one kind."""

    rotary_emb: RotaryFrequencies

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._kinds: set[str | None] = {block.options.style.rotary for block in self._ordered}
        self._native: dict[Block, NativeBlock | None] = {}

    def run(self, hidden: torch.Tensor, positions: torch.Tensor, step: StepAttention) -> torch.Tensor:
        rotary = {kind: self._rotary(positions[0], kind) for kind in self._kinds}
        if (shared := rotary.get("")) is not None and (native := self._native_blocks()):
            arenas = step.native_arenas([block.layer_idx for block in self._ordered])
            if arenas:
                return step.run_native(native, arenas, hidden[0], shared).unsqueeze(0)
        addend, residual = hidden[0], None
        for block in self._ordered:
            addend, residual = block(addend, residual, rotary[block.options.style.rotary], step)
        return (addend if residual is None else addend + residual).unsqueeze(0)

    def _block(self, index: int) -> Block:
        return Block(self._shapes(index), self._options(index), index)

    def _rotary_embedding(self) -> RotaryFrequencies:
        rope, shape = self.context.architecture.rope, self.context.shape
        assert rope is not None  # our blocks have no other positions
        return RotaryFrequencies(rope.rotations(self.context.decoder.fields, shape.head_dim, shape.max_context))

    def _final_norm(self) -> torch.nn.Module:
        return make_norm(self.context.shape.hidden_size, self._ends.eps, self._ends.unit_offset)

    def _shapes(self, layer: int) -> Shapes:
        """Of a block's tensors, by their names in blocks of the Llama kind."""
        record = self.context.architecture
        shapes = record.block(self.context.decoder.fields, self.context.shape, layer)
        return {record.place(name).parameter: size for name, size in shapes.items()}

    def _options(self, layer: int) -> BlockOptions:
        context, shape = self.context, self.context.shape
        runs: Any = context.architecture.runs
        return BlockOptions(
            style=runs.style(context.decoder.fields, shape, layer),
            heads=shape.attention_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            hidden_size=shape.hidden_size,
            window=self._windows[layer],
            integers=context.block_integers,
            expert_integers=context.expert_integers(layer),
        )

    def _accept_in_block(self, index: str, name: str, value: torch.Tensor | QuantizedWeight) -> None:
        block: Any = self.layers[index]
        path, _, kind = self.context.architecture.place(name).parameter.rpartition(".")
        place = place_of(path, block)
        if place is not None:
            self._fill(block.get_submodule(place[0]), kind, place[1], value)
        else:  # a norm
            self._assign((f"layers.{index}.{path.removeprefix('self_attn.')}.{kind}",), whole(value))

    def _native_blocks(self) -> list[NativeBlock]:
        """The blocks for a single native call; none where any of them has no such form."""
        if len(self._kinds) > 1:
            return []
        native = []
        for block in self._ordered:
            if block not in self._native:
                self._native[block] = block.native()
            if (compiled := self._native[block]) is None:
                return []
            native.append(compiled)
        return native

    def _rotary(self, positions: torch.Tensor, kind: str | None) -> Rotary | None:
        """Of the positions [T]; `kind` is the type of layer where the frequencies differ by it, None for none."""
        if kind is None:
            return None
        frequencies, scaling = self.rotary_emb.of(kind)
        half = torch.outer(positions.to(torch.float32), frequencies)
        angles = torch.cat((half, half), dim=-1)
        dtype = self.context.torch_dtype
        return angles.cos().mul_(scaling).to(dtype), angles.sin().mul_(scaling).to(dtype)
