"""edgectl serve: from one command to an answer over HTTP, found again after a restart, and larger by a line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

EDGECTL = [sys.executable, "-m", "edgeshard.cli.main"]
READY_S = 90.0


class Running:
    """An edgectl in the background, and what it has printed."""

    def __init__(self, directory: Path, name: str, *arguments: str) -> None:
        self.log = directory / f"{name}.log"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("EDGESHARD__")}
        environment |= {"XDG_CONFIG_HOME": str(directory / "config"), "XDG_STATE_HOME": str(directory / "state-home")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*EDGECTL, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def until(self, pattern: str) -> re.Match[str]:
        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s:
            found = re.search(pattern, self.log.read_text(), re.M)
            if found:
                return found
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(f"no {pattern!r} in {self.log.read_text()}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(30)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def begin(*arguments: str) -> Running:
        running.append(Running(tmp_path, f"edgectl-{len(running)}", *arguments))
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
    """Of all files, those that have two names once."""
    found = {}
    for directory in directories:
        for path in directory.rglob("*"):
            if path.is_file():
                status = path.stat()
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def test_one_command_answers_and_the_next_box_makes_it_bigger(start: Callable[..., Running], tmp_path: Path) -> None:
    state = tmp_path / "site"
    serve = ("serve", "demo", "--state-dir", str(state), "--listen", "127.0.0.1:0", "--port", "0")
    first = start(*serve)
    url, key = first.until(r"^URL +(\S+)$")[1], first.until(r"^API key +(\S+)$")[1]
    story = {"model": "fairy-tales", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    told = asked(url, key, "/completions", story)["choices"][0]["text"]
    assert told
    said = asked(
        url, key, "/chat/completions", {"model": "fairy-tales", "messages": [{"role": "user", "content": "x"}]}
    )
    assert said["choices"][0]["message"]["role"] == "assistant"
    shipped = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
    weights = (shipped / "model.safetensors").stat().st_size
    copies = [path for path in state.rglob("*") if path.is_file() and path.stat().st_size >= weights // 8]
    assert [path.stat().st_size for path in copies if path.parent.name == "linked"].count(weights) == 1
    assert all(path.parent.name == "linked" or path.suffix == ".sqlite-wal" for path in copies), "no box has its own"
    line = first.until(r"^  edgectl (join \S+)$")[1]
    box = start(*line.split(), "--foreground", "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "box"))
    first.until(r"box box-2 has joined")
    assert box.stop() == 0
    assert first.stop() == 128 + signal.SIGTERM
    assert not leftovers(state)

    again = start(*serve)
    assert again.until(r"^API key +(\S+)$")[1] == key, "the same site"
    assert "was served before" in again.log.read_text()
    url = again.until(r"^URL +(\S+)$")[1]
    assert asked(url, key, "/completions", story)["choices"][0]["text"] == told


def leftovers(state: Path) -> list[str]:
    """Command lines of processes that the site left."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_text().replace("\0", " ")
        except OSError:
            continue
        if str(state) in text and "edgeshard_" in text:
            found.append(text)
    return found


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
