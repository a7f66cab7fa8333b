"""The numbers of a model that placement, KV pools and frames need."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edgeshard.domain.models.dtypes import (
    STORED_GROUP,
    DType,
    ExpertWidths,
    IntegerFormat,
    KvFormat,
    Quantisation,
)
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.step import STEP_TOKENS

_EXPERT = re.compile(r"\bexperts\.\d+\.")


def name_of_experts(name: str) -> str:
    """A tensor's name with `*` for the number of its expert, the same for all experts of a
    layer."""
    return _EXPERT.sub("experts.*.", name)


@dataclass(frozen=True, slots=True)
class KvHeads:
    """The keys and values that a block keeps of every token: as many `heads`, of `head_dim` numbers
    each."""

    heads: int
    head_dim: int

    def bytes_per_token(self, kv_format: KvFormat | DType) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.heads * KvFormat(kv_format).head_bytes(self.head_dim)


@dataclass(frozen=True, slots=True)
class StateSize:
    """A tensor of fixed size that a block keeps of every request, in the deployment's dtype or in
    `float32`."""

    shape: tuple[int, ...]
    float32: bool = False

    def bytes_in(self, dtype: DType) -> int:
        return math.prod(self.shape) * (DType.FLOAT32 if self.float32 else dtype).itemsize


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model by its config.json.

    `architecture` is the name of its record. `max_context` is in tokens. `tied` means that the
    embedding is also the LM head. `frame_width` is the width of the hidden states between two
    stages. `eos_tokens` are the ids in config.json that the vocabulary holds. `stored_as` is the
    format of weights that are stored as small integers; if tensors differ, `formats` has each
    one's, by `name_of_experts`. `expert_widths` has each expert's format if the weights become
    small integers. `kv_heads` and `head_dim` are every block's, unless `kv` has them for each.
    `states` are each block's, in families whose requests have any.
    """

    architecture: str
    layer_count: int
    hidden_size: int
    vocab_size: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    tied: bool
    eos_tokens: tuple[int, ...]
    frame_width: int
    stored_as: Quantisation | None = None
    formats: Mapping[str, IntegerFormat] = field(default_factory=dict, hash=False)
    expert_widths: ExpertWidths | None = None
    kv: tuple[KvHeads, ...] = ()
    states: tuple[tuple[StateSize, ...], ...] = ()

    def group_of(self, integers: IntegerFormat) -> int:
        """Consecutive inputs of a row that share a scale, if this model's weights are small
        integers."""
        return integers.group if self.stored_as is None else STORED_GROUP

    def format_of(self, name: str) -> IntegerFormat | None:
        """The format in which the tensor of this canonical name is stored; None if it is whole, or
        if all are alike."""
        return self.formats.get(name) or self.formats.get(name_of_experts(name))

    def kv_of(self, layer: int) -> KvHeads:
        """The keys and values that the block of this index keeps."""
        return self.kv[layer] if self.kv else KvHeads(self.kv_heads, self.head_dim)

    def kv_in(self, layers: LayerRange) -> tuple[KvHeads, ...]:
        """The keys and values that each of these blocks keeps."""
        return tuple(self.kv_of(layer) for layer in range(layers.first, layers.end))

    def states_in(self, layers: LayerRange) -> tuple[tuple[StateSize, ...], ...]:
        """The states that each of these blocks keeps of a request."""
        return self.states[layers.first : layers.end] if self.states else ((),) * len(layers)

    def state_bytes(self, layers: LayerRange, dtype: DType) -> int:
        """Bytes of the states of one request in these layers."""
        return sum(size.bytes_in(dtype) for sizes in self.states_in(layers) for size in sizes)

    def save_every(self, dtype: DType, kv_format: KvFormat | DType, block_tokens: int) -> int:
        """Positions between two saves of a request's states, in whole KV blocks; 0 without states.

        Their keys and values take about as many bytes as a save, and they are at least a step's
        tokens: the head ends spans at the saves.
        """
        whole = LayerRange(0, self.layer_count)
        alike = self.state_bytes(whole, dtype) // max(1, self.kv_bytes_per_token(whole, kv_format))
        return -(-max(alike, STEP_TOKENS) // block_tokens) * block_tokens if self.states else 0

    def at(self, layer: int) -> ModelShape:
        """These sizes with the heads of one block."""
        own = self.kv_of(layer)
        return replace(self, kv_heads=own.heads, head_dim=own.head_dim)

    def kv_bytes_per_token(self, layers: LayerRange, kv_format: KvFormat | DType) -> int:
        """Bytes of keys and values one token takes in these layers."""
        return sum(own.bytes_per_token(kv_format) for own in self.kv_in(layers))

    @property
    def kv_widths(self) -> tuple[int, ...]:
        """The widths of heads whose keys and values are kept, ascending, each once."""
        return tuple(sorted({own.head_dim for own in self.kv if own.heads} or {self.head_dim}))

    def check_kv(self, kv_format: KvFormat) -> None:
        """Raise InvalidArgumentError naming `kv_dtype` if a block's heads cannot be stored in this
        format."""
        for head_dim in self.kv_widths:
            kv_format.check_heads(head_dim)
