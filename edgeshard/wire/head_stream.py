"""The head's request stream: commands down, tokens up; message <-> value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgeshard.domain.deployments.guesses import GuessCounts
from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError
from edgeshard.domain.ids import Epoch, RequestId
from edgeshard.domain.requests.generation import (
    PROMPT_LIMIT_TOKENS,
    PromptLogprobs,
    StageTiming,
    Token,
)
from edgeshard.domain.requests.head import (
    CancelRequest,
    ForgetRequest,
    HeadBeacon,
    HeadCommand,
    HeadEvent,
    HeadEvents,
    HeadHello,
    HeadMessage,
    LastToken,
    RequestAccepted,
    RequestAdmitted,
    RequestEnd,
    RequestEvent,
    StartRequest,
)
from edgeshard.proto.v1 import common_pb2
from edgeshard.proto.v1 import head_pb2 as pb
from edgeshard.wire.codec import choice, from_failure, pair, to_failure
from edgeshard.wire.generation import (
    check_count,
    prompt_logprobs_from_wire,
    prompt_logprobs_to_wire,
    reason_from_wire,
    reason_to_wire,
    timings_from_wire,
    timings_to_wire,
    token_fields,
    token_of,
)

MAX_TOKENS = 2048
"""Tokens of one message; a head sends at most 512 together."""
MAX_TOKEN_PARTS = 1 << 16
"""Timings and likeliest tokens within one message."""

head_command_to_wire: Callable[[HeadCommand], pb.AttachResponse]
_command_from_wire: Callable[[pb.AttachResponse], HeadCommand | None]
head_command_to_wire, _command_from_wire = choice(
    pb.AttachResponse,
    start=StartRequest,
    cancel=CancelRequest,
    forget=ForgetRequest,
    beacon=HeadBeacon,
)
_hello_to_wire, _hello_from_wire = pair(HeadHello, pb.HeadHello)
_beacon_to_wire, _beacon_from_wire = pair(HeadBeacon, pb.HeadBeacon)
_guesses_to_wire, _guesses_from_wire = pair(GuessCounts, common_pb2.GuessCounts)


def head_command_from_wire(message: pb.AttachResponse) -> HeadCommand:
    """Raises InvalidArgumentError for a command of a kind this version does not know."""
    command = _command_from_wire(message)
    if command is None:
        raise InvalidArgumentError(
            "the coordinator sent a command this head does not know", field="message"
        )
    return command


def request_of_command(message: pb.AttachResponse) -> RequestId:
    """The request of a command, even if the command cannot be read; '' if it names none."""
    return RequestId(message.start.request_id or message.cancel.request_id)


def head_message_to_wire(message: HeadMessage) -> pb.AttachRequest:
    match message:
        case HeadHello():
            return pb.AttachRequest(hello=_hello_to_wire(message))
        case HeadBeacon():
            return pb.AttachRequest(beacon=_beacon_to_wire(message))
        case HeadEvents(events=(said,)):
            kind, fields = _event_fields(said.event)
            return pb.AttachRequest(
                **{kind: {"request_id": said.request_id, "epoch": message.epoch, **fields}}
            )
        case HeadEvents():
            return pb.AttachRequest(tokens=_tokens_to_wire(message))


def head_message_from_wire(message: pb.AttachRequest) -> HeadMessage | None:
    """The message; None if this version does not know its kind."""
    match message.WhichOneof("message"):
        case "tokens":
            return _tokens_from_wire(message.tokens)
        case "hello":
            return _hello_from_wire(message.hello)
        case "beacon":
            return _beacon_from_wire(message.beacon)
        case str(kind) if kind in _READ:
            payload = getattr(message, kind)
            return HeadEvents(
                Epoch(payload.epoch),
                (HeadEvent(RequestId(payload.request_id), _READ[kind](payload)),),
            )
        case _:
            return None


def _event_fields(event: RequestEvent) -> tuple[str, dict[str, Any]]:
    """The kind of an event's message, and its fields except the request and the epoch."""
    match event:
        case Token() | LastToken():
            return "token", _token_fields(event)
        case PromptLogprobs():
            return "prompt_logprobs", {"prompt_logprobs": prompt_logprobs_to_wire(event)}
        case RequestAccepted():
            return "accepted", {"prompt_tokens": event.prompt_tokens}
        case RequestAdmitted():
            return "admitted", {"read": event.read}
        case RequestEnd():
            fields = {
                "reason": reason_to_wire(event.reason),
                "text": event.text,
                "guesses": _guesses_of(event),
            }
            return "finished", fields
        case EdgeShardError():
            return "failed", {"failure": to_failure(event)}


def _tokens_to_wire(message: HeadEvents) -> pb.HeadTokens:
    """Tokens of one step have its timings and its time in common; a token of another step has its
    own."""
    tokens = [_split(head_event.event)[0] for head_event in message.events]
    timings = tokens[0].timings if all(token.timings for token in tokens) else ()
    at_s = tokens[0].at_s if all(token.at_s for token in tokens) else 0.0
    return pb.HeadTokens(
        tokens=[
            pb.HeadToken(
                request_id=head_event.request_id,
                epoch=message.epoch,
                **_token_fields(head_event.event, timings, at_s),
            )
            for head_event in message.events
        ],
        timings=timings_to_wire(timings),
        at_s=at_s,
    )


def _tokens_from_wire(message: pb.HeadTokens) -> HeadEvents:
    """Each token names the epoch of the whole message; tokens that name several are of none.

    Raises InvalidArgumentError for more tokens, timings or likeliest tokens than a message has.
    """
    check_count(len(message.tokens), MAX_TOKENS, "tokens")
    parts = sum(len(item.timings) + len(item.top) for item in message.tokens)
    check_count(parts, MAX_TOKEN_PARTS, "tokens.timings")
    timings = timings_from_wire(message.timings)
    at_s = message.at_s
    items = list(message.tokens)
    epochs = {item.epoch for item in items}
    epoch = Epoch(epochs.pop() if len(epochs) == 1 else 0)
    events = [
        HeadEvent(RequestId(item.request_id), _token_from_wire(item, timings, at_s))
        for item in items
    ]
    return HeadEvents(epoch, tuple(events))


def _split(event: RequestEvent) -> tuple[Token, RequestEnd | None]:
    """The token of an event that is one, and the end that arrives with it."""
    if isinstance(event, LastToken):
        return event.token, event.end
    assert isinstance(event, Token)
    return event, None


def _token_fields(
    event: RequestEvent, timings: tuple[StageTiming, ...] = (), at_s: float = 0.0
) -> dict[str, Any]:
    token, end = _split(event)
    fields = token_fields(token, timings, at_s)
    if end is not None:
        fields |= {
            "finish_reason": reason_to_wire(end.reason),
            "final_text": end.text,
            "guesses": _guesses_of(end),
        }
    return fields


def _token_from_wire(
    message: pb.HeadToken, timings: tuple[StageTiming, ...] = (), at_s: float = 0.0
) -> Token | LastToken:
    token = token_of(message, timings, at_s)
    if not message.finish_reason:
        return token
    end = RequestEnd(
        reason_from_wire(message.finish_reason),
        message.final_text,
        _guesses_from_wire(message.guesses),
    )
    return LastToken(token, end)


def _guesses_of(end: RequestEnd) -> common_pb2.GuessCounts | None:
    return _guesses_to_wire(end.guesses) if end.guesses.steps else None


def _accepted_from_wire(message: pb.HeadAccepted) -> RequestAccepted:
    check_count(len(message.prompt_tokens), PROMPT_LIMIT_TOKENS, "prompt_tokens")
    return RequestAccepted(tuple(message.prompt_tokens))


_READ: dict[str, Callable[[Any], RequestEvent]] = {
    "token": _token_from_wire,
    "prompt_logprobs": lambda message: prompt_logprobs_from_wire(message.prompt_logprobs),
    "accepted": _accepted_from_wire,
    "admitted": lambda message: RequestAdmitted(message.read),
    "finished": lambda message: RequestEnd(
        reason_from_wire(message.reason), message.text, _guesses_from_wire(message.guesses)
    ),
    "failed": lambda message: from_failure(message.failure),
}
"""The event of a message that is about one request, by the message's kind."""
