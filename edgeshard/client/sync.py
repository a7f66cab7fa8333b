"""A thin synchronous face: the async client, run by an event loop in a background thread."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from edgeshard.client.client import Client
from edgeshard.client.connection import check_not_forked, is_forked
from edgeshard.domain.errors import FailedPreconditionError
from edgeshard.rpc.tls import TlsFiles

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_HEARS_S = 0.5


def _call(
    method: Callable[Concatenate[Client, Arguments], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[SyncClient, Arguments], Result]:
    """The method of `Client` for a caller without an event loop."""

    @functools.wraps(method)
    def call(self: SyncClient, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return self._run(method(self._client, *args, **kwargs))

    return call


def _stream(
    method: Callable[Concatenate[Client, Arguments], AsyncGenerator[Result, None]],
) -> Callable[Concatenate[SyncClient, Arguments], Generator[Result, None, None]]:
    """The same for a stream; leaving the loop over it cancels it at once."""

    @functools.wraps(method)
    def stream(
        self: SyncClient, /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Generator[Result, None, None]:
        yield from self._iterate(method(self._client, *args, **kwargs))

    return stream


class SyncClient:
    """`Client` for code without an event loop; methods, arguments and errors are the same as in
    `Client`.

    Callbacks (`progress`, `on_change`, `on_progress`) run in the background thread. Close it, or
    use it as a context manager.
    """

    def __init__(
        self,
        target: str | None = None,
        tls: TlsFiles | None = None,
        *,
        plaintext: bool | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self._client = Client(target, tls, plaintext=plaintext, timeout_s=timeout_s)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def target(self) -> str:
        return self._client.target

    def __enter__(self) -> Self:
        self._run(self._client.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end the background thread; requests still streaming are
        cancelled."""
        if self._loop is None or self._thread is None:
            return
        if is_forked():
            self._loop = self._thread = None  # the thread is the parent's
            return
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None

    generate = _stream(Client.generate)
    complete = _call(Client.complete)
    text_stream = _stream(Client.text_stream)
    chat = _stream(Client.chat)
    complete_chat = _call(Client.complete_chat)
    batch = _call(Client.batch)
    tokenize = _call(Client.tokenize)
    detokenize = _call(Client.detokenize)
    cancel = _call(Client.cancel)
    served_models = _call(Client.served_models)
    create_token = _call(Client.create_token)
    open_tokens = _call(Client.open_tokens)
    revoke_token = _call(Client.revoke_token)
    revoke = _call(Client.revoke)
    remove_node = _call(Client.remove_node)
    create_key = _call(Client.create_key)
    dashboard_link = _call(Client.dashboard_link)
    keys = _call(Client.keys)
    revoke_key = _call(Client.revoke_key)
    nodes = _call(Client.nodes)
    node = _call(Client.node)
    node_details = _call(Client.node_details)
    label_node = _call(Client.label_node)
    packed_units = _call(Client.packed_units)
    drop_packed = _call(Client.drop_packed)
    site = _call(Client.site)
    profile = _stream(Client.profile)
    stored_models = _call(Client.stored_models)
    stored_model = _call(Client.stored_model)
    add_model = _call(Client.add_model)
    delete_model = _call(Client.delete_model)
    plan = _call(Client.plan)
    deploy = _call(Client.deploy)
    wait_ready = _call(Client.wait_ready)
    deployments = _call(Client.deployments)
    deployment = _call(Client.deployment)
    delete_deployment = _call(Client.delete_deployment)
    replan = _call(Client.replan)
    trace = _call(Client.trace)
    dump = _call(Client.dump)
    audit = _call(Client.audit)
    check_audit = _call(Client.check_audit)
    events = _stream(Client.events)

    def _iterate(self, items: AsyncGenerator[Result, None]) -> Generator[Result, None, None]:
        # After a Ctrl-C the interrupted step is still unwinding when the stream is closed: one
        # waits for the other.
        turn = asyncio.Lock()
        step: asyncio.Task[Any] | None = None

        async def next_item() -> Result | None:
            nonlocal step
            step = asyncio.current_task()
            async with turn:
                return await anext(items, None)

        async def close() -> None:
            if step is not None:
                step.cancel()  # the interrupt may have arrived before the caller waited for it
            async with turn:
                await items.aclose()

        try:
            while (item := self._run(next_item())) is not None:
                yield item
        finally:
            self._run(close())

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        try:
            check_not_forked()
        except FailedPreconditionError:
            work.close()
            raise
        return _Call(self._running_loop(), work).result()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="edgeshard-client", daemon=True
            )
            self._thread.start()
        return self._loop


class _Call(Generic[Result]):
    """A coroutine that another thread's event loop runs.

    A Ctrl-C may arrive between any two lines of the caller's thread, so that thread takes no lock
    in Python code. `concurrent.futures` does, and stays locked, or reports that it is not, if one
    arrives at the wrong place.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Result]) -> None:
        self._loop = loop
        self._work = work
        self._task: asyncio.Task[Result] | None = None
        self._ended = SimpleQueue[asyncio.Task[Result]]()

    def result(self) -> Result:
        """Waits for it. An interrupt of the waiting also ends the call, which must not continue
        without its caller."""
        try:
            self._loop.call_soon_threadsafe(self._start)
            while True:
                # If a Ctrl-C arrives just before the wait begins, Python handles it when it next
                # stops waiting.
                with suppress(Empty):
                    return self._ended.get(timeout=_HEARS_S).result()
        except BaseException:
            self._loop.call_soon_threadsafe(self._cancel)
            raise

    def _start(self) -> None:
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if self._task is None:
            self._work.close()  # the interrupt arrived before it was handed over
        else:
            self._task.cancel()

    def _end(self, task: asyncio.Task[Result]) -> None:
        if not task.cancelled():
            # retrieved so that asyncio logs no warning if no caller waits any more
            task.exception()
        self._ended.put(task)
