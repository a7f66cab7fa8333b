"""What the two ends of a hop tell each other beside the steps themselves."""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.domain.ids import DeploymentName, Epoch


@dataclass(frozen=True, slots=True)
class LinkHello:
    """The first message of the dialling end. `next_step` is what it wants next, where it is the receiver."""

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
class LinkPadding:
    """Bytes that mean nothing: the lab fills frames up to an emulated model's size with them."""

    size_bytes: int
