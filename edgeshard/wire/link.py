"""Messages of the two ends of a hop: message <-> value. A frame stays as it is: `FrameReader` takes
it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgeshard.domain.nodes.profile import LinkSample
from edgeshard.domain.requests.link import LinkBeacon, LinkHello, LinkPadding, LinkWelcome
from edgeshard.proto.v1 import stage_pb2 as pb
from edgeshard.wire.codec import choice
from edgeshard.wire.frames import Frame

LinkMessage = LinkHello | LinkWelcome | LinkBeacon | LinkPadding | LinkSample | Frame

_to_wire: Callable[[LinkHello | LinkWelcome | LinkBeacon | LinkSample], pb.LinkMessage]
_from_wire: Callable[[pb.LinkMessage], LinkHello | LinkWelcome | LinkBeacon | LinkSample | None]
_to_wire, _from_wire = choice(
    pb.LinkMessage, hello=LinkHello, welcome=LinkWelcome, beacon=LinkBeacon, timing=LinkSample
)


def link_message_to_wire(message: LinkMessage) -> pb.LinkMessage:
    if isinstance(message, Frame):
        return pb.LinkMessage(frame=message)
    if isinstance(message, LinkPadding):
        return pb.LinkMessage(padding=bytes(message.size_bytes))
    return _to_wire(message)


def exchange_request(message: LinkMessage) -> pb.ExchangeRequest:
    return pb.ExchangeRequest(message=_fields(message))


def exchange_response(message: LinkMessage) -> pb.ExchangeResponse:
    return pb.ExchangeResponse(message=_fields(message))


def _fields(message: LinkMessage) -> Any:
    """The message within; a frame by its name, since a message that is made around it would copy it
    once more."""
    return {"frame": message} if isinstance(message, Frame) else link_message_to_wire(message)


def link_message_from_wire(message: pb.LinkMessage) -> LinkMessage | None:
    """The message; None if this version does not know its kind. The caller checks the figures of a
    sample."""
    match message.WhichOneof("message"):
        case "frame":
            return message.frame
        case "padding":
            return LinkPadding(len(message.padding))
        case _:
            return _from_wire(message)
