"""The size of a model, from its config.json only: parameters, bytes, operations and frames of every
part. Pure.

Counts are from the tensors a checkpoint must hold (`architectures.expected_tensors`), so they are
exact for every architecture EdgeShard runs and need no weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeshard.architectures import (
    HEAD_WEIGHT,
    KNOWN_MODELS,
    ExpectedTensor,
    KvHeads,
    ModelShape,
    StateSize,
    expected_tensors,
    integers_of,
    keeps_float32,
    matrix_size,
    name_in_block,
    read_config,
    shares_embedding,
)
from edgeshard.architectures.parts import chosen_experts, expert_count
from edgeshard.domain.errors import UnsupportedModelError
from edgeshard.domain.models.dtypes import DType, IntegerFormat, Quantisation
from edgeshard.domain.models.model import Part


@dataclass(frozen=True, slots=True)
class Matrices:
    """The part of some weights that quantisation makes small integers: its elements, and its bytes
    in each format.

    Those that are stored as integers are another part: embeddings may be among them.
    """

    elements: int = 0
    int8_bytes: int = 0
    int4_bytes: int = 0
    stored_elements: int = 0
    stored_bytes: int = 0

    def __add__(self, other: Matrices) -> Matrices:
        return Matrices(
            self.elements + other.elements,
            self.int8_bytes + other.int8_bytes,
            self.int4_bytes + other.int4_bytes,
            self.stored_elements + other.stored_elements,
            self.stored_bytes + other.stored_bytes,
        )

    @classmethod
    def of(cls, shape: ModelShape, name: str, size: tuple[int, ...]) -> Matrices:
        """The tensor of this canonical name; nothing for one that is never small integers."""
        sizes = {}
        for way in (Quantisation.INT8, Quantisation.INT4_HEAD_INT4, Quantisation.STORED):
            kind = integers_of(shape, name, len(size), way)
            if kind is not None:
                rows, columns = matrix_size(shape, name, size)
                sizes[way] = kind.matrix_bytes(rows, columns, shape.group_of(kind))
        count = math.prod(size)
        return cls(
            count * (Quantisation.INT8 in sizes),
            sizes.get(Quantisation.INT8, 0),
            sizes.get(Quantisation.INT4_HEAD_INT4, 0),
            count * (Quantisation.STORED in sizes),
            sizes.get(Quantisation.STORED, 0),
        )

    def weight_bytes(
        self,
        parameters: int,
        dtype: DType,
        quantisation: Quantisation | None,
        *,
        head: bool = False,
    ) -> int:
        """Bytes of `parameters` elements, of which these are the ones that may be small integers.

        `head`: whether they are the LM head's.
        """
        if quantisation is Quantisation.STORED:
            return (parameters - self.stored_elements) * dtype.itemsize + self.stored_bytes
        integers = None
        if quantisation is not None:
            integers = quantisation.head if head else quantisation.blocks
        if integers is None:
            return parameters * dtype.itemsize
        packed = self.int8_bytes if integers is IntegerFormat.INT8 else self.int4_bytes
        return (parameters - self.elements) * dtype.itemsize + packed


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """Experts of a block with the same size: their number, and the elements of each."""

    count: int
    parameters: int
    matrices: Matrices = Matrices()


_NOTHING = KvHeads(0, 0)


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One decoder block."""

    parameters: int
    expert_parameters: int = 0
    """The part of `parameters` that belongs to experts."""
    experts: int = 0
    experts_per_token: int = 0
    """Experts that a token uses."""
    kv: KvHeads = _NOTHING
    """The keys and values it keeps of a token."""
    states: tuple[StateSize, ...] = ()
    """States that it keeps of a request, however long the request is."""
    window: int = 0
    """Most positions that a token sees, 0 for all. The KV cache holds all of them either way."""
    matrices: Matrices = Matrices()
    """All matrices that may be small integers."""
    expert_matrices: Matrices = Matrices()
    """Those of the experts."""
    float32_parameters: int = 0
    """Parameters that are held in float32 whatever the dtype."""
    expert_kinds: tuple[ExpertKind, ...] = ()
    """Experts that a node can read from its disk one by one; empty in families whose layers pass
    whole."""

    def weight_bytes(self, dtype: DType, quantisation: Quantisation | None = None) -> int:
        wider = self.float32_parameters * (DType.FLOAT32.itemsize - dtype.itemsize)
        return self.matrices.weight_bytes(self.parameters, dtype, quantisation) + wider

    def state_bytes(self, dtype: DType) -> int:
        """Bytes of the states of one request."""
        return sum(size.bytes_in(dtype) for size in self.states)

    def read_bytes(
        self, tokens: int, dtype: DType, quantisation: Quantisation | None = None
    ) -> float:
        """Weights read to compute `tokens` tokens: all of a dense block, of a mixture the experts
        expected.

        With routing at random a token misses an expert with 1 - chosen / experts; all tokens do
        with its power.
        """
        every = self.weight_bytes(dtype, quantisation)
        if not self.experts:
            return float(every)
        missed = (1.0 - self.experts_per_token / self.experts) ** tokens
        return every - missed * self.expert_matrices.weight_bytes(
            self.expert_parameters, dtype, quantisation
        )

    def expert_bytes(self, dtype: DType, quantisation: Quantisation | None = None) -> list[int]:
        """Bytes of each expert that a node can read by itself."""
        sizes: list[int] = []
        for kind in self.expert_kinds:
            sizes += [kind.matrices.weight_bytes(kind.parameters, dtype, quantisation)] * kind.count
        return sizes

    @property
    def expert_share(self) -> float:
        """The experts' share of the computing of a token in this block, by parameters."""
        return 1.0 - (self.parameters - self.expert_parameters) / self.active_parameters

    @property
    def active_parameters(self) -> float:
        """Parameters one token is multiplied with."""
        if not self.experts:
            return float(self.parameters)
        return self.parameters - self.expert_parameters * (
            1.0 - self.experts_per_token / self.experts
        )


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as the planner sees it. Sizes are in elements, so that one spec serves every
    dtype."""

    name: str
    shape: ModelShape
    blocks: tuple[BlockSpec, ...]
    embedding_parameters: int
    """Includes a tied embedding, as `head_parameters` does."""
    head_parameters: int
    tied_parameters: int
    """The part that embedding and head share."""
    largest_block_tensor: int
    """Largest tensor of one block; it matters while a stage loads."""
    largest_outer_tensor: int
    """Largest tensor outside the blocks."""
    inner_size: int
    """The widest row of a block's activations."""
    head_matrices: Matrices = Matrices()
    """Matrices of the head that may be small integers."""
    embedding_matrices: Matrices = Matrices()
    """Those of the embedding that are stored so."""

    @property
    def layer_count(self) -> int:
        return len(self.blocks)

    @property
    def parameter_count(self) -> int:
        blocks = sum(block.parameters for block in self.blocks)
        return blocks + self.embedding_parameters + self.head_parameters - self.tied_parameters

    def head_bytes(self, dtype: DType, quantisation: Quantisation | None = None) -> int:
        """Bytes of norm and LM head."""
        return self.head_matrices.weight_bytes(self.head_parameters, dtype, quantisation, head=True)

    def embedding_bytes(self, dtype: DType, quantisation: Quantisation | None = None) -> int:
        """Bytes of the embedding, which keeps the dtype unless it is stored as integers."""
        stored = quantisation if quantisation is Quantisation.STORED else None
        return self.embedding_matrices.weight_bytes(self.embedding_parameters, dtype, stored)

    def shared_bytes(self, dtype: DType, quantisation: Quantisation | None = None) -> int:
        """Bytes that a stage with embedding and head holds once and not twice."""
        if not shares_embedding(self.shape, quantisation):
            return 0
        stored = quantisation if quantisation is Quantisation.STORED else None
        return self.embedding_matrices.weight_bytes(self.tied_parameters, dtype, stored)

    def attention_flops(self, block: BlockSpec, tokens: int, context: float) -> float:
        """Operations of a block's attention: scores and weighted sum of `tokens` queries over
        `context` keys."""
        return 4.0 * tokens * context * self.shape.attention_heads * block.kv.head_dim


@dataclass(slots=True)
class _Sums:
    """Sums over the tensors of one block, or of one part outside the blocks."""

    parameters: int = 0
    expert_parameters: int = 0
    float32_parameters: int = 0
    largest: int = 0
    matrices: Matrices = Matrices()
    expert_matrices: Matrices = Matrices()
    of_experts: dict[int, tuple[int, Matrices]] = field(default_factory=dict)

    def add(
        self, shape: ModelShape, tensor: ExpectedTensor, *, expert: bool, index: int | None = None
    ) -> None:
        """`index` is the tensor's expert, in families whose experts are units."""
        elements = math.prod(tensor.shape)
        matrices = Matrices.of(
            shape, HEAD_WEIGHT if tensor.unit is Part.TIED else tensor.name, tensor.shape
        )
        self.parameters += elements
        self.matrices += matrices
        self.largest = max(self.largest, elements)
        if keeps_float32(shape, tensor.name):
            self.float32_parameters += elements
        if expert:
            self.expert_parameters += elements
            self.expert_matrices += matrices
        if index is not None:
            before, packed_before = self.of_experts.get(index, (0, Matrices()))
            self.of_experts[index] = before + elements, packed_before + matrices

    @property
    def expert_kinds(self) -> tuple[ExpertKind, ...]:
        return tuple(
            ExpertKind(count, *size) for size, count in Counter(self.of_experts.values()).items()
        )


def model_from_config(name: str, config: Mapping[str, Any]) -> ModelSpec:
    """The spec of the model that a decoded config.json describes. Raises UnsupportedModelError
    naming the key."""
    if not isinstance(config, Mapping):
        raise UnsupportedModelError("config.json holds no object", field="model")
    decoder = read_config(config)
    architecture = decoder.architecture
    fields = decoder.fields
    shape = decoder.shape
    layers = [_Sums() for _ in range(shape.layer_count)]
    parts = {part: _Sums() for part in Part}
    inner = shape.hidden_size
    for tensor in expected_tensors(config).values():
        if isinstance(tensor.unit, Part):
            parts[tensor.unit].add(shape, tensor, expert=False)
            continue
        inside = name_in_block(tensor.name)
        expert, index = architecture.is_expert(inside), architecture.expert_index(inside)
        layers[tensor.unit].add(shape, tensor, expert=expert, index=index)
        inner = max((inner, *tensor.shape))
    experts = experts_per_token = 0
    if architecture.experts is not None:
        experts = expert_count(architecture.experts, fields)
        experts_per_token = chosen_experts(architecture.experts, fields)
    blocks = tuple(
        BlockSpec(
            parameters=sums.parameters,
            expert_parameters=sums.expert_parameters,
            experts=experts if sums.expert_parameters else 0,
            experts_per_token=experts_per_token if sums.expert_parameters else 0,
            kv=shape.kv_of(layer),
            states=shape.states[layer] if shape.states else (),
            window=window,
            matrices=sums.matrices,
            expert_matrices=sums.expert_matrices,
            float32_parameters=sums.float32_parameters,
            expert_kinds=sums.expert_kinds,
        )
        for layer, (sums, window) in enumerate(zip(layers, decoder.windows(), strict=True))
    )
    tied = parts[Part.TIED].parameters
    return ModelSpec(
        name=name,
        shape=shape,
        blocks=blocks,
        embedding_parameters=parts[Part.EMBEDDING].parameters + tied,
        head_parameters=parts[Part.HEAD].parameters + tied,
        tied_parameters=tied,
        largest_block_tensor=max(sums.largest for sums in layers),
        largest_outer_tensor=max(sums.largest for sums in parts.values()),
        inner_size=inner,
        head_matrices=parts[Part.HEAD].matrices + parts[Part.TIED].matrices,
        embedding_matrices=parts[Part.EMBEDDING].matrices + parts[Part.TIED].matrices,
    )


BUILT_IN_CONFIGS: Mapping[str, dict[str, Any]] = {
    name: dict(config) for name, config in KNOWN_MODELS.items()
}


def built_in_model(name: str) -> ModelSpec | None:
    """A built-in model by name, without any file; None if the name is unknown."""
    config = BUILT_IN_CONFIGS.get(name.lower())
    return None if config is None else model_from_config(name.lower(), config)
