"""The tensors that a checkpoint must hold, by unit, with their shapes.

Checkpoints of one architecture differ in the prefix of their names (`model.`, `transformer.`,
`language_model.`). A *canonical* name has no prefix: `layers.3.self_attn.q_proj.weight`,
`embed_tokens.weight`. Shapes are as stored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeshard.architectures.fields import ConfigFields
from edgeshard.architectures.model_config import Decoder, decoder_fields, is_tied, read_config
from edgeshard.architectures.parts import expert_count
from edgeshard.architectures.record import Architecture, Shapes
from edgeshard.architectures.registry import find
from edgeshard.domain.errors import InternalError
from edgeshard.domain.models.model import LayerRange, Part, Unit, units_of_stage

HEAD_WEIGHT = "lm_head.weight"
_BLOCK = re.compile(r"(\w+)\.(\d+)\.(.+)")
_FURTHER = ("mtp.", "mtp_")
"""Prefixes of the names of blocks that predict further tokens, unless these are the blocks after
the last one."""
_QUANTISED = re.compile(r"_(blocks|scales|scale_inv)$")


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """One tensor a checkpoint must hold, by canonical name."""

    name: str
    unit: Unit
    shape: tuple[int, ...]


def canonical_name(architecture: str, tensor_name: str) -> str:
    """`tensor_name` without the prefixes its architecture's checkpoints use, and without another
    name for it."""
    record = find(architecture)
    prefixes = () if record is None else record.prefixes
    name = tensor_name
    while (prefix := next((p for p in prefixes if name.startswith(p)), None)) is not None:
        name = name[len(prefix) :]
    for pattern, replacement in () if record is None else record.aliases:
        name = re.sub(pattern, replacement, name)
    return name


def name_in_block(name: str) -> str:
    """`layers.3.mlp.up_proj.weight` as `mlp.up_proj.weight`."""
    return name.split(".", 2)[2]


def unit_of(architecture: str, tensor_name: str, config: Mapping[str, Any]) -> Unit | None:
    """The unit of a checkpoint's tensor, or None if the tensor is not needed.

    Some are not needed: computed buffers (rotary frequencies, causal masks), an `lm_head` in
    addition to a tied embedding, and everything outside the decoder, such as a vision tower.
    """
    record, fields = decoder_fields(config)
    name = canonical_name(architecture, tensor_name)
    if name.startswith(_FURTHER):
        return Part.FURTHER
    if (block := _BLOCK.fullmatch(name)) is not None:
        if block[1] != record.block_list or block[3] in record.computed:
            return None
        index = int(block[2])
        return Part.FURTHER if is_further_block(record, fields, index) else index
    if name == record.embedding:
        return Part.TIED if is_tied(record, config, fields) else Part.EMBEDDING
    if name == HEAD_WEIGHT and not is_tied(record, config, fields):
        return Part.HEAD
    return record.outer_names.get(name)


def parts_of_joined(
    config: Mapping[str, Any], tensor_name: str, size: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """The tensors of single experts that follow one another in a checkpoint's tensor of all of
    them, with their sizes.

    Names are as the checkpoint's. Empty for any other tensor, and if the number of experts differs
    from `config`'s. Quantised ones have a suffix `_blocks`, `_scales` or `_scale_inv`, as their
    parts do then.
    """
    record, fields = decoder_fields(config)
    if record.experts is None or not record.experts.joined:
        return {}
    name = canonical_name(record.name, tensor_name)
    block = _BLOCK.fullmatch(name)
    if block is None or block[1] != record.block_list:
        return {}
    inside, end = block[3], ""
    if (match := _QUANTISED.search(inside)) is not None:
        inside, end = inside[: match.start()], match[0]
    joined = next((joined for joined in record.experts.joined if joined.tensor == inside), None)
    if joined is None or not size or size[0] != expert_count(record.experts, fields):
        return {}
    own, parts = size[1:], len(joined.parts)
    if parts > 1:
        if not own or own[0] % parts:
            return {}
        own = (own[0] // parts, *own[1:])
    prefix = tensor_name[: -len(block[3])]
    return {
        f"{prefix}{part.format(expert)}{end}": own
        for expert in range(size[0])
        for part in joined.parts
    }


def is_run(architecture: str, tensor_name: str, config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's tensor is of a unit that some stage has."""
    return unit_of(architecture, tensor_name, config) not in (None, Part.FURTHER)


def is_further_block(record: Architecture, fields: ConfigFields, index: int) -> bool:
    """Whether the checkpoint's block of this index follows those that are run."""
    if not record.further_blocks:
        return False
    beyond = index - fields.size(record.keys.layers)
    return 0 <= beyond < fields.count(record.further_blocks)


def expected_tensors(
    config: Mapping[str, Any], layers: LayerRange | None = None
) -> dict[str, ExpectedTensor]:
    """The tensors that a stage with `layers` needs, or without `layers` the whole model, by
    canonical name.

    Raises UnsupportedModelError as `parse_config` does.
    """
    decoder = read_config(config)
    record = decoder.architecture
    fields = decoder.fields
    shape = decoder.shape
    if layers is None:
        layers = LayerRange(0, shape.layer_count)
    units = units_of_stage(layers, shape.layer_count)
    expected: dict[str, ExpectedTensor] = {}
    for part, shapes in _outer_shapes(decoder).items():
        if part in units:
            expected |= {name: ExpectedTensor(name, part, size) for name, size in shapes.items()}
    for layer in range(layers.first, layers.end):
        for name, size in record.block(fields, shape, layer).items():
            full = f"{record.block_list}.{layer}.{name}"
            expected[full] = ExpectedTensor(full, layer, size)
    return expected


def _outer_shapes(decoder: Decoder) -> dict[Part, Shapes]:
    record, shape = decoder.architecture, decoder.shape
    parts: dict[Part, Shapes] = {Part.EMBEDDING: {}, Part.TIED: {}, Part.HEAD: {}}
    for name, size in record.outer(decoder.fields, shape).items():
        if name not in record.outer_names:
            raise InternalError(f"architecture {record.name}: outer_names lacks {name}")
        parts[record.outer_names[name]][name] = size
    matrix = (shape.vocab_size, record.embedding_width(decoder.fields, shape))
    if shape.tied:
        parts[Part.TIED][record.embedding] = matrix
    else:
        parts[Part.EMBEDDING][record.embedding] = matrix
        parts[Part.HEAD][HEAD_WEIGHT] = matrix
    return parts
