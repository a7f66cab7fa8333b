"""The numbers of a model that placement, KV pools and frames need."""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.domain.models.dtypes import STORED_GROUP, DType, ExpertWidths, IntegerFormat, KvFormat, Quantisation
from edgeshard.domain.models.model import LayerRange


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model by its config.json.

    `architecture` is the name of its record. `max_context` is in tokens. `tied` says that the embedding is the LM head
    too. `frame_width` is the width of the hidden states between two stages. `eos_tokens` are the ids config.json names
    that the vocabulary holds. `stored_as` is the format of weights that are stored as small integers,
    `expert_widths` that of each expert where the weights become small integers.
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
    expert_widths: ExpertWidths | None = None

    def group_of(self, integers: IntegerFormat) -> int:
        """Consecutive inputs of a row that share a scale, where this model's weights are small integers."""
        return integers.group if self.stored_as is None else STORED_GROUP

    def kv_bytes_per_token(self, layers: LayerRange, kept: KvFormat | DType) -> int:
        """Bytes of keys and values one token takes in these layers."""
        return 2 * len(layers) * self.kv_heads * KvFormat(kept).head_bytes(self.head_dim)
