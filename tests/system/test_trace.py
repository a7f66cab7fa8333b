"""A trace of real nodes at work: every stage's steps, on one clock, as a file that viewers open."""

from __future__ import annotations

import asyncio
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import pytest_asyncio
from rich.text import Text
from textual.widgets import DataTable

from edgeshard import Client
from edgeshard.cli.commands.observing.top import look
from edgeshard.cli.render.top_view import TopView
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.domain.errors import AbortedError
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.trace import StepRecord, aligned, most_in_flight, summarised
from tests.support.site import Site

DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
STREAMS = 4
SPEC = {
    "name": "tales", "model": "fairy-tales", "source": "a", "dtype": "float32",
    "concurrency": STREAMS, "layers": "a=0:6,b=6:12", "micro_batches": 2,
}  # fmt: skip

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[str, Client]]:
    directory = tmp_path_factory.mktemp("traced")
    async with Site(directory, ("a", "b"), models={"fairy-tales": DEMO_MODEL}) as site:
        await site.client.deploy(parse_spec(SPEC))
        yield site.address, site.client


@asynccontextmanager
async def streams(client: Client) -> AsyncIterator[None]:
    """Streams that run until the end, each of which has begun."""
    begun = [asyncio.Event() for _ in range(STREAMS)]

    async def stream(number: int) -> None:
        while True:
            prompt = f"Once upon a time there were {number} kings"
            async for _ in client.generate("tales", prompt, max_new_tokens=200, ignore_eos=True):
                begun[number].set()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(number)) for number in range(STREAMS)]
        async with asyncio.timeout(60):
            await asyncio.gather(*(event.wait() for event in begun))
        yield
        for task in tasks:
            task.cancel()


async def test_a_trace_has_the_steps_of_every_stage_on_one_clock(site: tuple[str, Client]) -> None:
    _, client = site
    first: dict[int, StepRecord] = {}
    second: dict[int, StepRecord] = {}
    async with streams(client), asyncio.timeout(60):
        # A machine with much else to do may run few in a second.
        while len(first.keys() & second.keys()) <= 10:
            traces = aligned(await client.trace("tales", 1.0))
            first, second = ({record.step: record for record in trace.records} for trace in traces)
    assert [(trace.stage, trace.node, trace.layers) for trace in traces] == [
        (0, "a", LayerRange(0, 6)),
        (1, "b", LayerRange(6, 12)),
    ]
    assert most_in_flight(traces) > 1
    for step in sorted(first.keys() & second.keys()):
        here, there = first[step], second[step]
        assert here.tokens == there.tokens and here.prompt_tokens == there.prompt_tokens
        assert here.arrived_s <= here.began_s < here.ended_s <= here.sent_s
        # On one clock, whatever the nodes' own: a step moves from the first to the second, and
        # returns.
        assert here.sent_s <= there.arrived_s
        assert here.returned_s == 0.0 or there.sent_s <= here.returned_s
    for summary in summarised(traces):
        assert summary.share.computing > 0 and summary.tokens_per_s > 0 and summary.compute_s > 0


async def test_files_for_viewers(site: tuple[str, Client], tmp_path: Path) -> None:
    address, client = site
    async with streams(client):
        for name in ("trace.json", "trace.svg"):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "edgeshard.cli.main", "--coordinator", address,
                "trace", "tales", "--seconds", "1", "-o", str(tmp_path / name),
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            async with asyncio.timeout(60):
                stdout, stderr = await process.communicate()
            assert process.returncode == 0, stderr.decode()
            assert [row.split()[:2] for row in stdout.decode().splitlines()[1:3]] == [
                ["a", "0:6"],
                ["b", "6:12"],
            ]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    computing = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in computing} == {0, 1}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in computing)
    ElementTree.parse(tmp_path / "trace.svg")


async def test_the_counters_of_a_deployment_at_work(site: tuple[str, Client]) -> None:
    _, client = site
    async with streams(client), asyncio.timeout(60):
        while True:
            stages = {stage.stage: stage for stage in (await client.deployment("tales")).stages}
            head, last = stages[0], stages[1]
            if (
                head.requests_running == STREAMS
                and 0 < head.busy_share <= 1
                and 0 < last.busy_share <= 1
            ):
                break
            await asyncio.sleep(0.05)
    assert head.tokens_done >= head.steps_done > 0 and head.kv_bytes_in_use > 0
    assert last.requests_running == last.requests_waiting == 0


async def test_a_newer_trace_ends_an_older_one(site: tuple[str, Client]) -> None:
    _, client = site
    older = asyncio.create_task(client.trace("tales", 60.0))
    async with asyncio.timeout(30):
        while not older.done():
            with suppress(AbortedError):  # should it have come first
                await client.trace("tales", 0.1)
    with pytest.raises(AbortedError) as replaced:
        await older
    assert replaced.value.reason == "TRACE_REPLACED"


async def test_the_live_view_shows_what_the_stages_do(site: tuple[str, Client]) -> None:
    address, client = site
    app = TopView(lambda: look(client), address, 0.1)
    async with streams(client), app.run_test(size=(110, 40)) as pilot, asyncio.timeout(60):
        stages: DataTable[Text] = app.query_one("#stages", DataTable)

        def rates() -> list[float]:
            rows = [
                [cell.plain for cell in stages.get_row_at(number)]
                for number in range(stages.row_count)
            ]
            return [float(row[5]) if row[5] != "-" else 0.0 for row in rows]

        while len(rates()) < 2 or min(rates()) <= 0:
            await pilot.pause(0.1)
        assert [stages.get_row_at(number)[2].plain for number in range(2)] == ["a", "b"]
        nodes: DataTable[Text] = app.query_one("#nodes", DataTable)
        assert nodes.row_count == 2 and nodes.get_row_at(0)[1].plain == "connected"
        await pilot.press("q")
