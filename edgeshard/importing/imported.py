"""A model that is ready to be added, from a source of any form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from edgeshard.architectures import read_config
from edgeshard.architectures.config import decoder_fields
from edgeshard.architectures.tensors import unit_of
from edgeshard.domain.models.model import Part
from edgeshard.storage.checkpoint import Checkpoint, StoredTensor

Progress = Callable[[str, int, int], None]
"""A call with the kind of work (`DOWNLOADING`, `CONVERTING`), the bytes so far and in all, from the working thread; an
error that it raises ends the work."""
DOWNLOADING, CONVERTING = "downloading", "converting"
_FURTHER_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


@dataclass(frozen=True, slots=True)
class Imported:
    """A checkpoint, and notes for an operator, such as about a loss."""

    checkpoint: Checkpoint
    notes: tuple[str, ...] = ()


def notes_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What a model's config.json says that an operator should know: the parts that are left out.

    Raises UnsupportedModelError as `read_config` does.
    """
    notes = []
    if config.get("auto_map"):
        notes.append("its config.json names code of its own (auto_map), which is neither fetched nor run")
    if read_config(config).fields.prefix or isinstance(config.get("vision_config"), Mapping):
        notes.append("only its text is run: weights of its other parts, such as those for pictures, are left out")
    return tuple(notes)


def tensor_notes(config: Mapping[str, Any], tensors: Iterable[StoredTensor]) -> tuple[str, ...]:
    """What its tensors say besides: blocks that predict the tokens behind the next one are not run."""
    architecture = decoder_fields(config)[0].name
    further = [tensor.size for tensor in tensors if unit_of(architecture, tensor.name, config) is Part.FURTHER]
    if not further:
        return ()
    return (f"its blocks for predicting further tokens ({sum(further) / (1 << 20):,.1f} MiB) are left out",)


def named_further_notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What config.json says of such blocks; checkpoints may lack them all the same."""
    fields = decoder_fields(config)[1]
    count = sum(fields.count(key) for key in _FURTHER_KEYS)
    if not count:
        return ()
    what = "a block" if count == 1 else f"{count} blocks"
    return (f"its config.json names {what} for predicting further tokens; where it has them they are left out",)
