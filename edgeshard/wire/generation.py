"""Requests and their events: message <-> value."""

from __future__ import annotations

from collections.abc import Iterable

from edgeshard.generation import (
    Finished,
    FinishReason,
    Generation,
    GenerationEvent,
    Sampling,
    StageTiming,
    Started,
    Token,
    TokenLogprob,
)
from edgeshard.ids import DeploymentName, RequestId
from edgeshard.proto.v1 import common_pb2 as pb
from edgeshard.proto.v1 import head_pb2, inference_pb2
from edgeshard.wire.common import placement_from_wire, placement_to_wire

_REASONS = {reason: getattr(head_pb2, f"FINISH_REASON_{reason.name}") for reason in FinishReason}
_REASONS_BACK = {number: reason for reason, number in _REASONS.items()}


def reason_to_wire(reason: FinishReason) -> head_pb2.FinishReason:
    return _REASONS[reason]  # type: ignore[no-any-return]


def reason_from_wire(number: int) -> FinishReason:
    return _REASONS_BACK.get(number, FinishReason.CANCELLED)


def sampling_to_wire(sampling: Sampling) -> pb.Sampling:
    return pb.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        logprobs=sampling.logprobs,
        top_logprobs=sampling.top_logprobs,
    )


def sampling_from_wire(message: pb.Sampling) -> Sampling:
    """Zero `top_p` and `repetition_penalty` mean off, so an empty message is greedy sampling."""
    return Sampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p or 1.0,
        repetition_penalty=message.repetition_penalty or 1.0,
        seed=message.seed,
        logprobs=message.logprobs,
        top_logprobs=message.top_logprobs,
    )


def generation_to_wire(generation: Generation) -> head_pb2.Generation:
    text = generation.prompt if isinstance(generation.prompt, str) else ""
    tokens = () if isinstance(generation.prompt, str) else generation.prompt
    return head_pb2.Generation(
        prompt=text,
        prompt_tokens=tokens,
        sampling=sampling_to_wire(generation.sampling),
        max_new_tokens=generation.max_new_tokens,
        stop_tokens=generation.stop_tokens,
        stop_strings=generation.stop_strings,
        ignore_eos=generation.ignore_eos,
        priority=generation.priority,
    )


def generation_from_wire(message: head_pb2.Generation) -> Generation:
    return Generation(
        prompt=tuple(message.prompt_tokens) if message.prompt_tokens else message.prompt,
        max_new_tokens=message.max_new_tokens,
        sampling=sampling_from_wire(message.sampling),
        stop_tokens=tuple(message.stop_tokens),
        stop_strings=tuple(message.stop_strings),
        ignore_eos=message.ignore_eos,
        priority=message.priority,
    )


def timings_to_wire(timings: Iterable[StageTiming]) -> list[pb.StageTiming]:
    return [pb.StageTiming(stage=t.stage, wait_s=t.wait_s, compute_s=t.compute_s) for t in timings]


def timings_from_wire(messages: Iterable[pb.StageTiming]) -> tuple[StageTiming, ...]:
    return tuple(StageTiming(m.stage, m.wait_s, m.compute_s) for m in messages)


def top_to_wire(top: Iterable[TokenLogprob]) -> list[pb.TokenLogprob]:
    return [pb.TokenLogprob(token=t.token, logprob=t.logprob) for t in top]


def top_from_wire(messages: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(m.token, m.logprob) for m in messages)


def event_to_wire(event: GenerationEvent) -> inference_pb2.GenerateResponse:
    match event:
        case Started():
            return inference_pb2.GenerateResponse(
                started=inference_pb2.GenerationStarted(
                    request_id=event.request_id,
                    deployment=event.deployment,
                    prompt_tokens=event.prompt_tokens,
                    placement=placement_to_wire(event.placement),
                )
            )
        case Token():
            return inference_pb2.GenerateResponse(
                token=inference_pb2.GeneratedToken(
                    position=event.position,
                    token=event.token,
                    text=event.text,
                    logprob=event.logprob,
                    top=top_to_wire(event.top),
                    timings=timings_to_wire(event.timings),
                )
            )
        case Finished():
            return inference_pb2.GenerateResponse(
                finished=inference_pb2.GenerationFinished(
                    reason=reason_to_wire(event.reason),
                    text=event.text,
                    prompt_token_count=event.prompt_token_count,
                    new_token_count=event.new_token_count,
                )
            )


def event_from_wire(message: inference_pb2.GenerateResponse) -> GenerationEvent:
    kind = message.WhichOneof("message")
    if kind == "started":
        started = message.started
        return Started(
            request_id=RequestId(started.request_id),
            deployment=DeploymentName(started.deployment),
            prompt_tokens=tuple(started.prompt_tokens),
            placement=placement_from_wire(started.placement),
        )
    if kind == "token":
        token = message.token
        return Token(
            position=token.position,
            token=token.token,
            text=token.text,
            logprob=token.logprob,
            top=top_from_wire(token.top),
            timings=timings_from_wire(token.timings),
        )
    finished = message.finished
    return Finished(
        reason=reason_from_wire(finished.reason),
        text=finished.text,
        prompt_token_count=finished.prompt_token_count,
        new_token_count=finished.new_token_count,
    )
