"""edgectl profile: the progress of each node, its outcome, and the exit code."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from typing import Any

import pytest
import yaml
from rich.console import Console

from edgeshard.cli.commands.deployments.profile import progress_on
from edgeshard.client import NodeProgress
from edgeshard.domain.errors import UnavailableError
from edgeshard.domain.ids import NodeName
from edgeshard.proto.v1 import admin_pb2, common_pb2

pytestmark = pytest.mark.timing


@pytest.fixture
def measured(site: Any) -> Any:
    """Both nodes have been measured, and say so."""
    site.measured(a=1e-3, b=5e-4)
    site.progress = [
        *(site.told("a", done, f"block: prefill {done}") for done in range(20)),
        site.told("b", 1, "embedding: 64 tokens"),
        site.told("a", 40, "", finished=True),
        site.told("b", 40, "", finished=True),
    ]
    return site


def test_progress_goes_to_stderr_and_figures_to_stdout(edgectl: Any, measured: Any) -> None:
    result = edgectl("profile", "--model", "fairy-tales")
    assert result.exit_code == 0, result.output
    said = result.stderr.splitlines()
    assert said[0] == "a: 0 of 40, block: prefill 0" and {"a: measured", "b: measured"} < set(said)
    assert sum(line.startswith("a: ") for line in said) == 6, (
        "a line for each tenth, not for each figure"
    )
    nodes, links = result.stdout.split("\n\n")
    assert nodes.splitlines()[0].split() == [
        "NODE",
        "DECODE",
        "PREFILL",
        "STEP",
        "SPREAD",
        "RESULT",
    ]
    assert nodes.splitlines()[2].split() == [
        "b", "531", "us/layer", "256", "tokens", "2.50", "ms/layer", "100", "us", "2.0%",
        "measured", "1", "h", "ago",
    ]  # fmt: skip
    assert [line.split()[:2] for line in links.splitlines()] == [
        ["FROM", "TO"],
        ["a", "b"],
        ["b", "a"],
    ]
    assert "100 Mb/s" in links and "2.00 ms" in links and "2 min ago" in links


def test_options_reach_the_server(edgectl: Any, measured: Any) -> None:
    edgectl(
        "profile",
        "a",
        "b",
        "--model",
        "fairy-tales",
        "--quick",
        "--again",
        "--dtype",
        "float32",
        "--quantise",
        "int4",
        "--head-quantisation",
        "none",
    )
    (request,) = measured.sent(admin_pb2.ProfileRequest)
    assert (request.model, list(request.nodes), request.quick, request.again) == (
        "fairy-tales",
        ["a", "b"],
        True,
        True,
    )
    assert request.dtype == common_pb2.DATA_TYPE_FLOAT32 and request.operation_id
    assert request.quantisation == "int4-head-none"
    assert edgectl("profile", "--model", "fairy-tales", "--quantise", "int3").exit_code == 2


def test_a_node_that_fails_is_shown_and_makes_it_exit_1_while_others_finish(
    edgectl: Any, measured: Any
) -> None:
    failure = UnavailableError(
        "node b went away; start its agent and profile it again", field="b", reason="NODE_AWAY"
    )
    measured.progress = [
        measured.told("b", 3, "", finished=True, failure=failure),
        measured.told("a", 40, "", finished=True),
    ]
    result = edgectl("profile", "--model", "fairy-tales", "-o", "json")
    assert result.exit_code == 1
    assert "b: failed: node b went away" in result.stderr and "a: measured" in result.stderr
    a, b = json.loads(result.stdout)
    assert (a["node"], a["failure"], a["profile"]["fingerprint"]) == ("a", None, "f" * 16)
    assert b["profile"] is None, "what was known of it before is no result"
    assert a["links"][0] | {"from": "a", "to": "b", "bandwidth_bps": 1e8} == a["links"][0]
    assert b["failure"] == {
        "reason": "NODE_AWAY", "field": "b", "message": "node b went away; start its agent and "
                                                        "profile it again",
    }  # fmt: skip
    table, below, _ = edgectl("profile", "--model", "fairy-tales").stdout.split("\n\n")
    assert [line.split()[0] for line in table.splitlines()] == ["NODE", "a", "b"]
    assert (
        table.splitlines()[2].rstrip().endswith("failed: see below")
        and max(map(len, table.splitlines())) <= 80
    )
    assert below == "b: failed: node b went away; start its agent and profile it again"


def test_a_link_that_was_not_measured_is_named_and_makes_it_exit_1(
    edgectl: Any, measured: Any
) -> None:
    measured.progress = [measured.told("a", 40, "", finished=True, missed=("b",))]
    result = edgectl("profile", "a")
    assert result.exit_code == 1
    assert "not measured: a -> b; see the log of a" in result.stderr.splitlines()
    assert "0 links, none to b" in result.stdout and "BANDWIDTH" not in result.stdout, (
        "what was known is no result"
    )
    (row,) = json.loads(edgectl("profile", "a", "-o", "json").stdout)
    assert (row["failure"], row["links"], row["missed"]) == (None, [], ["b"])


def test_every_output_says_the_same(edgectl: Any, measured: Any) -> None:
    as_json = json.loads(edgectl("profile", "--model", "fairy-tales", "-o", "json").stdout)
    assert as_json == yaml.safe_load(
        edgectl("profile", "--model", "fairy-tales", "-o", "yaml").stdout
    )
    assert edgectl("profile", "--model", "fairy-tales", "-o", "name").stdout == "a\nb\n"
    assert "SAMPLES" in edgectl("profile", "--model", "fairy-tales", "-o", "wide").stdout


def test_without_a_model_only_links_are_measured(edgectl: Any, measured: Any) -> None:
    result = edgectl("profile", "a")
    assert result.exit_code == 0 and measured.sent(admin_pb2.ProfileRequest)[0].model == ""
    assert "DECODE" not in result.stdout and "BANDWIDTH" in result.stdout


@pytest.mark.parametrize(
    "option",
    [
        ["--quick"],
        ["--again"],
        ["--dtype", "float32"],
        ["--quantise", "int8"],
        ["--head-quantisation", "int8"],
    ],
)
def test_what_is_about_a_model_needs_one(edgectl: Any, site: Any, option: list[str]) -> None:
    result = edgectl("profile", *option)
    assert (result.exit_code, site.requests) == (2, []) and f"{option[0]} is about" in result.stderr


def test_ctrl_c_leaves_and_says_that_measuring_goes_on(measured: Any) -> None:
    measured.progress = [measured.told("a", 1, "block: prefill 1"), measured.Hold()]
    arguments = ["--coordinator", measured.address, "profile", "--model", "fairy-tales"]
    # If the tests run in the background, their parent had them ignore SIGINT. Python code between
    # fork and exec could hang: the site's threads may hold a lock when this process forks.
    listening = [
        "env",
        "--default-signal=INT",
        sys.executable,
        "-m",
        "edgeshard.cli.main",
        *arguments,
    ]
    with subprocess.Popen(listening, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        try:
            assert process.stderr.readline().startswith(b"a: 1 of 40")
            process.send_signal(signal.SIGINT)
            assert measured.cancelled.wait(60)
            assert process.wait(60) == 130
            said = process.stderr.read()
            assert b"the nodes continue to measure" in said and b"Traceback" not in said
            assert b"restart its agent" in said
        finally:
            process.kill()


def test_a_terminal_shows_a_bar_for_each_node() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system=None, width=120)
    with progress_on(console) as reporter:
        reporter.show(NodeProgress(NodeName("a"), 10, 40, "block: prefill 64"))
        reporter.show(NodeProgress(NodeName("b"), 7, 40, "waiting [in line]\x1b[2J"))
        reporter.show(NodeProgress(NodeName("a"), 40, 40, "", finished=True))
    drawn = screen.getvalue()
    assert "40/40" in drawn and "measured" in drawn
    assert "7/40" in drawn
    assert r"waiting [in line]\x1b[2J" in drawn, (
        "neither markup nor escapes of an agent's words count"
    )


def test_a_node_that_was_busy_is_marked(edgectl: Any, measured: Any) -> None:
    measured.profiles[1].profile.others_share = 0.4
    result = edgectl("profile", "--model", "fairy-tales")
    assert "busy while measured (others took 40% of its cores)" in " ".join(result.stdout.split())
    rows = json.loads(edgectl("profile", "--model", "fairy-tales", "-o", "json").stdout)
    doubts = [row["profile"]["doubts"] for row in rows]
    assert doubts == [[], ["busy while measured (others took 40% of its cores)"]]
    described = edgectl("describe", "node", "b").stdout
    assert "  doubtful: busy while measured (others took 40% of its cores)\n" in described
    assert "measured again automatically" in described
    assert "doubtful" not in edgectl("describe", "node", "a").stdout
