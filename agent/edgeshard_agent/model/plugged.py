"""Stages in transformers' own decoder layers, which call our attention and our experts.

The layers are called with no cache and no mask: the attention plug finds the step in their keyword
arguments. Their matrices are `Projection`s, so that our kernels multiply and small integers are
possible. Experts are gated MLPs in our kernels, each a unit that may be streamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import nn

from edgeshard.architectures.record import Plugged
from edgeshard.domain.errors import InternalError
from edgeshard_agent.model.attention.attention import StepAttention
from edgeshard_agent.model.blocks import ExpertModules, GatedMlp, Gating, gating_of
from edgeshard_agent.model.decoder import DecoderModules
from edgeshard_agent.model.mixers import MIXERS
from edgeshard_agent.model.modules import Batch, StageContext, StageModules
from edgeshard_agent.model.projection import Integers, Projection, mlp_forms, whole
from edgeshard_agent.ops.block_formats import Weight


def replace_experts(layer: nn.Module, context: StageContext, index: int) -> None:
    """Replace the experts of transformers' layer with this global index by ours, if it has any."""
    record, shape = context.architecture, context.shape
    runs = record.runs
    if not isinstance(runs, Plugged) or not runs.experts:
        return
    block = record.block(context.decoder.fields, shape, index)
    sizes = {
        record.place(name).parameter: record.matrix(name, size, shape.hidden_size)
        for name, size in block.items()
    }
    count = len({expert for name in block if (expert := record.expert_index(name)) is not None})
    if not count:
        return
    owner_path, _, leaf = runs.experts.rpartition(".")
    owner = layer.get_submodule(owner_path)
    hidden, inner = sizes[f"{runs.experts}.0.down_proj.weight"]
    bias = f"{runs.experts}.0.down_proj.bias" in sizes
    gated = not {
        f"{runs.experts}.0.gate_proj.weight",
        f"{runs.experts}.0.gate_up_proj.weight",
    }.isdisjoint(sizes)
    gating = _gating(getattr(owner, leaf), context, gated)
    forms = context.block_forms(index)
    kinds = [mlp_forms(forms, f"{runs.experts}.{expert}") for expert in range(count)]
    mlps = (GatedMlp(inner, hidden, gating, bias=bias, gated=gated, forms=kind) for kind in kinds)
    setattr(owner, leaf, ExpertModules(mlps))


def _gating(theirs: Any, context: StageContext, gated: bool) -> Gating:
    """The gating of transformers' experts; a family's own is called, whatever it clamps and in
    whatever order it has rows of gate and up. Without gates it is the activation."""
    if not gated:
        activation: Gating = theirs.act_fn
        return activation
    own = getattr(type(theirs), "_apply_gate", None)
    if own is not None and own.__module__ == type(theirs).__module__:
        gating: Gating = theirs._apply_gate
        return gating
    record = context.architecture
    return gating_of(context.decoder.fields.choice(record.activation, record.activations))


@dataclass(slots=True)
class _Stacking:
    """A parameter made of several tensors, while they arrive; `left` elements are still to come."""

    memory: torch.Tensor
    left: int


def make_layer(context: StageContext, index: int) -> nn.Module:
    """transformers' decoder layer of this global index, on the meta device, with mixers of ours."""
    runs = context.architecture.runs
    mixers = runs.mixers if isinstance(runs, Plugged) else {}
    layer_class: Any = getattr(context.library, context.architecture.library.layer_class)
    # Some classes get the type of the layer as an argument, others look it up.
    arguments = (
        {"layer_type": context.config.layer_types[index]}
        if "layer_type" in signature(layer_class).parameters
        else {}
    )
    with torch.device("meta"):
        layer: nn.Module = layer_class(context.config, layer_idx=index, **arguments)
        for part, kind in mixers.items():
            if (theirs := getattr(layer, part, None)) is not None:
                setattr(layer, part, MIXERS[kind](theirs, context.config))
    return layer


class LayerModules(StageModules):
    """Base of module classes for one family, with blocks of transformers and all else its own."""

    token_embedding: ClassVar[str]
    """The canonical name of its tensor."""
    _ordered: list[nn.Module]
    """The blocks in the order they run."""

    def _blocks(self) -> nn.ModuleDict:
        layers = range(self.context.layers.first, self.context.layers.end)
        return nn.ModuleDict({str(index): make_layer(self.context, index) for index in layers})

    def run(
        self, hidden: torch.Tensor, positions: torch.Tensor, step: StepAttention
    ) -> torch.Tensor:
        for block in self._ordered:
            hidden = block(hidden, step=step)
        return hidden

    def accept(self, name: str, value: Weight) -> None:
        self._assign(
            self._embedding_places(name) if name == self.token_embedding else (name,), whole(value)
        )


class LayerProjection(Projection):
    """A matrix of a decoder layer, which has a batch axis before that of tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., rows] from [..., columns]."""
        return super().forward(x.reshape(-1, self.columns)).view(*x.shape[:-1], self.rows)


class PluggedBlock(nn.Module):
    """A decoder layer with the settings of its family's record: its window, the chunk of positions
    within which it attends (0: all), and its rotary embedding."""

    def __init__(self, layer: nn.Module, window: int | None, rotary: str, chunk: int = 0) -> None:
        super().__init__()
        self.layer = layer
        self.rotary = rotary
        self._window = window
        self._chunk = chunk

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, rotary: object, step: StepAttention
    ) -> torch.Tensor:
        """[1, T, width] from [1, T, width]."""
        result: Any = self.layer(
            hidden,
            attention_mask=None,
            position_ids=positions,
            past_key_values=None,
            position_embeddings=rotary,
            step=step,
            layer_window=self._window,
            layer_chunk=self._chunk,
            layer_positions=positions,
        )
        output: torch.Tensor = result[0] if isinstance(result, tuple) else result
        # Some layers add in float32. Between two of them is the dtype of frames, so that a cut
        # there changes nothing.
        return output.to(hidden.dtype)


class _NoPositions(nn.Module):
    """In place of a rotary embedding, for attention without one."""

    def forward(self, *_: object) -> None:
        return None


class PluggedModules(DecoderModules):
    """A stage of any family whose layers take hidden states, position ids and position
    embeddings."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._stacking: dict[str, _Stacking] = {}
        self._kinds = {block.rotary for block in self._ordered}

    def _rotary_of(self, hidden: torch.Tensor, positions: torch.Tensor) -> dict[Any, Any]:
        """The rotations of each kind that the blocks need."""
        rotations = {}
        for kind in self._kinds:
            rotations[kind] = self.rotary_emb(hidden, positions, *([kind] if kind else []))
        return rotations

    def run_sweep(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        hidden = [batch[0] for batch in batches]
        rotary = [self._rotary_of(first, positions) for first, positions, _ in batches]
        for blocks in self._in_memory():
            for index, (_, positions, step) in enumerate(batches):
                for block in blocks:
                    hidden[index] = block(
                        hidden[index], positions, rotary[index][block.rotary], step
                    )
        return hidden

    @property
    def is_static(self) -> bool:
        # pieces of a span differ by step
        return super().is_static and self.context.architecture.chunks is None

    def _block(self, index: int) -> PluggedBlock:
        context, record = self.context, self.context.architecture
        layer = make_layer(context, index)
        replace_experts(layer, context, index)
        forms = context.block_forms(index)
        for name in record.block(context.decoder.fields, context.shape, index):
            if not name.endswith(".weight") or record.expert_index(name) is not None:
                continue
            parameter = record.place(name).parameter
            path, _, _ = parameter.rpartition(".")
            linear = layer.get_submodule(path)
            if type(linear) is nn.Linear and not record.keeps_float32(name):
                owner, _, leaf = path.rpartition(".")
                setattr(
                    layer.get_submodule(owner), leaf, self._projection(linear, forms.get(parameter))
                )
            elif parameter in forms and not isinstance(linear, Projection):
                raise InternalError(
                    f"architecture {record.name}: {name} is not a matrix that can be quantised"
                )
        rotary = ""
        if record.rope is not None and record.rope.by_layer_type and record.windows is not None:
            rotary = record.windows.layer_types(context.decoder.fields, context.shape.layer_count)[
                index
            ]
        chunk = 0 if record.chunks is None else record.chunks(context.decoder.fields, index)
        return PluggedBlock(layer, self._windows[index], rotary, chunk)

    def _projection(self, linear: nn.Linear, integers: Integers | None) -> Projection:
        has_bias = linear.bias is not None
        return LayerProjection(
            (linear.out_features,), linear.in_features, bias=has_bias, integers=integers
        )

    def _rotary_embedding(self) -> nn.Module:
        context, rope = self.context, self.context.architecture.rope
        if rope is None or not rope.turns(context.decoder.fields):
            return _NoPositions()
        embedding: nn.Module = getattr(context.library, context.architecture.library.rotary_class)(
            context.config
        )
        return embedding

    def _final_norm(self) -> nn.Module:
        name = self.context.architecture.library.norm_class
        norm_class: Any = getattr(self.context.library, name, None) or getattr(nn, name)
        with torch.device("meta"):
            norm: nn.Module = norm_class(self.context.shape.hidden_size, eps=self._ends.eps)
        return norm

    def _accept_in_block(self, index: str, name: str, value: Weight) -> None:
        place = self.context.architecture.place(name)
        path, _, leaf = place.parameter.rpartition(".")
        block: Any = self.layers[index]
        if self.context.architecture.expert_index(name) is not None:
            path, _, part = path.rpartition(".")
            projection, first_row = block.layer.get_submodule(path).place(part)
            self._fill(block.layer.get_submodule(f"{path}.{projection}"), leaf, first_row, value)
            return
        owner = block.layer.get_submodule(path)
        if isinstance(owner, Projection):
            self._fill(owner, leaf, 0, value)
        elif place.index is not None:
            self._stack(f"{index}.{place.parameter}", owner, leaf, place.index, whole(value))
        else:
            dtype = torch.float32 if self.context.architecture.keeps_float32(name) else None
            self._set(owner, leaf, self._memory(whole(value), dtype))

    def _stack(self, key: str, owner: nn.Module, leaf: str, part: int, value: torch.Tensor) -> None:
        """Copy a tensor into its part of a parameter."""
        stacking = self._stacking.get(key)
        if stacking is None:
            shape, dtype = getattr(owner, leaf).shape, self.context.torch_dtype
            memory = self._taken(shape, dtype)
            stacking = self._stacking[key] = _Stacking(memory, memory.numel())
        stacking.memory[part].copy_(value)
        stacking.left -= value.numel()
        if stacking.left == 0:
            self._set(owner, leaf, self._stacking.pop(key).memory)

    def _set(self, owner: nn.Module, leaf: str, memory: torch.Tensor) -> None:
        if getattr(owner, leaf).shape != memory.shape:
            raise InternalError(f"{leaf} and its tensor differ in shape")
        if leaf in owner._buffers:
            setattr(owner, leaf, memory)
        else:
            setattr(owner, leaf, nn.Parameter(memory, requires_grad=False))
