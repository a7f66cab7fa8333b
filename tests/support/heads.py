"""A head's messages, passed to a coordinator's front without a socket."""

from __future__ import annotations

from edgeshard_coordinator.control.requests.request_front import RequestFront
from edgeshard_coordinator.control.requests.running_request import Attachment

from edgeshard.domain.ids import Epoch, RequestId
from edgeshard.domain.requests.head import HeadEvent, HeadEvents, RequestEvent


def say(
    front: RequestFront,
    head: Attachment,
    request_id: RequestId,
    *events: RequestEvent,
    epoch: Epoch | None = None,
) -> None:
    """Events of a request, in a message that names the head's epoch or another one."""
    said = tuple(HeadEvent(request_id, event) for event in events)
    front.reports.take(head, HeadEvents(head.epoch if epoch is None else epoch, said))
