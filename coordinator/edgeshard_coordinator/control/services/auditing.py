"""The calls that the audit log has entries of, each with the caller, the method, its target and the
result.

Most entries are made around the call, by the server (`CallWatch`). A method that is in no table
here is a mistake, which a test finds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from edgeshard.domain.audit import BEGUN, OK
from edgeshard.domain.errors import DeniedError, EdgeShardError
from edgeshard.domain.identity import Role
from edgeshard.rpc.access import AUTHORITIES, ENROLMENT, CallFrom
from edgeshard_coordinator.control.persistence.audit_log import AuditLog

_PACKAGE = "edgeshard.proto.v1"
_ADMIN, _STORE, _INFERENCE = (
    f"/{_PACKAGE}.{name}Service" for name in ("Admin", "ModelStore", "Inference")
)
_COORDINATOR, _HEAD, _STAGE = (
    f"/{_PACKAGE}.{name}Service" for name in ("Coordinator", "Head", "Stage")
)
_IDENTITY = f"/{_PACKAGE}.IdentityService"
_HEALTH = "/grpc.health.v1.Health"


@dataclass(frozen=True, slots=True)
class Mutation:
    """A call that changes something. `target` is the field of the request that names its object, ''
    for none. `counts` returns whether an answer reports a change, `asks` whether a request is for
    one."""

    target: str = ""
    counts: Callable[[Any], bool] = lambda _: True
    asks: Callable[[Any], bool] = lambda _: True

    def target_of(self, request: Any) -> str:
        return str(attrgetter(self.target)(request)) if self.target else ""


MUTATIONS: Mapping[str, Mutation] = {
    f"{_ADMIN}/DeleteModel": Mutation("name"),
    f"{_ADMIN}/DropPacked": Mutation("node"),
    f"{_ADMIN}/LabelNode": Mutation("node"),
    f"{_ADMIN}/Profile": Mutation("model"),
    f"{_ADMIN}/Deploy": Mutation("spec.name"),
    f"{_ADMIN}/DeleteDeployment": Mutation("name"),
    f"{_ADMIN}/Replan": Mutation("name", asks=lambda request: not request.dry_run),
    f"{_ADMIN}/Trace": Mutation("deployment"),
    f"{_ADMIN}/Dump": Mutation(),
    f"{_IDENTITY}/CreateToken": Mutation("id"),
    f"{_IDENTITY}/RevokeToken": Mutation("token_id"),
    f"{_IDENTITY}/Revoke": Mutation("id"),
    f"{_IDENTITY}/RemoveNode": Mutation("node"),
    f"{_IDENTITY}/CreateKey": Mutation("key.name"),
    f"{_IDENTITY}/RevokeKey": Mutation("name"),
    f"{_IDENTITY}/CreateDashboardLink": Mutation(),
    f"{_IDENTITY}/Renew": Mutation(),
    ENROLMENT: Mutation("token_id"),
    # Asked twice for each model: before its blobs are sent, and when all are there.
    f"{_STORE}/RegisterModel": Mutation("manifest.name", lambda answer: answer.registered),
    f"{_STORE}/AddLocalModel": Mutation("manifest.name"),
}
"""The server makes the entry."""

NOTED: Mapping[str, Mutation] = {
    f"{_COORDINATOR}/Register": Mutation("name"),
    f"{_INFERENCE}/Cancel": Mutation("request_id"),
}
"""The servicer logs these if needed: nodes register over and over, and clients cancel their own
requests."""

READS = frozenset(
    {
        AUTHORITIES,
        f"{_IDENTITY}/FindWheels",
        f"{_IDENTITY}/ListTokens",
        f"{_IDENTITY}/ListKeys",
        *(
            f"{_ADMIN}/List{what}"
            for what in ("Nodes", "Packed", "Models", "Deployments", "Audit", "Events")
        ),
        *(f"{_ADMIN}/{name}" for name in ("GetNode", "GetSite", "GetDeployment", "Plan")),
        *(f"{_STORE}/{name}" for name in ("GetManifest", "ReadBlob")),
        *(
            f"{_INFERENCE}/{name}"
            for name in ("ListModels", "RenderChat", "Tokenize", "Detokenize")
        ),
        *(f"{_HEALTH}/{name}" for name in ("Check", "Watch")),
    }
)

TRAFFIC = frozenset(
    {
        f"{_STORE}/PutBlob",  # RegisterModel reports it.
        *(f"{_INFERENCE}/{name}" for name in ("Generate", "Listen")),
        *(f"{_COORDINATOR}/{name}" for name in ("Control", "Heartbeat", "ReportProfile")),
        f"{_HEAD}/Attach",
        *(f"{_STAGE}/{name}" for name in ("Exchange", "Probe")),
    }
)
"""The daily calls of clients and nodes."""


class CallAudit:
    """A `CallWatch` that logs mutations, and every call that was refused because of its caller."""

    def __init__(self, log: AuditLog) -> None:
        self._log = log

    def began(self, method: str, source: CallFrom, request: Any) -> None:
        mutation = MUTATIONS.get(method)
        if mutation is not None:
            self.note(source, _name(method), mutation.target_of(request), BEGUN)

    def ended(
        self, method: str, source: CallFrom, request: Any, answer: Any, error: EdgeShardError | None
    ) -> None:
        mutation = MUTATIONS.get(method)
        if isinstance(error, DeniedError):
            mutation = mutation or NOTED.get(method)
            self._note_refusal(
                source, method, "" if mutation is None else mutation.target_of(request), error
            )
        elif mutation is None or not mutation.asks(request):
            pass
        elif error is not None or answer is None or mutation.counts(answer):
            result = OK if error is None else error.reason
            self.note(source, _name(method), mutation.target_of(request), result)

    def note(self, source: CallFrom, what: str, target: str, result: str = OK) -> None:
        """Make an entry of something that a caller did."""
        principal = source.principal
        # A joiner has no certificate yet, and may be anyone.
        by_operator = source.is_named and (principal is None or principal.role is Role.OPERATOR)
        who = source.address if principal is None else f"{principal.role}/{principal.id}"
        self._log.add(who, what, target, result, source.address, by_operator=by_operator)

    def _note_refusal(self, source: CallFrom, method: str, target: str, error: DeniedError) -> None:
        principal = source.principal
        if principal is None:
            who = source.address if source.is_named else "nobody"
        else:
            # A caller of another site: in full, or it would look like a member of this site.
            who = principal.uri if error.reason == "SITE" else f"{principal.role}/{principal.id}"
        self._log.add(who, _name(method), target, error.reason, source.address, by_operator=False)


def _name(method: str) -> str:
    return method.rpartition("/")[2]
