"""Manifests and blobs: message <-> value; manifests <-> JSON file.

Incoming values are checked as far as possible without their blobs.
"""

from __future__ import annotations

import re

from google.protobuf import json_format

from edgeshard.architectures import check_manifest, parse_config
from edgeshard.domain.control.site import (
    BlobHeader,
    BlobRange,
    LocalAdding,
    LocalModel,
    ModelRegistration,
)
from edgeshard.domain.errors import DataLossError, EdgeShardError, InvalidArgumentError
from edgeshard.domain.ids import Digest, ModelName, check_digest, check_name
from edgeshard.domain.models.dtypes import IntegerFormat
from edgeshard.domain.models.model import FileInfo, FurtherBlocks, ModelManifest, TensorInfo
from edgeshard.proto.v1 import common_pb2
from edgeshard.proto.v1 import store_pb2 as pb
from edgeshard.storage.blobs import blob_sizes, manifest_items
from edgeshard.storage.checkpoint import CONFIG_LIMIT_BYTES, FILE_LIMIT_BYTES, check_file_size
from edgeshard.storage.forms import SMALL_FILES, parse_json_object
from edgeshard.wire.codec import by_fields, by_hand, pair
from edgeshard.wire.site import dtype_from_wire

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}[A-Za-z0-9]")
_TENSOR_NAME_LIMIT = 512
_RANK_LIMIT = 8


further_to_wire, further_from_wire = pair(FurtherBlocks, common_pb2.FurtherBlocks)
manifest_to_wire, _ = by_fields(ModelManifest, pb.Manifest)


def manifest_from_wire(message: pb.Manifest) -> ModelManifest:
    """A manifest whose names, digests, types and sizes are well formed, and unique if they must be.

    Raises InvalidArgumentError naming the field. `validate_manifest` checks whether the tensors are
    the model's.
    """
    name = ModelName(check_name(message.name, "name"))
    if len(message.config_json.encode()) > CONFIG_LIMIT_BYTES:
        raise _invalid("config_json", f"has more than {CONFIG_LIMIT_BYTES} bytes")
    parse_json_object(message.config_json, "config_json")
    if not message.tensors:
        raise _invalid("tensors", "is empty")
    tensors = tuple(_tensor_from_wire(tensor) for tensor in message.tensors)
    files = tuple(_file_from_wire(file) for file in message.files)
    for kind, items in (("tensor", tensors), ("file", files)):
        names: set[str] = set()
        for item in items:
            if item.name in names:
                raise _invalid(item.name, f"is the name of two {kind}s")
            names.add(item.name)
    further = further_from_wire(message.further) if message.HasField("further") else None
    return ModelManifest(name, message.architecture, message.config_json, tensors, files, further)


by_hand(ModelManifest, pb.Manifest, manifest_to_wire, manifest_from_wire)


def validate_manifest(manifest: ModelManifest) -> dict[Digest, int]:
    """The size of every blob, once the manifest is known to describe a model that EdgeShard runs.

    Raises UnsupportedModelError, InvalidArgumentError or DataLossError naming the field or the
    tensor.
    """
    check_form(manifest)
    return blob_sizes(manifest_items(manifest))


def check_form(manifest: ModelManifest) -> None:
    """Check a manifest without its digests. Raises as `validate_manifest` does."""
    shape = parse_config(manifest.config)
    if manifest.architecture != shape.architecture:
        raise _invalid(
            "architecture",
            f"is {manifest.architecture[:40]!r}, but config_json has {shape.architecture}",
        )
    # Before anything is listed by layer: a config may claim two thousand million of them.
    if shape.layer_count > len(manifest.tensors):
        raise _invalid(
            "num_hidden_layers",
            f"is {shape.layer_count}, more than the manifest's {len(manifest.tensors)} tensors",
        )
    check_manifest(manifest)
    for file in manifest.files:
        if file.name not in SMALL_FILES:
            raise _invalid(
                file.name, f"is not a file of a model; those are {', '.join(SMALL_FILES)}"
            )
        check_file_size(file.name, file.size)


def manifest_to_json(manifest: ModelManifest) -> str:
    return json_format.MessageToJson(
        manifest_to_wire(manifest), indent=None, preserving_proto_field_name=True
    )


def manifest_from_json(text: str, expected: Digest) -> ModelManifest:
    """The manifest in a file written by `manifest_to_json`; raises DataLossError when it is not the
    expected one."""
    try:
        manifest = manifest_from_wire(json_format.Parse(text, pb.Manifest()))
    except (json_format.ParseError, EdgeShardError, ValueError, RecursionError):
        manifest = None
    if manifest is None or manifest.digest() != expected:
        raise DataLossError(f"the stored manifest {expected} is damaged", field="manifest_digest")
    return manifest


model_registration_to_wire, model_registration_from_wire = pair(
    ModelRegistration, pb.RegisterModelResponse
)
local_model_to_wire, local_model_from_wire = pair(LocalModel, pb.AddLocalModelRequest)
local_adding_to_wire, local_adding_from_wire = pair(LocalAdding, pb.AddLocalModelResponse)
blob_header_to_wire, blob_header_from_wire = pair(BlobHeader, pb.BlobHeader)
blob_range_to_wire, blob_range_from_wire = pair(BlobRange, pb.ReadBlobRequest)


def local_model_to_bytes(model: LocalModel) -> bytes:
    """The model for another process of this machine; `local_model_from_bytes` reads it."""
    return bytes(local_model_to_wire(model).SerializeToString())


def local_model_from_bytes(data: bytes) -> LocalModel:
    """Raises as `local_model_from_wire` does."""
    return local_model_from_wire(pb.AddLocalModelRequest.FromString(data))


def _tensor_from_wire(message: pb.ManifestTensor) -> TensorInfo:
    if not 0 < len(message.name) <= _TENSOR_NAME_LIMIT:
        raise _invalid(
            "tensors",
            f"has a name of {len(message.name)} characters; 1 to {_TENSOR_NAME_LIMIT} are valid",
        )
    if len(message.shape) > _RANK_LIMIT:
        raise _invalid(
            message.name, f"has rank {len(message.shape)}; at most {_RANK_LIMIT} is valid"
        )
    return TensorInfo(
        name=message.name,
        dtype=dtype_from_wire(message.dtype, message.name),
        shape=tuple(message.shape),
        sha256=check_digest(message.sha256, message.name),
        integers=IntegerFormat.parse_stored(message.integers, message.name)
        if message.integers
        else None,
    )


def _file_from_wire(message: pb.ManifestFile) -> FileInfo:
    # A name, never a path: a writer must stay within its directory.
    if not _FILE_NAME.fullmatch(message.name) or ".." in message.name:
        raise _invalid("files", f"has {message.name[:80]!r}, which is not a plain file name")
    if message.size > FILE_LIMIT_BYTES:
        raise _invalid(
            message.name, f"has {message.size} bytes; at most {FILE_LIMIT_BYTES} are accepted"
        )
    return FileInfo(message.name, message.size, check_digest(message.sha256, message.name))


def _invalid(field: str, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{field} {what}", field=field, reason="INVALID_MANIFEST")
