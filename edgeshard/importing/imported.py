"""A model that is ready to be added, from a source of any form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from edgeshard.architectures import read_config
from edgeshard.architectures.model_config import decoder_fields
from edgeshard.architectures.tensors import unit_of
from edgeshard.domain.models.model import Part
from edgeshard.storage.checkpoint import Checkpoint, StoredFile, StoredTensor
from edgeshard.storage.forms import GENERATION, TOKENIZER, parse_json_object, unusable_defaults

Progress = Callable[[str, int, int], None]
"""A call with the kind of work (`DOWNLOADING`, `CHECKING`, `CONVERTING`), the bytes so far and in
all, from the working thread; an error that it raises ends the work."""
DOWNLOADING = "downloading"
CHECKING = "checking"
CONVERTING = "converting"
_FURTHER_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


@dataclass(frozen=True, slots=True)
class Imported:
    """A checkpoint, and notes for an operator, such as about a loss."""

    checkpoint: Checkpoint
    notes: tuple[str, ...] = ()

    def notes_as(self, name: str) -> tuple[str, ...]:
        """The notes of the model under its name in the store, and one more if it has no
        tokenizer."""
        if any(file.name == TOKENIZER for file in self.checkpoint.files):
            return self.notes
        return (
            *self.notes,
            f"{name} has no {TOKENIZER}: it takes prompts and gives answers as token ids only",
        )


def size_notes(read_bytes: int, tensors: Iterable[StoredTensor]) -> tuple[str, ...]:
    """A note with both sizes if tensors of `read_bytes` bytes take more in the store."""
    stored_bytes = sum(tensor.size for tensor in tensors)
    if stored_bytes <= read_bytes:
        return ()
    return (
        f"its weights grow from {mebibytes(read_bytes)} to {mebibytes(stored_bytes)} in the store",
    )


def mebibytes(size: int) -> str:
    """A number of bytes for a note."""
    return f"{size / (1 << 20):,.1f} MiB"


def recommendation_notes(files: Iterable[StoredFile]) -> tuple[str, ...]:
    """A note for each recommendation of generation_config.json that no request may have."""
    path = next((file.path for file in files if file.name == GENERATION), None)
    if path is None:
        return ()
    values = parse_json_object(path.read_text(encoding="utf-8"), GENERATION)
    return tuple(
        f"{GENERATION}: {why}; this recommendation is left out" for why in unusable_defaults(values)
    )


def notes_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What a model's config.json says that an operator should know: the parts that are left out.

    Raises UnsupportedModelError as `read_config` does.
    """
    notes = []
    if config.get("auto_map"):
        notes.append(
            "its config.json names its own code (auto_map), which is neither fetched nor run"
        )
    if read_config(config).fields.prefix or isinstance(config.get("vision_config"), Mapping):
        notes.append(
            "only its text is run: weights of its other parts, such as those for pictures, are "
            "left out"
        )
    return tuple(notes)


def tensor_notes(config: Mapping[str, Any], tensors: Iterable[StoredTensor]) -> tuple[str, ...]:
    """What its tensors say besides: blocks that predict the tokens behind the next one are not
    run."""
    architecture = decoder_fields(config)[0].name
    further = [
        tensor.size
        for tensor in tensors
        if unit_of(architecture, tensor.name, config) is Part.FURTHER
    ]
    if not further:
        return ()
    return (f"its blocks for predicting further tokens ({mebibytes(sum(further))}) are left out",)


def named_further_notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What config.json says of such blocks; checkpoints may lack them all the same."""
    fields = decoder_fields(config)[1]
    count = sum(fields.count(key) for key in _FURTHER_KEYS)
    if not count:
        return ()
    what = "a block" if count == 1 else f"{count} blocks"
    return (f"its config.json names {what} for predicting further tokens; they are left out",)
