"""Messages between the two ends of a hop, except the steps themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from edgeshard.domain.ids import DeploymentName, Epoch, Text, check_short


@dataclass(frozen=True, slots=True)
class LinkHello:
    """The first message of the dialling end. `next_step` is the step it expects next, if it is the
    receiver."""

    deployment: DeploymentName
    epoch: Epoch
    from_stage: int
    to_stage: int
    dialler_sends: bool
    wire_version: int
    next_step: int = 0


@dataclass(frozen=True, slots=True)
class LinkWelcome:
    """The answer of the listening end. The sender sends again from `next_step`."""

    next_step: int


@dataclass(frozen=True, slots=True)
class LinkBeacon:
    """A keepalive of the listening end: the bytes that arrived over this stream, and the step it
    expects next."""

    received_bytes: int
    next_step: int


@dataclass(frozen=True, slots=True)
class LinkPadding:
    """Bytes that mean nothing: the lab fills frames up to an emulated model's size with them."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class LinkSuspected:
    """The report of a sending stage's node to the coordinator: the link carries nothing, or it has
    `recovered`."""

    deployment: Annotated[DeploymentName, check_short]
    epoch: Epoch
    from_stage: int
    to_stage: int
    recovered: bool
    why: Text
