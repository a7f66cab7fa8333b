"""The numbers of objects in a process's memory, reported on request: tasks, streams, requests.

SIGUSR1 makes a process of a chaos site write its counts to `NAME.census`, as JSON. Counting is put
there from outside, like the failpoints (tests/chaos/hooks.py).
"""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.hooks import replace_method

Counts = dict[str, int]


def census_file(directory: Path, process: str) -> Path:
    return directory / f"{process}.census"


def hook_coordinator(directory: Path, process: str) -> None:
    from edgeshard_coordinator.control.coordinator import Coordinator

    def starting(start: Callable[..., Any]) -> Callable[..., Any]:
        async def hooked(coordinator: Coordinator) -> str:
            _serve(census_file(directory, process), lambda: _of_coordinator(coordinator))
            address: str = await start(coordinator)
            return address

        return hooked

    replace_method(Coordinator, "start", starting)


def hook_agent(directory: Path, process: str) -> None:
    from edgeshard_agent.engine.pipeline_head import Head
    from edgeshard_agent.net.control import ControlClient

    heads: weakref.WeakSet[Head] = weakref.WeakSet()

    def making(make: Callable[..., None]) -> Callable[..., None]:
        def hooked(head: Head, *rest: Any, **more: Any) -> None:
            make(head, *rest, **more)
            heads.add(head)

        return hooked

    def running(run: Callable[..., Any]) -> Callable[..., Any]:
        async def hooked(client: ControlClient) -> None:
            _serve(census_file(directory, process), lambda: _of_agent(list(heads)))
            await run(client)

        return hooked

    replace_method(Head, "__init__", making)
    replace_method(ControlClient, "run", running)


def _serve(path: Path, count: Callable[[], Counts]) -> None:
    def write() -> None:
        gc.collect()
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps({"tasks": len(asyncio.all_tasks()), **count()}))
        draft.replace(path)

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, write)


def _of_coordinator(coordinator: Any) -> Counts:
    """Names that are gone raise AttributeError: then this count has to follow the product."""
    from edgeshard_coordinator.control.requests.running_request import Attachment, RunningRequest
    from edgeshard_coordinator.control.runtime.hub import ControlStream

    state, front = coordinator.loop.state, coordinator.front
    kept = (ControlStream, Attachment, RunningRequest)
    alive = [type(thing) for thing in gc.get_objects() if isinstance(thing, kept)]
    return {
        "nodes": len(state.nodes),
        "connected": sum(node.connected for node in state.nodes.values()),
        "streams": len(coordinator._hub),
        "streams alive": alive.count(ControlStream),
        "requests": len(front._requests),
        "requests alive": alive.count(RunningRequest),
        "requests of heads": sum(
            len(attachment.requests) for attachment in front._attachments.values()
        ),
        "attachments": len(front._attachments),
        "attachments alive": alive.count(Attachment),
        "followed": sum(
            len(stream._followed) for stream in coordinator._inference._listeners._streams.values()
        ),
        "waiting for the state": len(coordinator.loop._waiting),
        "jobs": len(state.jobs),
    }


def _of_agent(heads: list[Any]) -> Counts:
    return {
        "heads": len(heads),
        "requests of heads": sum(len(head._journal._entries) for head in heads),
        "tasks of heads": sum(len(head._tasks) for head in heads),
        "sequences": sum(not head.is_idle for head in heads),
    }
