"""A client's listener: message <-> value. Tokens of one step go as columns, converted a column at a
time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, groupby, repeat

from edgeshard.domain.errors import EdgeShardError, InvalidArgumentError
from edgeshard.domain.requests.generation import (
    Finished,
    Heard,
    ListenerHello,
    ListenerMessage,
    StageTiming,
    Token,
    TokensRead,
)
from edgeshard.proto.v1 import inference_pb2 as pb
from edgeshard.wire.codec import from_failure, to_failure
from edgeshard.wire.generation import (
    finished_from_wire,
    finished_to_wire,
    timings_from_wire,
    timings_to_wire,
    top_from_wire,
    top_to_wire,
)


def listener_message_to_wire(message: ListenerMessage) -> pb.ListenRequest:
    if isinstance(message, ListenerHello):
        return pb.ListenRequest(listener=message.id)
    return pb.ListenRequest(read=pb.TokensRead(number=message.number, count=message.count))


def listener_message_from_wire(message: pb.ListenRequest) -> ListenerMessage | None:
    """The message; None if this version does not know its kind."""
    match message.WhichOneof("message"):
        case "listener":
            return ListenerHello(message.listener)
        case "read":
            return TokensRead(message.read.number, message.read.count)
        case _:
            return None


def heard_to_wire(events: Heard) -> pb.ListenResponse:
    return pb.ListenResponse(
        steps=[_step_to_wire(list(step)) for _, step in groupby(events.tokens, _step_of)],
        ends=[_end_to_wire(number, end) for number, end in events.ends],
    )


def heard_from_wire(message: pb.ListenResponse) -> Heard:
    """Raises InvalidArgumentError for columns of different lengths."""
    tokens = chain.from_iterable(map(_step_from_wire, message.steps))
    return Heard(tuple(tokens), tuple([(end.number, _end_from_wire(end)) for end in message.ends]))


def _step_of(item: tuple[int, Token]) -> tuple[float, tuple[StageTiming, ...]]:
    """The common part of a step's tokens. The head's message of a step gives all its tokens one
    tuple of timings."""
    return item[1].at_s, item[1].timings


def _step_to_wire(step: list[tuple[int, Token]]) -> pb.StepTokens:
    tokens = [token for _, token in step]
    has_logprobs = any(token.logprob for token in tokens)
    has_tops = any(token.top for token in tokens)
    return pb.StepTokens(
        numbers=[number for number, _ in step],
        positions=[token.position for token in tokens],
        tokens=[token.token for token in tokens],
        texts=[token.text for token in tokens],
        logprobs=[token.logprob for token in tokens] if has_logprobs else (),
        tops=[pb.TopLogprobs(top=top_to_wire(token.top)) for token in tokens] if has_tops else (),
        timings=timings_to_wire(tokens[0].timings),
        at_s=tokens[0].at_s,
    )


def _step_from_wire(step: pb.StepTokens) -> Iterator[tuple[int, Token]]:
    count = len(step.numbers)
    optional = [column for column in (step.logprobs, step.tops) if column]
    if any(len(column) != count for column in (step.positions, step.tokens, step.texts, *optional)):
        raise InvalidArgumentError(
            "the coordinator sent columns of different lengths", field="steps"
        )
    logprobs = step.logprobs if step.logprobs else repeat(0.0, count)
    tops = [top_from_wire(top.top) for top in step.tops] if step.tops else repeat((), count)
    timings, at_s = timings_from_wire(step.timings), step.at_s
    tokens = map(
        Token,
        step.positions,
        step.tokens,
        step.texts,
        logprobs,
        tops,
        repeat(timings),
        repeat(at_s),
    )
    return zip(step.numbers, tokens, strict=True)


def _end_to_wire(number: int, end: Finished | EdgeShardError) -> pb.GenerationEnd:
    if isinstance(end, Finished):
        return pb.GenerationEnd(number=number, finished=finished_to_wire(end))
    return pb.GenerationEnd(number=number, failure=to_failure(end))


def _end_from_wire(message: pb.GenerationEnd) -> Finished | EdgeShardError:
    if message.WhichOneof("end") == "finished":
        return finished_from_wire(message.finished)
    return from_failure(message.failure)
