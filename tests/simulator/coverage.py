"""Which phases, triggers and messages are to be met, and what cannot be."""

from __future__ import annotations

from collections import Counter

from edgeshard_coordinator.core.deployments.transitions import TRANSITIONS

from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase

WAYS = ("drop", "twice")
_CALL = {"call": "of one request and one answer: the request comes again, later"}
_ONCE = {"twice": "gRPC sends it once in a call; a client that comes back sends another"}
_STREAM = {"twice": "each is of one node, and a stream says each once"}
_ANSWER = {"twice": "an answer to one request"}

MESSAGES: dict[str, dict[str, str]] = {
    "RegisterRequest": _CALL,
    "RegisterResponse": _ANSWER,
    "ControlRequest hello": {},
    "ControlRequest result": {},
    "ControlRequest suspected": {},
    "ControlRequest heartbeat": {},
    "ControlRequest heartbeat_change": {},
    "ControlResponse prepare": {},
    "ControlResponse activate": {},
    "ControlResponse release": {},
    "AttachRequest hello": {},
    "AttachRequest accepted": {},
    "AttachRequest admitted": {},
    "AttachRequest token": {},
    "AttachRequest tokens": {},
    "AttachRequest finished": {},
    "AttachRequest failed": {},
    "AttachRequest beacon": {},
    "AttachResponse start": {},
    "AttachResponse cancel": {},
    "AttachResponse forget": {},
    "AttachResponse beacon": {},
    "Link hello": {},
    "Link welcome": {},
    "Link frame": {},
    "Link beacon": {},
    "GenerateRequest": _ONCE,
    "GenerateResponse started": {
        "twice": "said once in a call; a client that comes back gets it again"
    },
    "GenerateResponse token": {},
    "GenerateResponse finished": {},
    "ListenRequest listener": {},
    "ListenRequest read": {},
    "ListenResponse": {},
    "InferenceServiceCancelRequest": _CALL,
    "InferenceServiceCancelResponse": _ANSWER,
    "DeployRequest": _CALL,
    "DeployResponse": _ANSWER,
    "ReplanRequest": _CALL,
    "ReplanResponse": _ANSWER,
    "DeleteDeploymentRequest": _CALL,
    "DeleteDeploymentResponse": _ANSWER,
    "GetDeploymentRequest": _CALL,
    "GetDeploymentResponse": _ANSWER,
    "ControlResponse standby": {},
    "ControlResponse trace": {},
    "ControlResponse dump": {},
    "ControlRequest dump": {},
    "ListEventsRequest": _ONCE,
    "ListEventsResponse": _STREAM,
    "TraceRequest": _ONCE,
    "TraceResponse": _STREAM,
    "DumpRequest": _ONCE,
    "DumpResponse": _STREAM,
    "PlanRequest": _CALL,
    "PlanResponse": _ANSWER,
    "ListDeploymentsRequest": _CALL,
    "ListDeploymentsResponse": _ANSWER,
    "ListNodesRequest": _CALL,
    "ListNodesResponse": _ANSWER,
    "GetNodeRequest": _CALL,
    "GetNodeResponse": _ANSWER,
    "GetSiteRequest": _CALL,
    "GetSiteResponse": _ANSWER,
    "ListModelsRequest": _CALL,
    "ListModelsResponse": _ANSWER,
    "InferenceServiceListModelsRequest": _CALL,
    "InferenceServiceListModelsResponse": _ANSWER,
}
"""Kinds of messages with the ways in which they cannot end, and why. `call` is how a request
arrives twice."""
_MEASURED = "nothing is measured here: measurements are of machines"
_STORED = "no model is uploaded or fetched here: blobs are files, with tests of their own"
_PACKED = "nothing is packed here: packed units are files, with tests of their own"
_PLAINTEXT = "of certificates, and nobody has one here"
_HTTP = "nobody comes by HTTP here"
_WRITTEN = "no audit log is kept here: it is files, with tests of their own"
_APART = "chat templates and tokenizers are in a process of their own, with tests of its own"
ABSENT = {
    "ControlRequest progress": _MEASURED,
    "ControlRequest condition": "of machines, and there are none here",
    "ControlResponse measure": _MEASURED,
    "ControlResponse probe": _MEASURED,
    "ReportProfileRequest": _MEASURED,
    "ReportProfileResponse": _MEASURED,
    "ProbeRequest": _MEASURED,
    "ProbeResponse": _MEASURED,
    "ProfileRequest": _MEASURED,
    "ProfileResponse": _MEASURED,
    "HeartbeatRequest": "of agents from before heartbeats came on the control stream",
    "HeartbeatResponse": "of agents from before heartbeats came on the control stream",
    "ControlResponse list_packed": _PACKED,
    "ControlResponse drop_packed": _PACKED,
    "ListPackedRequest": _PACKED,
    "ListPackedResponse": _PACKED,
    "DropPackedRequest": _PACKED,
    "DropPackedResponse": _PACKED,
    "DeleteModelRequest": _STORED,
    "DeleteModelResponse": _STORED,
    "RegisterModelRequest": _STORED,
    "RegisterModelResponse": _STORED,
    "AddLocalModelRequest": _STORED,
    "AddLocalModelResponse": _STORED,
    "PutBlobRequest": _STORED,
    "PutBlobResponse": _STORED,
    "GetManifestRequest": _STORED,
    "GetManifestResponse": _STORED,
    "ReadBlobRequest": _STORED,
    "ReadBlobResponse": _STORED,
    "ControlResponse denials": _PLAINTEXT,
    "CreateTokenRequest": _PLAINTEXT,
    "CreateTokenResponse": _PLAINTEXT,
    "ListTokensRequest": _PLAINTEXT,
    "ListTokensResponse": _PLAINTEXT,
    "RevokeTokenRequest": _PLAINTEXT,
    "RevokeTokenResponse": _PLAINTEXT,
    "FindWheelsRequest": _PLAINTEXT,
    "FindWheelsResponse": _PLAINTEXT,
    "EnrolRequest": _PLAINTEXT,
    "EnrolResponse": _PLAINTEXT,
    "GetAuthoritiesRequest": _PLAINTEXT,
    "GetAuthoritiesResponse": _PLAINTEXT,
    "CreateDashboardLinkRequest": _HTTP,
    "CreateDashboardLinkResponse": _HTTP,
    **{
        f"{call}Key{'s' * (call == 'List')}{kind}": _HTTP
        for call in ("Create", "List", "Revoke")
        for kind in ("Request", "Response")
    },
    "RenewRequest": _PLAINTEXT,
    "RenewResponse": _PLAINTEXT,
    "RevokeRequest": _PLAINTEXT,
    "RevokeResponse": _PLAINTEXT,
    "RemoveNodeRequest": "a node that is taken out is one that is lost and never comes again",
    "RemoveNodeResponse": "a node that is taken out is one that is lost and never comes again",
    "LabelNodeRequest": "rules here are by names: tests/coordinator/control/test_labels.py",
    "LabelNodeResponse": "rules here are by names: tests/coordinator/control/test_labels.py",
    "ListAuditRequest": _WRITTEN,
    "ListAuditResponse": _WRITTEN,
    "AttachRequest prompt_logprobs": "nobody here asks for a prompt's log-probabilities",
    "GenerateResponse prompt_logprobs": "nobody here asks for a prompt's log-probabilities",
    "RenderChatRequest": _APART,
    "RenderChatResponse": _APART,
    "TokenizeRequest": _APART,
    "TokenizeResponse": _APART,
    "DetokenizeRequest": _APART,
    "DetokenizeResponse": _APART,
    "Link padding": "of the lab, whose links pretend to be slow",
    "Link timing": "of steps in several parts, and the steps here are small",
}
"""Kinds that are not sent here, and why."""

EVENTS = (
    "NodeRegistered", "NodeConnected", "NodeDisconnected", "HeartbeatsReceived", "LinkReported",
    "HeadReported", "DeleteRequested", "CommandAnswered", "HeadAttached", "HeadDetached",
    "DeploymentSaved", "SaveFailed", "DeploymentForgotten", "Replanned", "ReplanRequested",
    "Ticked",
)  # fmt: skip
"""The events of the coordinator's state about a deployment or its nodes. There are no measurements
here."""
_FORGOTTEN = "only what is being deleted is forgotten"
NEVER: dict[tuple[str, str], str] = {
    (str(phase), "DeploymentForgotten"): _FORGOTTEN
    for phase in Phase
    if phase is not Phase.DELETING
}
"""Phases in which an event cannot come, and why."""
_ATTACHED = (
    "a head is taken only while it is awaited; the phase must change between two turns of the loop"
)
_REPLANNED = (
    "asked for while it waits; the answer must come in the moment in which it has just begun again"
)
_MOVES = "asked for while it is ready; the phase must change while the placement is found"
_REPORTED = (
    "a link is suspect after 2 s, and an epoch comes into this phase and out of it within moments"
)
_WATCHED = (
    "a head is watched while it has requests, and has none before it is ready; an end ends "
    "its stream"
)
RARE: dict[tuple[str, str], str] = {
    (
        "failed",
        "HeadDetached",
    ): "it must fail between its head's stream and the answer to its activate",
    ("loading", "HeadAttached"): _ATTACHED,
    ("waiting", "HeadAttached"): _ATTACHED,
    ("failed", "HeadAttached"): _ATTACHED,
    ("deleting", "HeadAttached"): _ATTACHED,
    ("activating", "Replanned"): _REPLANNED,
    ("ready", "Replanned"): _REPLANNED,
    ("failed", "Replanned"): _REPLANNED,
    ("deleting", "Replanned"): _REPLANNED,
    **{(str(phase), "ReplanRequested"): _MOVES for phase in Phase if phase is not Phase.READY},
    ("loading", "LinkReported"): _REPORTED,
    ("activating", "LinkReported"): _REPORTED,
    ("failed", "LinkReported"): _REPORTED,
    ("deleting", "LinkReported"): _REPORTED,
    ("loading", "HeadReported"): _WATCHED,
    ("activating", "HeadReported"): _WATCHED,
    ("waiting", "HeadReported"): _WATCHED,
    ("failed", "HeadReported"): _WATCHED,
    ("deleting", "HeadReported"): _WATCHED,
}
"""Events that may come in a phase and hardly do, and why: they are not asked for."""
SWAPS = (("held", "put aside"), ("kept aside", "taken back"))
"""The events of the KV of a preempted request."""
LATE = ("token", "late", "chosen")
"""A token that came with a later step than its own, as a guide may have it."""
SAVED = ("states", "saved", "taken up")
"""A request that began from states of another, or of its own before it gave way."""
BEHIND_GUESS = ("states", "behind a guess", "gone on from")
"""A request whose guesses were right, and that had states."""
GUESSES = (("drawn", "right"), ("drawn", "wrong"), ("drawn", "not told"))
"""The outcomes of tokens that the head guessed; late ones are not sent."""
SEEDS, TIMES = 10_000, 100
"""Over SEEDS seeds, every outcome must happen at least TIMES times; over fewer seeds half as often,
because of chance.
"""


def wanted() -> list[tuple[str, str, str]]:
    """The expected occurrences: of transitions, of events, of messages, of swaps, tokens, states
    and guesses."""
    known = NEVER.keys() | RARE.keys()
    transitions = [("transition", str(phase), str(trigger)) for phase, trigger in TRANSITIONS]
    events = [
        ("event", str(phase), event)
        for phase in Phase
        for event in EVENTS
        if (str(phase), event) not in known
    ]
    messages = [
        ("message", kind, way) for kind, no in MESSAGES.items() for way in WAYS if way not in no
    ]
    further = [
        *(("swap", *way) for way in SWAPS),
        LATE,
        SAVED,
        BEHIND_GUESS,
        *(("guess", *way) for way in GUESSES),
    ]
    return [*transitions, *events, *messages, *further]


def missed(met: Counter[tuple[str, str, str]], seeds: int) -> list[str]:
    """Descriptions of everything that occurred in too few seeds."""
    need = TIMES * seeds / SEEDS * (1.0 if seeds >= SEEDS else 0.5)
    few = [(met[key], key) for key in wanted() if met[key] < need]
    return [
        f"{' / '.join(key)} was met in {count} of {seeds} seeds, which is below {need:g}"
        for count, key in sorted(few)
    ]


def strange(met: Counter[tuple[str, str, str]]) -> list[str]:
    """Descriptions of everything that happened and is in no table: even with few seeds, the tables
    are old."""
    known = set(wanted()) | {("event", *pair) for pair in RARE}
    odd = [key for key in met if (key[1] not in MESSAGES if key[2] == "sent" else key not in known)]
    return [f"{' / '.join(key)} was met, which is not in the tables of coverage.py" for key in odd]


def minima(met: Counter[tuple[str, str, str]]) -> list[str]:
    """The least met of each table."""
    lines = []
    for table in ("transition", "event", "message", "swap", "token", "states", "guess"):
        count, key = min((met[key], key) for key in wanted() if key[0] == table)
        lines.append(f"least met {table}: {' / '.join(key[1:])}, in {count} seeds")
    return lines
