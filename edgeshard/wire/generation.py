"""Requests and their events: message <-> value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import Message

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import DeploymentName, RequestId
from edgeshard.domain.options import option_fields
from edgeshard.domain.requests.generation import (
    Finished,
    FinishReason,
    GenerateRequest,
    Generation,
    GenerationEvent,
    Guide,
    GuideKind,
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
from edgeshard.wire.common import message_of, plain_value, value_of
from edgeshard.wire.deployment import placement_from_wire, placement_to_wire

_REASONS = {reason: getattr(head_pb2, f"FINISH_REASON_{reason.name}") for reason in FinishReason}
_REASONS_BACK = {number: reason for reason, number in _REASONS.items()}
_GUIDES = {kind: getattr(pb, f"GUIDE_KIND_{kind.name}") for kind in GuideKind}
_GUIDES_BACK = {number: kind for kind, number in _GUIDES.items()}


def reason_to_wire(reason: FinishReason) -> head_pb2.FinishReason:
    return _REASONS[reason]  # type: ignore[no-any-return]


def reason_from_wire(number: int) -> FinishReason:
    return _REASONS_BACK.get(number, FinishReason.CANCELLED)


def sampling_to_wire(sampling: Sampling) -> pb.Sampling:
    return pb.Sampling(**_options_to_wire(sampling) | {"logit_bias": dict(sampling.logit_bias)})


def sampling_from_wire(message: pb.Sampling) -> Sampling:
    """An absent field takes its default, so an empty message is greedy sampling."""
    biases = tuple(sorted(message.logit_bias.items()))
    return Sampling(**_options_from_wire(message, Sampling) | {"logit_bias": biases})


def guide_to_wire(guide: Guide) -> pb.Guide:
    return pb.Guide(kind=_GUIDES[guide.kind], text=guide.text)


def guide_from_wire(message: pb.Guide) -> Guide:
    """Raises InvalidArgumentError for a kind that this version does not know: an answer must not go without it."""
    kind = _GUIDES_BACK.get(message.kind)
    if kind is None:
        raise InvalidArgumentError("guide is of a kind that this version does not know", field="guide")
    return Guide(kind, message.text)


def generation_to_wire(generation: Generation) -> head_pb2.Generation:
    text = generation.prompt if isinstance(generation.prompt, str) else ""
    tokens = () if isinstance(generation.prompt, str) else generation.prompt
    return head_pb2.Generation(
        prompt=text,
        prompt_tokens=tokens,
        sampling=sampling_to_wire(generation.sampling),
        **_options_to_wire(generation),
    )


def generation_from_wire(message: head_pb2.Generation) -> Generation:
    """An absent field takes its default. Raises InvalidArgumentError for a prompt given in both forms."""
    if message.prompt and message.prompt_tokens:
        raise InvalidArgumentError("prompt: give a prompt or prompt_tokens, not both", field="prompt")
    return Generation(
        prompt=tuple(message.prompt_tokens) if message.prompt_tokens else message.prompt,
        sampling=sampling_from_wire(message.sampling),
        **_options_from_wire(message, Generation),
    )


def generate_request_to_wire(request: GenerateRequest) -> inference_pb2.GenerateRequest:
    listener = request.listener
    return inference_pb2.GenerateRequest(
        model=request.model,
        generation=generation_to_wire(request.generation),
        request_id=request.request_id,
        listener=None if listener is None else inference_pb2.Listener(id=listener.id, number=listener.number),
        resume=None
        if request.emitted is None
        else inference_pb2.Resumption(tokens=request.emitted, scored=request.scored),
    )


def generate_request_from_wire(message: inference_pb2.GenerateRequest) -> GenerateRequest:
    listener = Listener(message.listener.id, message.listener.number) if message.HasField("listener") else None
    emitted = tuple(message.resume.tokens) if message.HasField("resume") else None
    generation, scored = generation_from_wire(message.generation), message.resume.scored or 1
    return GenerateRequest(message.model, generation, message.request_id, listener, emitted, scored)


def _options_to_wire(value: Sampling | Generation) -> dict[str, Any]:
    """The options of a value, which have the names they have on the wire."""
    options = {item.name: getattr(value, item.name) for item in option_fields(type(value))}
    return {name: guide_to_wire(item) if isinstance(item, Guide) else item for name, item in options.items()}


def _options_from_wire(message: Message, owner: type[Sampling] | type[Generation]) -> dict[str, Any]:
    """Those that are there."""
    names = {item.name for item in option_fields(owner)}
    values = {field.name: plain_value(value) for field, value in message.ListFields() if field.name in names}
    return {name: guide_from_wire(item) if isinstance(item, pb.Guide) else item for name, item in values.items()}


def timings_to_wire(timings: Iterable[StageTiming]) -> list[pb.StageTiming]:
    return [pb.StageTiming(stage=t.stage, wait_s=t.wait_s, compute_s=t.compute_s) for t in timings]


def timings_from_wire(messages: Iterable[pb.StageTiming]) -> tuple[StageTiming, ...]:
    return tuple(StageTiming(m.stage, m.wait_s, m.compute_s) for m in messages)


def top_to_wire(top: Iterable[TokenLogprob]) -> list[pb.TokenLogprob]:
    return [pb.TokenLogprob(token=t.token, logprob=t.logprob) for t in top]


def top_from_wire(messages: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(m.token, m.logprob) for m in messages)


def prompt_logprobs_to_wire(prompt_logprobs: PromptLogprobs) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(
        position=prompt_logprobs.position,
        logprobs=prompt_logprobs.logprobs,
        top_tokens=[entry.token for top in prompt_logprobs.top for entry in top],
        top_logprobs=[entry.logprob for top in prompt_logprobs.top for entry in top],
    )


def prompt_logprobs_from_wire(message: pb.PromptLogprobs) -> PromptLogprobs:
    """Raises InvalidArgumentError where the likeliest tokens are not equally many at each position."""
    positions, entries = len(message.logprobs), len(message.top_tokens)
    if len(message.top_logprobs) != entries or entries % max(1, positions):
        raise InvalidArgumentError("prompt_logprobs has columns of different lengths", field="prompt_logprobs")
    likeliest = list(map(TokenLogprob, message.top_tokens, message.top_logprobs))
    count = entries // max(1, positions)
    top = tuple(tuple(likeliest[index * count : (index + 1) * count]) for index in range(positions))
    return PromptLogprobs(message.position, tuple(message.logprobs), top)


def event_to_wire(event: GenerationEvent) -> inference_pb2.GenerateResponse:
    match event:
        case Started():
            return inference_pb2.GenerateResponse(
                started=inference_pb2.GenerationStarted(
                    request_id=event.request_id,
                    deployment=event.deployment,
                    prompt_tokens=event.prompt_tokens,
                    placement=placement_to_wire(event.placement),
                ),
                listened=event.listened,
            )
        case PromptLogprobs():
            return inference_pb2.GenerateResponse(prompt_logprobs=prompt_logprobs_to_wire(event))
        case Token():
            return inference_pb2.GenerateResponse(
                token=inference_pb2.GeneratedToken(
                    position=event.position,
                    token=event.token,
                    text=event.text,
                    logprob=event.logprob,
                    top=top_to_wire(event.top),
                    timings=timings_to_wire(event.timings),
                    at_s=event.at_s,
                )
            )
        case Finished():
            return inference_pb2.GenerateResponse(finished=finished_to_wire(event))


def event_from_wire(message: inference_pb2.GenerateResponse) -> GenerationEvent:
    kind = message.WhichOneof("message")
    if kind == "started":
        started = message.started
        return Started(
            request_id=RequestId(started.request_id),
            deployment=DeploymentName(started.deployment),
            prompt_tokens=tuple(started.prompt_tokens),
            placement=placement_from_wire(started.placement),
            listened=message.listened,
        )
    if kind == "prompt_logprobs":
        return prompt_logprobs_from_wire(message.prompt_logprobs)
    if kind == "token":
        token = message.token
        return Token(
            position=token.position,
            token=token.token,
            text=token.text,
            logprob=token.logprob,
            top=top_from_wire(token.top),
            timings=timings_from_wire(token.timings),
            at_s=token.at_s,
        )
    return finished_from_wire(message.finished)


def finished_to_wire(finished: Finished) -> inference_pb2.GenerationFinished:
    return message_of(finished, inference_pb2.GenerationFinished, reason=reason_to_wire(finished.reason))


def finished_from_wire(message: inference_pb2.GenerationFinished) -> Finished:
    return value_of(message, Finished, reason=reason_from_wire(message.reason))
