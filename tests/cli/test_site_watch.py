"""The output and actions of `edgectl serve` when nodes join and leave, on a scripted site."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgeshard.cli.commands.site import site_watch
from edgeshard.cli.commands.site.site_watch import SiteWatch
from edgeshard.domain.control.site import ReplanReason
from edgeshard.domain.errors import AbortedError, UnavailableError
from edgeshard.domain.identity import JoinToken, Principal, Role

pytestmark = pytest.mark.timing

AWAY = UnavailableError("the coordinator is away")


def node(
    name: str, *, connected: bool = True, unknown_profiles: int = 0, stages: tuple[str, ...] = ()
) -> Any:
    return SimpleNamespace(
        name=name,
        connected=connected,
        placeable=connected,
        unknown_profiles=unknown_profiles,
        unknown_links=0,
        stages=stages,
    )


def found(reason: ReplanReason) -> Any:
    stage = SimpleNamespace(node_name="b", layers="0:4")
    return SimpleNamespace(
        reason=reason,
        found=SimpleNamespace(stages=[stage], predicted=None),
        expected=None,
        gain=None,
    )


@dataclass
class Site:
    """The calls of a client that SiteWatch makes; `tell` wakes its stream, `break_off` ends it."""

    known: list[Any]
    reason: ReplanReason = ReplanReason.SAME_LAYERS
    failure: Exception | None = None
    said: list[str] = field(default_factory=list)
    looks: int = 0
    streams: int = 0
    moves: int = 0
    _events: asyncio.Queue[Exception | None] = field(default_factory=asyncio.Queue)

    async def nodes(self) -> list[Any]:
        self.looks += 1
        return list(self.known)

    async def events(self, limit: int, follow: bool) -> AsyncGenerator[str, None]:
        assert (limit, follow) == (1, True)
        self.streams += 1
        yield "the newest"
        while (broken := await self._events.get()) is None:
            yield "news"
        raise broken

    def tell(self) -> None:
        self._events.put_nowait(None)

    def break_off(self) -> None:
        self._events.put_nowait(AWAY)

    async def create_token(self, *_: object) -> Any:
        return JoinToken((b"",), Principal("mill", Role.AGENT, "b"), "a:1", "a:2", b"")

    async def replan(self, name: str, dry_run: bool = False) -> Any:
        if self.failure is not None and not dry_run:
            self.moves += 1
            raise self.failure
        self.moves += not dry_run
        return found(self.reason)

    def next_name(self, taken: set[str]) -> str:
        return next(
            name for name in (f"node-{number}" for number in range(2, 9)) if name not in taken
        )


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not met():  # noqa: ASYNC110 - what is waited for is any condition
            await asyncio.sleep(0.005)


@asynccontextmanager
async def watched(site: Site, *, grow: bool = False) -> AsyncIterator[None]:
    watch = SiteWatch(cast("Any", site), "tales", site.next_name, site.said.append, grow=grow)
    running = asyncio.create_task(watch.run())
    try:
        yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_watch, "_FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr("edgeshard.client.joining.invitation_to_text", lambda _: "TOKEN")


def lines(site: Site) -> list[str]:
    return [text for text in site.said if not text.startswith("another node joins")]


async def said(site: Site, text: str) -> None:
    await until(lambda: lines(site)[-1:] == [text])


async def another_look(site: Site) -> None:
    looks = site.looks
    site.tell()
    await until(lambda: site.looks > looks)


async def test_nodes_that_come_and_go_are_told_of_when_an_event_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float | None] = []
    wait_for = asyncio.wait_for

    async def waited(work: Any, timeout_s: float | None) -> Any:
        waits.append(timeout_s)
        return await wait_for(work, timeout_s)

    monkeypatch.setattr("asyncio.wait_for", waited)
    site = Site([node("a"), node("old", connected=False)])
    async with watched(site):
        await until(lambda: site.looks >= 2)
        assert lines(site) == []
        site.known = [node("a"), node("old"), node("node-2")]
        site.tell()
        await until(lambda: len(lines(site)) == 2)
        assert lines(site) == ["node node-2 has joined", "node old is back"]
        site.known = [node("a"), node("old"), node("node-2", connected=False)]
        site.tell()
        await until(lambda: len(lines(site)) == 3)
        assert lines(site)[2] == "node node-2 is away"
        site.known = [node("a"), node("old"), node("node-2")]
        site.tell()
        await until(lambda: len(lines(site)) == 4)
        assert lines(site)[3] == "node node-2 is back"
    offers = [text for text in site.said if text.startswith("another node joins")]
    assert len(offers) == 2, "one line, and the next when it was used"
    assert set(waits) == {None}, "it looks at no time by itself"


async def test_what_happened_while_the_stream_was_broken_is_seen_at_its_return() -> None:
    site = Site([node("a")])
    async with watched(site):
        await until(lambda: site.looks >= 2)
        for number in range(2, 5):
            site.known.append(node(f"node-{number}"))
            site.break_off()
            await said(site, f"node node-{number} has joined")
    assert site.streams == 4


async def test_a_call_that_fails_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_watch, "_LONGEST_BACKOFF_S", 0.01)
    site = Site([node("a")])

    async def failing() -> list[Any]:
        site.looks += 1
        raise AWAY

    nodes, site.nodes = site.nodes, failing  # type: ignore[method-assign]
    async with watched(site):
        await until(lambda: site.looks >= 3)
        site.nodes = nodes  # type: ignore[method-assign]
        await until(lambda: bool(site.said))


@pytest.mark.parametrize(
    ("nodes", "considered"),
    [
        ([node("a", stages=("tales",))], False),
        ([node("a", stages=("tales",)), node("b", unknown_profiles=1)], False),
        ([node("a", stages=("tales",)), node("b", connected=False)], False),
        ([node("a", stages=("tales",), unknown_profiles=1), node("b")], True),
        ([node("a", stages=("tales",)), node("b")], True),
    ],
)
async def test_it_plans_once_nothing_is_left_to_measure(nodes: list[Any], considered: bool) -> None:
    site = Site(nodes, ReplanReason.WOULD_MOVE)
    async with watched(site, grow=True):
        await until(lambda: site.looks >= 2)
        if considered:
            await until(lambda: site.moves > 0)
    assert (site.moves > 0) is considered


async def test_without_grow_it_says_once_what_there_is_to_gain() -> None:
    site = Site([node("a", stages=("tales",)), node("b")], ReplanReason.WOULD_MOVE)
    async with watched(site):
        for _ in range(3):
            await another_look(site)
    assert site.moves == 0 and len(lines(site)) == 1
    assert "`edgectl replan tales` moves it" in lines(site)[0]


async def test_a_gain_that_is_not_known_is_said_with_how_to_move() -> None:
    site = Site(
        [node("a", stages=("tales",), unknown_profiles=1), node("b")], ReplanReason.NOT_WEIGHED
    )
    async with watched(site, grow=True):
        await until(lambda: bool(lines(site)))
    assert site.moves == 0 and "edgectl replan tales --force` moves it to b=0:4" in lines(site)[0]


async def test_a_move_that_went_back_is_not_tried_again_at_once() -> None:
    site = Site(
        [node("a", stages=("tales",)), node("b")],
        ReplanReason.WOULD_MOVE,
        AbortedError("node b went away"),
    )
    async with watched(site, grow=True):
        await until(lambda: site.moves == 1)
        for _ in range(3):
            await another_look(site)
    assert site.moves == 1 and "stays where it is: node b went away" in lines(site)[-1]
