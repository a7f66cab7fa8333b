"""A checkpoint folder as a source of tensors, for stages that tests and benchmarks load without a
store."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from edgeshard.architectures import parts_of_joined
from edgeshard.domain.errors import DataLossError, InvalidArgumentError, NotFoundError


class SafetensorsDirectory:
    """A checkpoint folder: `model.safetensors`, or shards named by `model.safetensors.index.json`.

    Nothing but safetensors is read; other formats can hold code. A tensor of all experts of a layer
    is read as tensors of the single experts, if there is a config.json.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = _files_by_tensor(path)
        self._parts = _parts_by_name(path, self._files)
        joined = {part.tensor for part in self._parts.values()}
        self._names = [name for name in self._files if name not in joined] + list(self._parts)

    def names(self) -> Collection[str]:
        return self._names

    def read(self, name: str) -> torch.Tensor:
        if (part := self._parts.get(name)) is not None:
            return self.read(part.tensor).view(part.parts, *part.shape)[part.number]
        file = self._files.get(name)
        if file is None:
            raise DataLossError(
                f"tensor {name} is not in the checkpoint", field=name, reason="MISSING_TENSOR"
            )
        try:
            with safe_open(str(file), framework="pt", device="cpu") as shard:
                tensor: torch.Tensor = shard.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise DataLossError(
                f"tensor {name} cannot be read from {file.name}: {error}",
                field=name,
                reason="UNREADABLE_TENSOR",
            ) from error
        return tensor


class _Part(NamedTuple):
    """The part with this number of `parts` equal ones of a tensor."""

    tensor: str
    number: int
    parts: int
    shape: tuple[int, ...]


def _parts_by_name(path: Path, files: Mapping[str, Path]) -> dict[str, _Part]:
    parts: dict[str, _Part] = {}
    if not (path / "config.json").is_file():
        return parts
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    for name, file in files.items():
        if "proj" not in name and "linear" not in name:
            continue
        with safe_open(str(file), framework="pt", device="cpu") as shard:
            shape = tuple(shard.get_slice(name).get_shape())
        found = parts_of_joined(config, name, shape)
        parts |= {
            part: _Part(name, number, len(found), own)
            for number, (part, own) in enumerate(found.items())
        }
    return parts


def _files_by_tensor(path: Path) -> dict[str, Path]:
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if single.is_file():
        try:
            with safe_open(str(single), framework="pt", device="cpu") as shard:
                return dict.fromkeys(shard.keys(), single)
        except (SafetensorError, OSError) as error:
            raise DataLossError(
                f"{single.name} cannot be read: {error}", field=single.name
            ) from error
    if not index.is_file():
        raise NotFoundError(
            f"{path.name} holds neither model.safetensors nor {index.name}; convert the checkpoint "
            "to safetensors",
            field="path",
        )
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataLossError(f"{index.name} cannot be read: {error!r}", field=index.name) from error
    for file in files.values():
        if file != Path(file).name or not file.endswith(".safetensors"):
            raise InvalidArgumentError(
                f"{index.name} names {file!r}, which is not a safetensors file of its folder",
                field="weight_map",
            )
    return {name: path / file for name, file in files.items()}
