"""The head's request stream: commands down, tokens up; message <-> value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId, RequestId
from edgeshard.domain.requests.generation import StageTiming, Token
from edgeshard.domain.requests.head import (
    CancelRequest,
    ForgetRequest,
    HeadAccepted,
    HeadAdmitted,
    HeadBeacon,
    HeadCommand,
    HeadFailed,
    HeadFinished,
    HeadHello,
    HeadMessage,
    HeadPromptLogprobs,
    HeadToken,
    HeadTokens,
    HeldRequest,
    StartRequest,
)
from edgeshard.proto.v1 import head_pb2 as pb
from edgeshard.wire.common import message_of, value_of
from edgeshard.wire.failure import from_failure, to_failure
from edgeshard.wire.generation import (
    generation_from_wire,
    generation_to_wire,
    prompt_logprobs_from_wire,
    prompt_logprobs_to_wire,
    reason_from_wire,
    reason_to_wire,
    timings_from_wire,
    timings_to_wire,
    top_from_wire,
    top_to_wire,
)


def head_command_to_wire(command: HeadCommand) -> pb.AttachResponse:
    match command:
        case StartRequest():
            start = message_of(command, pb.StartRequest, generation=generation_to_wire(command.generation))
            return pb.AttachResponse(start=start)
        case CancelRequest():
            return pb.AttachResponse(cancel=pb.CancelRequest(request_id=command.request_id))
        case ForgetRequest():
            return pb.AttachResponse(forget=pb.ForgetRequest(request_id=command.request_id))
        case HeadBeacon():
            return pb.AttachResponse(beacon=pb.HeadBeacon(follows=command.follows))
        case _:
            assert_never(command)


def head_command_from_wire(message: pb.AttachResponse) -> HeadCommand:
    """Raises InvalidArgumentError for a command of a kind this version does not know."""
    match message.WhichOneof("message"):
        case "start":
            start = message.start
            return value_of(
                start,
                StartRequest,
                generation=generation_from_wire(start.generation),
                emitted_tokens=tuple(start.emitted_tokens),
                scored=start.scored or 1,
            )
        case "cancel":
            return CancelRequest(RequestId(message.cancel.request_id))
        case "forget":
            return ForgetRequest(RequestId(message.forget.request_id))
        case "beacon":
            return HeadBeacon(message.beacon.follows)
        case _:
            raise InvalidArgumentError("the coordinator sent a command this head does not know", field="message")


def request_of_command(message: pb.AttachResponse) -> RequestId:
    """The request that a command is about, also of one that cannot be read; '' where that is not said."""
    return RequestId(message.start.request_id or message.cancel.request_id)


def head_message_to_wire(message: HeadMessage) -> pb.AttachRequest:
    match message:
        case HeadToken():
            return pb.AttachRequest(token=_token_to_wire(message))
        case HeadTokens():
            return pb.AttachRequest(tokens=_tokens_to_wire(message.tokens))
        case HeadPromptLogprobs():
            scored = pb.HeadPromptLogprobs(
                request_id=message.request_id,
                epoch=message.epoch,
                prompt_logprobs=prompt_logprobs_to_wire(message.prompt_logprobs),
            )
            return pb.AttachRequest(prompt_logprobs=scored)
        case HeadHello():
            hello = message_of(message, pb.HeadHello, held=[message_of(item, pb.HeldRequest) for item in message.held])
            return pb.AttachRequest(hello=hello)
        case HeadAccepted():
            accepted = pb.HeadAccepted(
                request_id=message.request_id, epoch=message.epoch, prompt_tokens=message.prompt_tokens
            )
            return pb.AttachRequest(accepted=accepted)
        case HeadAdmitted():
            admitted = pb.HeadAdmitted(request_id=message.request_id, epoch=message.epoch)
            return pb.AttachRequest(admitted=admitted)
        case HeadFinished():
            finished = pb.HeadFinished(
                request_id=message.request_id,
                epoch=message.epoch,
                reason=reason_to_wire(message.reason),
                text=message.text,
            )
            return pb.AttachRequest(finished=finished)
        case HeadFailed():
            failed = pb.HeadFailed(
                request_id=message.request_id, epoch=message.epoch, failure=to_failure(message.failure)
            )
            return pb.AttachRequest(failed=failed)
        case HeadBeacon():
            return pb.AttachRequest(beacon=pb.HeadBeacon(follows=message.follows))
        case _:
            assert_never(message)


def head_message_from_wire(message: pb.AttachRequest) -> HeadMessage | None:
    """None for a message of a kind this version does not know."""
    match message.WhichOneof("message"):
        case "token":
            return _token_from_wire(message.token)
        case "tokens":
            shared = timings_from_wire(message.tokens.timings)
            tokens, at_s = message.tokens.tokens, message.tokens.at_s
            return HeadTokens(tuple(_token_from_wire(token, shared, at_s) for token in tokens))
        case "prompt_logprobs":
            scored = message.prompt_logprobs
            logprobs = prompt_logprobs_from_wire(scored.prompt_logprobs)
            return HeadPromptLogprobs(RequestId(scored.request_id), Epoch(scored.epoch), logprobs)
        case "hello":
            hello = message.hello
            held = tuple(value_of(item, HeldRequest, scored=item.scored or 1) for item in hello.held)
            deployment, epoch = DeploymentName(hello.deployment), Epoch(hello.epoch)
            head_for_s = hello.head_for_s if hello.HasField("head_for_s") else None
            return HeadHello(NodeId(hello.node_id), deployment, epoch, held, hello.beacons, head_for_s)
        case "accepted":
            accepted = message.accepted
            return HeadAccepted(RequestId(accepted.request_id), Epoch(accepted.epoch), tuple(accepted.prompt_tokens))
        case "admitted":
            return HeadAdmitted(RequestId(message.admitted.request_id), Epoch(message.admitted.epoch))
        case "finished":
            finished = message.finished
            reason = reason_from_wire(finished.reason)
            return HeadFinished(RequestId(finished.request_id), Epoch(finished.epoch), reason, finished.text)
        case "failed":
            failed = message.failed
            return HeadFailed(RequestId(failed.request_id), Epoch(failed.epoch), from_failure(failed.failure))
        case "beacon":
            return HeadBeacon(message.beacon.follows)
        case _:
            return None


def _tokens_to_wire(tokens: Sequence[HeadToken]) -> pb.HeadTokens:
    """Tokens of one step have its timings and its time in common; a token of another step has its own."""
    common = tokens[0].token.timings if all(message.token.timings for message in tokens) else ()
    at_s = tokens[0].token.at_s if all(message.token.at_s for message in tokens) else 0.0
    return pb.HeadTokens(
        tokens=[_token_to_wire(message, common, at_s) for message in tokens],
        timings=timings_to_wire(common),
        at_s=at_s,
    )


def _token_to_wire(message: HeadToken, common: tuple[StageTiming, ...] = (), at_s: float = 0.0) -> pb.HeadToken:
    token = message.token
    return pb.HeadToken(
        request_id=message.request_id,
        epoch=message.epoch,
        position=token.position,
        token=token.token,
        logprob=token.logprob,
        top=top_to_wire(token.top),
        text=token.text,
        timings=() if token.timings == common else timings_to_wire(token.timings),
        finish_reason=None if message.finish_reason is None else reason_to_wire(message.finish_reason),
        final_text=message.final_text,
        at_s=0.0 if token.at_s == at_s else token.at_s,
    )


def _token_from_wire(message: pb.HeadToken, common: tuple[StageTiming, ...] = (), at_s: float = 0.0) -> HeadToken:
    token = Token(
        position=message.position,
        token=message.token,
        text=message.text,
        logprob=message.logprob,
        top=top_from_wire(message.top),
        timings=timings_from_wire(message.timings) or common,
        at_s=message.at_s or at_s,
    )
    reason = reason_from_wire(message.finish_reason) if message.finish_reason else None
    return HeadToken(RequestId(message.request_id), Epoch(message.epoch), token, reason, message.final_text)
