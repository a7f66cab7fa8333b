"""edgectl serve: from one command to an answer over HTTP, found again after a restart, and larger
by a line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgeshard import Client
from edgeshard.cli.commands.site.serve import HttpOptions
from edgeshard.domain.control.site import ReplanReason
from edgeshard.domain.deployments.placement import parse_layers
from edgeshard.local.own_site import _node_name
from edgeshard.rpc.addresses import free_port
from edgeshard.rpc.tls_files import tls_files
from tests.house import documents
from tests.support.clients import CLIENTS, needs_clients
from tests.support.running import READY_S, Running, processes_of, wrong_modules

pytestmark = pytest.mark.timing

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "edgeshard" / "demo_model"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def begin(*arguments: str, cwd: Path | None = None, **settings: str) -> Running:
        running.append(
            Running(tmp_path, f"edgectl-{len(running)}", *arguments, settings=settings, cwd=cwd)
        )
        return running[-1]

    yield begin
    for item in reversed(running):
        item.stop()


def asked(url: str, key: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{url}{path}",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def disk_bytes(*directories: Path) -> int:
    """The bytes of all files; a file with two names counts once."""
    found = {}
    for directory in directories:
        for path in directory.rglob("*"):
            if path.is_file():
                status = path.stat()
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def test_one_command_answers_and_the_next_node_makes_it_bigger(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    state = tmp_path / "site"
    serve = ("serve", "demo", "--state-dir", str(state), "--listen", "127.0.0.1:0", "--port", "0")
    first = start(*serve)
    url, key = first.until(r"^URL +(\S+)$")[1], first.until(r"^API key +(\S+)$")[1]
    story = {
        "model": "fairy-tales",
        "prompt": "Once upon a time",
        "max_tokens": 8,
        "temperature": 0,
    }
    told = asked(url, key, "/completions", story)["choices"][0]["text"]
    assert told
    said = asked(
        url,
        key,
        "/chat/completions",
        {"model": "fairy-tales", "messages": [{"role": "user", "content": "x"}]},
    )
    assert said["choices"][0]["message"]["role"] == "assistant"
    weights = (DEMO_MODEL / "model.safetensors").stat().st_size
    copies = [
        path for path in state.rglob("*") if path.is_file() and path.stat().st_size >= weights // 8
    ]
    assert [path.stat().st_size for path in copies if path.parent.name == "linked"].count(
        weights
    ) == 1
    assert all(path.parent.name == "linked" or path.suffix == ".sqlite-wal" for path in copies), (
        "no node has its own"
    )
    line = first.until(r"^  edgectl (join \S+)$")[1]
    node = start(
        *line.split(),
        "--foreground",
        "--listen",
        "127.0.0.1:0",
        "--state-dir",
        str(tmp_path / "node"),
    )
    first.until(r"node node-2 has joined")
    node.until(r"node node-2 has joined site here")
    assert node.stop() == 0
    first.until(r"node node-2 is away$")
    assert first.stop() == 0
    assert (
        first.log.read_text()
        .splitlines()[-1]
        .endswith("ended by SIGTERM, with all processes of the site")
    )
    assert not processes_of(state)

    again = start(*serve, "--concurrency", "3")
    assert again.until(r"^API key +(\S+)$")[1] == key, "the same site"
    assert (
        "was served before" in again.log.read_text()
        and "edgectl delete deployment fairy-tales" in again.log.read_text()
    )
    url = again.until(r"^URL +(\S+)$")[1]
    assert asked(url, key, "/completions", story)["choices"][0]["text"] == told


LAB = """
source = "{first}"
[[device]]
name = "{first}"
memory_bytes = 4e9
bandwidth_bytes_per_s = 100e9
flops = 1e9
[[device]]
name = "node-2"
memory_bytes = 4e9
bandwidth_bytes_per_s = 100e9
flops = 1e9
[[link]]
bandwidth_bps = 1e9
latency_s = 0.0005
[lab]
model = "config.json"
"""
"""Two slow nodes: one computes a token in some 16 ms, and as long for each of a batch. So two give
twice the tokens, whatever else this machine does."""


@pytest.mark.long
async def test_grow_moves_to_the_next_node_where_that_gains(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((DEMO_MODEL / "config.json").read_bytes())
    lab, state = tmp_path / "lab.toml", tmp_path / "site"
    lab.write_text(LAB.format(first=_node_name()))
    emulate = {"EDGESHARD__AGENT__EMULATE": str(lab)}
    serve = (
        "serve",
        "demo",
        "--grow",
        "--state-dir",
        str(state),
        "--listen",
        "127.0.0.1:0",
        "--port",
        "0",
    )
    site = start(*serve, **emulate)
    url, key = site.until(r"^URL +(\S+)$")[1], site.until(r"^API key +(\S+)$")[1]
    story = {
        "model": "fairy-tales",
        "prompt": "Once upon a time",
        "max_tokens": 32,
        "temperature": 0,
    }
    told = asked(url, key, "/completions", story)
    address = site.until(r"the coordinator listens on (\S+),")[1]
    async with Client(address, tls_files(state / "pki" / "operator-admin")) as client:
        before = await client.deployment("fairy-tales")
        line = site.until(r"^  edgectl (join \S+)$")[1]
        options = ("--foreground", "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "node"))
        start(*line.split(), *options, **emulate)
        said = site.until(
            r"moving fairy-tales to (\S+): (\d+) % more tokens/s \((\S+) instead of (\S+)\)$"
        )
        site.until(r"fairy-tales has moved; running requests continued$")
        after = (await client.deployment("fairy-tales")).placement
        assert after.predicted is not None
        assert [str(stage.node_name) for stage in after.stages] == [_node_name(), "node-2"]
        assert said[1] == ",".join(f"{stage.node_name}={stage.layers}" for stage in after.stages)
        alone = parse_layers(f"{_node_name()}=0:12")
        planned = await client.plan(replace(before.spec, layers=alone))
        assert planned.predicted is not None
        now, then = planned.predicted.throughput_tps, after.predicted.throughput_tps
        assert (said[3], said[4]) == (f"{then:.1f}", f"{now:.1f}")
        assert said[2] == f"{100 * (then / now - 1):.0f}" and then > 1.3 * now
        assert (await client.replan("fairy-tales", dry_run=True)).reason is ReplanReason.NOTHING_NEW
    assert asked(url, key, "/completions", story)["choices"] == told["choices"]


def newcomer() -> list[str]:
    """The commands on the first screen of README.md."""
    first = next(
        block for block in documents.blocks(ROOT / "README.md") if block.language == "console"
    )
    assert first.line < 40, "it is on the first screen"
    return first.text.splitlines()


def test_the_readme_has_four_commands_to_a_chat() -> None:
    clone, serve, install, chat = newcomer()
    assert clone.startswith("git clone ") and install == ".venv/bin/pip install openai"
    recipe = (
        (ROOT / "Makefile")
        .read_text()
        .partition(f"\n{serve.removeprefix('make ')}: $(RUNS)")[2]
        .splitlines()[1]
    )
    assert recipe.strip() == "@$(call interruptible,$(BIN)/edgectl serve $(or $(ARGS),demo))"
    python, program, key = chat.split()
    assert (python, key) == (".venv/bin/python", "esk-...") and (ROOT / program).exists()


@needs_clients
@pytest.mark.long
def test_the_readmes_program_gets_a_chat_from_the_readmes_command(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    options = ("--state-dir", str(tmp_path / "site"), "--listen", "127.0.0.1:0", "--port", "0")
    site = start("serve", "demo", *options)
    url, key = site.until(r"^URL +(\S+)$")[1], site.until(r"^API key +(\S+)$")[1]
    # Its port may be taken on a machine that runs tests.
    text = (ROOT / newcomer()[3].split()[1]).read_text()
    assert text.count("http://127.0.0.1:8000/v1") == 1
    program = tmp_path / "program.py"
    program.write_text(text.replace("http://127.0.0.1:8000/v1", url))

    def run(*arguments: str, state: str = "nowhere") -> subprocess.CompletedProcess[str]:
        command = [str(CLIENTS / "bin" / "python"), str(program), *arguments]
        environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / state)}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=environment, check=False
        )

    said = run(key)
    assert said.returncode == 0 and len(said.stdout.split()) > 5, said.stderr
    (tmp_path / "kept" / "edgeshard").mkdir(parents=True)
    (tmp_path / "kept" / "edgeshard" / "serve").symlink_to(tmp_path / "site")
    assert run(state="kept").stdout == said.stdout, "without a key it takes that which serve keeps"
    refused = run()
    assert (
        refused.returncode == 1
        and "edgectl key create" in refused.stderr
        and "Traceback" not in refused.stderr
    )
    site.stop()
    alone = run()
    assert (
        alone.returncode == 1
        and "edgectl serve demo" in alone.stderr
        and "Traceback" not in alone.stderr
    )


@pytest.mark.long
def test_a_port_that_is_taken_is_replaced_by_another(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wanted = f"127.0.0.1:{taken.getsockname()[1]}"
        site = start(
            "serve",
            "demo",
            "--state-dir",
            str(tmp_path / "site"),
            "--listen",
            wanted,
            "--port",
            "0",
        )
        assert site.until(r"the coordinator listens on (\S+),")[1] != wanted
        site.until(f"{wanted} is in use: ")
        site.until(r"^API key ")  # so its node has found it


def test_a_taken_port_that_nobody_asked_for_is_replaced_by_the_next() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        assert first < free_port("127.0.0.1", first, 32) < first + 32
        assert free_port("127.0.0.1", first, 1) == first, "who listens there says what is wrong"


def test_a_taken_port_of_the_url_is_an_error(start: Callable[..., Running], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        site = start(
            "serve",
            "demo",
            "--state-dir",
            str(tmp_path / "site"),
            "--listen",
            "127.0.0.1:0",
            "--port",
            port,
        )
        assert site.process.wait(READY_S) == 5
    assert f"cannot listen on 127.0.0.1:{port}" in site.log.read_text()
    assert not processes_of(tmp_path / "site")


def test_what_is_said_of_the_endpoint_goes_to_the_coordinator() -> None:
    options = HttpOptions(
        "127.0.0.1:1", ["myhost.local"], ["http://a"], "https://edge.example/edge"
    )
    words = [
        "--http-listen",
        "127.0.0.1:1",
        "--dashboard-url",
        "https://edge.example/edge",
        "--http-name",
    ]
    assert options.of_coordinator() == [*words, "myhost.local", "--http-allow-origin", "http://a"]
    assert HttpOptions().of_coordinator() == []
    adding = HttpOptions(model_folders=["/srv/models", "here"], allow_hub=True).of_coordinator()
    assert adding == [
        "--model-folder",
        "/srv/models",
        "--model-folder",
        str(Path("here").absolute()),
        "--allow-hub",
    ]


def test_the_demos_site_leaves_nothing_behind(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    site = start("demo", "--serve", "--port", "0", cwd=wrong_modules(tmp_path / "folder"))
    site.until(r"the coordinator listens on ")
    assert not (tmp_path / "config").exists(), "its certificates go with it"
    assert site.stop(signal.SIGINT) == 0
    assert (
        site.log.read_text()
        .splitlines()[-1]
        .endswith("ended by Ctrl-C, with all processes of the site")
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["./nowhere"], "no such file or directory"),
        (["demo", "--quantise", "int3"], "--quantise 'int3': use one of auto, none, int8, int4"),
        (["demo", "--listen", "nonsense"], "listen"),
        (["demo", "--state-dir", "/proc/none"], "--state-dir"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    start: Callable[..., Running], arguments: list[str], said: str
) -> None:
    running = start("serve", *arguments)
    assert running.process.wait(60) in (2, 3, 4)
    assert said in running.log.read_text()
