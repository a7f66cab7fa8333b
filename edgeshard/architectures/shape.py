"""The numbers of a model that placement, KV pools and frames need."""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.domain.dtypes import DType
from edgeshard.domain.model import LayerRange


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a config.json says of a model's size.

    `architecture` is the name of its record. `max_context` is in tokens. `tied` says that the embedding is the LM head
    too. `frame_width` is the width of the hidden states between two stages. `eos_tokens` are the ids config.json names
    that the vocabulary holds.
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

    def kv_bytes_per_token(self, layers: LayerRange, dtype: DType) -> int:
        """Bytes of keys and values one token takes in these layers."""
        return 2 * len(layers) * self.kv_heads * self.head_dim * dtype.itemsize
