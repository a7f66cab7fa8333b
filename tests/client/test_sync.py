"""The synchronous face: same answers, same errors, same cancelling."""

from __future__ import annotations

import asyncio
import inspect
import random
import signal
import threading
from typing import Any

import pytest

from edgeshard import SyncClient
from edgeshard.client import sync
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.errors import NotFoundError
from edgeshard.domain.requests.generation import Started, Token
from tests.support.forms import in_form

pytestmark = pytest.mark.timing


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "edgeshard-client"]


def test_it_completes_and_ends_its_thread(site: Any) -> None:
    with SyncClient(site.address) as client:
        assert client.complete("tales", "Once").text == "Once upon a time é!"
        assert [node.name for node in client.nodes()] == ["a", "b"]
        assert (
            client.deploy(DeploymentSpec(name="tales", model="fairy-tales", source="a")).spec.name
            == "tales"
        )
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


class _InterruptedQueue:
    """The queue that a call waits on, and a Ctrl-C that hits the wait once `held` is set."""

    def __init__(self, held: threading.Event) -> None:
        self._held = held

    def get(self, timeout: float) -> Any:
        assert self._held.wait(60)
        raise KeyboardInterrupt

    def put(self, item: Any) -> None:
        """No reader waits for it any more."""


def test_an_interrupt_while_waiting_cancels_at_the_server(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.hold_after(0)
    with SyncClient(site.address) as client:
        events = client.generate("tales", "Once")
        next(events)
        real = sync._Call.result

        def interrupted(call: Any) -> Any:
            monkeypatch.setattr(sync._Call, "result", real)
            call._ended = _InterruptedQueue(site.held)
            return real(call)

        monkeypatch.setattr(sync._Call, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(events)
        assert site.cancelled.wait(60)


def test_an_interrupt_before_anybody_waits_cancels_at_the_server(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step has been sent already, and its result would be lost."""
    site.hold_after(0)
    with SyncClient(site.address) as client:
        events = client.generate("tales", "Once")
        next(events)
        loop = client._running_loop()
        real = loop.call_soon_threadsafe

        def interrupted(*arguments: Any) -> None:
            monkeypatch.setattr(loop, "call_soon_threadsafe", real)
            real(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(loop, "call_soon_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(events)
        assert site.cancelled.wait(60)


def test_an_interrupt_before_a_call_is_handed_over_leaves_nothing_unawaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with SyncClient("127.0.0.1:1", plaintext=True) as client:
        loop = client._running_loop()
        real = loop.call_soon_threadsafe

        def interrupted(*arguments: Any) -> None:
            monkeypatch.setattr(loop, "call_soon_threadsafe", real)
            raise KeyboardInterrupt

        monkeypatch.setattr(loop, "call_soon_threadsafe", interrupted)
        work = asyncio.sleep(60)
        with pytest.raises(KeyboardInterrupt):
            client._run(work)
        client._run(asyncio.sleep(0))
        assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED


def test_an_interrupt_is_one_wherever_it_hits_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another error, as of a lock in disorder, would end `edgectl chat`; a lock left taken would
    hold it for ever."""
    chance = random.Random(1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sync, "_HEARS_S", 0.0005)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with SyncClient("127.0.0.1:1", plaintext=True) as client:
            loop = client._running_loop()
            for _ in range(in_form(500, 5000)):
                call = sync._Call(loop, asyncio.sleep(60))
                with pytest.raises(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0005, 0.004))
                    call.result()
                assert client._run(asyncio.sleep(0, "answered")) == "answered"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


async def test_it_works_inside_a_running_event_loop(site: Any) -> None:
    with SyncClient(site.address) as client:
        assert client.served_models()[0].deployment == "tales"


def test_errors_are_typed(site: Any) -> None:
    with SyncClient(site.address) as client, pytest.raises(NotFoundError) as caught:
        client.node("zebra")
    assert caught.value.field == "node"
