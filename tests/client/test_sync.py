"""The synchronous face: same answers, same errors, same cancelling."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from edgeshard import SyncClient
from edgeshard.domain.deployment import DeploymentSpec
from edgeshard.domain.errors import NotFoundError
from edgeshard.domain.generation import Started, Token

pytestmark = pytest.mark.timing


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "edgeshard-client"]


def test_it_completes_and_ends_its_thread(site: Any) -> None:
    with SyncClient(site.address) as client:
        assert client.complete("tales", "Once").text == "Once upon a time é!"
        assert [node.name for node in client.nodes()] == ["a", "b"]
        assert client.deploy(DeploymentSpec(name="tales", model="fairy-tales", source="a")).spec.name == "tales"
        assert client_threads()
    assert not client_threads()


def test_it_streams_token_by_token(site: Any) -> None:
    site.hold_after(1)
    with SyncClient(site.address) as client:
        events = client.generate("tales", "Once")
        assert isinstance(next(events), Started) and isinstance(next(events), Token)
        assert not site.released.is_set()
        site.released.set()
        assert len(list(events)) == 5


def test_leaving_the_loop_cancels_at_the_server(site: Any) -> None:
    site.hold_after(1)
    with SyncClient(site.address) as client:
        for event in client.generate("tales", "Once"):
            if isinstance(event, Token):
                break
        assert site.cancelled.wait(60)


def test_an_interrupt_while_waiting_cancels_at_the_server(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site.hold_after(0)
    with SyncClient(site.address) as client:
        events = client.generate("tales", "Once")
        next(events)
        original = asyncio.run_coroutine_threadsafe

        def interrupted(work: Any, loop: asyncio.AbstractEventLoop) -> Any:
            monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", original)
            future = original(work, loop)
            site.held.wait(60)

            def result(timeout: float | None = None) -> Any:
                raise KeyboardInterrupt

            future.result = result  # type: ignore[method-assign]
            return future

        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(events)
        assert site.cancelled.wait(60)


def test_an_interrupt_before_anybody_waits_cancels_at_the_server(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is on its way already, and nothing would come of it."""
    site.hold_after(0)
    begin, interrupts = asyncio.run_coroutine_threadsafe, [KeyboardInterrupt()]

    def interrupted(work: Any, loop: Any) -> Any:
        future = begin(work, loop)
        if interrupts:
            raise interrupts.pop()
        return future

    with SyncClient(site.address) as client:
        events = client.generate("tales", "Once")
        next(events)
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(events)
        assert site.cancelled.wait(60)


async def test_it_works_inside_a_running_event_loop(site: Any) -> None:
    with SyncClient(site.address) as client:
        assert client.served_models()[0].deployment == "tales"


def test_errors_are_typed(site: Any) -> None:
    with SyncClient(site.address) as client, pytest.raises(NotFoundError) as caught:
        client.node("zebra")
    assert caught.value.field == "node"
