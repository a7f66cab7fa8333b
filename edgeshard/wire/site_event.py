"""Events of a site: message <-> value."""

from __future__ import annotations

from edgeshard.domain.control.site_event import SiteEvent, Subject
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.proto.v1 import admin_pb2 as pb


def site_event_to_wire(event: SiteEvent) -> pb.SiteEvent:
    return pb.SiteEvent(
        number=event.number,
        time=event.time,
        subject=event.subject.value,
        name=event.name,
        what=event.what,
        detail=event.detail,
        warning=event.warning,
    )


def site_event_from_wire(message: pb.SiteEvent) -> SiteEvent:
    """Raises InvalidArgumentError for a subject that this version does not know."""
    try:
        subject = Subject(message.subject)
    except ValueError:
        raise InvalidArgumentError(f"subject {message.subject[:80]!r} is not known", field="subject") from None
    return SiteEvent(message.number, message.time, subject, message.name, message.what, message.detail, message.warning)
