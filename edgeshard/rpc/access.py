"""Rights of callers: one table of the roles that may call each method. A method that is not in it
is refused.

In plaintext, which is only for loopback, callers cannot be distinguished, and everyone there may
call everything.
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
_METHODS: Mapping[tuple[str, frozenset[Role]], str] = {
    ("CoordinatorService", _AGENT): "Register Control Heartbeat ReportProfile",
    ("HeadService", _AGENT): "Attach",
    ("StageService", _AGENT): "Exchange Probe",
    ("InferenceService", _USER): "Generate Listen Cancel ListModels RenderChat Tokenize Detokenize",
    (
        "AdminService",
        _OPERATOR,
    ): "ListNodes GetNode LabelNode ListPacked DropPacked ListModels DeleteModel GetSite "
    "Profile Plan Deploy ListDeployments GetDeployment DeleteDeployment Replan Trace Dump "
    "ListAudit ListEvents",
    ("ModelStoreService", _OPERATOR): "RegisterModel AddLocalModel PutBlob",
    ("ModelStoreService", _AGENT | _OPERATOR): "GetManifest",
    ("ModelStoreService", _AGENT): "ReadBlob",
    (
        "IdentityService",
        _OPERATOR,
    ): "CreateToken ListTokens RevokeToken Revoke RemoveNode CreateKey ListKeys RevokeKey "
    "CreateDashboardLink",
    ("IdentityService", _ANYONE): "Renew FindWheels",
}
"""Services and roles, and the methods of a service that these roles may call."""
ROLES: Mapping[str, frozenset[Role]] = {
    **{
        f"/{_PACKAGE}.{service}/{name}": roles
        for (service, roles), names in _METHODS.items()
        for name in names.split()
    },
    "/grpc.health.v1.Health/Check": _ANYONE,
    "/grpc.health.v1.Health/Watch": _ANYONE,
}
ENROLMENT = f"/{_PACKAGE}.EnrolmentService/Enrol"
AUTHORITIES = f"/{_PACKAGE}.EnrolmentService/GetAuthorities"
WITHOUT_CERTIFICATE = (ENROLMENT, AUTHORITIES)
"""The only methods without a certificate, on a listener of their own."""
COUNTED_ELSEWHERE = frozenset({f"/{_PACKAGE}.InferenceService/Generate"})
"""Streams that are requests; quotas limit how many one client has at once."""


def caller(context: Any) -> Principal | None:
    """The caller, by its certificate; None in plaintext. Raises DeniedError for a certificate
    without a role."""
    auth_context = context.auth_context()
    if list(auth_context.get("transport_security_type", _PLAINTEXT)) == _PLAINTEXT:
        return None
    uris = auth_context.get("peer_uri", ())
    try:
        if len(uris) != 1:
            raise InvalidArgumentError("the certificate names no URI edgeshard://SITE/ROLE/ID")
        return principal_from_uri(uris[0].decode("utf-8", "replace"))
    except InvalidArgumentError as error:
        raise DeniedError(
            f"your certificate has no identity: {error.message}",
            field="certificate",
            reason="NO_ROLE",
        ) from None


def peer_address(context: Any) -> str:
    """`host:port` of the caller, `[host]:port` for IPv6, of gRPC's `ipv4:host:port`."""
    return unquote(str(context.peer())).removeprefix("ipv4:").removeprefix("ipv6:")


@dataclass(frozen=True, slots=True)
class CallFrom:
    """The source of a call, read from its context while the call lasts: afterwards gRPC would read
    freed memory."""

    address: str
    principal: Principal | None
    """None in plaintext, and if the certificate names no role."""
    is_named: bool
    """Whether a certificate names it, or none is needed."""


def call_from(context: Any) -> CallFrom:
    """The source of a call. Ask before the call can be over: the `finally` of a stream may run
    after its end."""
    address = peer_address(context)
    try:
        return CallFrom(address, caller(context), is_named=True)
    except DeniedError:
        return CallFrom(address, None, is_named=False)


def check_enrolment(context: Any, method: str) -> None:
    """Raise DeniedError for a method that is not of enrolment."""
    if method not in WITHOUT_CERTIFICATE:
        raise DeniedError(
            "this address serves only enrolment; use --coordinator's own port",
            field="role",
            reason="ROLE",
        )


def check_access(context: Any, method: str, site: str | None, denials: Denials) -> Principal | None:
    """The caller, None in plaintext.

    Raises DeniedError for a caller of another site than the server's, of a role that may not call
    `method`, or with a revoked certificate.
    """
    principal = caller(context)
    if principal is None and site is None:
        return None
    if principal is None:
        raise DeniedError(
            "this address needs TLS: give --tls-ca, --tls-cert and --tls-key",
            field="certificate",
            reason="NO_ROLE",
        )
    if principal.site != site:
        raise DeniedError(
            f"your certificate is of site {principal.site!r}, and this is {site!r}",
            field="certificate",
            reason="SITE",
        )
    allowed = ROLES.get(method, frozenset())
    if principal.role not in allowed:
        who = (
            " or ".join(
                f"an {role}" if role[0] in "ao" else f"a {role}" for role in sorted(allowed)
            )
            or "nobody"
        )
        raise DeniedError(
            f"{principal} may not call {method.rpartition('/')[2]}, which is for {who}",
            field="role",
            reason="ROLE",
        )
    denials.check(context, principal)
    return principal


def check_acts_for_itself(context: Any, node_name: str, field: str) -> None:
    """Raise DeniedError naming `field` if a node that is not `node_name` calls and callers can be
    distinguished."""
    principal = caller(context)
    if principal is not None and (principal.role, principal.id) != (Role.AGENT, node_name):
        raise DeniedError(
            f"{field}: {principal} may not act for node {node_name}",
            field=field,
            reason="IMPERSONATION",
        )
