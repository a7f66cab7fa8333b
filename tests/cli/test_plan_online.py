"""edgectl plan without --cluster: the running site, by its nodes' measurements of themselves and of
their links."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from typer.testing import CliRunner

from edgeshard.architectures import parse_config
from edgeshard.architectures.units import UnitForm, layer_unit
from edgeshard.cli.main import app
from edgeshard.domain.deployments.guesses import GuessCounts
from edgeshard.domain.deployments.traffic import NO_TRAFFIC
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.packed_units import PackedOn
from edgeshard.planning.search.locality import LOCALITY_MARGIN
from edgeshard.proto.v1 import admin_pb2


@pytest.fixture
def measured(site: Any) -> Any:
    """Node b takes half of node a's time."""
    site.measured(a=1e-3, b=5e-4)
    return site


@pytest.fixture
def plan(edgectl: Any) -> Any:
    def invoke(*arguments: str, source: str = "a", model: str = "fairy-tales") -> Any:
        return edgectl("plan", "--model", model, "--source", source, *arguments)

    return invoke


@pytest.fixture
def data(plan: Any) -> Any:
    def invoke(*arguments: str) -> Any:
        result = plan(*arguments, "-o", "json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return invoke


def test_a_plan_of_the_site_has_figures_from_its_measurements(
    measured: Any, plan: Any, data: Any
) -> None:
    values = data()
    assert values["feasible"] and values["placement"] == "a=0:1,b=1:12", (
        "the fast node takes all but what the source must"
    )
    assert values["measured"] == ["a", "b"] and values["figures"] == {}
    # 1 block at 1 ms and 11 at half of it, twice 2 ms of delay, and little else.
    assert 0.0105 < values["time_per_token_s"] < 0.0125
    text = plan().stdout
    assert (
        "figures:             measured on a, b" in text
        and "bottleneck:" in text
        and "RUNNER-UP" in text
    )
    assert plan("-o", "name").stdout == "a=0:1,b=1:12\n"
    assert [request.model for request in measured.sent(admin_pb2.GetSiteRequest)] == [
        "fairy-tales"
    ] * 3


def test_the_views_of_a_cluster_file_are_there(
    measured: Any, plan: Any, data: Any, tmp_path: Any
) -> None:
    rows = data("--compare")
    assert [row["strategy"] for row in rows if row["feasible"]][-1] == "edgeshard" and len(
        rows
    ) == 9
    from_source = [row for row in rows if row["placement"].startswith("a=")]
    assert min(row["time_per_token_s"] for row in from_source) == rows[-1]["time_per_token_s"]
    # Only node b is faster than any pipeline that begins on a.
    assert {row["strategy"]: row["placement"] for row in rows}["replicas"] == "b=0:12 x1"
    assert (
        "advice:              the model whole on b, where requests then come in, would give "
        in plan().stdout
    )
    explained = plan("--explain").stdout
    assert "What binds it: compute of b" in explained and "data sheets" not in explained
    points = data("--sweep", "bandwidth=1:100", "--plot", str(tmp_path / "sweep.svg"))
    times = [point["time_per_token_s"] for point in points if point["strategy"] == "edgeshard"]
    assert times[0] > times[-1] and all(
        later <= sooner * (1 + 1e-9) for sooner, later in pairwise(times)
    )
    assert (tmp_path / "sweep.svg").exists()
    assert data("--max-nodes", "1")["placement"] == "a=0:12"
    assert data("--reserve", "b=4GiB")["time_per_token_s"] > data()["time_per_token_s"]


def test_a_plan_says_what_guesses_are_worth(measured: Any, plan: Any, data: Any) -> None:
    """By the model's requests of any deployment. If it would not guess, it reports why; other nodes
    are not the site's.
    """

    def said(*arguments: str) -> str:
        (line,) = [
            line for line in plan(*arguments).stdout.splitlines() if line.startswith("speculation:")
        ]
        return str(line)

    assert (
        "a node, the model or its dtype does not guarantee equal bits (bits)" in said()
        and data()["speculation"] == "bits"
    )
    measured.nodes = [
        replace(node, facts=replace(node.facts, takes_guesses=True)) for node in measured.nodes
    ]
    half = data("--kv-dtype", "float16")
    assert half["speculation"] == "bits" and half["guesses"] is None
    assert "none were seen yet" in said() and (data()["speculation"], data()["guesses"]) == (
        "apart",
        None,
    )
    counts = GuessCounts.of({(0, 0): 10, (4, 4): 20, (7, 0): 5})
    measured.traffic = NO_TRAFFIC.after(100, 200, guesses=counts)
    found = data("--new-tokens", "50", "--prompt-tokens", "9")["guesses"]
    assert found["right"] == pytest.approx(80 / 115) and 1.0 < found["times"] <= 115 / 35
    assert f"{found['times']:.1f} times the tokens/s if 70 % are accepted" in said()
    promised = data("--max-time-per-token", "9")
    assert promised["speculation"] == "promise" and promised["guesses"] is None
    assert (
        "guesses" not in data("--what-if", "+1 h200")
        and "speculation" not in plan("--what-if", "+1 h200").stdout
    )


def test_what_if_there_were_another_node(measured: Any, plan: Any, data: Any) -> None:
    more = data("--what-if", "+1 h200")
    assert "h200-new-1=1:12" in more["placement"] and more["measured"] == ["a"]
    assert "the median of the site's links: 100 Mb/s, 2.0 ms" in plan("--what-if", "+1 h200").stderr
    assert more["before"]["placement"] == "a=0:1,b=1:12"
    # A node like b is as quick as b was measured to be, and no quicker.
    assert (
        data("--what-if", "-b", "--what-if", "+1 a")["time_per_token_s"]
        == data("--exclude", "b")["time_per_token_s"]
    )
    assert data("--what-if", "-b")["placement"] == "a=0:12"


def test_what_nodes_hold_decides_where_it_costs_little_and_the_plan_says_so(
    measured: Any, plan: Any, data: Any
) -> None:
    assert data()["locality"] is None and "packed:" not in plan().stdout
    form = UnitForm(Digest("d" * 64), DType.BFLOAT16, None, parse_config(measured.config))
    ids = (int(form.id(layer_unit(layer)), 16) for layer in (0, 1))
    measured.packed_on = [PackedOn(measured.nodes[0].node_id, tuple(ids))]
    near = data("--objective", "latency")
    assert near["placement"] == "a=0:2,b=2:12" and near["locality"]["best"] == "a=0:1,b=1:12"
    assert 0 < near["locality"]["slower"] <= LOCALITY_MARGIN
    words = "a holds layers 0:2 packed: chosen over a=0:1,b=1:12, "
    assert f"packed:              {words}" in plan("--objective", "latency").stdout
    assert words in plan("--objective", "latency", "--explain").stdout.replace("\n", " ").replace(
        "A holds", "a holds"
    )
    assert (
        data("--dtype", "bfloat16", "--what-if", "+1 h200")["before"]["placement"] == "a=0:1,b=1:12"
    ), "what would be"


def test_a_node_nobody_measured_is_named_with_the_command_that_measures_it(
    site: Any, plan: Any, data: Any
) -> None:
    site.measured(a=1e-3)
    result = plan("-o", "name")
    assert (result.exit_code, result.stdout) == (0, "a=0:12\n")
    command = "edgectl profile --model fairy-tales --dtype bfloat16 b"
    assert f"note: b: left out, not measured for fairy-tales; run `{command}`" in result.stderr
    assert (
        data("--exclude", "b")["placement"] == "a=0:12"
        and "left out" not in plan("--exclude", "b").stderr
    )
    refused = plan(source="b")
    assert (
        refused.exit_code == 1
        and "not measured for fairy-tales in bfloat16: b; run" in refused.stderr
    )
    other = plan("--dtype", "float32")
    assert other.exit_code == 1 and "--dtype float32" in other.stderr


def test_without_a_source_prompts_come_in_at_the_largest_measured_node(
    site: Any, edgectl: Any
) -> None:
    arguments = ("plan", "--model", "fairy-tales", "-o", "name")
    site.measured(a=1e-3, b=5e-4)
    small, large = (
        replace(node, free_bytes=size)
        for node, size in zip(site.nodes, (1 << 30, 2 << 30), strict=True)
    )
    site.nodes = [small, large]
    assert edgectl(*arguments).stdout == "b=0:12\n"
    assert edgectl(*arguments, "--exclude", "b").stdout == "a=0:12\n"
    site.measured(a=1e-3)
    site.nodes = [small, large]
    result = edgectl(*arguments)
    assert result.stdout == "a=0:12\n" and "b: left out" in result.stderr
    site.nodes = [replace(node, connected=False) for node in site.nodes]
    away = edgectl(*arguments)
    assert away.exit_code == 5 and "no node of the site is connected" in away.stderr


def test_what_is_said_of_a_node_that_is_left_out_is_no_mistake(
    measured: Any, plan: Any, data: Any
) -> None:
    alone = data("--exclude", "b")
    assert data("--exclude", "b", "--reserve", "b=1GiB", "--max-share", "b=0.5") == alone
    measured.nodes[1] = replace(measured.nodes[1], connected=False)
    assert data("--reserve", "b=1GiB") == alone
    for option in ("--reserve", "--max-share"):
        result = plan(option, "z=1")
        assert result.exit_code == 2 and "there is no node 'z'; nodes are a, b" in result.stderr


def test_a_starting_node_is_left_out_and_a_note_says_so(
    measured: Any, plan: Any, data: Any
) -> None:
    alone = data("--exclude", "b")["placement"]
    measured.nodes[1] = replace(measured.nodes[1], starting=True)
    assert data()["placement"] == alone
    assert "note: b: left out, still starting; try again in a moment" in plan().stderr
    assert "still starting" not in plan("--exclude", "b").stderr


def test_quantised_nodes_are_planned_by_profiles_of_that(site: Any, plan: Any, data: Any) -> None:
    site.measured(a=1e-3, b=5e-4, quantisation=Quantisation.INT8)
    assert data("--quantise", "int8")["quantisation"] == "int8"
    assert "fairy-tales, int8 with bfloat16" in plan("--quantise", "int8").stdout
    for other in ((), ("--quantise", "int4")):
        assert plan(*other).exit_code == 1
    assert "--dtype bfloat16 --quantise int4`" in plan("--quantise", "int4").stderr
    assert plan("--quantise", "int3").exit_code == 2
    for options in (
        ("--quantise", "int8", "--head-quantisation", "int3"),
        ("--head-quantisation", "int8"),
    ):
        refused = plan(*options)
        assert refused.exit_code == 2 and "--head-quantisation" in refused.stderr


def test_another_head_has_a_profile_of_its_own(site: Any, plan: Any, data: Any) -> None:
    site.measured(a=1e-3, b=5e-4, quantisation=Quantisation.INT4_HEAD_WHOLE)
    whole = ("--quantise", "int4", "--head-quantisation", "none")
    assert data(*whole)["quantisation"] == "int4-head-none"
    for other in (("--quantise", "int4"), ("--quantise", "int4", "--head-quantisation", "int4")):
        assert plan(*other).exit_code == 1
    assert (
        "--quantise int4 --head-quantisation int4`"
        in plan("--quantise", "int4", "--head-quantisation", "int4").stderr
    )


def test_a_known_device_is_planned_from_its_data_sheet_and_a_note_says_so(
    site: Any, plan: Any
) -> None:
    site.measured(a=1e-3)
    known = replace(site.nodes[1], facts=replace(site.nodes[1].facts, model="NVIDIA H200"))
    site.nodes = [site.nodes[0], known]
    result = plan("-o", "json")
    assert result.exit_code == 0 and json.loads(result.stdout)["placement"] == "a=0:1,b=1:12"
    assert (
        "note: b: not measured" in result.stderr
        and "`edgectl profile --model fairy-tales --dtype bfloat16 b`" in result.stderr
    )


def test_a_link_nobody_measured_is_not_planned_with_and_a_note_says_so(
    measured: Any, plan: Any
) -> None:
    measured.links = [link for link in measured.links if link.sender_id != "id-b"]
    result = plan("-o", "name")
    assert (result.exit_code, result.stdout) == (0, "a=0:12\n")
    assert (
        "no link was measured for b -> a" in result.stderr
        and "`edgectl profile b`" in result.stderr
    )
    # Neither a faster link nor another node makes that one.
    swept = plan("--sweep", "bandwidth=1:1000", "-o", "json")
    assert {
        point["placement"] for point in json.loads(swept.stdout) if point["strategy"] == "edgeshard"
    } == {"a=0:12"}
    assert "b=" not in plan("--what-if", "+1 h200", "--exclude", "b", "-o", "name").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--source", "z"], 3, "source"),
        (["--source", "a", "--exclude", "z"], 2, "exclude: there is no node 'z'; nodes are a, b"),
        (["--source", "a", "--exclude", "a"], 2, "exclude names the source a"),
        (["--source", "a", "--head-on-source"], 2, "--head-on-source"),
        (["--source", "a", "--objective", "speed"], 2, "--objective"),
        (["--source", "a", "--prompt-tokens", "4096"], 2, "prompt_tokens"),
        (["--source", "a", "--what-if", "+1 orin-mega"], 2, "what_if"),
    ],
)
def test_wrong_options_name_the_field(
    measured: Any, edgectl: Any, arguments: list[str], code: int, words: str
) -> None:
    result = edgectl("plan", "--model", "fairy-tales", *arguments)
    assert (result.exit_code, result.stdout) == (code, ""), result.stderr
    assert words in result.stderr


def test_a_source_that_is_away_and_an_unknown_model(site: Any, plan: Any) -> None:
    away = plan(source="b")
    assert away.exit_code == 5 and "node b is not connected" in away.stderr
    assert plan(model="zebra").exit_code == 3


def test_without_a_coordinator_the_other_way_is_named() -> None:
    result = CliRunner().invoke(
        app, ["--coordinator", "127.0.0.1:1", "plan", "--model", "m", "--source", "a"]
    )
    assert result.exit_code == 5 and "--cluster FILE" in result.stderr


def test_a_profile_of_a_busy_node_is_named_in_every_view_of_a_plan(
    measured: Any, plan: Any, data: Any
) -> None:
    assert data()["doubtful"] == {} and "doubtful" not in plan().stderr
    measured.profiles[1].profile.others_share = 0.4
    words = "busy while measured (others took 40% of its cores)"
    assert data()["doubtful"] == {"b": [words]}
    assert f"Doubtful figures of b: {words}." in plan("--explain").stdout
    again = (
        "run `edgectl profile --model fairy-tales --dtype bfloat16 b --again` when these nodes "
        "are idle"
    )
    for view in (
        (),
        ("--explain",),
        ("--compare",),
        ("--sweep", "bandwidth=1:10"),
        ("--simulate", "together"),
    ):
        assert f"note: doubtful figures of b: {words}; {again}" in plan(*view).stderr
    assert data("--exclude", "b")["doubtful"] == {} == data("--what-if", "-b")["doubtful"]


def test_lengths_nobody_gave_are_those_of_the_models_traffic(
    measured: Any, plan: Any, data: Any
) -> None:
    def note(*arguments: str) -> str:
        return " ".join(plan(*arguments).stderr.split())

    assert (
        "--prompt-tokens and --new-tokens not given: planned for 128 and 128, the default" in note()
    )
    assert "--prompt-tokens not given: planned for 128, the default" in note("--new-tokens", "7")
    measured.traffic = NO_TRAFFIC.after(300, 20).after(301, 21)
    assert (
        "planned for 300 and 20, as in the latest of 2 requests that deployments of fairy-tales "
        "served" in note()
    )
    assert (
        " 300 tokens in, 20 out" in plan().stdout
        and " 64 tokens in, 20 out" in plan("--prompt-tokens", "64").stdout
    )
    assert not note("--prompt-tokens", "64", "--new-tokens", "8")
