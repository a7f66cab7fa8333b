"""edgectl plan --simulate: arrivals drawn or read, the figures as every output, a picture, and
wrong loads by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from typer.testing import CliRunner

from edgeshard.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
TESTBED = ROOT / "deploy/examples/paper-testbed.toml"
SHARED = ("--objective", "throughput", "--concurrency", "8")


def run(*arguments: str, model: str = "llama2-7b") -> Any:
    return CliRunner().invoke(
        app, ["plan", "--cluster", str(TESTBED), "--model", model, *arguments]
    )


def data(*arguments: str) -> Any:
    result = run(*arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_rare_requests_see_the_planned_figures() -> None:
    values = data("--objective", "request", "--simulate", "rate=0.001,requests=5,prompt=32,new=16")
    found = values["simulation"]
    assert found["time_per_token_s"]["median"] == pytest.approx(
        values["time_per_token_s"], rel=0.01
    )
    assert found["ttft_s"]["median"] == pytest.approx(values["ttft_s"], rel=0.01)
    assert [node["node"] for node in found["nodes"]] == [
        stage["node"] for stage in values["stages"]
    ]
    assert found["requests"] == 5 and found["assumed"] and "visits" not in found


def test_a_seed_gives_the_same_requests_and_another_one_others() -> None:
    load = "rate=2,requests=20,prompt=16:32,new=4:16"
    first, again, other = (data(*SHARED, "--simulate", f"{load},seed={seed}") for seed in (1, 1, 2))
    assert first["simulation"] == again["simulation"]
    assert first["simulation"]["ttft_s"] != other["simulation"]["ttft_s"]


def test_the_arrivals_come_at_the_rate_asked_for() -> None:
    found = data("--simulate", "rate=0.01,requests=400,prompt=8,new=1")["simulation"]
    assert found["requests_per_s"] == pytest.approx(0.01, rel=0.15)
    assert found["tokens"] == 400


def test_a_load_that_is_too_much_is_seen_by_the_requests_that_wait() -> None:
    light = data("--simulate", "rate=0.001,requests=20,prompt=8,new=8")["simulation"]
    assert light["waiting"] == 0
    assert "waiting:" not in run("--simulate", "rate=0.001,requests=20,prompt=8,new=8").stdout
    # All come at once, and the test bed's file has eight at a time.
    heavy = data("--simulate", "rate=1000,requests=20,prompt=8,new=8")["simulation"]
    assert heavy["waiting"] == 12
    assert (
        "waiting:    12 of 20 requests for a place when the last one came"
        in run("--simulate", "rate=1000,requests=20,prompt=8,new=8").stdout
    )


def test_lengths_are_drawn_from_their_ranges() -> None:
    found = data("--simulate", "rate=0.001,requests=200,prompt=8,new=1:9")["simulation"]
    assert found["tokens"] == pytest.approx(200 * 5, rel=0.1)


def test_arrivals_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.csv"
    path.write_text("prompt_tokens,arrival_s,new_tokens\n32,0,8\n16,900,4\n")
    found = data("--simulate", f"file={path}")["simulation"]
    assert (found["requests"], found["tokens"]) == (2, 12)
    assert found["span_s"] > 900


def test_spaces_blank_lines_a_byte_order_mark_and_other_columns_do_not_matter(
    tmp_path: Path,
) -> None:
    path = tmp_path / "arrivals.csv"
    path.write_text(
        "\ufeffuser, arrival_s , prompt_tokens,new_tokens\r\nme, 900, 16, 4\r\n\r\nme, 0, 32, 8\r\n"
    )
    found = data("--simulate", f"file={path}")["simulation"]
    assert (found["requests"], found["tokens"]) == (2, 12) and found["span_s"] > 900
    spaced = data("--simulate", " rate = 0.01 , requests = 3 , new = 2 ")["simulation"]
    assert spaced["tokens"] == 6


@pytest.mark.parametrize("objective", ["request", "ttft", "latency"])
@pytest.mark.parametrize("more", [(), ("--head-on-source",)], ids=["", "head-on-source"])
def test_one_request_together_gets_the_planned_figures_with_its_prompt_in_slices(
    objective: str, more: tuple[str, ...]
) -> None:
    """On the test bed, a prompt of 2,000 tokens runs in slices; only the slices' own order is left
    out."""
    values = data(
        "--objective", objective, "--prompt-tokens", "2000", *more, "--simulate", "together"
    )
    found = values["simulation"]
    assert found["ttft_s"]["median"] == pytest.approx(values["ttft_s"], rel=0.01)
    assert found["time_per_token_s"]["median"] == pytest.approx(
        values["time_per_token_s"], rel=0.01
    )
    assert found["end_to_end_s"]["median"] == pytest.approx(values["request_s"], rel=0.01)


def test_arrivals_for_a_head_on_the_source_are_refused_by_name() -> None:
    result = run("--head-on-source", "--simulate", "rate=1")
    assert (
        result.exit_code == 2 and "head_on_source" in result.stderr and "together" in result.stderr
    )


def test_a_batch_that_starts_together_in_each_mode() -> None:
    rates = {
        mode: data(*SHARED, "--simulate", f"together,mode={mode}")["simulation"]["tokens_per_s"]
        for mode in ("sequential", "bubbles", "no-bubbles")
    }
    assert rates["sequential"] < rates["bubbles"] < rates["no-bubbles"]
    planned = data(*SHARED, "--simulate", "together")
    assert planned["simulation"]["tokens_per_s"] == rates["no-bubbles"]
    assert rates["no-bubbles"] == pytest.approx(planned["throughput_tps"], rel=0.02)


def test_yaml_name_and_tables() -> None:
    load = ("--simulate", "rate=1,requests=4,prompt=16,new=4")
    values = data(*load)
    assert yaml.safe_load(run(*load, "-o", "yaml").stdout) == values
    assert run(*load, "-o", "name").stdout.strip() == values["placement"]
    text = run(*load).stdout
    for word in (
        "4 requests, 1 a second (Poisson, seed 0)",
        "time to first token",
        "P99",
        "COMPUTING",
        "assumed:",
    ):
        assert word in text
    assert "-> " not in text and values["stages"][0]["node"] in text


@pytest.mark.parametrize("load", ["rate=1,requests=30,prompt=16,new=8", "together"])
def test_a_picture_has_a_row_for_every_node_and_link_in_the_order_of_the_ring(
    tmp_path: Path, load: str
) -> None:
    picture = tmp_path / "out.svg"
    values = data(*SHARED, "--simulate", load, "--plot", str(picture))
    texts = [
        element.text
        for element in ElementTree.parse(picture).iter()
        if element.tag.endswith("text")
    ]
    nodes = values["simulation"]["nodes"]
    rows = [
        row for node in nodes for row in (node["node"], f"{node['node']} -> {node['receiver']}")
    ]
    assert [text for text in texts if text in rows] == rows


def test_a_comparison_is_drawn_too(tmp_path: Path) -> None:
    picture = tmp_path / "out.svg"
    for objective, label in (
        ("latency", "ms per token"),
        ("request", "ms per request"),
        ("ttft", "ms to first token"),
    ):
        data("--objective", objective, "--compare", "--plot", str(picture))
        text = picture.read_text()
        assert all(
            name in text for name in ("edge-solo", "edgeshard-paper", f"{label} by strategy")
        )


def test_no_plan_is_said_and_exits_1() -> None:
    result = run("--simulate", "rate=1", "--max-nodes", "1", model="llama2-70b")
    assert result.exit_code == 1 and "no plan:" in result.stderr and result.stdout == ""


@pytest.mark.parametrize(
    ("load", "words"),
    [
        ("", "rate=2"),
        ("often", "file=arrivals.csv"),
        ("requests=3", "rate=2"),
        ("rate=often", "rate=often"),
        ("rate=0", "above 0"),
        ("rate=inf", "above 0"),
        ("rate=1,rate=2", "given twice"),
        ("rate=1,tokens=2", "use one of rate, requests, prompt, new, seed"),
        ("rate=1,requests=0", "from 1 to 10000"),
        ("rate=1,requests=10001", "from 1 to 10000"),
        ("rate=1,seed=-1", "seed=-1"),
        ("rate=1,prompt=0", "prompt=0"),
        ("rate=1,new=9:3", "new=9:3"),
        ("rate=1e-300", "rate=1e-300"),
        ("rate=1,prompt=4000", "prompt=4000 and new=96: amount to 4096 tokens; the plan holds 128"),
        ("rate=1,prompt=1:100,new=1:40", "prompt=1 to 100 and new=1 to 40"),
        ("together,rate=1", "use one of mode"),
        ("together,mode=quick", "no-bubbles"),
        ("file=none.csv", "none.csv"),
        ("file=none.csv,rate=1", "use one of file"),
    ],
)
def test_wrong_loads_exit_2_and_name_the_key(load: str, words: str) -> None:
    result = run("--simulate", load)
    assert result.exit_code == 2, result.output
    assert words in result.stderr and result.stdout == ""
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1


def test_more_tokens_than_are_simulated_are_refused() -> None:
    result = run("--new-tokens", "500", "--simulate", "rate=1,requests=10000,new=500")
    assert result.exit_code == 2 and "at most 2000000 are simulated" in result.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "arrival_s,prompt_tokens,new_tokens"),
        (
            "arrival_s,prompt_tokens\n0,1\n",
            "arrival_s,prompt_tokens,new_tokens; new_tokens is missing",
        ),
        ("arrival_s;prompt_tokens;new_tokens\n0;1;1\n", "arrival_s is missing"),
        (
            "arrival_s,prompt_tokens,new_tokens\n0,1,1\n\n1,100,40\n",
            "line 4: it has 100 tokens in and 40 out",
        ),
        (
            "arrival_s,prompt_tokens,new_tokens\n0," + "1" * 200_000 + ",1\n",
            "line 2: field larger than",
        ),
        ("arrival_s,prompt_tokens,new_tokens\n", "holds 0 requests"),
        ("arrival_s,prompt_tokens,new_tokens\n0,1,1\n-1,1,1\n", "line 3"),
        ("arrival_s,prompt_tokens,new_tokens\n0,1,one\n", "line 2"),
        ("arrival_s,prompt_tokens,new_tokens\nnan,1,1\n", "line 2"),
        ("arrival_s,prompt_tokens,new_tokens\n0,1\n", "line 2"),
        ("arrival_s,prompt_tokens,new_tokens\n0,1.5,1\n", "line 2"),
    ],
)
def test_a_wrong_file_of_arrivals_exits_2_and_names_the_line(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "arrivals.csv"
    path.write_text(text)
    result = run("--simulate", f"file={path}")
    assert result.exit_code == 2 and words in result.stderr, result.output


def test_it_is_one_view_of_several() -> None:
    assert "--simulate" in run("--simulate", "together", "--compare").stderr
    unwritable = run("--simulate", "together", "--plot", str(ROOT / "no-such-folder" / "out.svg"))
    assert unwritable.exit_code == 2 and "--plot" in unwritable.stderr


def test_a_plan_at_saturation_plays_nearly_its_steady_rate() -> None:
    played = data(*SHARED, "--simulate", "saturated")
    assert played["simulation"]["tokens_per_s"] == pytest.approx(played["throughput_tps"], rel=0.1)
    assert "another whenever one ends" in run(*SHARED, "--simulate", "saturated").stdout
