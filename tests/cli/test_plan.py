"""edgectl plan, offline: it queries no site, loads nothing heavy, and names wrong input with exit
code 2."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from typer.testing import CliRunner

from edgeshard.cli.main import app
from edgeshard.cpsat import solver_process

ROOT = Path(__file__).resolve().parents[2]
TESTBED = ROOT / "deploy/examples/paper-testbed.toml"
ROW_FIELDS = (
    "strategy",
    "feasible",
    "time_per_token_s",
    "throughput_tps",
    "ttft_s",
    "request_s",
    "joules_per_token",
    "nodes",
    "placement",
    "gap",
    "reason",
)


def run(*arguments: str, cluster: Path | str = TESTBED, model: str = "llama2-7b") -> Any:
    """For one request's tokens, unless another objective is given: the test bed's file has several
    requests."""
    objective = () if "--objective" in arguments else ("--objective", "latency")
    return CliRunner().invoke(
        app, ["plan", "--cluster", str(cluster), "--model", model, *objective, *arguments]
    )


def data(*arguments: str, **more: Any) -> Any:
    result = run(*arguments, "-o", "json", **more)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_compare_prints_a_row_for_each_strategy_with_exactly_its_fields() -> None:
    rows = data("--compare")
    assert [row["strategy"] for row in rows] == [
        "edge-solo",
        "cloud-edge-even",
        "cloud-edge-opt",
        "edgeshard-even",
        "edgeshard-paper",
        "memory-proportional",
        "whole-fastest",
        "replicas",
        "edgeshard",
    ]
    assert all(tuple(row) == ROW_FIELDS for row in rows)
    assert all(row["feasible"] for row in rows)
    assert not {
        row["strategy"] for row in data("--compare", model="llama2-70b") if row["feasible"]
    } & {
        "edge-solo",
        "cloud-edge-even",
        "cloud-edge-opt",
    }


def two_nodes(tmp_path: Path, rate: str = "1e9") -> Path:
    path = tmp_path / "two.toml"
    devices = "".join(f'[[device]]\nname = "{name}"\nkind = "agx-orin"\n' for name in "ab")
    path.write_text(
        f'source = "a"\n{devices}[[link]]\nbandwidth_bps = {rate}\n[model]\ndtype = "float16"\n'
        "[workload]\nnew_tokens = 128\n"
    )
    return path


def test_compare_says_whether_to_split_at_all(tmp_path: Path) -> None:
    path = two_nodes(tmp_path)
    loaded = ("--objective", "throughput", "--concurrency", "8", "--compare")
    wide = run(*loaded, "-o", "wide", cluster=path)
    assert "a=0:32 x4 | b=0:32 x4" in wide.stdout and wide.stderr == ""
    words = wide.stdout.splitlines()[-1]
    assert words.startswith(
        "Do not split it: the model whole on each of 2 nodes (a=0:32 x4 | b=0:32 x4) gives "
    )
    assert "Splitting would be better with up to 1 requests at once." in words
    assert "Splitting would be better if no node had more than " in words
    listed = run(*loaded, "-o", "json", cluster=path)
    assert len(json.loads(listed.stdout)) == 9 and listed.stderr == f"note: {words}\n"
    named = run(*loaded, "-o", "name", cluster=path)
    assert named.stdout.split()[-2:] == ["replicas", "edgeshard"] and named.stderr == ""
    whole = run("--compare", cluster=path, model="llama2-70b").stdout
    assert "There is no plan: no node can hold the whole model: a (" in whole


def test_the_documented_answer_is_what_the_documented_command_says(tmp_path: Path) -> None:
    section = (ROOT / "docs/planning/split.md").read_text()
    path = tmp_path / "two.toml"
    path.write_text(section.partition("<<'END'\n")[2].partition("END\n")[0])
    command = (
        section.partition("edgectl plan --cluster two.toml ")[2]
        .partition("```")[0]
        .replace("\\", "")
        .split()
    )
    result = CliRunner().invoke(app, ["plan", "--cluster", str(path), *command])
    shown = section.partition("```text\n")[2].partition("```")[0].splitlines()
    printed = [line.rstrip() for line in result.stdout.splitlines()]
    assert len(shown) == 6 and shown[-1] == printed[-1]
    for row in shown[:4]:
        assert any(line.startswith(row) for line in printed), row


def test_the_documented_first_plan_is_what_its_command_says(tmp_path: Path) -> None:
    section = (
        (ROOT / "docs/planning.md")
        .read_text()
        .partition("## A first plan")[2]
        .partition("\n## ")[0]
    )
    path = tmp_path / "home.toml"
    path.write_text(section.partition("<<'END'\n")[2].partition("END\n")[0])
    command = section.partition("edgectl plan --cluster home.toml ")[2].partition("```")[0].split()
    shown = section.partition("```text\n")[2].partition("```")[0].splitlines()
    result = CliRunner().invoke(app, ["plan", "--cluster", str(path), *command])
    printed = [line.rstrip() for line in result.stdout.splitlines()]
    assert len(shown) > 10 and shown == printed[2:]


def test_the_reference_has_every_option() -> None:
    section = (
        (ROOT / "docs/planning-reference.md")
        .read_text()
        .partition("## Options")[2]
        .partition("\n## ")[0]
    )
    options = re.findall(r"--[a-z-]+", run("--help").stdout)
    spelled = {
        option.replace("quantize", "quantise").replace("quantization", "quantisation")
        for option in options
    }
    assert spelled - {"--help", "--output"} <= set(re.findall(r"`(--[a-z-]+)", section))


def test_a_plan_says_when_the_whole_model_on_each_node_would_be_clearly_better(
    tmp_path: Path,
) -> None:
    loaded = ("--objective", "throughput", "--concurrency", "16")
    slow = two_nodes(tmp_path, "1e6")
    values = data(*loaded, cluster=slow)
    assert values["advice"].startswith(
        "the model whole on each of 2 nodes (a=0:32 x8 | b=0:32 x8) would give "
    )
    assert f"advice:              {values['advice']}\n" in run(*loaded, cluster=slow).stdout
    assert f"\nT{values['advice'][1:]}.\n" in run(*loaded, "--explain", cluster=slow).stdout
    fast = two_nodes(tmp_path, "1e10")
    assert data(*loaded, cluster=fast)["advice"] is None
    assert "advice" not in run(*loaded, cluster=fast).stdout


def test_a_plan_as_json_yaml_table_and_name() -> None:
    values = data()
    assert values["feasible"] and values["placement"] == ",".join(
        f"{s['node']}={s['layers']}" for s in values["stages"]
    )
    assert values["bottleneck"] and values["gap"] == 0 and len(values["alternatives"]) == 2
    assert "datasheet" in values["figures"]["rtx-3090"]
    assert yaml.safe_load(run("-o", "yaml").stdout) == values
    assert run("-o", "name").stdout.strip() == values["placement"]
    table = run().stdout
    for word in (
        "time per token",
        "throughput",
        "bottleneck",
        "agx-1",
        "WEIGHTS",
        "KV CACHE",
        "RUNNER-UP",
    ):
        assert word in table
    assert "WORKSPACE" not in table and "WORKSPACE" in run("-o", "wide").stdout


def test_explain_says_why() -> None:
    text = run("--explain").stdout
    assert (
        "around the slow link agx-1 -> cloud" in text
        and "Runner-up 1" in text
        and "the search is exact" in text
    )
    assert data("--explain")["explanation"][0].startswith("llama2-7b in float32")


def test_options_reach_the_planner() -> None:
    assert "cloud=" not in data("--exclude", "cloud")["placement"]
    assert "cloud=" not in data("--reserve", "cloud=21.5GB")["placement"]
    assert data("--max-nodes", "1")["placement"] == "agx-1=0:32"
    assert data("--source", "nx-1")["placement"].startswith("nx-1=0:")
    assert data("--dtype", "bfloat16")["time_per_token_s"] < data()["time_per_token_s"]
    share = data("--max-share", "cloud=0.25")
    assert all(eval_layers(s["layers"]) <= 8 for s in share["stages"] if s["node"] == "cloud")
    many = data("--objective", "auto", "--concurrency", "4")
    assert 1 < many["batch"] * many["micro_batches"] <= 4
    assert data("--objective", "auto", "--concurrency", "4", "--batch", "1")["batch"] == 1
    assert data("--new-tokens", "8", "--prompt-tokens", "4")["ttft_s"] < data()["ttft_s"]
    assert data("--head-on-source")["time_per_token_s"] > data()["time_per_token_s"]


def test_energy_is_printed_where_the_power_of_the_nodes_is_known(tmp_path: Path) -> None:
    values = data("--objective", "energy", "--concurrency", "4")
    assert values["gap_objective"] == "energy per token" and values["joules_per_token"] > 0
    assert values["stages"][0]["power"] == {"idle_w": 15, "busy_w": 40, "measured": False}
    assert values["joules_per_token"] < data("--concurrency", "4")["joules_per_token"]
    table = run("--objective", "energy", "--max-time-per-token", "1").output
    assert "J per token, of these nodes only" in table and "in energy per token" in table
    assert {row["joules_per_token"] is None for row in data("--compare")} == {False}

    unknown = tmp_path / "site.toml"
    nodes = "".join(
        f'[[device]]\nname = "{name}"\nkind = "{kind}"\n'
        for name, kind in (("pi", "raspberry-pi-5"), ("nx", "orin-nx"))
    )
    unknown.write_text(
        f'source = "pi"\n{nodes}[link]\nbandwidth_bps = 1e9\n[model]\ndtype = "float16"\n'
    )
    shown = run("--compare", cluster=unknown)
    assert shown.exit_code == 0 and "no J/TOKEN with pi, whose power is unknown" in shown.stderr
    assert "J per token" not in run(cluster=unknown).output
    refused = run("--objective", "energy", cluster=unknown)
    assert refused.exit_code == 2 and "the power of pi is unknown" in refused.stderr


def eval_layers(text: str) -> int:
    first, _, end = text.partition(":")
    return int(end) - int(first)


def test_what_if() -> None:
    values = data("--what-if", "+1 h100")
    assert "h100-new-1" in values["placement"]
    assert values["before"]["placement"] == data()["placement"]
    assert values["time_per_token_s"] < values["before"]["time_per_token_s"]
    assert data("--what-if", "-cloud")["placement"] == data("--exclude", "cloud")["placement"]
    text = run("--what-if", "+1 h100").stdout
    assert "before:" in text


def test_what_if_makes_an_infeasible_one_feasible() -> None:
    arguments = [word for n in range(4, 13) for word in ("--exclude", f"agx-{n}")]
    short = run(*arguments, "-o", "json", model="llama2-70b")
    assert short.exit_code == 1 and "GiB short" in json.loads(short.stdout)["shortage"]["text"]
    assert "no plan:" in short.stderr
    enough = data(*arguments, "--what-if", "+2 h200", model="llama2-70b")
    assert enough["feasible"] and not enough["before"]["feasible"]


def test_sweep_and_plot(tmp_path: Path) -> None:
    picture = tmp_path / "out.svg"
    points = data("--sweep", "bandwidth=1:100", "--plot", str(picture))
    rates = sorted({point["bandwidth_bps"] for point in points})
    assert rates[0] == 1e6 and rates[-1] == pytest.approx(100e6)
    times = [point["time_per_token_s"] for point in points if point["strategy"] == "edgeshard"]
    assert all(later <= sooner * (1 + 1e-9) for sooner, later in pairwise(times))
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    one = data("--sweep", "bandwidth:agx-1,cloud=1:50")
    solo = {point["time_per_token_s"] for point in one if point["strategy"] == "edge-solo"}
    assert len(solo) == 1


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    values = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 512,
    }
    (path / "config.json").write_text(json.dumps(values))
    return path


def test_a_model_is_a_directory_or_its_config_json(config: Path) -> None:
    assert data(model=str(config))["model"] == "tiny"
    assert (
        data(model=str(config / "config.json"))["placement"] == data(model=str(config))["placement"]
    )


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("this is not TOML", "TOML"),
        (
            'source = "z"\n[[device]]\nname = "a"\nkind = "h100"\n[link]\nbandwidth_bps = 1e9',
            "source",
        ),
        (
            'source = "a"\n[[device]]\nname = "a"\nkind = "h900"\n[link]\nbandwidth_bps = 1e9',
            "device[0].kind",
        ),
        (
            'source = "a"\n[[device]]\nname = "a"\nkind = "h100"\n[link]\nbandwidth_bps = -1e9',
            "link.bandwidth_bps",
        ),
        (
            'source = "a"\n[[device]]\nname = "a"\nkind = "h100"\n[link]\nbandwidth_bps = nan',
            "link.bandwidth_bps",
        ),
        ('[[device]]\nname = "a"\nkind = "h100"\n[link]\nbandwidth_bps = 1e9', "source"),
    ],
)
def test_a_wrong_cluster_file_exits_2_and_names_the_field(
    tmp_path: Path, text: str, field: str
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    result = run(cluster=path)
    assert result.exit_code == 2 and field in result.stderr and result.stdout == ""
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_type": "llama", "vocab_size": ' + "9" * 5000 + "}", "JSON"),
        ('{"a":' * 100_000, "JSON"),
        ('{"a":[' + "[]," * (5 << 20) + "0]}", "values"),
        ("[" * 20 + "]" * 20, "no object"),
    ],
    ids=["a number of 5,000 digits", "deep", "many values", "a list"],
)
def test_a_config_that_would_take_memory_or_the_stack_exits_2(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    result = run("--model", str(path))
    assert result.exit_code == 2 and words in result.stderr and len(result.stderr.splitlines()) == 1
    result = run("--model", str(tmp_path))
    assert (
        result.exit_code == 2
        and "config.json" in result.stderr
        and len(result.stderr.splitlines()) == 1
    )


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"]
)
def test_absurd_numbers_of_a_config_exit_2_and_are_named(config: Path, key: str) -> None:
    path = config / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: 10**9}))
    result = run("--model", str(config))
    assert result.exit_code == 2 and key in result.stderr


def test_keys_and_values_of_4_bits_for_heads_that_kernels_do_not_read_exit_2(config: Path) -> None:
    path = config / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"head_dim": 72}))
    assert run("--model", str(config)).exit_code == 0
    result = run("--model", str(config), "--kv-dtype", "int4")
    assert (
        result.exit_code == 2
        and "kv_dtype: int4 takes heads whose width is a multiple of 16" in result.stderr
    )
    assert "this model's is 72; use bfloat16" in result.stderr and result.stdout == ""


def test_a_cluster_file_with_a_number_of_5000_digits_exits_2(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("source = " + "9" * 5000)
    result = run(cluster=path)
    assert result.exit_code == 2 and "TOML" in result.stderr
    path.write_bytes(b"#" * (3 << 20))
    assert "larger than 2 MiB" in run(cluster=path).stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--objective", "beauty"], "--objective"),
        (["--source", "z"], "source"),
        (["--dtype", "int7"], "dtype"),
        (["--prompt-tokens", "0"], "prompt_tokens"),
        (["--new-tokens", "-3"], "new_tokens"),
        (["--prompt-tokens", "9000"], "prompt_tokens"),
        (["--batch", "0"], "batch"),
        (["--max-time-per-token", "nan"], "max_time_per_token_s"),
        (["--exclude", "z"], "exclude"),
        (["--exclude", "agx-1"], "exclude"),
        (["--reserve", "agx-1"], "--reserve"),
        (["--reserve", "agx-1=lots"], "reserve.agx-1"),
        (["--max-share", "agx-1=half"], "--max-share"),
        (["--max-share", "agx-1=2"], "max_share.agx-1"),
        (["--min-nodes", "0"], "min_nodes"),
        (["--what-if", "2 orin-nx"], "--what-if"),
        (["--what-if", "+0 orin-nx"], "--what-if"),
        (["--what-if", "+2 orin-mega"], "what_if"),
        (["--what-if", "-agx-1"], "what_if"),
        (["--sweep", "latency=1:2"], "--sweep"),
        (["--sweep", "bandwidth=100:1"], "--sweep"),
        (["--sweep", "bandwidth=0:1"], "--sweep"),
        (["--sweep", "bandwidth:agx-1,z=1:2"], "sweep"),
        (["--plot", "out.svg"], "--plot"),
        (["--compare", "--explain"], "--compare"),
    ],
)
def test_wrong_options_exit_2_and_name_the_field(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr and result.stdout == ""


def test_wrong_models_exit_2(tmp_path: Path, config: Path) -> None:
    for model, words in (
        (str(tmp_path / "none"), "--model"),
        ("", "--model"),
        (str(tmp_path), "--model"),
    ):
        result = run(model=model)
        assert result.exit_code == 2 and words in result.stderr
    values = json.loads((config / "config.json").read_text())
    for text, words in (
        ("{", "JSON"),
        ("[]", "config.json"),
        (json.dumps({k: v for k, v in values.items() if k != "hidden_size"}), "hidden_size"),
        (json.dumps(values | {"num_hidden_layers": -4}), "num_hidden_layers"),
        (json.dumps(values | {"model_type": "mystery"}), "mystery"),
    ):
        (config / "config.json").write_text(text)
        result = run(model=str(config))
        assert result.exit_code == 2 and words in result.stderr, text
    assert run(cluster=tmp_path / "none.toml").exit_code == 2
    assert (
        "--model is missing" in CliRunner().invoke(app, ["plan", "--cluster", str(TESTBED)]).stderr
    )


def test_it_needs_no_torch_no_ortools_and_no_grpc() -> None:
    """In a process that cannot import them, and help does not even load numpy."""
    program = (
        "import sys\n"
        "for name in ('torch', 'ortools', 'transformers', 'grpc', 'safetensors'): "
        "sys.modules[name] = None\n"
        "import edgeshard.cli.main as m\n"
        "try: m.app(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print('numpy' in sys.modules)"
    )
    for arguments, numpy in (
        (["--cluster", str(TESTBED), "--model", "llama2-70b"], "True"),
        (["--help"], "False"),
    ):
        command = [sys.executable, "-c", program, "plan", *arguments]
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stdout
        assert output.strip().splitlines()[-1] == numpy


SMALL_NODES = """
source = "left"
[[device]]
name = "left"
memory_bytes = 12e9
system_bytes = 2e9
bandwidth_bytes_per_s = 40e9
flops = 1e12
disk_bytes_per_s = 2.1e9
[[device]]
name = "right"
memory_bytes = 12e9
system_bytes = 2e9
bandwidth_bytes_per_s = 40e9
flops = 1e12
disk_bytes_per_s = 2.1e9
[[link]]
bandwidth_bps = 1e9
[model]
dtype = "float16"
"""


@pytest.fixture
def small_nodes(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL_NODES, encoding="utf-8")
    return path


def test_streaming_is_offered_with_its_speed_and_never_done_unasked(small_nodes: Path) -> None:
    refused = run(cluster=small_nodes, model="llama2-13b")
    assert refused.exit_code == 1
    assert (
        "with --allow-streaming it would run: right holds 7.9 of 17 GB and streams 8.9"
        in refused.stdout
    )
    assert (
        "a token for a single request" in refused.stdout and "a day from its disk" in refused.stdout
    )
    asked = run("-o", "json", cluster=small_nodes, model="llama2-13b")
    assert json.loads(asked.stdout)["offer"]["stages"][1]["streaming"]["streamed_bytes"] > 8e9


def test_a_plan_that_streams_says_what_it_reads_and_what_would_do_without(
    small_nodes: Path,
) -> None:
    result = run("--allow-streaming", cluster=small_nodes, model="llama2-13b")
    assert result.exit_code == 0, result.output
    assert (
        "streams 8.9 from its disk at 2.1 GB/s: 4.8 s a token for a single request" in result.stdout
    )
    assert (
        "one more node like right would bring" in result.stdout
        and "GB more memory in right" in result.stdout
    )
    plan = data("--allow-streaming", cluster=small_nodes, model="llama2-13b")
    assert [stage["streaming"] is None for stage in plan["stages"]] == [True, False]
    assert plan["daily_read_bytes"]["right"] > 1e12 and plan["sweep"] == 1
    named = run("--allow-streaming", "-o", "name", cluster=small_nodes, model="llama2-13b")
    assert (
        named.stdout.strip() == "left=0:14,right=14:40" and "streaming: right holds" in named.stderr
    )


def test_a_faster_disk_is_faster_and_more_memory_streams_nothing(small_nodes: Path) -> None:
    options = ("--allow-streaming", "--what-if")
    plans = [
        data("--allow-streaming", cluster=small_nodes, model="llama2-13b"),
        data(*options, "disk=6GB/s", cluster=small_nodes, model="llama2-13b"),
        data(*options, "right memory=+8GB", cluster=small_nodes, model="llama2-13b"),
    ]
    slow, fast, none = (plan["time_per_token_s"] for plan in plans)
    assert slow > 2 * fast > 2 * none and "daily_read_bytes" not in plans[2]


def test_streaming_is_refused_beside_what_does_not_know_it(small_nodes: Path) -> None:
    for other in (("--compare",), ("--simulate", "together"), ("--objective", "energy")):
        result = run("--allow-streaming", *other, cluster=small_nodes, model="llama2-13b")
        assert result.exit_code == 2 and "allow" in result.stderr, result.output


def test_a_rate_is_steady_unless_all_requests_start_together() -> None:
    loaded = ("--objective", "throughput", "--concurrency", "8")
    text = run(*loaded).stdout
    assert re.search(
        r"throughput: +90\.28 tokens/s with 8 requests .* all the time; 94\.90 where all start tog",
        text,
    )
    assert "in steady token rate" in text
    together = run(*loaded, "--rate", "together").stdout
    assert "94.90 tokens/s with 8 requests" in together and "all the time" not in together
    wrong = run(*loaded, "--rate", "batch")
    assert wrong.exit_code == 2 and "--rate 'batch': use one of together, steady" in wrong.stderr


HALLS = """
source = "a"

[[device]]
name = "a"
kind = "agx-orin"
labels = { zone = "hall1", cost_per_hour = "0.5" }

[[device]]
name = "b"
kind = "orin-nx"
count = 2
labels = { zone = "hall1", cost_per_hour = "0.1" }

[[device]]
name = "c"
kind = "rtx-3090"
labels = { zone = "hall2", cost_per_hour = "1.5" }

[[link]]
bandwidth_bps = 1e9
latency_s = 0.001
"""


@pytest.fixture
def halls(tmp_path: Path) -> Path:
    (tmp_path / "halls.toml").write_text(HALLS)
    return tmp_path / "halls.toml"


def test_rules_choose_the_nodes_by_the_labels_of_the_cluster_file(halls: Path) -> None:
    def nodes(*rules: str) -> set[str]:
        options = [word for rule in rules for word in ("--rule", rule)]
        found = run("-o", "name", *options, cluster=halls, model="llama2-13b")
        assert found.exit_code == 0, found.output
        return {part.partition("=")[0] for part in found.stdout.strip().split(",")}

    assert "c" in nodes()
    assert "c" not in nodes("together by zone")
    assert nodes("max-cost-per-hour 0.5") == {"a"}
    assert {"a", "b-2"} <= nodes("use b-2", "avoid c")


def test_rules_that_cannot_hold_together_are_named_and_the_exit_code_is_1(halls: Path) -> None:
    options = ("--rule", "use c", "--rule", "together by zone", "--rule", "avoid b-1", "--verify")
    result = run(*options, cluster=halls, model="llama2-13b")
    assert result.exit_code == 1
    words = " ".join(result.stdout.split())
    assert "'use c'; 'together by zone'" in words and "avoid" not in words
    assert "verified: CP-SAT proved that there is no plan" in words


@pytest.mark.parametrize(
    "option", [("--compare",), ("--sweep", "bandwidth=100:1000"), ("--what-if", "+1 orin-nx")]
)
@pytest.mark.one_in(3)
def test_other_questions_keep_the_rules(halls: Path, option: tuple[str, ...]) -> None:
    result = run("--rule", "avoid c", *option, "-o", "json", cluster=halls, model="llama2-13b")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    placements = (
        [row["placement"] for row in found] if isinstance(found, list) else [found["placement"]]
    )
    assert placements and not any("c=" in placement for placement in placements)


def test_a_plan_is_verified(halls: Path) -> None:
    found = data("--verify", cluster=halls, model="llama2-13b")["verified"]
    assert found == {
        "better": "",
        "cheaper": 0.0,
        "gap": 0.0,
        "proven": True,
        "text": "CP-SAT proved that no plan is better",
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rule", "avoid x"), "rule[0].nodes: there is no node x"),
        (("--rule", "use a", "--rule", "near b"), "rule[1].rule: 'near b' is not a rule"),
        (
            ("--rule", "avoid c", "--allow-streaming"),
            "allow_streaming is not for plans under rules",
        ),
        (
            ("--rule", "avoid c", "--objective", "energy"),
            "objective energy is not for plans under rules",
        ),
        (("--verify", "--compare"), "--verify checks one plan"),
        (("--verify", "--allow-streaming"), "--verify knows only nodes that hold their weights"),
        (("--verify", "--objective", "energy"), "verify is not for the objective energy"),
    ],
)
def test_what_rules_and_verify_do_not_go_with_is_refused(
    halls: Path, options: tuple[str, ...], words: str
) -> None:
    result = run(*options, cluster=halls, model="llama2-13b")
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


@pytest.mark.parametrize("option", [("--rule", "avoid c"), ("--verify",)])
def test_without_the_extra_rules_and_verify_name_it(
    halls: Path, option: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(solver_process, "missing", lambda *extras: list(extras))
    result = run(*option, cluster=halls, model="llama2-13b")
    assert result.exit_code != 0
    assert "pip install '.[rules]'" in " ".join(result.stderr.split())
