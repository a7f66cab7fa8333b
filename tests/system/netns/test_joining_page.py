"""docs/joining.md as somebody follows it: two machines with nothing but EdgeShard, and the page's
lines in order."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.house.documents import ROOT, blocks
from tests.system.netns.shells import COMMAND_S, Machine, end, made_machines

pytestmark = pytest.mark.netns
PAGE = ROOT / "docs" / "joining.md"
README = ROOT / "README.md"
MACHINES = ("first", "second")
LINE = re.compile(rf"(?P<machine>{'|'.join(MACHINES)})\$ (?P<command>.+)")
MODELS_OVER_HTTP = """
import pathlib, urllib.request
key = (pathlib.Path.home() / ".local/state/edgeshard/serve/api-key").read_text().strip()
headers = {"Authorization": f"Bearer {key}"}
request = urllib.request.Request("http://127.0.0.1:8000/v1/models", headers=headers)
print(urllib.request.urlopen(request).read())
"""
NO_TOKEN = "edgeshard2-AMCoAQ..."


def lines(with_text: str = "") -> list[tuple[str, str]]:
    """The lines of the first block that has this text, each with its machine."""
    block = next(
        block for block in blocks(PAGE) if block.language == "console" and with_text in block.text
    )
    found = [LINE.fullmatch(line) for line in block.text.splitlines()]
    assert all(found), block.text
    return [(match["machine"], match["command"]) for match in found if match is not None]


@pytest.fixture
def machines(namespaces: ModuleType, tmp_path: Path) -> Iterator[dict[str, Machine]]:
    with made_machines(namespaces, MACHINES, "100mbit", tmp_path) as made:
        shutil.copytree(ROOT / "edgeshard" / "demo_model", made["first"].home / "tiny-tales")
        yield made


@pytest.mark.long
def test_the_page_takes_two_machines_from_nothing_to_an_answer(
    machines: dict[str, Machine],
) -> None:
    typed = lines()
    assert [machine for machine, _ in typed].count("first") <= 6
    assert [machine for machine, _ in typed].count("second") == 1
    running: list[subprocess.Popen[str]] = []
    said = ""
    try:
        for machine, command in typed:
            if NO_TOKEN in command:
                joining = re.search(r"edgectl join (edgeshard2-\S+)", said)
                assert joining is not None, said
                command = command.replace(NO_TOKEN, joining[1])
            background = command.endswith(" &")
            # A shell in the background would end with its parent.
            process = machines[machine].run(command.removesuffix(" &"))
            running.append(process)
            if background:
                settle(machines["first"], command)
                continue
            said, _ = process.communicate(timeout=COMMAND_S)
            assert process.returncode == 0, f"{command}\n{said}"
        assert len(said.split()) > 20, said
    finally:
        end(running)


@pytest.mark.long
def test_the_readme_leads_from_one_node_to_two(machines: dict[str, Machine]) -> None:
    """Its lines in order, except for those that install or set the path."""
    section = README.read_text().partition("### Your second node")[2].partition("\n### ")[0]
    typed = re.findall(r"```console\n(.*?)```", section, re.DOTALL)
    assert len(typed) == 3 and "".join(typed).count("\n") <= 8
    on_first, on_second, again = (
        [line for line in block.splitlines() if "activate" not in line] for block in typed
    )
    (create,) = on_first
    (join,) = on_second
    (listing, measure, deploy, generate) = again
    first, second = machines["first"], machines["second"]
    running = [first.run("edgectl serve demo")]
    try:
        settle(first, "--quiet")
        said = first.finished(create)
        printed = re.search(r"^edgectl join edgeshard2-\S+$", said, re.MULTILINE)
        assert printed is not None and join == "edgectl join edgeshard2-...", said
        running.append(second.run(printed[0]))
        settle(first, create)
        assert "second" in first.finished(listing)
        first.finished(measure)
        first.finished(deploy)
        stages = re.findall(
            r"^(\S+) +\d+:\d+ ", first.finished("edgectl describe deployment both"), re.MULTILINE
        )
        assert len(stages) == 2 and "second" in stages
        assert len(first.finished(generate).split()) > 20
        assert '"both"' in first.finished(f"{sys.executable} -c '{MODELS_OVER_HTTP}'")
    finally:
        end(running)


@pytest.mark.long
def test_the_page_leads_a_second_machine_to_a_site_whose_address_it_does_not_know(
    machines: dict[str, Machine],
) -> None:
    announced, created, _ = (command for _, command in lines("--discover"))
    first, second = machines["first"], machines["second"]
    said, _ = first.run("edgectl init mill").communicate(timeout=COMMAND_S)
    running = [first.run(announced)]
    try:
        settle(first, announced)
        said, _ = first.run(created).communicate(timeout=COMMAND_S)
        joining = re.search(r"edgectl join edgeshard2-\S+", said)
        assert joining is not None and "looks for the site" in said, said
        running.append(second.run(joining[0]))
        settle(first, "")
    finally:
        end(running)


def settle(first: Machine, command: str) -> None:
    """Wait until the started process shows: a reader waits for its line, too."""
    deadline = time.monotonic() + COMMAND_S
    wanted = 0 if "coordinator" in command else 1 if "--quiet" in command or not command else 2
    while True:
        process = first.run("edgectl get nodes")
        out, _ = process.communicate(timeout=COMMAND_S)
        if process.returncode == 0 and out.count(" connected ") >= wanted:
            return
        assert time.monotonic() < deadline, (command, out)
        time.sleep(0.2)
