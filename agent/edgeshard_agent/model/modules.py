"""The base of a stage's modules: their place in the model, their arguments, and how they fill.

Parameters are made on the meta device and take memory when their tensor arrives. Computed values
that are not stored (rotary frequencies) are made on the real device, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from edgeshard.architectures import HEAD_WEIGHT, Architecture, Decoder, ModelShape, integers_of
from edgeshard.domain.errors import InternalError
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard_agent.model.attention.attention import StepAttention
from edgeshard_agent.model.projection import Forms, Integers, Projection, whole
from edgeshard_agent.model.tensors import TORCH_DTYPES
from edgeshard_agent.ops.block_formats import Weight
from edgeshard_agent.ops.huge_pages import WEIGHTS


@dataclass(frozen=True, slots=True)
class StageContext:
    """The parts that every family's modules are built from.

    Families that run in transformers' layers have its module with their classes, `library`, and a
    transformers config of the stage's own, `config`.
    """

    decoder: Decoder
    layers: LayerRange
    dtype: DType
    device: str
    quantisation: Quantisation | None = None
    config: Any = None
    library: Any = None

    @property
    def architecture(self) -> Architecture:
        return self.decoder.architecture

    @property
    def shape(self) -> ModelShape:
        return self.decoder.shape

    @property
    def is_first(self) -> bool:
        return self.layers.first == 0

    @property
    def is_last(self) -> bool:
        return self.layers.end == self.shape.layer_count

    def block_forms(self, layer: int) -> Forms:
        """The forms in which matrices of a block are packed, by the places of their tensors in
        it."""
        record, shape = self.architecture, self.shape
        forms: dict[str, Integers] = {}
        for name, size in record.block(self.decoder.fields, shape, layer).items():
            kind = integers_of(
                shape, f"{record.block_list}.{layer}.{name}", len(size), self.quantisation
            )
            if kind is not None:
                forms[record.place(name).parameter] = Integers(kind, shape.group_of(kind))
        return forms

    @property
    def head_integers(self) -> Integers | None:
        """The form in which the LM head is packed; None if it has the stage's dtype."""
        return self._outer_integers(HEAD_WEIGHT)

    @property
    def embedding_integers(self) -> Integers | None:
        """The form in which the embedding is packed; None if it keeps the dtype."""
        return self._outer_integers(self.architecture.embedding)

    def _outer_integers(self, name: str) -> Integers | None:
        kind = integers_of(self.shape, name, 2, self.quantisation)
        return None if kind is None else Integers(kind, self.shape.group_of(kind))

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]


Batch = tuple[torch.Tensor, torch.Tensor, StepAttention]
"""A micro-batch as `StageModules.run` takes it: hidden states, positions, and the places of its
keys and values."""


class StageModules(nn.Module):
    """Base of the families: token ids or hidden states in, hidden states out; `head` turns those
    into logits."""

    def __init__(self, context: StageContext) -> None:
        super().__init__()
        self.context = context

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[1, T, width] from token ids [1, T]; on the first stage only."""
        raise NotImplementedError

    def run(
        self, hidden: torch.Tensor, positions: torch.Tensor, step: StepAttention
    ) -> torch.Tensor:
        """[1, T, width] through this stage's blocks."""
        raise NotImplementedError

    def run_sweep(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Hidden states that `run` makes of each of several micro-batches. A streamed layer is read
        once for all of them."""
        return [self.run(*batch) for batch in batches]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab] of hidden states [R, width]; on the last stage only."""
        raise NotImplementedError

    @property
    def is_static(self) -> bool:
        """Whether a step of decodes runs without reading anything back to the host, so that it can
        be recorded."""
        return True

    def accept(self, name: str, value: Weight) -> None:
        """Take the tensor of this canonical name into the stage's own memory. `value` may be mapped
        from a file.

        A tensor stored as integers stays so if the stage packs it as the same integers.
        """
        self._assign((name,), whole(value))

    # Weights that are in memory already

    @property
    def shareable_blocks(self) -> frozenset[int]:
        """Layers whose blocks other modules of the same model can share. Empty unless the family
        lists them."""
        return frozenset()

    def share(self, other: StageModules) -> frozenset[str]:
        """Use the tensors of the same model that `other` has in memory; return their keys, as `has`
        understands them.
        """
        return frozenset()

    def has(self, name: str, shared: frozenset[str]) -> bool:
        """Whether the tensor of this canonical name is among the shared ones."""
        return False

    def drop_blocks(self, layers: LayerRange) -> None:
        """Give back the memory of the blocks of other layers."""

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all weights on the device; a tied one counts once."""
        return weight_bytes(self)

    def missing(self) -> str | None:
        """The name of a parameter or a buffer that is still without memory, if there is one."""
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if tensor.is_meta:
                return name
        return None

    def _assign(
        self, places: tuple[str, ...], value: torch.Tensor, dtype: torch.dtype | None = None
    ) -> None:
        """One parameter in all its places, so that a tied one is in memory once; `dtype` is that of
        `_memory`."""
        memory = self._memory(value, dtype)
        parameter = nn.Parameter(memory, requires_grad=False)
        for place in places:
            owner, _, name = place.rpartition(".")
            module = self.get_submodule(owner)
            if module.get_parameter(name).shape != parameter.shape:
                raise InternalError(f"{place} and its tensor differ in shape")
            setattr(module, name, parameter)

    def _memory(self, value: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy even if nothing changes: a loaded stage must not depend on a mapped file.

        `dtype` is the stage's unless given.
        """
        return self._taken(value.shape, dtype or self.context.torch_dtype).copy_(value)

    def _taken(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a weight, on the CPU in huge pages."""
        if torch.device(self.context.device).type == "cpu":
            return WEIGHTS.take(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.context.device)

    def _weight(self, rows: int, columns: int) -> nn.Linear:
        """A bare matrix, for embeddings and heads whose arithmetic is written out in the family."""
        with torch.device("meta"):
            return nn.Linear(columns, rows, bias=False)

    def _embedding_places(self, name: str) -> tuple[str, ...]:
        """The places of the token embedding: its own and, if the two are tied, the LM head's."""
        places = (name,) if self.context.is_first else ()
        return (
            (*places, "lm_head.weight")
            if self.context.shape.tied and self.context.is_last
            else places
        )


def weight_bytes(module: nn.Module) -> int:
    """Bytes of a module's weights in memory, packed or not; one that is in two places counts once.

    Buffers that a checkpoint stores count, computed ones do not.
    """
    plain = sum(parameter.nbytes for parameter in module.parameters() if not parameter.is_meta)
    for part in module.modules():
        stored = part._buffers.keys() - part._non_persistent_buffers_set
        plain += sum(
            part.get_buffer(name).nbytes for name in stored if not part.get_buffer(name).is_meta
        )
    return plain + sum(
        part.packed_bytes for part in module.modules() if isinstance(part, Projection)
    )
