"""A thin synchronous face: the async client, run by an event loop in a background thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, Unpack

from edgeshard.client.arguments import Message, Tool
from edgeshard.client.batch import BatchProgress, BatchRequest, BatchResult
from edgeshard.client.chat import ChatCompletion
from edgeshard.client.client import Client
from edgeshard.client.completion import Completion
from edgeshard.debugging.dump import ProcessDump
from edgeshard.domain.audit import AuditCheck, AuditEntry
from edgeshard.domain.control.site import NodeDetails, NodeProgress, ServedModel, Site, StoredModel
from edgeshard.domain.control.site_event import SiteEvent
from edgeshard.domain.deployments.deployment import Deployment, DeploymentSpec
from edgeshard.domain.deployments.placement import Placement
from edgeshard.domain.deployments.replan import Replan
from edgeshard.domain.identity import ApiKey, JoinToken, Role
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.packed import PackedUnit
from edgeshard.domain.nodes.device import Node
from edgeshard.domain.requests.chat import ChatEvent
from edgeshard.domain.requests.generation import GenerateOptions, GenerationEvent
from edgeshard.domain.requests.trace import StageTrace
from edgeshard.rpc.tls import TlsFiles

if TYPE_CHECKING:
    from edgeshard.client.models import Adding, Progress

Result = TypeVar("Result")
_HEARS_S = 0.5


class SyncClient:
    """`Client` for code without an event loop; methods, arguments and errors are those of `Client`.

    Callbacks (`progress`, `on_change`, `on_progress`) run in the background thread. Close it, or use it as a context
    manager.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end the background thread; requests still streaming are cancelled."""
        if self._loop is None or self._thread is None:
            return
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None

    def generate(
        self, model: str, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> Generator[GenerationEvent, None, None]:
        """Stream one request; leaving the loop cancels it at once."""
        yield from self._iterate(self._client.generate(model, prompt, **options))

    def complete(self, model: str, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Completion:
        return self._run(self._client.complete(model, prompt, **options))

    def text_stream(
        self, model: str, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> Generator[str, None, None]:
        yield from self._iterate(self._client.text_stream(model, prompt, **options))

    def chat(
        self,
        model: str,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        variables: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generator[ChatEvent, None, None]:
        """Stream one answer; leaving the loop cancels it at once."""
        events = self._client.chat(model, messages, tools=tools, variables=variables, **options)
        yield from self._iterate(events)

    def complete_chat(
        self,
        model: str,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        variables: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> ChatCompletion:
        return self._run(self._client.complete_chat(model, messages, tools=tools, variables=variables, **options))

    def batch(
        self, requests: Sequence[BatchRequest], concurrency: int = 8, on_progress: BatchProgress | None = None
    ) -> list[BatchResult]:
        return self._run(self._client.batch(requests, concurrency, on_progress))

    def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        return self._run(self._client.tokenize(model, text, special))

    def detokenize(self, model: str, tokens: Sequence[int]) -> str:
        return self._run(self._client.detokenize(model, tokens))

    def cancel(self, request_id: str) -> bool:
        return self._run(self._client.cancel(request_id))

    def served_models(self) -> tuple[ServedModel, ...]:
        return self._run(self._client.served_models())

    def create_token(self, role: Role, name: str, ttl_s: float = 900.0, host: str = "") -> JoinToken:
        return self._run(self._client.create_token(role, name, ttl_s, host))

    def revoke(self, role: Role, name: str) -> None:
        self._run(self._client.revoke(role, name))

    def remove_node(self, node: str) -> None:
        self._run(self._client.remove_node(node))

    def create_key(
        self,
        name: str,
        models: Sequence[str] = (),
        *,
        tokens_per_minute: int | None = None,
        requests: int | None = None,
    ) -> tuple[ApiKey, str]:
        return self._run(self._client.create_key(name, models, tokens_per_minute=tokens_per_minute, requests=requests))

    def keys(self) -> tuple[ApiKey, ...]:
        return self._run(self._client.keys())

    def revoke_key(self, name: str) -> None:
        self._run(self._client.revoke_key(name))

    def nodes(self) -> tuple[Node, ...]:
        return self._run(self._client.nodes())

    def node(self, name: str) -> Node:
        return self._run(self._client.node(name))

    def node_details(self, name: str) -> NodeDetails:
        return self._run(self._client.node_details(name))

    def packed_units(self, node: str) -> tuple[PackedUnit, ...]:
        return self._run(self._client.packed_units(node))

    def drop_packed(self, node: str, ids: Sequence[str] | None = None) -> tuple[PackedUnit, ...]:
        return self._run(self._client.drop_packed(node, ids))

    def site(self, model: str = "") -> Site:
        return self._run(self._client.site(model))

    def profile(
        self,
        model: str = "",
        nodes: Sequence[str] = (),
        *,
        dtype: DType = DType.BFLOAT16,
        quick: bool = False,
        again: bool = False,
        quantisation: Quantisation | None = None,
    ) -> Generator[NodeProgress, None, None]:
        events = self._client.profile(model, nodes, dtype=dtype, quick=quick, again=again, quantisation=quantisation)
        yield from self._iterate(events)

    def stored_models(self) -> tuple[StoredModel, ...]:
        return self._run(self._client.stored_models())

    def stored_model(self, name: str) -> StoredModel:
        return self._run(self._client.stored_model(name))

    def add_model(
        self,
        source: Path | str,
        name: str | None = None,
        progress: Progress | None = None,
        adding: Adding | None = None,
    ) -> Digest:
        return self._run(self._client.add_model(source, name, progress, adding))

    def delete_model(self, name: str) -> None:
        self._run(self._client.delete_model(name))

    def plan(self, spec: DeploymentSpec) -> Placement:
        return self._run(self._client.plan(spec))

    def deploy(
        self,
        spec: DeploymentSpec,
        wait: bool = True,
        timeout_s: float | None = None,
        on_change: Callable[[Deployment], None] | None = None,
    ) -> Deployment:
        return self._run(self._client.deploy(spec, wait, timeout_s, on_change))

    def wait_ready(
        self,
        name: str,
        timeout_s: float | None = None,
        on_change: Callable[[Deployment], None] | None = None,
    ) -> Deployment:
        return self._run(self._client.wait_ready(name, timeout_s, on_change))

    def deployments(self) -> tuple[Deployment, ...]:
        return self._run(self._client.deployments())

    def deployment(self, name: str) -> Deployment:
        return self._run(self._client.deployment(name))

    def delete_deployment(self, name: str, wait: bool = True, timeout_s: float | None = None) -> None:
        self._run(self._client.delete_deployment(name, wait, timeout_s))

    def replan(
        self,
        name: str,
        *,
        dry_run: bool = False,
        force: bool = False,
        wait: bool = True,
        timeout_s: float | None = None,
        on_change: Callable[[Deployment], None] | None = None,
    ) -> Replan:
        return self._run(
            self._client.replan(name, dry_run=dry_run, force=force, wait=wait, timeout_s=timeout_s, on_change=on_change)
        )

    def trace(self, name: str, seconds: float = 5.0) -> tuple[StageTrace, ...]:
        return self._run(self._client.trace(name, seconds))

    def dump(self, timeout_s: float | None = None) -> tuple[ProcessDump, ...]:
        return self._run(self._client.dump(timeout_s))

    def audit(self, limit: int = 100) -> tuple[AuditEntry, ...]:
        return self._run(self._client.audit(limit))

    def check_audit(self) -> tuple[AuditCheck, ...]:
        return self._run(self._client.check_audit())

    def events(self, limit: int = 100, follow: bool = False) -> Generator[SiteEvent, None, None]:
        yield from self._iterate(self._client.events(limit, follow))

    def _iterate(self, items: AsyncGenerator[Result, None]) -> Generator[Result, None, None]:
        # After a Ctrl-C the interrupted step is still unwinding when the stream is closed: one waits for the other.
        turn = asyncio.Lock()
        step: asyncio.Task[Any] | None = None

        async def next_item() -> Result | None:
            nonlocal step
            step = asyncio.current_task()
            async with turn:
                return await anext(items, None)

        async def close() -> None:
            if step is not None:
                step.cancel()  # the interrupt may have come before anybody waited for it, who would have done so
            async with turn:
                await items.aclose()

        try:
            while (item := self._run(next_item())) is not None:
                yield item
        finally:
            self._run(close())

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return _Call(self._running_loop(), work).result()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="edgeshard-client", daemon=True)
            self._thread.start()
        return self._loop


class _Call(Generic[Result]):
    """A coroutine that another thread's event loop runs.

    A Ctrl-C may come between any two lines of the caller's thread, so that thread takes no lock in Python code:
    `concurrent.futures` does, and stays locked, or says that it is not, when one comes at the wrong place.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Result]) -> None:
        self._loop = loop
        self._work = work
        self._task: asyncio.Task[Result] | None = None
        self._ended = SimpleQueue[asyncio.Task[Result]]()

    def result(self) -> Result:
        """Waits for it. What interrupts the waiting also ends the call, which must not go on behind the caller's
        back."""
        try:
            self._loop.call_soon_threadsafe(self._start)
            while True:
                # Of a Ctrl-C that came just before it began to wait, Python hears when it next stops waiting.
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
            self._work.close()  # the interrupt came before it was handed over
        else:
            self._task.cancel()

    def _end(self, task: asyncio.Task[Result]) -> None:
        if not task.cancelled():
            task.exception()  # asked for, so that asyncio does not complain where nobody waits any more
        self._ended.put(task)
