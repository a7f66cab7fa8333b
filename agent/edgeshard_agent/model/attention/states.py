"""The data that blocks keep for each request besides keys and values: tensors of fixed size, in
numbered slots.

Convolutions keep their last inputs, linear attention a matrix for each head. The head grants the
slots (`kv.KvPool` checks them). A slot is zeroed when it is granted, so that no request starts from
another request's data. Slots that no request has keep copies of states, for requests that begin
alike. The slots after these are given by the pool to guessed tokens: the request continues from the
slot of the last right guess.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgeshard.architectures import StateSize
from edgeshard.domain.errors import ResourceExhaustedError
from edgeshard.domain.models.dtypes import DType
from edgeshard_agent.model.tensors import TORCH_DTYPES
from edgeshard_agent.ops.kv_arena import zeroed


class States:
    """`slots` slots with the states of each of a stage's layers, whose sizes are given in its
    order; then `guess_slots` slots for guesses."""

    def __init__(
        self,
        slots: int,
        sizes: Sequence[Sequence[StateSize]],
        device: str,
        dtype: DType = DType.FLOAT32,
        guess_slots: int = 0,
    ) -> None:
        every = [size for layer in sizes for size in layer]
        self.slots = slots if every else 0
        self.guess_slots = range(self.slots, self.slots + (guess_slots if every else 0))
        self.slot_bytes = sum(size.bytes_in(dtype) for size in every)
        """Bytes of one slot in all layers."""
        count, plain = self.guess_slots.stop, TORCH_DTYPES[dtype]
        try:
            self._layers = []
            for layer in sizes:
                dtypes = [torch.float32 if size.float32 else plain for size in layer]
                shapes = [(count, *size.shape) for size in layer]
                pairs = zip(shapes, dtypes, strict=True)
                self._layers.append(tuple(zeroed(shape, dtype, device) for shape, dtype in pairs))
        except (RuntimeError, MemoryError) as error:
            raise ResourceExhaustedError(
                f"no memory for the states of {slots} requests: {error}", field="concurrency"
            ) from error

    @property
    def bytes_capacity(self) -> int:
        return self.guess_slots.stop * self.slot_bytes

    def layer(self, index: int) -> tuple[torch.Tensor, ...]:
        """The states of a layer by its place in the stage, each [slots, ...]."""
        return self._layers[index]

    def of(self, slot: int | None) -> list[torch.Tensor]:
        """Views of all that a slot holds, layer by layer; nothing without a slot."""
        return [] if slot is None else [state[slot] for layer in self._layers for state in layer]

    def clear(self, slot: int) -> None:
        for state in self.of(slot):
            state.zero_()

    def copy(self, source: int, target: int) -> None:
        for state, copied in zip(self.of(target), self.of(source), strict=True):
            state.copy_(copied)

    def release(self) -> None:
        """Give the memory back."""
        for layer in self._layers:
            for state in layer:
                if state.device.type != "cpu":
                    # what torch gives back of an accelerator's memory, it keeps for this process
                    state.zero_()
        self._layers = []
