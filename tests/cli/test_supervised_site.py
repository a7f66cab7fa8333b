"""The processes of `edgectl serve` are restarted, although files in the user's directory look like
modules."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgeshard.local.own_site import _node_name
from tests.house.documents import ROOT
from tests.support.forms import DAYS, in_turn
from tests.support.running import (
    EDGECTL,
    POLL_S,
    READY_S,
    Running,
    environment_of,
    processes_of,
    wrong_modules,
)

pytestmark = pytest.mark.timing

STORY = {"model": "fairy-tales", "prompt": "Once upon a time", "max_tokens": 400, "temperature": 0}


@dataclass
class Served:
    """A site of one node; `serve` is the command that runs it now."""

    home: Path
    state: Path
    hostile: Path
    serve: Running
    url: str = ""
    key: str = ""
    told: str = ""
    """Its answer to STORY."""

    def begin(self, name: str) -> None:
        options = ("--state-dir", str(self.state), "--listen", "127.0.0.1:0", "--port", "0")
        self.serve = Running(self.home, name, "serve", "demo", *options, cwd=self.hostile)
        self.url = self.serve.until(r"^URL +(\S+)$")[1]
        self.key = self.serve.until(r"^API key +(\S+)$")[1]
        self.serve.until(r"^  edgectl join ")

    def ready(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.state / f"{name}.ready").read_text())
        return found

    def stream(self) -> Iterator[str]:
        """The answer to STORY, piece by piece. Raises OSError or HTTPException if it breaks off."""
        request = urllib.request.Request(
            f"{self.url}/completions",
            json.dumps(STORY | {"stream": True}).encode(),
            {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=READY_S) as answer:
            for line in answer:
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data and not data.startswith(":"):  # a comment of a stream that is slow
                    value = json.loads(data)
                    if "error" in value:
                        raise OSError(data)
                    yield from (choice["text"] for choice in value["choices"])
        raise http.client.IncompleteRead(b"")

    def answer(self) -> str:
        """Repeat the request until it is answered, as a client does."""
        deadline_s = time.monotonic() + READY_S
        while True:
            try:
                return "".join(self.stream())
            except (OSError, http.client.HTTPException) as error:
                assert time.monotonic() < deadline_s, (error, self.serve.log.read_text())
                time.sleep(POLL_S)

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until it has recovered."""
        before = self.ready(name)
        os.kill(before["pid"], signal.SIGKILL)
        deadline_s = time.monotonic() + READY_S
        while True:
            with contextlib.suppress(OSError):
                after = self.ready(name)
                if after["pid"] != before["pid"]:
                    break
            assert time.monotonic() < deadline_s, self.serve.log.read_text()
            time.sleep(POLL_S)
        assert after | {"pid": 0} == before | {"pid": 0}, "at the same addresses"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wrong_modules(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, hostile: Path) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    served = Served(home, home / "site", hostile, None)  # type: ignore[arg-type]
    try:
        served.begin("serve")
        served.told = served.answer()
        yield served
    finally:
        if served.serve is not None:
            served.serve.stop()


@pytest.fixture(scope="module")
def above(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the clone."""
    folder = tmp_path_factory.mktemp("above")
    (folder / "edgeshard").symlink_to(ROOT)
    return folder


@pytest.fixture(
    params=[
        "hostile",
        pytest.param("above", marks=pytest.mark.long),
        pytest.param("/", marks=pytest.mark.long),
    ]
)
def anywhere(request: pytest.FixtureRequest, hostile: Path, above: Path) -> Path:
    return {"hostile": hostile, "above": above, "/": Path("/")}[request.param]


@pytest.fixture
def run(site: Served) -> Callable[..., subprocess.CompletedProcess[str]]:
    def call(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [EDGECTL, *arguments],
            cwd=cwd,
            env=environment_of(site.home),
            capture_output=True,
            text=True,
            timeout=READY_S,
        )

    return call


Run = Callable[..., subprocess.CompletedProcess[str]]


def test_a_node_joins_from_any_directory(
    site: Served, anywhere: Path, tmp_path: Path, run: Run
) -> None:
    name = f"node-{anywhere.name or 'root'}"[:20]
    token = run("token", "create", "--node", name, "--quiet", cwd=anywhere).stdout.strip()
    options = ("--foreground", "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "node"))
    node = Running(tmp_path, "join", "join", token, *options, cwd=anywhere)
    try:
        node.until(f"node {name} has joined site here")
        assert (tmp_path / "node").stat().st_mode & 0o777 == 0o700
        assert "directory_made_private" not in node.log.read_text(), "it made it so itself"
        site.serve.until(f"node {name} has joined$")
    finally:
        assert node.stop() == 0
    site.serve.until(f"node {name} is away$")


def test_bench_measures_from_any_directory(site: Served, anywhere: Path, run: Run) -> None:
    done = run(
        "bench",
        "--requests",
        "2",
        "--new-tokens",
        "4",
        "--prompt-tokens",
        "4",
        "-o",
        "json",
        cwd=anywhere,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["answered"] == 2


LAB = """
source = "a"
[[device]]
name = "a"
memory_bytes = 8e9
bandwidth_bytes_per_s = 100e9
flops = 2e12
[workload]
prompt_tokens = 4
new_tokens = 2
[lab]
model = "config.json"
"""


@pytest.mark.parametrize("place", in_turn(DAYS, ["hostile", "above", "/"]))
def test_serve_demo_and_lab_run_from_any_directory(
    place: str, hostile: Path, above: Path, tmp_path: Path
) -> None:
    cwd = {"hostile": hostile, "above": above}.get(place, Path(place))
    served = Running(tmp_path, "serve", "serve", "demo", "--listen", "127.0.0.1:0", cwd=cwd)
    try:
        served.until(r"^URL +http://127.0.0.1:8\d\d\d/v1$")
    finally:
        assert served.stop() == 0
    (tmp_path / "lab.toml").write_text(LAB)
    (tmp_path / "config.json").write_bytes((ROOT / "edgeshard/demo_model/config.json").read_bytes())
    lab = ("lab", "run", str(tmp_path / "lab.toml"), "--directory", str(tmp_path / "lab"))
    for command in (("demo", "--max-tokens", "4"), lab):
        done = subprocess.run(
            [EDGECTL, *command, "-o", "json"],
            cwd=cwd, env=environment_of(tmp_path), capture_output=True, text=True, timeout=READY_S,
        )  # fmt: skip
        assert done.returncode == 0 and json.loads(done.stdout), done.stderr


def test_an_agent_that_is_killed_under_a_stream_comes_back_and_so_does_the_stream(
    site: Served,
) -> None:
    """The only node, which holds all layers."""
    pieces = []
    for piece in site.stream():
        pieces.append(piece)
        if len(pieces) == 3:
            site.kill(_node_name())
    assert "".join(pieces) == site.told
    site.serve.until(f"{_node_name()} ended by signal 9: it starts again$")
    site.serve.until(f"{_node_name()} runs again$")


def test_the_coordinator_comes_back_with_its_url_and_its_keys(site: Served) -> None:
    site.kill("coordinator")
    site.serve.until("coordinator runs again$")
    assert site.answer() == site.told


@pytest.mark.long
def test_a_coordinator_that_is_killed_while_all_starts_costs_nothing_but_time(
    tmp_path: Path,
) -> None:
    """Once when the model is being added, once when it is being deployed."""
    options = ("--state-dir", str(tmp_path / "site"), "--listen", "127.0.0.1:0", "--port", "0")
    served = Running(tmp_path, "serve", "serve", "demo", *options)
    try:
        for said in ("the coordinator listens on", "loading fairy-tales$"):
            served.until(said)
            os.kill(
                json.loads((tmp_path / "site" / "coordinator.ready").read_text())["pid"],
                signal.SIGKILL,
            )
            served.until("coordinator runs again$")
        served.until("^API key ")
    finally:
        assert served.stop() == 0


@pytest.mark.long
def test_a_node_that_cannot_start_any_more_ends_the_site_with_its_own_words(tmp_path: Path) -> None:
    state, name = tmp_path / "site", _node_name()
    served = Running(
        tmp_path,
        "serve",
        "serve",
        "demo",
        "--state-dir",
        str(state),
        "--listen",
        "127.0.0.1:0",
        "--port",
        "0",
    )
    try:
        served.until("^API key ")
        (state / name / "node-id").write_text("")
        os.kill(json.loads((state / f"{name}.ready").read_text())["pid"], signal.SIGKILL)
        assert served.process.wait(READY_S) == 2
    finally:
        served.stop()
    assert (
        served.log.read_text()
        .splitlines()[-1]
        .startswith(f"error: {name} did not start: {state / name}/node-id is empty")
    )
    assert not processes_of(state)


def test_a_second_serve_of_the_same_site_says_where_it_is(
    site: Served, run: Run, hostile: Path
) -> None:
    done = run("serve", "demo", "--state-dir", str(site.state), cwd=hostile)
    assert done.returncode == 1
    assert f"URL {site.url}," in done.stderr and str(site.state / "api-key") in done.stderr
    assert (
        "edgectl deploy NAME --model MODEL\n" in done.stderr
        and "another --state-dir" in done.stderr
    )


def test_a_killed_serve_leaves_nothing_and_the_next_finds_the_site(site: Served) -> None:
    key = site.key
    assert processes_of(site.state)
    site.serve.process.kill()
    site.serve.process.wait()
    deadline_s = time.monotonic() + 10
    while processes_of(site.state):
        assert time.monotonic() < deadline_s, processes_of(site.state)
        time.sleep(POLL_S)
    site.begin("again")
    assert site.key == key and site.answer() == site.told
    assert site.serve.stop() == 0
    last = site.serve.log.read_text().splitlines()[-1]
    assert last.endswith("ended by SIGTERM, with all processes of the site")
    assert not processes_of(site.state)
