"""The parts that generic stages share, as a record defines them: token embedding, rotary embedding,
final norm and LM head."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from edgeshard.architectures import shares_embedding
from edgeshard.architectures.record import Ends
from edgeshard.architectures.units import EMBEDDING_UNIT, HEAD_UNIT
from edgeshard.domain.models.model import LayerRange
from edgeshard_agent.model.attention.attention import StepAttention
from edgeshard_agent.model.modules import StageContext, StageModules
from edgeshard_agent.model.projection import Matrix, Projection, whole
from edgeshard_agent.ops.block_formats import Weight
from edgeshard_agent.ops.elementwise import softcap


class LayerStore(Protocol):
    """Layers that are in memory only between `acquire` and `release`, in the order they run."""

    def streams(self, layer: int) -> bool: ...

    def acquire(self, layer: int) -> None: ...

    def release(self, layer: int) -> None: ...


class DecoderModules(StageModules):
    """Base of the stages whose blocks are in `layers`; `_ordered` has them in the order they
    run."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        shape, record = context.shape, context.architecture
        self._ends: Ends = record.ends(context.decoder.fields, shape)
        windows = context.decoder.windows()
        self._windows = [windows[index] or None for index in range(shape.layer_count)]
        self.layers = nn.ModuleDict(
            {
                str(index): self._block(index)
                for index in range(context.layers.first, context.layers.end)
            }
        )
        self.rotary_emb = self._rotary_embedding().to(context.device)
        if context.is_first:
            self._embeds_with_head = context.is_last and shares_embedding(
                shape, context.quantisation
            )
            integers = context.embedding_integers
            if integers is not None and not self._embeds_with_head:
                self.embed_tokens: nn.Module = Projection(
                    (shape.vocab_size,), shape.hidden_size, integers=integers
                )
            elif not self._embeds_with_head:
                self.embed_tokens = self._weight(shape.vocab_size, shape.hidden_size)
            scale = self._ends.embedding_scale
            # sqrt(3072) = 55.43 is 55.5 in bfloat16, and some families multiply by that.
            self._scale = (
                torch.tensor(scale).to(context.torch_dtype).item() if self._ends.rounded else scale
            )
        if context.is_last:
            self.norm = self._final_norm()
            self.lm_head = Projection(
                (shape.vocab_size,), shape.hidden_size, integers=context.head_integers
            )
        self._ordered: list[Any] = list(self.layers.values())
        self.ends_there: set[str] = set()
        """The ends, embedding and head, that have their weights, shared or from packed files: they
        accept none."""
        self.store: LayerStore | None = None
        """Through which some of the layers pass; None if all of them stay in memory."""
        self.has_all = True
        experts = context.architecture.is_expert
        self._has_experts = any(
            experts(name)
            for index in range(context.layers.first, context.layers.end)
            for name in record.block(context.decoder.fields, shape, index)
        )

    def _block(self, index: int) -> nn.Module:
        """The block of this global index, without memory."""
        raise NotImplementedError

    def _rotary_embedding(self) -> nn.Module:
        """The frequencies of the rotary embedding, in float32."""
        raise NotImplementedError

    def _final_norm(self) -> nn.Module:
        raise NotImplementedError

    def _accept_in_block(self, index: str, name: str, value: Weight) -> None:
        """Take the tensor of this name in the block of this index."""
        raise NotImplementedError

    def run(
        self, hidden: torch.Tensor, positions: torch.Tensor, step: StepAttention
    ) -> torch.Tensor:
        return self.run_sweep([(hidden, positions, step)])[0]

    def _in_memory(self) -> Iterator[list[Any]]:
        """The blocks in the order they run, as many at a time as are in memory together."""
        store = self.store
        if store is None:
            yield self._ordered
            return
        layers = range(self.context.layers.first, self.context.layers.end)
        for streamed, group in groupby(
            zip(layers, self._ordered, strict=True), lambda item: store.streams(item[0])
        ):
            if not streamed:
                yield [block for _, block in group]
                continue
            for layer, block in group:
                store.acquire(layer)
                yield [block]
                store.release(layer)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        embedding: Any = self.lm_head if self._embeds_with_head else self.embed_tokens
        if isinstance(embedding, Projection):
            embedded = embedding.row_vectors(tokens[0]).to(self.context.torch_dtype).unsqueeze(0)
        else:
            embedded = functional.embedding(tokens, embedding.weight)
        return embedded if self._scale == 1.0 else embedded * self._scale

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.norm(hidden))
        ends = self._ends
        if ends.logit_divisor != 1.0:
            logits = logits / ends.logit_divisor
        return logits if ends.logit_cap is None else softcap(logits, ends.logit_cap)

    @property
    def is_static(self) -> bool:
        # The host knows a token's experts only after reading them back; states are no part of
        # recordings.
        return not (self._has_experts or self.context.shape.states)

    def accept(self, name: str, value: Weight) -> None:
        if name == "lm_head.weight":
            self._fill(self.lm_head, "weight", 0, value)
        elif name == self.context.architecture.embedding:
            if hasattr(self, "embed_tokens") and EMBEDDING_UNIT not in self.ends_there:
                if isinstance(self.embed_tokens, Projection):
                    self._fill(self.embed_tokens, "weight", 0, value)
                else:
                    self._assign(("embed_tokens.weight",), whole(value))
            if (
                self.context.shape.tied
                and self.context.is_last
                and HEAD_UNIT not in self.ends_there
            ):
                self._fill(self.lm_head, "weight", 0, value)
        elif name.startswith("layers."):
            _, index, inner = name.split(".", 2)
            self._accept_in_block(index, inner, value)
        else:  # the final norm, whatever its name
            self._assign((f"norm.{name.rpartition('.')[2]}",), whole(value))

    @property
    def shareable_blocks(self) -> frozenset[int]:
        if self.store is not None or not self.has_all:
            return frozenset()  # they pass through the slots of this stage, or their experts do
        return frozenset(int(index) for index in self.layers)

    def share(self, other: StageModules) -> frozenset[str]:
        mine, theirs = self.context, other.context
        if not isinstance(other, type(self)) or (mine.dtype, mine.device, mine.quantisation) != (
            theirs.dtype,
            theirs.device,
            theirs.quantisation,
        ):
            return frozenset()
        if (
            self.store is not None
            or other.store is not None
            or not (self.has_all and other.has_all)
        ):
            return frozenset()
        shared = self.layers.keys() & other.layers.keys()
        for index in shared:
            self.layers[index] = other.layers[index]
        self._ordered = list(self.layers.values())
        if hasattr(self, "embed_tokens") and hasattr(other, "embed_tokens"):
            self.embed_tokens = other.embed_tokens
            shared.add(EMBEDDING_UNIT)
        if mine.is_last and theirs.is_last:
            self.norm, self.lm_head = other.norm, other.lm_head
            shared.add(HEAD_UNIT)
        self.ends_there |= shared & {EMBEDDING_UNIT, HEAD_UNIT}
        return frozenset(shared)

    def has(self, name: str, shared: frozenset[str]) -> bool:
        if name.startswith("layers."):
            return name.split(".", 2)[1] in shared
        if name != self.context.architecture.embedding:
            return HEAD_UNIT in shared  # the head and its norm
        embeds = not hasattr(self, "embed_tokens") or EMBEDDING_UNIT in shared
        heads = not (self.context.shape.tied and self.context.is_last) or HEAD_UNIT in shared
        return embeds and heads

    def drop_blocks(self, layers: LayerRange) -> None:
        for index in [
            index for index in self.layers if not layers.first <= int(index) < layers.end
        ]:
            del self.layers[index]
        self._ordered = []

    def _fill(
        self,
        projection: Matrix,
        kind: str,
        first_row: int,
        value: Weight,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Fill rows of a matrix, whose `dtype` is the stage's unless given."""
        projection.fill(
            kind, first_row, value, dtype or self.context.torch_dtype, self.context.device
        )
