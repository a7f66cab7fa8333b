"""Packed units: the files from which a node loads or streams parts of a model, as an operator sees
them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from edgeshard.domain.ids import NodeId, OperationId, Text, check_id


@dataclass(frozen=True, slots=True)
class PackedUnit:
    """A layer, embedding or head in a node's file of `size_bytes`, so that loading only reads it.

    `id` (16 hexadecimal digits) names the file on its node, `model` is the first 12 digits of the
    manifest's digest. `model_name` is that model's name, empty if the coordinator's store has no
    such model. `form` is the weights' data type, or "int8" or "int4". A unit `in_use` belongs to a
    stage or a standby.
    """

    id: Annotated[str, check_id]
    model: Text
    unit: Text
    form: Text
    size_bytes: int
    in_use: bool
    model_name: Text = ""


@dataclass(frozen=True, slots=True)
class PackedOn:
    """The ids, as numbers, of the units that a node keeps packed."""

    node_id: NodeId
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackedParts:
    """The parts of one model that a node keeps packed, in a deployment's form: loading them is
    reading them."""

    layers: frozenset[int] = frozenset()
    embedding: bool = False
    head: bool = False


NOTHING_HELD = PackedParts()


@dataclass(frozen=True, slots=True)
class DropCall:
    """An operator's call to remove packed units of a node (its name or id); without ids all that
    are not in use."""

    operation_id: OperationId
    node: str
    ids: tuple[str, ...] = ()
