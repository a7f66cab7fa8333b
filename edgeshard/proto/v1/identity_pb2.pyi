from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinToken(_message.Message):
    __slots__ = ("authorities", "site", "role", "id", "coordinator", "enrolment", "token_id", "secret", "packages", "bootstrap_sha256")
    AUTHORITIES_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    ENROLMENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    PACKAGES_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_SHA256_FIELD_NUMBER: _ClassVar[int]
    authorities: _containers.RepeatedScalarFieldContainer[bytes]
    site: str
    role: str
    id: str
    coordinator: str
    enrolment: str
    token_id: str
    secret: bytes
    packages: str
    bootstrap_sha256: str
    def __init__(self, authorities: _Optional[_Iterable[bytes]] = ..., site: _Optional[str] = ..., role: _Optional[str] = ..., id: _Optional[str] = ..., coordinator: _Optional[str] = ..., enrolment: _Optional[str] = ..., token_id: _Optional[str] = ..., secret: _Optional[bytes] = ..., packages: _Optional[str] = ..., bootstrap_sha256: _Optional[str] = ...) -> None: ...

class EnrolRequest(_message.Message):
    __slots__ = ("token_id", "secret", "request")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    token_id: str
    secret: bytes
    request: bytes
    def __init__(self, token_id: _Optional[str] = ..., secret: _Optional[bytes] = ..., request: _Optional[bytes] = ...) -> None: ...

class EnrolResponse(_message.Message):
    __slots__ = ("certificate", "authorities")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    AUTHORITIES_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    authorities: bytes
    def __init__(self, certificate: _Optional[bytes] = ..., authorities: _Optional[bytes] = ...) -> None: ...

class GetAuthoritiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetAuthoritiesResponse(_message.Message):
    __slots__ = ("authorities",)
    AUTHORITIES_FIELD_NUMBER: _ClassVar[int]
    authorities: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, authorities: _Optional[_Iterable[bytes]] = ...) -> None: ...

class FindWheelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FindWheelsResponse(_message.Message):
    __slots__ = ("host", "port")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class CreateTokenRequest(_message.Message):
    __slots__ = ("role", "id", "ttl_s", "host")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    role: str
    id: str
    ttl_s: float
    host: str
    def __init__(self, role: _Optional[str] = ..., id: _Optional[str] = ..., ttl_s: _Optional[float] = ..., host: _Optional[str] = ...) -> None: ...

class CreateTokenResponse(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: JoinToken
    def __init__(self, token: _Optional[_Union[JoinToken, _Mapping]] = ...) -> None: ...

class OpenToken(_message.Message):
    __slots__ = ("token_id", "role", "id", "created_at", "expires_at", "creator")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    CREATOR_FIELD_NUMBER: _ClassVar[int]
    token_id: str
    role: str
    id: str
    created_at: float
    expires_at: float
    creator: str
    def __init__(self, token_id: _Optional[str] = ..., role: _Optional[str] = ..., id: _Optional[str] = ..., created_at: _Optional[float] = ..., expires_at: _Optional[float] = ..., creator: _Optional[str] = ...) -> None: ...

class ListTokensRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTokensResponse(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[OpenToken]
    def __init__(self, tokens: _Optional[_Iterable[_Union[OpenToken, _Mapping]]] = ...) -> None: ...

class RevokeTokenRequest(_message.Message):
    __slots__ = ("token_id",)
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    token_id: str
    def __init__(self, token_id: _Optional[str] = ...) -> None: ...

class RevokeTokenResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    def __init__(self, request: _Optional[bytes] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("certificate", "authorities")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    AUTHORITIES_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    authorities: bytes
    def __init__(self, certificate: _Optional[bytes] = ..., authorities: _Optional[bytes] = ...) -> None: ...

class RevokeRequest(_message.Message):
    __slots__ = ("role", "id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    role: str
    id: str
    def __init__(self, role: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class RevokeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveNodeRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class RemoveNodeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Denial(_message.Message):
    __slots__ = ("principal", "accepted")
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    principal: str
    accepted: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, principal: _Optional[str] = ..., accepted: _Optional[_Iterable[str]] = ...) -> None: ...

class Denials(_message.Message):
    __slots__ = ("denials",)
    DENIALS_FIELD_NUMBER: _ClassVar[int]
    denials: _containers.RepeatedCompositeFieldContainer[Denial]
    def __init__(self, denials: _Optional[_Iterable[_Union[Denial, _Mapping]]] = ...) -> None: ...

class ApiKey(_message.Message):
    __slots__ = ("name", "models", "tokens_per_minute", "requests", "key_id", "created_at", "metrics")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    name: str
    models: _containers.RepeatedScalarFieldContainer[str]
    tokens_per_minute: int
    requests: int
    key_id: str
    created_at: float
    metrics: bool
    def __init__(self, name: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ..., tokens_per_minute: _Optional[int] = ..., requests: _Optional[int] = ..., key_id: _Optional[str] = ..., created_at: _Optional[float] = ..., metrics: _Optional[bool] = ...) -> None: ...

class CreateKeyRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: ApiKey
    def __init__(self, key: _Optional[_Union[ApiKey, _Mapping]] = ...) -> None: ...

class CreateKeyResponse(_message.Message):
    __slots__ = ("key", "text")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    key: ApiKey
    text: str
    def __init__(self, key: _Optional[_Union[ApiKey, _Mapping]] = ..., text: _Optional[str] = ...) -> None: ...

class ListKeysRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListKeysResponse(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[ApiKey]
    def __init__(self, keys: _Optional[_Iterable[_Union[ApiKey, _Mapping]]] = ...) -> None: ...

class RevokeKeyRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RevokeKeyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CreateDashboardLinkRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CreateDashboardLinkResponse(_message.Message):
    __slots__ = ("link",)
    LINK_FIELD_NUMBER: _ClassVar[int]
    link: DashboardLink
    def __init__(self, link: _Optional[_Union[DashboardLink, _Mapping]] = ...) -> None: ...

class DashboardLink(_message.Message):
    __slots__ = ("url", "ttl_s")
    URL_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    url: str
    ttl_s: float
    def __init__(self, url: _Optional[str] = ..., ttl_s: _Optional[float] = ...) -> None: ...
