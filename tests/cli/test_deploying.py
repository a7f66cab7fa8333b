"""edgectl deploy, delete and model add."""

from __future__ import annotations

import io
import json
import math
import re
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from edgeshard.cli.commands.spec_options import flag_of
from edgeshard.cli.render import loading
from edgeshard.cli.render.loading import DeployReporter, RemainingTime, loading_text
from edgeshard.domain.deployments.deployment import DeploymentPhase, DeploymentSpec
from edgeshard.domain.deployments.placement import parse_layers
from edgeshard.domain.errors import PlacementError, ResourceExhaustedError
from edgeshard.domain.models.dtypes import DType, IntegerFormat, KvFormat
from edgeshard.domain.nodes.device import StageFilling, StagePhase, WeightLoadingWork
from edgeshard.proto.v1 import admin_pb2, common_pb2, store_pb2
from edgeshard.wire.site import spec_to_wire
from tests.support.scripted_site import deployment as scripted_deployment
from tests.support.scripted_site import stage_status


def spec_sent(site: Any) -> Any:
    (request,) = site.sent(admin_pb2.DeployRequest)
    return request.spec


def test_options_become_the_spec_and_phases_go_to_stderr(edgectl: Any, site: Any) -> None:
    stages = (site.stage_status(StagePhase.LOADING, 50),)
    site.states = [
        site.deployment_in(DeploymentPhase.LOADING),
        site.deployment_in(DeploymentPhase.LOADING, stages=stages),
        site.deployment_in(DeploymentPhase.ACTIVATING),
        site.deployment_in(DeploymentPhase.READY),
    ]
    result = edgectl(
        "deploy", "tales", "--model", "fairy-tales", "--layers", "a=0:4,b=4:9",
        "--dtype", "float16", "--max-context", "256", "--max-new-tokens", "99",
        "--concurrency", "3",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    spec = spec_sent(site)
    assert (spec.name, spec.model, spec.source) == ("tales", "fairy-tales", "a")
    assert [(s.node, s.layers.first, s.layers.end) for s in spec.layers] == [
        ("a", 0, 4),
        ("b", 4, 9),
    ]
    assert spec.dtype == common_pb2.DATA_TYPE_FLOAT16
    assert (spec.max_context, spec.max_new_tokens, spec.concurrency) == (256, 99, 3)
    assert [line for line in result.stderr.splitlines() if line.startswith("tales: ")] == [
        "tales: loading",
        "tales: activating",
        "tales: ready",
    ]
    assert result.stdout.splitlines()[1].split() == [
        "tales",
        "ready",
        "fairy-tales",
        "a=0:4,b=4:9",
        "0",
    ]


def test_how_far_a_stage_is_with_loading_is_said_in_words() -> None:
    def text(fetched: int, filling: StageFilling | None) -> str:
        fetching = replace(stage_status(StagePhase.LOADING, fetched), filling=filling)
        return loading_text(scripted_deployment(DeploymentPhase.LOADING, stages=(fetching,)))

    assert text(50, None) == "loading: a fetching 50 B of 100 B"
    assert (
        text(100, StageFilling(WeightLoadingWork.PACKING, 0, 1 << 20))
        == "loading: a packing 0 B of 1 MiB"
    )
    assert (
        text(100, StageFilling(WeightLoadingWork.READING, 1 << 19, 1 << 20, 11.4))
        == "loading: a reading 512 KiB of 1 MiB, about 12 s left"
    )
    assert text(100, StageFilling(WeightLoadingWork.CONVERTING, 1, 2, 630.0)).endswith(
        ", about 10 min left"
    )


def test_a_terminal_gets_a_bar_with_the_seconds_left_and_a_file_gets_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(loading, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def shown(terminal: bool) -> str:
        file = io.StringIO()
        console = Console(file=file, force_terminal=terminal, width=100, color_system=None)
        clock[0] = 0.0
        with console.status("") as status:
            reporter = DeployReporter(status)
            for fetched in (20, 40, 60):
                fetching = stage_status(StagePhase.LOADING, fetched)
                reporter.show(scripted_deployment(DeploymentPhase.LOADING, stages=(fetching,)))
                clock[0] += 4.0
            if terminal:
                console.print(status.renderable)
        return file.getvalue()

    on_a_terminal = shown(True)
    # One of two stages is half fetched: a twentieth of the whole in 4 s, and 17 of them are left.
    assert re.search(r"━+.* about 68 s left +loading: a fetching 60 B of 100 B", on_a_terminal), (
        on_a_terminal
    )
    assert shown(False).splitlines() == [
        "tales: loading",
        "tales: loading: a fetching 60 B of 100 B",
    ]


def test_the_pace_tells_what_is_left() -> None:
    pace = RemainingTime()
    assert pace.left_s(0.2, 10.0) == 0.0, "nothing to go by yet"
    assert pace.left_s(0.6, 14.0) == pytest.approx(4.0)
    assert pace.left_s(1.0, 18.0) == 0.0


def test_every_key_of_a_spec_has_an_option(edgectl: Any, site: Any) -> None:
    """Except privacy, which has only one kind yet."""
    result = edgectl(
        "deploy", "tales", "--model", "fairy-tales", "--layers", "a=0:4,b=4:9", "--source", "a",
        "--objective", "latency", "--max-time-per-token", "0.5", "--exclude", "c", "--exclude", "d",
        "--reserve", "a=1GiB", "--reserve", "b=5", "--dtype", "float16", "--kv-dtype", "int4",
        "--quantise", "int8", "--quantise", "b=int4", "--head-quantisation", "none",
        "--max-context", "256", "--max-new-tokens", "99",
        "--concurrency", "3", "--mode", "bubbles", "--micro-batches", "2",
        "--max-inter-token-latency", "0.25",
        "--prefix-cache", "--kv-overcommit", "--kv-swap-bytes", "2GiB", "--kv-swap-on-disk",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    expected = DeploymentSpec(
        name="tales",
        model="fairy-tales",
        source="a",
        layers=parse_layers("a=0:4,b=4:9"),
        objective="latency",
        max_time_per_token_s=0.5,
        exclude=("c", "d"),
        reserve={"a": 1 << 30, "b": 5},
        dtype=DType.FLOAT16,
        kv_dtype=KvFormat.INT4,
        quantisation={"*": IntegerFormat.INT8, "b": IntegerFormat.INT4},
        head_quantisation="none",
        max_context=256,
        max_new_tokens=99,
        concurrency=3,
        mode="bubbles",
        micro_batches=2,
        max_inter_token_latency_s=0.25,
        prefix_cache=True,
        kv_overcommit=True,
        kv_swap_bytes=2 << 30,
        kv_swap_on_disk=True,
    )
    assert spec_sent(site) == spec_to_wire(expected)
    options = edgectl("deploy", "--help").stdout
    for key in DeploymentSpec.__match_args__:
        assert key in ("privacy", "replica") or re.search(f"{flag_of(key)}[ ,]", options), key


def test_without_options_a_spec_keeps_its_defaults(edgectl: Any, site: Any) -> None:
    edgectl("deploy", "tales", "--model", "fairy-tales", "--source", "a", "--quantise", "none")
    assert spec_sent(site) == spec_to_wire(
        DeploymentSpec(name="tales", model="fairy-tales", source="a", quantisation={"*": "none"})
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--concurrency 0", "--concurrency: "),
        ("--max-inter-token-latency 0", "--max-inter-token-latency: "),
        ("--max-time-per-token -1", "--max-time-per-token: "),
        ("--micro-batches 3 --concurrency 2", "--micro-batches: 3 cannot be in flight"),
        ("--micro-batches 2 --mode sequential", "--micro-batches: 2 cannot be in flight"),
        ("--mode fast", "--mode: "),
        ("--objective fast", "--objective: "),
        ("--kv-dtype int8", "--kv-dtype: "),
        ("--quantise int7", "--quantise 'int7': give none, int8, int4 or stored"),
        ("--quantise =int8", "--quantise '=int8': "),
        ("--quantise a=none", "--quantise 'a=none': "),
        ("--quantise int8 --quantise int4", "--quantise 'int4': "),
        ("--quantise a=int8 --quantise a=int4", "--quantise 'a=int4': "),
        ("--quantise int8 --head-quantisation int7", "--head-quantisation: "),
        ("--head-quantisation int8", "--head-quantisation: no node has quantised weights"),
        ("--reserve a", "--reserve 'a' is not NODE=VALUE"),
        ("--reserve a=lots", "--reserve.a 'lots' is not a size"),
        ("--layers a=4", "--layers: 'a=4' is not NODE=FIRST:END"),
    ],
)
def test_a_wrong_option_is_named(edgectl: Any, site: Any, arguments: str, message: str) -> None:
    result = edgectl(
        "deploy", "tales", "--model", "fairy-tales", "--source", "a", *arguments.split()
    )
    assert (result.exit_code, site.requests) == (2, [])
    assert result.stderr.startswith(f"error: {message}")


@pytest.mark.parametrize("name", ["spec.toml", "spec.json"])
def test_a_spec_file(edgectl: Any, site: Any, tmp_path: Path, name: str) -> None:
    values = {
        "name": "tales",
        "model": "fairy-tales",
        "source": "a",
        "layers": "a=0:4,b=4:9",
        "concurrency": 2,
    }
    toml = "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
    (tmp_path / name).write_text(toml if name.endswith("toml") else json.dumps(values))
    result = edgectl("deploy", "--file", str(tmp_path / name), "-o", "json")
    assert json.loads(result.stdout)["phase"] == "ready"
    assert (spec_sent(site).concurrency, len(spec_sent(site).layers)) == (2, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "is not a spec"),
        ('name = "t"\nmodel = "m"\nsource = "a"\ncolour = "red"', "colour: is not a known field"),
        ('name = "t"\nmodel = "m"\nsource = "a"\nconcurrency = 0', "concurrency: "),
        ('name = "t"\nsource = "a"', "model: is missing"),
    ],
)
def test_a_wrong_spec_file_names_the_field(
    edgectl: Any, site: Any, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "spec.toml"
    file.write_text(text)
    result = edgectl("deploy", "--file", str(file))
    assert (result.exit_code, site.requests) == (2, [])
    assert message in result.stderr


def test_a_spec_file_and_options_exclude_each_other(edgectl: Any, tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text("")
    result = edgectl("deploy", "tales", "--file", str(file), "--max-context", "5")
    assert result.exit_code == 2
    assert "leave out NAME, --max-context" in result.stderr


def test_dry_run_prints_the_placement_and_deploys_nothing(edgectl: Any, site: Any) -> None:
    result = edgectl("deploy", "tales", "--model", "fairy-tales", "--source", "a", "--dry-run")
    assert result.exit_code == 0
    lines = [line.split()[:2] for line in result.stdout.splitlines()[1:]]
    assert lines == [["a", "0:4"], ["b", "4:9"], [], ["Speculation:", "off"]]
    assert site.sent(admin_pb2.DeployRequest) == []


def test_no_wait_returns_while_it_is_loading(edgectl: Any, site: Any) -> None:
    site.states = [site.deployment_in(DeploymentPhase.LOADING)]
    result = edgectl(
        "deploy", "tales", "--model", "fairy-tales", "--source", "a", "--no-wait", "-o", "json"
    )
    assert json.loads(result.stdout)["phase"] == "loading"


def test_a_deployment_that_fails_to_load_exits_by_its_reason(edgectl: Any, site: Any) -> None:
    failure = ResourceExhaustedError("node b lacks 2 GiB", field="b")
    site.states = [
        site.deployment_in(DeploymentPhase.LOADING),
        site.deployment_in(DeploymentPhase.FAILED, failure),
    ]
    result = edgectl("deploy", "tales", "--model", "fairy-tales", "--source", "a")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "error: node b lacks 2 GiB" in result.stderr


def test_a_deployment_that_takes_too_long_exits_6(edgectl: Any, site: Any) -> None:
    site.states = [site.deployment_in(DeploymentPhase.LOADING)]
    result = edgectl(
        "deploy", "tales", "--model", "fairy-tales", "--source", "a", "--timeout", "0.1"
    )
    assert result.exit_code == 6
    assert "edgectl describe deployment tales" in result.stderr


def test_a_placement_with_a_gap_exits_2(edgectl: Any, site: Any) -> None:
    site.failures["Deploy"] = PlacementError(
        "layers: no node holds layers 4:5", field="layers", reason="LAYER_GAP"
    )
    result = edgectl("deploy", "tales", "--model", "fairy-tales", "--layers", "a=0:4,b=5:9")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (
        2,
        "error: layers: no node holds layers 4:5",
    )


def test_delete(edgectl: Any, site: Any) -> None:
    result = edgectl("delete", "deployment", "tales")
    assert (result.exit_code, result.stdout) == (0, "deployment tales deleted\n")
    edgectl("delete", "deployment", "tales", "--force")
    sent = site.sent(admin_pb2.DeleteDeploymentRequest)
    assert [(call.name, call.force) for call in sent] == [("tales", False), ("tales", True)]
    result = edgectl("delete", "model", "fairy-tales")
    assert (result.exit_code, result.stdout) == (0, "model fairy-tales deleted\n")


CONFIG = {
    "model_type": "llama",
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 16,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
SHAPES = {
    "model.embed_tokens.weight": [16, 4],
    "model.norm.weight": [4],
    "model.layers.0.input_layernorm.weight": [4],
    "model.layers.0.post_attention_layernorm.weight": [4],
    **{f"model.layers.0.self_attn.{name}_proj.weight": [4, 4] for name in "qkvo"},
    "model.layers.0.mlp.gate_proj.weight": [8, 4],
    "model.layers.0.mlp.up_proj.weight": [8, 4],
    "model.layers.0.mlp.down_proj.weight": [4, 8],
}


def write_model(directory: Path) -> None:
    """A checkpoint of the smallest Llama, all zeros."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    header: dict[str, Any] = {}
    end = 0
    for name, shape in SHAPES.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def test_model_add(edgectl: Any, site: Any, tmp_path: Path) -> None:
    write_model(tmp_path / "Tiny")
    result = edgectl("model", "add", str(tmp_path / "Tiny"), "--name", "tiny", "-o", "json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["name"] == "tiny"
    (request,) = site.sent(store_pb2.RegisterModelRequest)
    assert {tensor.name for tensor in request.manifest.tensors} == set(SHAPES)


def test_a_directory_is_put_into_the_store_before_it_is_deployed(
    edgectl: Any, site: Any, tmp_path: Path
) -> None:
    write_model(tmp_path / "Tiny")
    site.states = [site.deployment_in(DeploymentPhase.READY)]
    result = edgectl("deploy", "tales", "--model", str(tmp_path / "Tiny"))
    assert result.exit_code == 0, result.stderr
    (added,) = site.sent(store_pb2.RegisterModelRequest)
    assert added.manifest.name == spec_sent(site).model == "tiny"


def test_model_add_of_a_directory_without_a_model_exits_with_a_reason(
    edgectl: Any, site: Any, tmp_path: Path
) -> None:
    result = edgectl("model", "add", str(tmp_path))
    assert result.exit_code in (2, 3)
    assert result.stderr.startswith("error: ") and not site.sent(store_pb2.RegisterModelRequest)
