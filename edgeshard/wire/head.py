"""The head's request stream: commands down, tokens up; message <-> value."""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.errors import EdgeShardError, InvalidArgumentError
from edgeshard.generation import FinishReason, Generation, Token
from edgeshard.ids import DeploymentName, Epoch, NodeId, RequestId
from edgeshard.proto.v1 import head_pb2 as pb
from edgeshard.wire.generation import (
    generation_from_wire,
    reason_to_wire,
    timings_to_wire,
    top_to_wire,
)
from edgeshard.wire.status import to_failure


@dataclass(frozen=True, slots=True)
class Start:
    """Begin a request. `emitted_tokens` were streamed by a former head; `client` is whom it is for."""

    request_id: RequestId
    generation: Generation
    emitted_tokens: tuple[int, ...] = ()
    client: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: RequestId


def command_from_wire(message: pb.AttachResponse) -> Start | Cancel:
    kind = message.WhichOneof("message")
    if kind == "start":
        start = message.start
        generation = generation_from_wire(start.generation)
        return Start(RequestId(start.request_id), generation, tuple(start.emitted_tokens), start.client)
    if kind == "cancel":
        return Cancel(RequestId(message.cancel.request_id))
    raise InvalidArgumentError("the coordinator sent a command this head does not know", field="message")


def hello_to_wire(node_id: NodeId, deployment: DeploymentName, epoch: Epoch) -> pb.AttachRequest:
    return pb.AttachRequest(hello=pb.HeadHello(node_id=node_id, deployment=deployment, epoch=epoch))


def accepted_to_wire(request_id: RequestId, epoch: Epoch, prompt_tokens: list[int]) -> pb.AttachRequest:
    return pb.AttachRequest(accepted=pb.HeadAccepted(request_id=request_id, epoch=epoch, prompt_tokens=prompt_tokens))


def token_to_wire(request_id: RequestId, epoch: Epoch, token: Token) -> pb.AttachRequest:
    return pb.AttachRequest(
        token=pb.HeadToken(
            request_id=request_id,
            epoch=epoch,
            position=token.position,
            token=token.token,
            logprob=token.logprob,
            top=top_to_wire(token.top),
            text=token.text,
            timings=timings_to_wire(token.timings),
        )
    )


def finished_to_wire(request_id: RequestId, epoch: Epoch, reason: FinishReason, text: str) -> pb.AttachRequest:
    return pb.AttachRequest(
        finished=pb.HeadFinished(request_id=request_id, epoch=epoch, reason=reason_to_wire(reason), text=text)
    )


def failed_to_wire(request_id: RequestId, epoch: Epoch, error: EdgeShardError) -> pb.AttachRequest:
    return pb.AttachRequest(failed=pb.HeadFailed(request_id=request_id, epoch=epoch, failure=to_failure(error)))
