from edgeshard.proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Manifest(_message.Message):
    __slots__ = ("name", "architecture", "config_json", "tensors", "files", "further")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    FURTHER_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    config_json: str
    tensors: _containers.RepeatedCompositeFieldContainer[ManifestTensor]
    files: _containers.RepeatedCompositeFieldContainer[ManifestFile]
    further: _common_pb2.FurtherBlocks
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., config_json: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[ManifestTensor, _Mapping]]] = ..., files: _Optional[_Iterable[_Union[ManifestFile, _Mapping]]] = ..., further: _Optional[_Union[_common_pb2.FurtherBlocks, _Mapping]] = ...) -> None: ...

class ManifestTensor(_message.Message):
    __slots__ = ("name", "dtype", "shape", "sha256", "integers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    INTEGERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: _common_pb2.DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    sha256: str
    integers: str
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[_common_pb2.DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., sha256: _Optional[str] = ..., integers: _Optional[str] = ...) -> None: ...

class ManifestFile(_message.Message):
    __slots__ = ("name", "size", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    sha256: str
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class RegisterModelRequest(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ...) -> None: ...

class RegisterModelResponse(_message.Message):
    __slots__ = ("registered", "manifest_digest", "missing")
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    registered: bool
    manifest_digest: str
    missing: _containers.RepeatedCompositeFieldContainer[MissingBlob]
    def __init__(self, registered: _Optional[bool] = ..., manifest_digest: _Optional[str] = ..., missing: _Optional[_Iterable[_Union[MissingBlob, _Mapping]]] = ...) -> None: ...

class AddLocalModelRequest(_message.Message):
    __slots__ = ("manifest", "files", "places")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    files: _containers.RepeatedCompositeFieldContainer[LocalFile]
    places: _containers.RepeatedCompositeFieldContainer[LocalPlace]
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., files: _Optional[_Iterable[_Union[LocalFile, _Mapping]]] = ..., places: _Optional[_Iterable[_Union[LocalPlace, _Mapping]]] = ...) -> None: ...

class LocalFile(_message.Message):
    __slots__ = ("path", "device", "inode", "size", "modified_ns", "head_sha256", "stays")
    PATH_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    MODIFIED_NS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SHA256_FIELD_NUMBER: _ClassVar[int]
    STAYS_FIELD_NUMBER: _ClassVar[int]
    path: str
    device: int
    inode: int
    size: int
    modified_ns: int
    head_sha256: str
    stays: bool
    def __init__(self, path: _Optional[str] = ..., device: _Optional[int] = ..., inode: _Optional[int] = ..., size: _Optional[int] = ..., modified_ns: _Optional[int] = ..., head_sha256: _Optional[str] = ..., stays: _Optional[bool] = ...) -> None: ...

class LocalPlace(_message.Message):
    __slots__ = ("file", "offset", "order")
    FILE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    file: int
    offset: int
    order: RowOrder
    def __init__(self, file: _Optional[int] = ..., offset: _Optional[int] = ..., order: _Optional[_Union[RowOrder, _Mapping]] = ...) -> None: ...

class RowOrder(_message.Message):
    __slots__ = ("first", "second", "row_bytes")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    first: int
    second: int
    row_bytes: int
    def __init__(self, first: _Optional[int] = ..., second: _Optional[int] = ..., row_bytes: _Optional[int] = ...) -> None: ...

class AddLocalModelResponse(_message.Message):
    __slots__ = ("hashed", "total", "manifest_digest", "knows_orders")
    HASHED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KNOWS_ORDERS_FIELD_NUMBER: _ClassVar[int]
    hashed: int
    total: int
    manifest_digest: str
    knows_orders: bool
    def __init__(self, hashed: _Optional[int] = ..., total: _Optional[int] = ..., manifest_digest: _Optional[str] = ..., knows_orders: _Optional[bool] = ...) -> None: ...

class MissingBlob(_message.Message):
    __slots__ = ("sha256", "size", "offset")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    size: int
    offset: int
    def __init__(self, sha256: _Optional[str] = ..., size: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class PutBlobRequest(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: BlobHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[BlobHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class BlobHeader(_message.Message):
    __slots__ = ("sha256", "size", "offset")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    size: int
    offset: int
    def __init__(self, sha256: _Optional[str] = ..., size: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class PutBlobResponse(_message.Message):
    __slots__ = ("size",)
    SIZE_FIELD_NUMBER: _ClassVar[int]
    size: int
    def __init__(self, size: _Optional[int] = ...) -> None: ...

class GetManifestRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetManifestResponse(_message.Message):
    __slots__ = ("manifest", "manifest_digest")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    manifest_digest: str
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., manifest_digest: _Optional[str] = ...) -> None: ...

class ReadBlobRequest(_message.Message):
    __slots__ = ("sha256", "offset", "length")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    offset: int
    length: int
    def __init__(self, sha256: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class ReadBlobResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
