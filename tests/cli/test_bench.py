"""edgectl bench: the load it draws, the figures it gives, and that it ends by itself."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from edgeshard.cli.commands.requests.bench_load import (
    LengthRange,
    Loading,
    OfferedLoad,
    Wanted,
    arrivals,
    drawn,
    put_on,
)
from edgeshard.cli.render.bench_report import Goal, Served, report
from edgeshard.domain.errors import InvalidArgumentError, ResourceExhaustedError
from edgeshard.process.clock import SystemClock

pytestmark = pytest.mark.timing


def test_the_same_seed_draws_the_same_load_in_the_lengths_asked_for() -> None:
    first, again, other = (
        list(islice(drawn(s, LengthRange(4, 9), LengthRange(2, 5)), 40)) for s in (1, 1, 2)
    )
    assert first == again != other
    assert {len(one.prompt) for one in first} == set(range(4, 10)) and {
        one.new_tokens for one in first
    } == {2, 3, 4, 5}
    assert len({one.prompt for one in first}) == 40, (
        "no prompt begins as another, so that none is cached"
    )


def test_texts_of_a_file_are_taken_in_turn() -> None:
    assert [one.prompt for one in islice(drawn(0, ["x", "y"], LengthRange(1, 1)), 3)] == [
        "x",
        "y",
        "x",
    ]


def test_requests_arrive_at_their_rate_by_seed() -> None:
    times = list(islice(arrivals(3, 10.0), 2001))
    assert (
        times == list(islice(arrivals(3, 10.0), 2001))
        and times[0] == 0.0
        and times == sorted(times)
    )
    assert 190 < times[-1] < 210, "2,000 at 10 a second"
    gaps = [after - before for before, after in pairwise(times)]
    assert 0.33 < sum(1 for gap in gaps if gap > 0.1) / len(gaps) < 0.41, (
        "1/e of them longer than the mean"
    )


@pytest.mark.parametrize("text", ["0", "", "8:4", "x", "1:2:3", "-1", "9999999"])
def test_lengths_that_cannot_be_are_named(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        LengthRange.parse(text, "new-tokens")
    assert "--new-tokens" in refusal.value.message


class Service:
    """Answers when the test allows it; `full` is set once it holds the expected number."""

    def __init__(self, full_at: int = 0) -> None:
        self._full_at = full_at
        self.full = asyncio.Event()
        self.held = self.most = self.begun = 0
        self.go = asyncio.Event()

    async def serve(self, wanted: Wanted, began_s: float) -> Served:
        self.begun += 1
        self.held += 1
        self.most = max(self.most, self.held)
        if self.held == self._full_at:
            self.full.set()
        await self.go.wait()
        self.held -= 1
        return Served(began_s, 1.0, 0.5, 3, wanted.new_tokens)


def put(load: OfferedLoad, service: Service) -> Any:
    wanted = drawn(0, LengthRange(1, 1), LengthRange(1, 1))
    return put_on(load, wanted, 0, service.serve, SystemClock(), lambda found: None)


async def test_a_closed_loop_has_so_many_at_a_time_and_an_open_one_does_not_wait() -> None:
    closed = Service(3)
    task = asyncio.create_task(put(OfferedLoad(7, 60.0, None, 3), closed))
    await closed.full.wait()
    closed.go.set()
    assert len((await task).served) == 7 and closed.most == 3
    opened = Service(7)
    task = asyncio.create_task(put(OfferedLoad(7, 60.0, 1e6, 1), opened))
    await opened.full.wait()
    opened.go.set()
    assert len((await task).served) == 7


async def test_none_begins_after_the_duration() -> None:
    service = Service()
    service.go.set()
    assert len((await put(OfferedLoad(1000, 0.0, 1.0, 1), service)).served) == 1, (
        "the one at the beginning"
    )


async def test_an_interrupted_load_gives_what_it_has() -> None:
    service = Service(2)
    task: asyncio.Task[Loading] = asyncio.create_task(put(OfferedLoad(2, 60.0, 1e6, 1), service))
    await service.full.wait()
    task.cancel()
    found = await task
    assert (found.served, found.unfinished, found.interrupted) == ([], 2, True)


def test_figures_leave_errors_out_and_count_what_keeps_the_goal() -> None:
    quick = Served(0.0, 2.0, 0.1, 5, 3, (0.1, 0.3))
    slow = Served(1.0, 9.0, 3.0, 5, 2, (6.0,))
    refused = Served(1.0, 0.0, error="OVERLOADED")
    found = report(
        "tales", "a load", 0, [quick, slow, refused], 1, Goal(ttft_s=1.0, inter_token_s=0.25)
    )
    assert (found.requests, found.answered, found.unfinished, found.errors) == (
        4,
        2,
        1,
        {"OVERLOADED": 1},
    )
    assert (found.seconds, found.new_tokens, found.new_tokens_per_s) == (10.0, 5, 0.5)
    assert found.goodput == 0.1 and found.good_share == pytest.approx(1 / 3)
    assert found.ttft_s is not None and found.ttft_s.most == 3.0
    assert found.inter_token_s is not None and found.inter_token_s.p50 == 0.3
    assert report("tales", "a load", 0, [refused], 0, Goal()).ttft_s is None


def test_the_command_prints_a_table_and_draws(edgectl: Any, site: Any, tmp_path: Path) -> None:
    file = tmp_path / "load.svg"
    result = edgectl("bench", "--requests", "3", "--slo-ttft", "60", "--picture", str(file))
    assert result.exit_code == 0, result.stderr
    assert "3 answered of 3" in result.stdout and "OVERLOADED" not in result.stdout
    assert "within the goal, 100 % of them" in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines()[-3:]] == [
        "first",
        "between",
        "request",
    ]
    ElementTree.fromstring(file.read_text())
    assert "first token" in file.read_text()


def test_json_has_every_figure(edgectl: Any, site: Any) -> None:
    result = edgectl(
        "bench", "tales", "--requests", "2", "--rate", "500", "--seed", "7", "-o", "json"
    )
    found = json.loads(result.stdout)
    assert (found["deployment"], found["answered"], found["new_tokens"], found["seed"]) == (
        "tales",
        2,
        10,
        7,
    )
    assert (
        set(found["ttft_s"]) == {"mean", "p50", "p90", "p99", "most"} and found["goodput"] is None
    )


def test_a_load_that_nobody_answers_fails(edgectl: Any, site: Any) -> None:
    site.failures["Generate"] = ResourceExhaustedError("no room", reason="OVERLOADED")
    result = edgectl("bench", "tales")
    assert result.exit_code == 1 and "OVERLOADED" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "field"),
    [
        (("nobody",), 3, "nobody"),
        (("--rate", "1", "--concurrency", "2"), 2, "--rate"),
        (("--picture", "x.png"), 2, ".svg"),
        (("--prompt-tokens", "400", "--new-tokens", "400"), 2, "--prompt-tokens"),
        (("--prompts", "/nowhere"), 2, "/nowhere"),
    ],
)
def test_what_cannot_be_is_named(
    edgectl: Any, site: Any, arguments: tuple[str, ...], code: int, field: str
) -> None:
    result = edgectl("bench", *arguments)
    assert result.exit_code == code and field in result.stderr


def test_prompts_of_a_file_are_sent(edgectl: Any, site: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('Once upon\n\n{"prompt": "There was"}\n{"other": 1}\n')
    assert edgectl("bench", "--requests", "3", "--prompts", str(file)).exit_code == 0
    asked = [request.generation for request in site.requests if hasattr(request, "generation")]
    assert [generation.prompt for generation in asked] == [
        "Once upon",
        "There was",
        '{"other": 1}',
        "Once upon",
    ]


def test_an_interrupt_ends_it_with_what_was_measured(site: Any) -> None:
    program = [
        sys.executable,
        "-m",
        "edgeshard.cli.main",
        "--coordinator",
        site.address,
        "--plaintext",
    ]
    process = subprocess.Popen(
        [*program, "bench", "--requests", "100000", "-o", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    while sum(1 for request in site.requests if hasattr(request, "generation")) < 5:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and json.loads(output)["answered"] >= 3
