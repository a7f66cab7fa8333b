"""Layers with random weights, in enough copies that no cache still holds one when it is used
again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgeshard.architectures import KvHeads, ModelShape, parse_config
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.step import KvGrant, Span, StepPlan
from edgeshard_agent.model.adapters import build_modules
from edgeshard_agent.model.attention.attention import StepAttention
from edgeshard_agent.model.attention.kv import KvMemory, KvPool
from edgeshard_agent.model.attention.states import States
from edgeshard_agent.model.modules import StageModules, weight_bytes
from edgeshard_agent.model.projection import Projection
from edgeshard_agent.model.tensors import TORCH_DTYPES
from edgeshard_agent.ops.block_formats import BlockWeight

CACHE_FALLBACK_BYTES = 32 << 20
MOST_COPIES = 256
"""Limit for layers so small that the caches would need too many copies."""
BLOCK_TOKENS = 16
FEW_TOKENS = 4096
_PATTERN = 1_048_573  # a prime, so that the rows of no matrix are equal
_CACHES = Path("/sys/devices/system/cpu")


def cache_bytes(device: str, root: Path = _CACHES) -> int:
    """The largest cache of the processor, or the second-level cache of an accelerator."""
    if torch.device(device).type == "cuda":
        size = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
        return size or CACHE_FALLBACK_BYTES
    sizes = [0]
    for path in root.glob("cpu*/cache/index*/size"):
        try:
            match = re.fullmatch(r"(\d+)([KMG]?)", path.read_text(encoding="ascii").strip())
        except OSError:
            continue
        if match:
            sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]])
    return max(sizes) or CACHE_FALLBACK_BYTES


def copies_needed(layer_bytes: int, rotated_bytes: int) -> int:
    """The number of copies whose size exceeds `rotated_bytes`: at least 1, at most MOST_COPIES."""
    return min(MOST_COPIES, rotated_bytes // max(1, layer_bytes) + 1)


def kv_bytes(heads: KvHeads, dtype: DType, tokens: int) -> int:
    """Bytes of the KV memory that each copy of a block has."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS * heads.bytes_per_token(dtype)


def fill(module: nn.Module, dtype: DType, device: str, skip: str = "") -> int:
    """Give every parameter still on the meta device random values and pack them; returns the bytes
    in memory then.

    The list of modules named `skip` is left out. Large ones repeat a pattern: drawing each element
    would take longer than the measurement. A matrix that is packed is never in memory as a whole.
    """
    torch_dtype = TORCH_DTYPES[dtype]
    pattern = _pattern(torch_dtype, device)
    for name, parameter in list(module.named_parameters()):
        if skip and name.startswith(f"{skip}."):
            continue
        if parameter.is_meta:
            owner, _, leaf = name.rpartition(".")
            place = module.get_submodule(owner)
            if parameter.dim() == 1:  # norms and biases
                values = torch.ones(parameter.shape, dtype=torch_dtype, device=device)
            elif isinstance(place, Projection):
                rows, columns = parameter.shape
                values = pattern.as_strided((rows, columns), ((_PATTERN - columns) // rows, 1))
            else:
                count = parameter.numel()
                values = pattern.repeat(-(-count // _PATTERN))[:count].view(parameter.shape)
            setattr(place, leaf, nn.Parameter(values, requires_grad=False))
    for part in module.modules():
        if isinstance(part, Projection):
            if (kind := part.block_format) is not None and part.packed is None:
                part.pack_blocks(BlockWeight.random(part.rows, part.columns, kind), torch_dtype)
                continue
            part.pack()
            if part.weight is not None and not part.weight.is_meta:  # torch multiplies it
                part.weight = nn.Parameter(part.weight.contiguous(), requires_grad=False)
        for name, buffer in list(part.named_buffers(recurse=False)):
            if buffer.is_meta and not skip:
                setattr(part, name, torch.ones_like(buffer, device=device))
    return weight_bytes(module)


def fill_all(alike: Sequence[nn.Module], dtype: DType, device: str, skip: str = "") -> int:
    """Fill modules of one form, each with memory of its own; returns the bytes of all of them.

    Packed parts are copied and not packed again: packing takes ten times as long.
    """
    size = fill(alike[0], dtype, device, skip)
    for module in alike[1:]:
        for part, filled in zip(module.modules(), alike[0].modules(), strict=True):
            _take_after(part, filled)
    return size * len(alike)


def _take_after(part: nn.Module, filled: nn.Module) -> None:
    if (
        isinstance(part, Projection)
        and isinstance(filled, Projection)
        and filled.packed is not None
    ):
        part.adopt(filled.packed.copied(), filled.dtype)
    for name, value in filled.named_parameters(recurse=False):
        if part.get_parameter(name).is_meta and not value.is_meta:
            setattr(part, name, nn.Parameter(value.clone(), requires_grad=False))
    for name, buffer in filled.named_buffers(recurse=False):
        if part.get_buffer(name).is_meta and not buffer.is_meta:
            setattr(part, name, buffer.clone())


@lru_cache(maxsize=1)
def _pattern(dtype: torch.dtype, device: str) -> torch.Tensor:
    return (
        torch.randn(_PATTERN, generator=torch.Generator().manual_seed(7))
        .mul_(0.02)
        .to(device, dtype)
    )


@dataclass(frozen=True, slots=True)
class LayerForm:
    """A model whose layers are made, by its config.json, and how its numbers are kept on a
    device."""

    config: Mapping[str, Any]
    dtype: DType
    device: str
    quantisation: Quantisation | None = None

    @property
    def shape(self) -> ModelShape:
        return parse_config(self.config)

    def with_few_tokens(self) -> LayerForm:
        """The same with a vocabulary of FEW_TOKENS at most."""
        size = min(FEW_TOKENS, self.shape.vocab_size)
        return replace(self, config={**self.config, "vocab_size": size})

    def modules(self, layer: int) -> StageModules:
        """The modules of a stage of this one layer, without memory."""
        return build_modules(
            self.config, LayerRange(layer, layer + 1), self.dtype, self.device, self.quantisation
        )


class BlockRotation:
    """Copies of one block, used in turn, each with a KV memory of its own. Nothing else of the
    model is made."""

    def __init__(
        self, form: LayerForm, layer: int, copies: int, kv_tokens: int, requests: int = 1
    ) -> None:
        self.copies = copies
        self.shape = shape = form.shape
        self.dtype = dtype = form.dtype
        device = form.device
        self.device = torch.device(device)
        built: list[Any] = [form.modules(layer) for _ in range(copies)]
        self._blocks = [each._ordered[0] for each in built]
        self.rotated_bytes = fill_all(self._blocks, dtype, device)
        for index, each in enumerate(self._blocks):
            for part in each.modules():
                if hasattr(part, "layer_idx"):
                    part.layer_idx = index
        self.modules: StageModules = built[0]
        memory = KvMemory(dtype, -(-kv_tokens // BLOCK_TOKENS), BLOCK_TOKENS)
        states = States(
            requests, shape.states_in(LayerRange(layer, layer + 1)) * copies, device, dtype
        )
        self.pool = KvPool(
            LayerRange(0, copies), memory, (shape.kv_of(layer),) * copies, device, states=states
        )
        self._next = 0

    def turn(self, count: int) -> None:
        """Let the next `run` use `count` copies, starting after the last one used."""
        start = self._next
        blocks = [self._blocks[(start + offset) % self.copies] for offset in range(count)]
        self._next = (start + count) % self.copies
        modules: Any = self.modules
        modules._ordered = blocks

    def step(
        self, batch: int, tokens: int, context: int
    ) -> tuple[torch.Tensor, torch.Tensor, StepAttention]:
        """Hidden states, positions and attention of `batch` spans of `tokens` tokens, after
        `context` positions."""
        for request in self.pool.requests:
            self.pool.free(request)
        spans = tuple(Span(request, context, tokens) for request in range(batch))
        blocks = -(-(context + tokens) // BLOCK_TOKENS)
        has_states = self.pool.states.slots > 0
        grants = tuple(
            KvGrant(
                request,
                0,
                tuple(range(request * blocks, (request + 1) * blocks)),
                slot=request if has_states else None,
            )
            for request in range(batch)
        )
        self.pool.commit(self.pool.check(StepPlan(grants=grants)))
        for request in range(batch):
            if context:
                self.pool.begin_span(request, 0, context, True)
        generator = torch.Generator().manual_seed(11)
        width = self.shape.frame_width
        hidden = torch.randn(1, batch * tokens, width, generator=generator).to(
            self.device, TORCH_DTYPES[self.dtype]
        )
        positions = (
            torch.arange(context, context + tokens, device=self.device).repeat(batch).unsqueeze(0)
        )
        return hidden, positions, StepAttention(self.pool, spans, self.device)

    def run(self, step: tuple[torch.Tensor, torch.Tensor, StepAttention]) -> torch.Tensor:
        hidden, positions, attention = step
        return self.modules.run(hidden, positions, attention)


class OuterRotation:
    """Copies of a model's embedding, or of its final norm and head, used in turn."""

    def __init__(self, form: LayerForm, head: bool, copies: int) -> None:
        layer = form.shape.layer_count - 1 if head else 0
        self.vocab_size = form.shape.vocab_size
        self._copies = [form.modules(layer) for _ in range(copies)]
        self._next = 0
        blocks = self._copies[0].context.architecture.block_list
        self.rotated_bytes = fill_all(self._copies, form.dtype, form.device, skip=blocks)

    def __len__(self) -> int:
        return len(self._copies)

    def take(self) -> StageModules:
        """The next copy."""
        self._next = (self._next + 1) % len(self._copies)
        return self._copies[self._next]
