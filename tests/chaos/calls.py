"""Calls to the coordinator that get lost, or come twice: an interceptor in front of its
services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from tests.chaos.failpoints import Action, Moment, Place, Trap


class FaultyCalls(grpc.aio.ServerInterceptor):
    """A call that is lost ends with UNAVAILABLE, as it does for its caller when a connection
    breaks."""

    def __init__(self, trap: Trap) -> None:
        self._trap = trap

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        actions = self._trap.hit(
            Moment(Place.CALL, what=str(handler_call_details.method).rpartition("/")[2])
        )
        if not actions:
            return handler
        for kind in ("unary_unary", "stream_unary"):
            if (behaviour := getattr(handler, kind)) is not None:
                return handler._replace(**{kind: _faulty(behaviour, actions)})
        return handler._replace(unary_stream=_faulty_stream(handler.unary_stream, actions))


def _faulty(
    behaviour: Callable[..., Awaitable[Any]], actions: Sequence[Action]
) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: Any) -> Any:
        if Action.LOSE_REQUEST in actions:
            await _lose(context)
        if Action.TWICE in actions:
            _, answer = await asyncio.gather(
                behaviour(request, context), behaviour(request, context)
            )
        else:
            answer = await behaviour(request, context)
        if Action.LOSE_REPLY in actions:
            await _lose(context)
        return answer

    return call


def _faulty_stream(
    behaviour: Callable[..., AsyncIterator[Any]], actions: Sequence[Action]
) -> Callable[..., AsyncIterator[Any]]:
    """The reply of a stream is lost after its first message."""

    async def call(request: Any, context: Any) -> AsyncIterator[Any]:
        if Action.LOSE_REQUEST in actions:
            await _lose(context)
        async for answer in behaviour(request, context):
            yield answer
            if Action.LOSE_REPLY in actions:
                await _lose(context)

    return call


async def _lose(context: Any) -> None:
    await context.abort(
        grpc.StatusCode.UNAVAILABLE, "the connection broke (a fault that was asked for)"
    )


def hook_calls(directory: Path, process: str = "coordinator") -> None:
    """Let every gRPC server that this process makes have the interceptor, outside of all others."""
    make: Any = grpc.aio.server
    trap = Trap(directory, process)

    def make_faulty(*arguments: Any, interceptors: Sequence[Any] = (), **options: Any) -> Any:
        return make(*arguments, interceptors=[FaultyCalls(trap), *interceptors], **options)

    grpc.aio.server = make_faulty  # type: ignore[assignment]
