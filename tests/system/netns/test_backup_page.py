"""docs/backup.md over five machines: a site of three nodes is backed up under load, lost, and
restored elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.house.documents import ROOT, blocks
from tests.system.netns.shells import COMMAND_S, Machine, end, made_machines

pytestmark = [pytest.mark.netns, pytest.mark.long, pytest.mark.timing, pytest.mark.timeout(900)]

PAGE = ROOT / "docs" / "backup.md"
NODES = ("a", "b", "c")
MACHINES = ("coordinator", "spare", *NODES)
MODEL = ROOT / "edgeshard" / "demo_model"
GENERATE = 'edgectl generate story --prompt "Once upon a time" --max-tokens 8'
MOVED = "127.0.0.1:7700"
"""The address on the page to which the coordinator moves."""
ASK = """
import json, pathlib, sys, urllib.error, urllib.request
body = {
    "model": "story",
    "messages": [{"role": "user", "content": "Once upon a time"}],
    "max_tokens": int(sys.argv[2]),
}
headers = {"Authorization": f"Bearer {sys.argv[1]}", "Content-Type": "application/json"}
while True:
    asked = urllib.request.Request(
        "http://127.0.0.1:8000/v1/chat/completions", json.dumps(body).encode(), headers
    )
    try:
        print(urllib.request.urlopen(asked, timeout=60).status, flush=True)
    except urllib.error.HTTPError as error:
        print(error.code, flush=True)
    if sys.argv[3:] == ["once"]:
        break
"""
"""A client of the coordinator's HTTP endpoint: KEY TOKENS [once]; it prints the status of each
answer."""


def page_line(beginning: str) -> str:
    """The line of the page that begins so, and those that continue it."""
    text = "".join(block.text for block in blocks(PAGE) if block.language == "bash").replace(
        "\\\n", " "
    )
    found = [line.strip() for line in text.splitlines() if line.strip().startswith(beginning)]
    assert found, f"{PAGE.name} has no line {beginning!r}"
    return found[-1]


def waits_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + COMMAND_S
    while not what():
        assert time.monotonic() < deadline, what
        time.sleep(0.3)


def deployment_of(machine: Machine) -> tuple[str, int]:
    """Phase and epoch of the deployment; ("", 0) if the site does not answer."""
    process = machine.run("edgectl get deployments -o json 2> get.log")
    output, _ = process.communicate(timeout=COMMAND_S)
    if process.returncode != 0:
        return "", 0
    (found,) = json.loads(output)
    return found["phase"].lower(), found["epoch"]


class Mill:
    """The page's site. `running` has the processes of machines, by their names."""

    def __init__(self, machines: dict[str, Machine]) -> None:
        self.machines = machines
        self.running: dict[str, subprocess.Popen[str]] = {}

    def start_coordinator(self, name: str, line: str) -> None:
        """Start a coordinator by the page's line, with its HTTP endpoint on the machine's own
        loopback."""
        log = "2> coordinator.log"
        self.running[name] = self.machines[name].run(
            f"exec {line} --http-listen 127.0.0.1:8000 {log}"
        )

    def start_agent(self, name: str, line: str) -> None:
        self.running[name] = self.machines[name].run(f"exec {line} 2>> agent.log")

    def kill(self, name: str) -> None:
        """End all processes of a machine as a power cut does."""
        network = self.machines[name].network
        command = ("ip", "netns", "pids", network.namespace(name))
        for pid in subprocess.check_output(command, text=True).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        self.running.pop(name).communicate(timeout=30)
        waits_for(lambda: not subprocess.check_output(command))


@pytest.fixture
def mill(namespaces: ModuleType, tmp_path: Path) -> Iterator[Mill]:
    with made_machines(namespaces, MACHINES, None, tmp_path) as machines:
        for name in ("coordinator", "spare"):
            shutil.copytree(MODEL, machines[name].home / "tales")
            (machines[name].home / "ask.py").write_text(ASK)
        mill = Mill(machines)
        try:
            yield mill
        finally:
            end(list(mill.running.values()))


def test_a_site_of_three_is_restored_at_another_address(mill: Mill) -> None:
    first, spare = mill.machines["coordinator"], mill.machines["spare"]
    nodes = [mill.machines[name] for name in NODES]

    # The page's site, over real addresses and with one node more.
    first.finished("edgectl init mill")
    mill.start_coordinator("coordinator", "edgeshard-coordinator --config pki/coordinator.toml")
    waits_for(lambda: first.run("edgectl get nodes").wait(COMMAND_S) == 0)
    for node in nodes:
        token = first.finished(
            f"edgectl token create --node {node.name} --host {first.address} --quiet 2> log"
        ).strip()
        mill.start_agent(node.name, f"edgectl join {token} --foreground")
    waits_for(lambda: first.finished("edgectl get nodes").count(" connected ") == len(NODES))
    first.finished("edgectl model add tales --name fairy-tales")
    first.finished("edgectl deploy story --model fairy-tales --layers a=0:4,b=4:8,c=8:12")
    first.finished(page_line("edgectl key create robot"))
    key = (first.home / "robot.key").read_text().strip()
    story = first.finished(GENERATE)

    # Backed up under load.
    load = first.run(f"exec python3 ask.py {key} 24 > load.log")

    def answered() -> int:
        log = first.home / "load.log"
        return len(log.read_text().split()) if log.exists() else 0

    waits_for(lambda: answered() >= 2)
    before = answered()
    first.finished(page_line("edgectl backup"))
    waits_for(lambda: answered() >= before + 2)
    end([load])
    assert set((first.home / "load.log").read_text().split()) == {"200"}
    shutil.copy(first.home / "mill.backup", spare.home)

    # It serves on, and reaches higher epochs.
    epoch = deployment_of(first)[1]
    mill.kill("b")
    mill.start_agent(
        "b", page_line("edgeshard-agent --config").partition(" 2>")[0].replace("$node", "b")
    )
    waits_for(lambda: deployment_of(first) > ("ready", epoch))
    epoch = deployment_of(first)[1]

    # The coordinator's disk is lost. Nodes run on.
    mill.kill("coordinator")
    shutil.rmtree(first.home)

    # Restored on another machine, by the page's lines.
    spare.finished(page_line("edgectl restore"))
    moved = f"{spare.address}:7700"
    line = page_line("edgeshard-coordinator --config pki/coordinator.toml --listen")
    line = line.partition(" --ready-file")[0].replace("127.0.0.1", spare.address)
    mill.start_coordinator("spare", line)
    change = page_line("edgectl set-coordinator").replace(MOVED, moved)
    for node in nodes:
        restart = node.finished(change).splitlines()[-1]
        mill.kill(node.name)
        mill.start_agent(node.name, restart.strip())
    spare.finished(change)
    waits_for(lambda: spare.run("edgectl get nodes").wait(COMMAND_S) == 0)
    spare.finished(page_line("edgectl model add").replace('"$model"', "tales"))
    waits_for(lambda: deployment_of(spare)[0] == "ready")
    assert spare.finished("edgectl get nodes").count(" connected ") == len(NODES)
    assert spare.finished(GENERATE) == story
    assert page_line("wait_for 'edgectl generate") == f"wait_for '{GENERATE}'"
    spare.finished(page_line("edgectl key list"))
    assert spare.finished(f"python3 ask.py {key} 4 once").strip() == "200"
    assert spare.finished(f"python3 ask.py {key[:-1]} 4 once").strip() == "401"
