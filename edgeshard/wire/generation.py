"""Requests, their events, and conversations with the prompts made of them: message <-> value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import DeploymentName, RequestId
from edgeshard.domain.requests.conversation import ChatPrompt, Conversation, TokenizeCall
from edgeshard.domain.requests.generation import (
    PROMPT_LOGPROBS_POSITIONS,
    Finished,
    FinishReason,
    GenerateRequest,
    Generation,
    GenerationEvent,
    Guide,
    Listener,
    PromptLogprobs,
    Sampling,
    StageTiming,
    Started,
    Token,
    TokenLogprob,
)
from edgeshard.proto.v1 import common_pb2 as pb
from edgeshard.proto.v1 import head_pb2, inference_pb2
from edgeshard.wire.codec import by_fields, by_hand, numbers, pair
from edgeshard.wire.site import placement_from_wire, placement_to_wire

conversation_to_wire, conversation_from_wire = pair(Conversation, inference_pb2.Conversation)
chat_prompt_to_wire, chat_prompt_from_wire = pair(ChatPrompt, inference_pb2.ChatPrompt)
tokenize_request_to_wire, tokenize_request_from_wire = pair(
    TokenizeCall, inference_pb2.TokenizeRequest
)

reason_to_wire, reason_from_wire = numbers(FinishReason, head_pb2.FinishReason, "reason")
sampling_to_wire, sampling_from_wire = pair(Sampling, pb.Sampling)
guide_to_wire, guide_from_wire = pair(Guide, pb.Guide)
_fields_to_wire, _fields_from_wire = by_fields(Generation, head_pb2.Generation)


def generation_to_wire(generation: Generation) -> head_pb2.Generation:
    message = _fields_to_wire(generation)
    if not isinstance(generation.prompt, str):
        message.prompt_tokens.extend(generation.prompt)
    return message


def generation_from_wire(message: head_pb2.Generation) -> Generation:
    """An absent field takes its default. Raises InvalidArgumentError for a prompt given in both
    forms."""
    if message.prompt and message.prompt_tokens:
        raise InvalidArgumentError(
            "prompt: give a prompt or prompt_tokens, not both", field="prompt"
        )
    generation = _fields_from_wire(message)
    return (
        replace(generation, prompt=tuple(message.prompt_tokens))
        if message.prompt_tokens
        else generation
    )


by_hand(Generation, head_pb2.Generation, generation_to_wire, generation_from_wire)
finished_to_wire, finished_from_wire = pair(Finished, inference_pb2.GenerationFinished)
_listener_to_wire, _listener_from_wire = pair(Listener, inference_pb2.Listener)


def generate_request_to_wire(request: GenerateRequest) -> inference_pb2.GenerateRequest:
    listener, emitted = request.listener, request.emitted
    return inference_pb2.GenerateRequest(
        model=request.model,
        generation=generation_to_wire(request.generation),
        request_id=request.request_id,
        listener=None if listener is None else _listener_to_wire(listener),
        resume=None
        if emitted is None
        else inference_pb2.Resumption(tokens=emitted, scored=request.scored),
    )


def generate_request_from_wire(message: inference_pb2.GenerateRequest) -> GenerateRequest:
    listener = _listener_from_wire(message.listener) if message.HasField("listener") else None
    emitted = tuple(message.resume.tokens) if message.HasField("resume") else None
    generation, scored = generation_from_wire(message.generation), message.resume.scored or 1
    return GenerateRequest(message.model, generation, message.request_id, listener, emitted, scored)


MAX_TOP = 32
"""Likeliest tokens at one position; a request may want 20."""
MAX_TIMINGS = 1024
"""Timings of one step: one for each stage."""


def check_count(count: int, most: int, field: str) -> None:
    """Raise InvalidArgumentError naming a list that has more than `most` items."""
    if count > most:
        raise InvalidArgumentError.about(field, f"it has at most {most} items, not {count}")


def timings_to_wire(timings: Iterable[StageTiming]) -> list[pb.StageTiming]:
    return [pb.StageTiming(stage=t.stage, wait_s=t.wait_s, compute_s=t.compute_s) for t in timings]


def timings_from_wire(messages: Sequence[pb.StageTiming]) -> tuple[StageTiming, ...]:
    """Raises InvalidArgumentError for more than a placement has stages."""
    check_count(len(messages), MAX_TIMINGS, "timings")
    return tuple(StageTiming(m.stage, m.wait_s, m.compute_s) for m in messages)


def top_to_wire(top: Iterable[TokenLogprob]) -> list[pb.TokenLogprob]:
    return [pb.TokenLogprob(token=t.token, logprob=t.logprob) for t in top]


def top_from_wire(messages: Sequence[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    """Raises InvalidArgumentError for more than a request can want."""
    check_count(len(messages), MAX_TOP, "top")
    return tuple(TokenLogprob(m.token, m.logprob) for m in messages)


def prompt_logprobs_to_wire(prompt_logprobs: PromptLogprobs) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(
        position=prompt_logprobs.position,
        logprobs=prompt_logprobs.logprobs,
        top_tokens=[entry.token for top in prompt_logprobs.top for entry in top],
        top_logprobs=[entry.logprob for top in prompt_logprobs.top for entry in top],
    )


def prompt_logprobs_from_wire(message: pb.PromptLogprobs) -> PromptLogprobs:
    """Raises InvalidArgumentError for more positions or likeliest tokens than an event has, and if
    the likeliest tokens are not equally many at each position."""
    positions, entries = len(message.logprobs), len(message.top_tokens)
    check_count(positions, PROMPT_LOGPROBS_POSITIONS, "logprobs")
    check_count(entries, MAX_TOP * positions, "top_tokens")
    if len(message.top_logprobs) != entries or entries % max(1, positions):
        raise InvalidArgumentError(
            "prompt_logprobs has columns of different lengths", field="prompt_logprobs"
        )
    likeliest = list(map(TokenLogprob, message.top_tokens, message.top_logprobs))
    count = entries // max(1, positions)
    top = tuple(tuple(likeliest[index * count : (index + 1) * count]) for index in range(positions))
    return PromptLogprobs(message.position, tuple(message.logprobs), top)


def token_fields(
    token: Token, timings: tuple[StageTiming, ...] = (), at_s: float = 0.0
) -> dict[str, Any]:
    """The fields of a token's message. It leaves out `timings` and `at_s` if the token has just
    these."""
    return {
        "position": token.position,
        "token": token.token,
        "text": token.text,
        "logprob": token.logprob,
        "top": top_to_wire(token.top),
        "timings": () if token.timings == timings else timings_to_wire(token.timings),
        "at_s": 0.0 if token.at_s == at_s else token.at_s,
    }


def token_of(
    message: inference_pb2.GeneratedToken | head_pb2.HeadToken,
    timings: tuple[StageTiming, ...] = (),
    at_s: float = 0.0,
) -> Token:
    """The token of a message; `timings` and `at_s` are used if it has none of its own."""
    return Token(
        message.position,
        message.token,
        message.text,
        message.logprob,
        top_from_wire(message.top) if message.top else (),
        timings_from_wire(message.timings) if message.timings else timings,
        message.at_s or at_s,
    )


def event_to_wire(event: GenerationEvent) -> inference_pb2.GenerateResponse:
    match event:
        case Token():
            return inference_pb2.GenerateResponse(
                token=inference_pb2.GeneratedToken(**token_fields(event))
            )
        case PromptLogprobs():
            return inference_pb2.GenerateResponse(prompt_logprobs=prompt_logprobs_to_wire(event))
        case Finished():
            return inference_pb2.GenerateResponse(finished=finished_to_wire(event))
        case Started():
            started = inference_pb2.GenerationStarted(
                request_id=event.request_id,
                deployment=event.deployment,
                prompt_tokens=event.prompt_tokens,
                placement=placement_to_wire(event.placement),
            )
            return inference_pb2.GenerateResponse(started=started, listened=event.listened)


def event_from_wire(message: inference_pb2.GenerateResponse) -> GenerationEvent:
    match message.WhichOneof("message"):
        case "token":
            return token_of(message.token)
        case "prompt_logprobs":
            return prompt_logprobs_from_wire(message.prompt_logprobs)
        case "started":
            started = message.started
            tokens, placement = tuple(started.prompt_tokens), placement_from_wire(started.placement)
            return Started(
                RequestId(started.request_id),
                DeploymentName(started.deployment),
                tokens,
                placement,
                message.listened,
            )
        case _:
            return finished_from_wire(message.finished)
