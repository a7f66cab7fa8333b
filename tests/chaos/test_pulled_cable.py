"""A node whose cable is pulled in the middle of an answer: no packet reports it, and the answer
continues without it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgeshard.rpc.tls import TlsFiles
from tests.chaos import failpoints
from tests.chaos.failpoints import Action, Failpoint, Place
from tests.chaos.site import DEMO_MODEL, DEPLOYMENT, LAYERS, MODEL, NODES
from tests.support.identities import Identities
from tests.support.nursery import PATHS
from tests.system.netns import namespaces, processes

pytestmark = [pytest.mark.netns, pytest.mark.timeout(600)]
HOSTS = ("coordinator", *NODES, "operator")
PROMPT = "Once upon a time"
PROMPT_TOKENS = 4
NEW_TOKENS = 40
STARTUP_S = 120.0
ANSWER_S = 120.0
HELD_S = 5.0
"""How long the node holds its step, so that the cable is out before it ends: far more than the test
needs."""


@dataclass
class Site:
    network: namespaces.Network
    launcher: processes.Launcher
    tls: dict[str, TlsFiles]
    coordinator: str
    directory: Path

    def edgectl(self, *arguments: str) -> processes.Running:
        return self.launcher.edgectl("operator", self.coordinator, self.tls["operator"], *arguments)

    def ask(self, *arguments: str) -> dict[str, object]:
        """Run edgectl, which must succeed; return its JSON output."""
        ended = self.edgectl(*arguments, "-o", "json").wait(ANSWER_S)
        assert ended.exit_code == 0, ended.stderr
        return dict(json.loads(ended.stdout))

    def pull(self, host: str) -> None:
        command = [
            "ip",
            "-n",
            self.network.namespace(host),
            "link",
            "set",
            namespaces.DEVICE,
            "down",
        ]
        subprocess.run(command, check=True, timeout=60)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    reason = namespaces.why_impossible()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setenv("PYTHONPATH", ":".join(map(str, PATHS)))
    with namespaces.Network(HOSTS, "100mbit") as network:
        launcher = processes.Launcher(network, tmp_path)
        try:
            yield start(network, launcher, tmp_path)
        finally:
            launcher.stop()


def start(network: namespaces.Network, launcher: processes.Launcher, directory: Path) -> Site:
    """Three nodes hold a stage each, one is the spare."""
    identities = Identities(directory)
    tls = {host: identities.host(host) for host in HOSTS}
    listen = {host: ("--listen", f"{network.address(host)}:0") for host in HOSTS}
    running, ready = launcher.daemon(
        "coordinator", "edgeshard_coordinator", tls["coordinator"], *listen["coordinator"]
    )
    coordinator = processes.address_when_ready(running, ready, STARTUP_S)
    ours = ("--failpoints", str(directory), "--coordinator", coordinator, "--threads", "1")
    agents = [
        launcher.daemon(name, "tests.chaos.agent", tls[name], "--name", name, *listen[name], *ours)
        for name in NODES
    ]
    for running, ready in agents:
        processes.address_when_ready(running, ready, STARTUP_S)
    site = Site(network, launcher, tls, coordinator, directory)
    site.ask("model", "add", str(DEMO_MODEL), "--name", MODEL)
    site.ask(
        "deploy",
        DEPLOYMENT,
        "--model",
        MODEL,
        "--layers",
        LAYERS,
        "--dtype",
        "float32",
        "--timeout",
        "100",
    )
    return site


@pytest.mark.long
def test_an_answer_goes_on_when_a_cable_is_pulled(site: Site) -> None:
    asked = (
        "generate",
        DEPLOYMENT,
        "--prompt",
        PROMPT,
        "--max-tokens",
        str(NEW_TOKENS),
        "--temperature",
        "0",
    )
    right = site.ask(*asked)
    held = Failpoint(
        "held",
        Place.BEFORE_COMPUTE,
        position=PROMPT_TOKENS + 9,
        action=Action.SLEEP,
        seconds=HELD_S,
    )
    failpoints.arm(site.directory, "b", [held])
    running = site.edgectl(*asked, "-o", "json")
    processes.wait_until(lambda: "held" in failpoints.marks(site.directory), ANSWER_S, running.said)
    site.pull("b")
    ended = running.wait(ANSWER_S)
    assert ended.exit_code == 0, ended.stderr
    answer = json.loads(ended.stdout)
    same = ("prompt_token_ids", "token_ids", "text", "finish_reason")
    assert {key: answer[key] for key in same} == {key: right[key] for key in same}
