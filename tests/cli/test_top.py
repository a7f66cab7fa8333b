"""edgectl top: the rows it shows, and the view itself by textual's pilot on the scripted site."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from textual.widgets import DataTable, Static

from edgeshard.cli.commands.observing import top
from edgeshard.cli.render.top_rows import DEPLOYMENTS, LINKS, NODES, STAGES, summary, tables
from edgeshard.cli.render.top_view import TopView
from edgeshard.domain.control.site import Site, StoredLink
from edgeshard.domain.deployments.deployment import DeploymentPhase, SuspectHop
from edgeshard.domain.errors import UnavailableError
from edgeshard.domain.ids import Epoch
from edgeshard.domain.nodes.device import Condition, StagePhase
from edgeshard.domain.nodes.profile import LinkProfile, MeasuredLink
from edgeshard.views import Look

pytestmark = pytest.mark.timing


def look(site: Any, at_s: float, steps: int, tokens: int) -> Look:
    """Node a, which was heard half a second ago, runs stage 0 of tales."""
    known = Condition(memory_available_bytes=3 << 30)
    nodes = tuple(
        replace(node, connected=True, condition=known, heartbeat_age_s=0.5) for node in site.nodes
    )
    stage = replace(
        site.stage_status(StagePhase.ACTIVE),
        steps_done=steps,
        tokens_done=tokens,
        busy_share=0.25,
        kv_bytes_capacity=100,
        kv_bytes_in_use=50,
        requests_waiting=2,
    )
    nodes = (replace(nodes[0], stages=(stage,)), *nodes[1:])
    links = (
        StoredLink(
            MeasuredLink(nodes[0].node_id, nodes[1].node_id, LinkProfile(0.002, 1e8, 0.0, 9, 1)),
            1.0,
        ),
    )
    tales = replace(site.deployment_in(DeploymentPhase.READY, None, (stage,)), active_requests=5)
    return Look(at_s, Site(nodes, links, (), {}), (tales,))


def test_rows_say_load_rates_and_what_waits(site: Any) -> None:
    now, before = look(site, 12.0, 30, 400), look(site, 10.0, 10, 100)
    deployments, stages, links, nodes = tables(now, before)
    assert deployments == [("tales", "ready", "3", "2", "150.0", "0", "1")]
    assert stages == [("tales", "0", "a", "0:4", "active", "150.0", "10.0", "75 %", "0", "50 %")]
    assert links == [
        ("tales", "a", "b", "100 Mb/s", "2.0 ms", "carries"),
        ("tales", "b", "a", "-", "-", "carries"),
    ]
    assert nodes[0][:4] == ("a", "connected", "25 %", "1") and nodes[0][6:] == ("3 GiB", "0.5 s")
    assert nodes[1][2] == "-"
    assert summary(now) == "2 of 2 nodes, 3 requests running, 2 waiting"


def test_rows_have_as_many_cells_as_their_tables(site: Any) -> None:
    shapes = (DEPLOYMENTS, STAGES, LINKS, NODES)
    for shape, rows in zip(shapes, tables(look(site, 1.0, 1, 1), None), strict=True):
        assert {len(row) for row in rows} == {len(shape.columns)}


def test_there_is_no_rate_without_an_earlier_heartbeat_of_the_epoch(site: Any) -> None:
    now, other = look(site, 12.0, 30, 400), look(site, 10.0, 10, 100)
    epoch = replace(other.deployments[0].stages[0], epoch=Epoch(0))
    for before in (
        None,
        replace(other, at_s=11.9),
        replace(other, deployments=(_holding(other, epoch),)),
    ):
        assert tables(now, before)[1][0][5:7] == ("-", "-")


def _holding(look: Look, stage: Any) -> Any:
    return replace(look.deployments[0], stages=(stage,))


def test_a_suspect_link_says_why(site: Any) -> None:
    now = look(site, 12.0, 30, 400)
    tales = replace(now.deployments[0], suspects=(SuspectHop(1, 0, "nothing came back for 2.0 s"),))
    links = tables(replace(now, deployments=(tales,)), None)[2]
    assert [row[-1] for row in links] == ["carries", "suspect: nothing came back for 2.0 s"]


class Looks:
    """The readings that the view gets, one after the other. An error is raised."""

    def __init__(self, *looks: Look | UnavailableError) -> None:
        self._queue: asyncio.Queue[Look | UnavailableError] = asyncio.Queue()
        self._shows = False
        self.add(*looks)

    def add(self, *looks: Look | UnavailableError) -> None:
        for found in looks:
            self._queue.put_nowait(found)

    async def next(self) -> Look:
        if self._shows:
            self._queue.task_done()
        found = await self._queue.get()
        self._shows = True
        if isinstance(found, UnavailableError):
            raise found
        return found

    async def shown(self) -> None:
        """Until the view requests the reading after the last one."""
        await asyncio.wait_for(self._queue.join(), 60)


def cells(app: TopView, table: str) -> list[list[str]]:
    found: Any = app.query_one(f"#{table}", DataTable)
    return [[cell.plain for cell in found.get_row_at(number)] for number in range(found.row_count)]


def status(app: TopView) -> str:
    return str(app.query_one("#status", Static).render())


async def test_the_view_shows_the_newest_look_and_quits(site: Any) -> None:
    looks = Looks(look(site, 10.0, 10, 100), look(site, 12.0, 30, 400))
    app = TopView(looks.next, "here:7600", 0.01)
    async with app.run_test(size=(100, 40)) as pilot:
        await looks.shown()
        assert cells(app, "stages")[0][5] == "150.0"
        assert [row[0] for row in cells(app, "nodes")] == ["a", "b"]
        assert "here:7600: 2 of 2 nodes" in status(app)
        await pilot.press("tab", "tab", "tab", "down")
        nodes: Any = app.query_one("#nodes", DataTable)
        assert (app.focused, nodes.cursor_row) == (nodes, 1)
        looks.add(look(site, 14.0, 50, 500))
        await looks.shown()
        assert cells(app, "stages")[0][5] == "100.0" and nodes.cursor_row == 1, (
            "reading anew does not move it"
        )
        await pilot.press("q")
    assert app.return_code == 0


async def test_a_node_that_left_leaves_its_row(site: Any) -> None:
    both = look(site, 10.0, 10, 100)
    looks = Looks(
        both,
        replace(
            both, at_s=11.0, site=replace(both.site, nodes=both.site.nodes[:1]), deployments=()
        ),
    )
    app = TopView(looks.next, "here", 0.01)
    async with app.run_test(size=(100, 40)):
        await looks.shown()
        assert [row[0] for row in cells(app, "nodes")] == ["a"] and cells(app, "stages") == []


async def test_a_site_that_does_not_answer_is_said_and_what_was_seen_stays(site: Any) -> None:
    looks = Looks(look(site, 10.0, 10, 100), UnavailableError("nobody answers"))
    app = TopView(looks.next, "here", 0.01)
    async with app.run_test(size=(100, 40)):
        await looks.shown()
        assert "nobody answers" in status(app) and len(cells(app, "nodes")) == 2


async def test_it_stands_still_and_goes_on(site: Any) -> None:
    looks = Looks(look(site, 10.0, 10, 100))
    app = TopView(looks.next, "here", 0.01)
    async with app.run_test(size=(100, 40)) as pilot:
        await looks.shown()
        await pilot.press("p")
        assert "paused; p resumes" in status(app)
        await pilot.press("p")
        looks.add(look(site, 12.0, 30, 400))
        await looks.shown()
        assert cells(app, "stages")[0][5] == "150.0" and "paused" not in status(app)


def test_without_a_terminal_it_prints_once(
    edgectl: Any, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "BETWEEN_S", 0.0)
    site.states = [site.deployment_in(DeploymentPhase.READY)]
    result = edgectl("top")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].endswith("0 requests running, 0 waiting")
    assert "DEPLOYMENT  FROM  TO" in result.stdout and lines[-1].split()[0] == "b"


def test_without_textual_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "find_spec", lambda name: None)
    with pytest.raises(Exception, match=r"pip install '\.\[top\]'") as refusal:
        top.check_textual()
    assert refusal.value.exit_code == 1  # type: ignore[attr-defined]
