"""A client's listener: message <-> value. Tokens of one step go as columns, converted a column at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.generation import Finished, Token
from edgeshard.domain.requests.listening import GenerationEnd, Heard, ListenerHello, ListenerMessage, TokensRead
from edgeshard.proto.v1 import inference_pb2 as pb
from edgeshard.wire.failure import from_failure, to_failure
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
    """None for a message of a kind this version does not know."""
    match message.WhichOneof("message"):
        case "listener":
            return ListenerHello(message.listener)
        case "read":
            return TokensRead(message.read.number, message.read.count)
        case _:
            return None


def heard_to_wire(heard: Heard) -> pb.ListenResponse:
    return pb.ListenResponse(
        steps=[_step_to_wire(heard, begin, end) for begin, end in _steps(heard.tokens)],
        ends=[generation_end_to_wire(end) for end in heard.ends],
    )


def heard_from_wire(message: pb.ListenResponse) -> Heard:
    """Raises InvalidArgumentError for columns of different lengths."""
    numbers: list[int] = []
    tokens: list[Token] = []
    for step in message.steps:
        numbers += step.numbers
        tokens += _step_from_wire(step)
    ends = tuple(generation_end_from_wire(end) for end in message.ends) if message.ends else ()
    return Heard(tuple(numbers), tuple(tokens), ends)


def _steps(tokens: tuple[Token, ...]) -> Iterator[tuple[int, int]]:
    """[begin, end) of each run of tokens with the same time and timings: those of a step."""
    begin = 0
    for index in range(1, len(tokens) + 1):
        if index == len(tokens) or not _same(tokens[index], tokens[begin]):
            yield begin, index
            begin = index


def _same(some: Token, other: Token) -> bool:
    # The head's message of a step gives all its tokens one tuple, so comparing values is rare.
    return some.at_s == other.at_s and (some.timings is other.timings or some.timings == other.timings)


def _step_to_wire(heard: Heard, begin: int, end: int) -> pb.StepTokens:
    tokens = heard.tokens[begin:end]
    has_logprobs, has_tops = any(token.logprob for token in tokens), any(token.top for token in tokens)
    return pb.StepTokens(
        numbers=heard.numbers[begin:end],
        positions=[token.position for token in tokens],
        tokens=[token.token for token in tokens],
        texts=[token.text for token in tokens],
        logprobs=[token.logprob for token in tokens] if has_logprobs else (),
        tops=[pb.TopLogprobs(top=top_to_wire(token.top)) for token in tokens] if has_tops else (),
        timings=timings_to_wire(tokens[0].timings),
        at_s=tokens[0].at_s,
    )


def _step_from_wire(step: pb.StepTokens) -> list[Token]:
    count = len(step.numbers)
    optional = [column for column in (step.logprobs, step.tops) if column]
    if any(len(column) != count for column in (step.positions, step.tokens, step.texts, *optional)):
        raise InvalidArgumentError("the coordinator sent columns of different lengths", field="steps")
    timings = timings_from_wire(step.timings)
    logprobs = step.logprobs if step.logprobs else repeat(0.0, count)
    tops = [top_from_wire(top.top) for top in step.tops] if step.tops else repeat((), count)
    columns = zip(step.positions, step.tokens, step.texts, logprobs, tops, strict=True)
    at_s = step.at_s
    return [
        Token(position, token, text, logprob, top, timings, at_s) for position, token, text, logprob, top in columns
    ]


def generation_end_to_wire(end: GenerationEnd) -> pb.GenerationEnd:
    if isinstance(end.end, Finished):
        return pb.GenerationEnd(number=end.number, finished=finished_to_wire(end.end))
    return pb.GenerationEnd(number=end.number, failure=to_failure(end.end))


def generation_end_from_wire(message: pb.GenerationEnd) -> GenerationEnd:
    finished = message.WhichOneof("end") == "finished"
    return GenerationEnd(
        message.number, finished_from_wire(message.finished) if finished else from_failure(message.failure)
    )
