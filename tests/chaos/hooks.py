"""Hooks in the product's classes, put there from outside in this one process.

The product has no hooks of its own. A method that is not there any more raises AttributeError when
its hook is installed, so that a failpoint never goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from edgeshard.domain.errors import UnavailableError
from edgeshard.domain.requests.step import Span
from tests.chaos.failpoints import Moment, Place, Trap

WRITES = {
    "save_node": "node",
    "forget_node": "node that is deleted",
    "save_measurements": "measurements",
    "save_traffic": "traffic",
    "save_operation": "operation",
}
"""Other writes of the coordinator's database than deployments, by the StateStore method that writes
them."""
FILES = ("blob", "manifest", "names")
"""The writes of its model store: the end of a blob, a manifest, and the names of all."""
KEPT_STEPS = 256
"""Steps whose spans are remembered for the places that know a step's number only; a window is far
smaller."""


def replace_method(
    owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Put `make(method)` in the place of a method."""
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(make(original)))


def replace_write(
    owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """The same for a store's method, in the thread that writes."""
    from edgeshard_coordinator.sqlite_store import in_own_thread

    work = getattr(owner, name).__wrapped__
    setattr(owner, name, in_own_thread(wraps(work)(make(work))))


class _Steps:
    """The spans of the newest steps of this process."""

    def __init__(self, trap: Trap) -> None:
        self._trap = trap
        self._spans: dict[int, tuple[Span, ...]] = {}

    def began(self, number: int, spans: tuple[Span, ...]) -> None:
        self._spans.pop(number, None)
        self._spans[number] = spans
        if len(self._spans) > KEPT_STEPS:
            del self._spans[next(iter(self._spans))]

    def hit(self, place: Place, number: int) -> None:
        self._trap.hit(Moment(place, number, self._spans.get(number, ())))


def hook_agent(trap: Trap) -> None:  # noqa: C901 - a function for each place
    """The places of an agent. Imports torch."""
    from edgeshard_agent.engine.pipeline_head import Head
    from edgeshard_agent.engine.stage_runner import StageRunner
    from edgeshard_agent.hosting.loading import StageLoader
    from edgeshard_agent.net.attach import HeadStream
    from edgeshard_agent.net.link_sender import LinkSender

    steps = _Steps(trap)

    def computing(compute: Callable[..., Any]) -> Callable[..., Any]:
        def hooked(runner: StageRunner, offered: Any) -> Any:
            step, _ = offered[0]  # if nothing streams, a sweep is one step
            steps.began(step.number, step.plan.spans)
            steps.hit(Place.BEFORE_COMPUTE, step.number)
            ran = compute(runner, offered)
            steps.hit(Place.AFTER_COMPUTE, step.number)
            return ran

        return hooked

    def writing(write: Callable[..., Any]) -> Callable[..., Any]:
        async def hooked(sender: LinkSender, call: Any, step: int, *rest: Any) -> None:
            await write(sender, call, step, *rest)
            steps.hit(Place.AFTER_SEND, step)

        return hooked

    def returning(take: Callable[..., Any]) -> Callable[..., Any]:
        def hooked(head: Head, step: Any) -> None:
            steps.hit(Place.BEFORE_RETURN, step.number)
            take(head, step)
            steps.hit(Place.AFTER_RETURN, step.number)

        return hooked

    def loading(load: Callable[..., Any]) -> Callable[..., Any]:
        async def hooked(loader: StageLoader, *rest: Any) -> Any:
            trap.hit(Moment(Place.BEFORE_LOAD))
            loaded = await load(loader, *rest)
            trap.hit(Moment(Place.AFTER_LOAD))
            return loaded

        return hooked

    def reading(read: Callable[..., Any]) -> Callable[..., Any]:
        def hooked(loader: StageLoader, *rest: Any) -> Any:
            trap.hit(Moment(Place.DURING_LOAD))
            return read(loader, *rest)

        return hooked

    def attaching(serve: Callable[..., Any]) -> Callable[..., Any]:
        async def hooked(stream: HeadStream, *rest: Any) -> None:
            trap.hit(Moment(Place.BEFORE_ATTACH))
            await serve(stream, *rest)

        return hooked

    def saying(take: Callable[..., Any]) -> Callable[..., Any]:
        def hooked(stream: HeadStream) -> Any:
            if trap.hit(Moment(Place.BEFORE_SAY)):
                raise UnavailableError("the request stream broke (a fault that was asked for)")
            return take(stream)

        return hooked

    replace_method(HeadStream, "_serve", attaching)
    replace_method(HeadStream, "_take", saying)
    replace_method(StageRunner, "_compute", computing)
    replace_method(LinkSender, "_write_step", writing)
    replace_method(Head, "on_return", returning)
    replace_method(StageLoader, "load", loading)
    replace_method(StageLoader, "_load_stage", reading)


def cut_prompts(step_tokens: int) -> None:
    """Limit a head to `step_tokens` tokens in a step, so that short prompts need several chunks,
    too."""
    from edgeshard_agent.scheduler import setup

    name = "step_tokens"
    if not hasattr(setup, name):
        raise AttributeError(f"{setup.__name__} has no {name} to replace")
    setattr(setup, name, lambda *_: step_tokens)


def hook_coordinator(trap: Trap) -> None:  # noqa: C901 - a function for each sort of write
    """The places of a coordinator: each of its writes, in the thread that writes."""
    from edgeshard_coordinator.control.persistence.persistence import StateStore
    from edgeshard_coordinator.store import models

    from edgeshard.storage.blobs import BlobDirectory
    from edgeshard.storage.files import write_atomically

    phases: dict[str, str] = {}

    def kind(record: Any, after: str) -> str:
        """Such as ready->waiting; a save that changes no phase is ready->ready."""
        return f"{phases.get(record.name, 'new')}->{after}"

    def saving(save: Callable[..., Any]) -> Callable[..., Any]:
        def hooked(store: StateStore, *records: Any) -> None:
            transition = kind(records[-1], records[-1].on_disk.phase.value)
            trap.hit(Moment(Place.BEFORE_SAVE, what=transition))
            save(store, *records)
            phases.update({record.name: record.on_disk.phase.value for record in records})
            trap.hit(Moment(Place.AFTER_SAVE, what=transition))

        return hooked

    def forgetting(forget: Callable[..., Any]) -> Callable[..., Any]:
        def hooked(store: StateStore, record: Any, *rest: Any) -> None:
            transition = kind(record, "gone")
            trap.hit(Moment(Place.BEFORE_SAVE, what=transition))
            forget(store, record, *rest)
            phases.pop(record.name, None)
            trap.hit(Moment(Place.AFTER_SAVE, what=transition))

        return hooked

    def opening(open_: Callable[..., Any]) -> Callable[..., Any]:
        def hooked(store: StateStore, *rest: Any) -> Any:
            state = open_(store, *rest)
            phases.update({name: record.phase.value for name, record in state.deployments.items()})
            return state

        return hooked

    def writing(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(write: Callable[..., Any]) -> Callable[..., Any]:
            def hooked(store: Any, *rest: Any) -> Any:
                trap.hit(Moment(Place.BEFORE_SAVE, what=what))
                written = write(store, *rest)
                trap.hit(Moment(Place.AFTER_SAVE, what=what))
                return written

            return hooked

        return make

    for name, what in WRITES.items():
        replace_write(StateStore, name, writing(what))
    replace_method(BlobDirectory, "commit", writing("blob"))

    def write_file(path: Path, text: str) -> None:
        what = "names" if path.name == "names.json" else "manifest"
        trap.hit(Moment(Place.BEFORE_SAVE, what=what))
        write_atomically(path, text)
        trap.hit(Moment(Place.AFTER_SAVE, what=what))

    models.write_atomically = write_file  # type: ignore[attr-defined]
    replace_write(StateStore, "save", saving)
    replace_write(StateStore, "forget", forgetting)
    replace_write(StateStore, "open", opening)
