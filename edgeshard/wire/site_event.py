"""Events of a site: message <-> value."""

from __future__ import annotations

from edgeshard.domain.control.site_event import SiteEvent, Subject
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.proto.v1 import admin_pb2 as pb
from edgeshard.wire.common import message_of, value_of


def site_event_to_wire(event: SiteEvent) -> pb.SiteEvent:
    return message_of(event, pb.SiteEvent, subject=event.subject.value)


def site_event_from_wire(message: pb.SiteEvent) -> SiteEvent:
    """Raises InvalidArgumentError for a subject that this version does not know."""
    try:
        subject = Subject(message.subject)
    except ValueError:
        raise InvalidArgumentError(f"subject {message.subject[:80]!r} is not known", field="subject") from None
    return value_of(message, SiteEvent, subject=subject)
