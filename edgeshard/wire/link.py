"""Messages of the two ends of a hop: message <-> value. A frame stays as it is: `FrameReader` takes it."""

from __future__ import annotations

from typing import assert_never

from edgeshard.domain.nodes.profile import LinkSample
from edgeshard.domain.requests.link import LinkBeacon, LinkHello, LinkPadding, LinkWelcome
from edgeshard.proto.v1 import stage_pb2 as pb
from edgeshard.wire.common import message_of, value_of
from edgeshard.wire.frames import Frame

LinkMessage = LinkHello | LinkWelcome | LinkBeacon | LinkPadding | LinkSample | Frame


def link_message_to_wire(message: LinkMessage) -> pb.LinkMessage:
    match message:
        case Frame():
            return pb.LinkMessage(frame=message)
        case LinkHello():
            return pb.LinkMessage(hello=message_of(message, pb.LinkHello))
        case LinkWelcome():
            return pb.LinkMessage(welcome=pb.LinkWelcome(next_step=message.next_step))
        case LinkBeacon():
            return pb.LinkMessage(beacon=message_of(message, pb.LinkBeacon))
        case LinkPadding():
            return pb.LinkMessage(padding=bytes(message.size_bytes))
        case LinkSample():
            return pb.LinkMessage(timing=pb.LinkTiming(bytes=message.size_bytes, seconds=message.seconds))
        case _:
            assert_never(message)


def link_message_from_wire(message: pb.LinkMessage) -> LinkMessage | None:
    """None for a kind this version does not know. Figures of a sample are the caller's to check."""
    match message.WhichOneof("message"):
        case "frame":
            return message.frame
        case "hello":
            return value_of(message.hello, LinkHello)
        case "welcome":
            return LinkWelcome(message.welcome.next_step)
        case "beacon":
            return LinkBeacon(message.beacon.received_bytes, message.beacon.next_step)
        case "padding":
            return LinkPadding(len(message.padding))
        case "timing":
            return LinkSample(message.timing.bytes, message.timing.seconds)
        case _:
            return None
