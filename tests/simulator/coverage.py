"""Which phases, triggers and messages are to be met, and what cannot be."""

from __future__ import annotations

WAYS = ("drop", "twice")
_CALL = {"call": "of one request and one answer: the request comes again, later"}
_ONCE = {"twice": "gRPC sends it once in a call; a client that comes back sends another"}
_ANSWER = {"twice": "an answer to one request"}

MESSAGES: dict[str, dict[str, str]] = {
    "RegisterRequest": _CALL,
    "RegisterResponse": _ANSWER,
    "Control hello": {},
    "Control result": {},
    "Control suspected": {},
    "Control heartbeat": {},
    "Control heartbeat_change": {},
    "Control prepare": {},
    "Control activate": {},
    "Control release": {},
    "Attach hello": {},
    "Attach accepted": {},
    "Attach token": {},
    "Attach tokens": {},
    "Attach finished": {},
    "Attach failed": {},
    "Attach start": {},
    "Attach cancel": {},
    "Attach forget": {},
    "Link hello": {},
    "Link welcome": {},
    "Link frame": {},
    "Link beacon": {},
    "GenerateRequest": _ONCE,
    "Generate started": {},
    "ListenRequest": {},
    "ListenResponse": {},
    "InferenceServiceCancelRequest": _CALL,
    "InferenceServiceCancelResponse": _ANSWER,
    "DeployRequest": _CALL,
    "DeployResponse": _ANSWER,
    "DeleteDeploymentRequest": _CALL,
    "DeleteDeploymentResponse": _ANSWER,
    "GetDeploymentRequest": _CALL,
    "GetDeploymentResponse": _ANSWER,
}
"""Kinds of messages with the ways in which they cannot end, and why. `call` says how a request comes twice."""
