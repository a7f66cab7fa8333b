"""The conversions that do not follow from only names and types, in tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from operator import attrgetter
from typing import Any

from edgeshard.domain.control.commands import MeasureCompute, Term
from edgeshard.domain.control.site import BlobHeader, BlobRange, MissingBlob, NodeProgress, Site
from edgeshard.domain.deployments.deployment import DeploymentSpec, parse_spec
from edgeshard.domain.deployments.placement import LengthsFrom, Speculation
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.identity import Principal, principal_from_uri
from edgeshard.domain.models.packed import PackedOn
from edgeshard.domain.nodes.condition import Support
from edgeshard.domain.nodes.device import StagePhase, WeightLoadingWork
from edgeshard.domain.nodes.profile import Effort, LinkSample, MeasuredLink
from edgeshard.domain.requests.chat import ToolFormat
from edgeshard.domain.requests.generation import FinishReason, Prompt
from edgeshard.wire.failure import from_failure, to_failure

NAMES: Mapping[tuple[type, str], str] = {
    (BlobHeader, "digest"): "sha256",
    (BlobRange, "digest"): "sha256",
    (LinkSample, "size_bytes"): "bytes",
    (MeasureCompute, "config"): "config_json",
    (MeasuredLink, "receiver"): "receiver_id",
    (MeasuredLink, "sender"): "sender_id",
    (MissingBlob, "digest"): "sha256",
    (MissingBlob, "received"): "offset",
    (NodeProgress, "missed"): "missed_nodes",
    (PackedOn, "ids"): "units",
    (Site, "config"): "config_json",
    (Term, "number"): "term",
}
"""A field's name in the message, if it has another."""

UNKNOWN: Mapping[type[Enum], Enum] = {
    FinishReason: FinishReason.CANCELLED,
    LengthsFrom: LengthsFrom.DEFAULT,
    Speculation: Speculation.OFF,
    StagePhase: StagePhase.FAILED,
    Support: Support.UNKNOWN,
    ToolFormat: ToolFormat.NONE,
    WeightLoadingWork: WeightLoadingWork.CONVERTING,
}
"""The value for a member that this version does not know. Other enumerations refuse unknown members."""

UNSPECIFIED: Mapping[type[Enum], Enum] = {Effort: Effort.FULL, ToolFormat: ToolFormat.NONE}
"""The member that a message does not name: number 0."""

MAKERS: Mapping[type, Callable[[Mapping[str, Any]], Any]] = {DeploymentSpec: parse_spec}
"""Classes whose values are made, and checked, by a function of their fields by name."""

BY_HAND: Mapping[Any, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    EdgeShardError: (to_failure, from_failure),
    Principal: (attrgetter("uri"), principal_from_uri),
    Prompt: (lambda prompt: prompt if isinstance(prompt, str) else "", lambda text: text),
}
"""Classes of another form than their message, with the functions to it and back."""
