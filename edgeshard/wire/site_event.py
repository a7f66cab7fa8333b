"""Events of a site: message <-> value."""

from __future__ import annotations

from edgeshard.domain.control.site_event import SiteEvent
from edgeshard.proto.v1 import admin_pb2 as pb
from edgeshard.wire.codec import pair

site_event_to_wire, site_event_from_wire = pair(SiteEvent, pb.SiteEvent)
