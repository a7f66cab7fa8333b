"""Rights of callers: one table of roles for each method, and nothing that is not in it.

In plaintext, which is for loopback alone, callers cannot be told apart, and everyone there may call everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from edgeshard.domain.errors import DeniedError, InvalidArgumentError
from edgeshard.domain.identity import Principal, Role, principal_from_uri
from edgeshard.rpc.denials import Denials

_AGENT = frozenset({Role.AGENT})
_USER = frozenset({Role.CLIENT, Role.OPERATOR})
_OPERATOR = frozenset({Role.OPERATOR})
_ANYONE = frozenset(Role)

_PLAINTEXT = [b"insecure"]
_PACKAGE = "edgeshard.proto.v1"
ROLES: Mapping[str, frozenset[Role]] = {
    f"/{_PACKAGE}.CoordinatorService/Register": _AGENT,
    f"/{_PACKAGE}.CoordinatorService/Control": _AGENT,
    f"/{_PACKAGE}.CoordinatorService/Heartbeat": _AGENT,
    f"/{_PACKAGE}.CoordinatorService/ReportProfile": _AGENT,
    f"/{_PACKAGE}.HeadService/Attach": _AGENT,
    f"/{_PACKAGE}.StageService/Exchange": _AGENT,
    f"/{_PACKAGE}.StageService/Probe": _AGENT,
    f"/{_PACKAGE}.InferenceService/Generate": _USER,
    f"/{_PACKAGE}.InferenceService/Listen": _USER,
    f"/{_PACKAGE}.InferenceService/Cancel": _USER,
    f"/{_PACKAGE}.InferenceService/ListModels": _USER,
    f"/{_PACKAGE}.InferenceService/RenderChat": _USER,
    f"/{_PACKAGE}.InferenceService/Tokenize": _USER,
    f"/{_PACKAGE}.InferenceService/Detokenize": _USER,
    f"/{_PACKAGE}.AdminService/ListNodes": _OPERATOR,
    f"/{_PACKAGE}.AdminService/GetNode": _OPERATOR,
    f"/{_PACKAGE}.AdminService/ListPacked": _OPERATOR,
    f"/{_PACKAGE}.AdminService/DropPacked": _OPERATOR,
    f"/{_PACKAGE}.AdminService/ListModels": _OPERATOR,
    f"/{_PACKAGE}.AdminService/DeleteModel": _OPERATOR,
    f"/{_PACKAGE}.AdminService/GetSite": _OPERATOR,
    f"/{_PACKAGE}.AdminService/Profile": _OPERATOR,
    f"/{_PACKAGE}.AdminService/Plan": _OPERATOR,
    f"/{_PACKAGE}.AdminService/Deploy": _OPERATOR,
    f"/{_PACKAGE}.AdminService/ListDeployments": _OPERATOR,
    f"/{_PACKAGE}.AdminService/GetDeployment": _OPERATOR,
    f"/{_PACKAGE}.AdminService/DeleteDeployment": _OPERATOR,
    f"/{_PACKAGE}.AdminService/Replan": _OPERATOR,
    f"/{_PACKAGE}.AdminService/Trace": _OPERATOR,
    f"/{_PACKAGE}.AdminService/Dump": _OPERATOR,
    f"/{_PACKAGE}.AdminService/ListAudit": _OPERATOR,
    f"/{_PACKAGE}.AdminService/ListEvents": _OPERATOR,
    f"/{_PACKAGE}.ModelStoreService/RegisterModel": _OPERATOR,
    f"/{_PACKAGE}.ModelStoreService/AddLocalModel": _OPERATOR,
    f"/{_PACKAGE}.ModelStoreService/PutBlob": _OPERATOR,
    f"/{_PACKAGE}.ModelStoreService/GetManifest": _AGENT | _OPERATOR,
    f"/{_PACKAGE}.ModelStoreService/ReadBlob": _AGENT,
    f"/{_PACKAGE}.IdentityService/CreateToken": _OPERATOR,
    f"/{_PACKAGE}.IdentityService/Revoke": _OPERATOR,
    f"/{_PACKAGE}.IdentityService/RemoveNode": _OPERATOR,
    f"/{_PACKAGE}.IdentityService/CreateKey": _OPERATOR,
    f"/{_PACKAGE}.IdentityService/ListKeys": _OPERATOR,
    f"/{_PACKAGE}.IdentityService/RevokeKey": _OPERATOR,
    f"/{_PACKAGE}.IdentityService/Renew": _ANYONE,
    "/grpc.health.v1.Health/Check": _ANYONE,
    "/grpc.health.v1.Health/Watch": _ANYONE,
}
ENROLMENT = f"/{_PACKAGE}.EnrolmentService/Enrol"
AUTHORITIES = f"/{_PACKAGE}.EnrolmentService/GetAuthorities"
WITHOUT_CERTIFICATE = (ENROLMENT, AUTHORITIES)
"""The only methods that are called so, on a listener of their own."""
COUNTED_ELSEWHERE = frozenset({f"/{_PACKAGE}.InferenceService/Generate"})
"""Streams that are requests, of which quotas say how many one client may have at once."""


def caller(context: Any) -> Principal | None:
    """The caller, by its certificate; None in plaintext. Raises DeniedError for a certificate that carries no role."""
    shown = context.auth_context()
    if list(shown.get("transport_security_type", _PLAINTEXT)) == _PLAINTEXT:
        return None
    uris = shown.get("peer_uri", ())
    try:
        if len(uris) != 1:
            raise InvalidArgumentError("the certificate names no URI edgeshard://SITE/ROLE/ID")
        return principal_from_uri(uris[0].decode("utf-8", "replace"))
    except InvalidArgumentError as error:
        raise DeniedError(
            f"your certificate does not say who you are: {error.message}", field="certificate", reason="NO_ROLE"
        ) from None


def peer_address(context: Any) -> str:
    """`host:port` of the caller, `[host]:port` for IPv6, of gRPC's `ipv4:host:port`."""
    return unquote(str(context.peer())).removeprefix("ipv4:").removeprefix("ipv6:")


@dataclass(frozen=True, slots=True)
class CallFrom:
    """Whom a call came from, as its context says while it lasts: of a call that is over, gRPC reads freed memory."""

    address: str
    principal: Principal | None
    """None in plaintext, and where the certificate names no role."""
    is_named: bool
    """Whether a certificate says who it is, or none is needed."""


def call_from(context: Any) -> CallFrom:
    """To be asked for before the call can be over. The `finally` of a stream may run after its end."""
    address = peer_address(context)
    try:
        return CallFrom(address, caller(context), is_named=True)
    except DeniedError:
        return CallFrom(address, None, is_named=False)


def check_enrolment(context: Any, method: str) -> None:
    """Raise DeniedError for any other method than enrolment's."""
    if method not in WITHOUT_CERTIFICATE:
        raise DeniedError("nothing but enrolment is served here", field="role", reason="ROLE")


def check_access(context: Any, method: str, site: str | None, denials: Denials) -> Principal | None:
    """The caller, None in plaintext. Raises DeniedError for a caller of another site than the server's, whose role may
    not call `method`, or whose certificate was revoked."""
    principal = caller(context)
    if principal is None and site is None:
        return None
    if principal is None:
        raise DeniedError("plaintext is not spoken here", field="certificate", reason="NO_ROLE")
    if principal.site != site:
        raise DeniedError(
            f"your certificate is of site {principal.site!r}, and this is {site!r}", field="certificate", reason="SITE"
        )
    allowed = ROLES.get(method, frozenset())
    if principal.role not in allowed:
        who = " or ".join(f"an {role}" if role[0] in "ao" else f"a {role}" for role in sorted(allowed)) or "nobody"
        raise DeniedError(
            f"{principal} may not call {method.rpartition('/')[2]}, which is for {who}", field="role", reason="ROLE"
        )
    denials.check(context, principal)
    return principal


def check_acts_for_itself(context: Any, node_name: str, field: str) -> None:
    """Raise DeniedError naming `field` if a node that is not `node_name` calls, where callers can be told apart."""
    principal = caller(context)
    if principal is not None and (principal.role, principal.id) != (Role.AGENT, node_name):
        raise DeniedError(f"{field}: {principal} may not act for node {node_name}", field=field, reason="IMPERSONATION")
