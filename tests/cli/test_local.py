"""Daemons as child processes: ready files, early ends, and stopping them all."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from edgeshard.cli.commands.site import demo
from edgeshard.domain.deployments.placement import check_cover
from edgeshard.domain.errors import (
    DeadlineError,
    EdgeShardError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from edgeshard.local import child_daemons
from edgeshard.local.child_daemons import ChildDaemon, keep_running

pytestmark = pytest.mark.timing

READY = """
import json, os, signal, sys, time
path = sys.argv[sys.argv.index("--ready-file") + 1]
with open(path + ".tmp", "w") as file:
    json.dump({"address": "127.0.0.1:41234", "pid": os.getpid()}, file)
"""
RENAME = "os.rename(path + '.tmp', path)\n"


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon here is a module of the test's directory, which no daemon finds by standing
    there."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def daemon(directory: Path, source: str) -> ChildDaemon:
    (directory / "scripted.py").write_text(source)
    return ChildDaemon("node", "scripted", [], directory)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_it_is_ready_when_its_file_says_so_and_sigterm_ends_it(tmp_path: Path) -> None:
    node = daemon(tmp_path, READY + RENAME + "signal.pause()\n")
    await node.start()
    assert await node.wait_ready(60) == node.address == "127.0.0.1:41234"
    pid = node.pid
    assert pid is not None and alive(pid)
    await node.stop()
    assert node.pid is None and not alive(pid)
    await node.stop()


async def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    node = daemon(
        tmp_path,
        READY + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + RENAME + "time.sleep(60)\n",
    )
    await node.start()
    await node.wait_ready(60)
    pid = node.pid
    assert pid is not None
    await node.stop(grace_s=0.1)
    assert not alive(pid)


async def test_a_killed_one_can_be_started_again(tmp_path: Path) -> None:
    node = daemon(tmp_path, READY + RENAME + "signal.pause()\n")
    pids = []
    for _ in range(2):
        await node.start()
        await node.wait_ready(60)
        pids.append(node.pid)
        await node.kill()
    assert pids[0] != pids[1]


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        (
            "print('error: port 1 is in use'); raise SystemExit(5)",
            UnavailableError,
            "node did not start: port 1 is in use",
        ),
        (
            "raise SystemExit(\"edgeshard-agent needs the agent extra: pip install '.[agent]'\")",
            FailedPreconditionError,
            "edgeshard-agent needs the agent extra: pip install '.[agent]'",
        ),
        ("1 / 0", FailedPreconditionError, "ZeroDivisionError"),
    ],
)
async def test_an_early_end_is_a_typed_error_with_the_reason(
    tmp_path: Path, source: str, kind: type[EdgeShardError], message: str
) -> None:
    node = daemon(tmp_path, source)
    await node.start()
    with pytest.raises(kind) as caught:
        await node.wait_ready(60)
    assert message in caught.value.message


async def test_one_that_never_gets_ready_is_a_deadline_error_with_its_log(tmp_path: Path) -> None:
    node = daemon(tmp_path, "import time\nprint('still fetching', flush=True)\ntime.sleep(60)\n")
    await node.start()
    while b"still" not in node.log_path.read_bytes():  # noqa: ASYNC110 (it is another process's file)
        await asyncio.sleep(0.01)
    with pytest.raises(DeadlineError, match="still fetching"):
        await node.wait_ready(0.05)
    await node.kill()


SHORT_LIVED = """
number = len(open("tries").read()) if os.path.exists("tries") else 0
open("tries", "a").write("x")
print(f"this is life {number}", flush=True)
where = sys.argv[sys.argv.index("--listen") + 1] if "--listen" in sys.argv else "127.0.0.1:41234"
assert where == "127.0.0.1:41234", where
if number >= lives:
    raise SystemExit("the disk is gone")
"""


async def supervised(
    directory: Path, lives: int, proven: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, ...]:
    """A process that is ready and ends by itself at once, `lives` times; then it ends before it is
    ready."""
    monkeypatch.setattr(child_daemons, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(child_daemons, "WINDOW_S", 0.1)
    (directory / "node.log").write_text("of an earlier time\n")
    node = daemon(
        directory, f"import os, sys\nlives = {lives}\n{SHORT_LIVED}{READY}{RENAME}os.abort()\n"
    )
    await node.start()
    await node.wait_ready(60)
    said: list[str] = []
    async with asyncio.timeout(120):
        code = await keep_running(node, said.append, lambda: proven)
    return node, said, node.error_of(code).message


async def test_one_that_ends_comes_back_until_it_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, said, message = await supervised(tmp_path, 7, True, monkeypatch)
    assert node.starts == 7 + child_daemons.MOST_STARTS
    assert said[:2] == ["node ended by signal 6: it starts again", "node runs again"]
    assert "before it was ready" in message and message.endswith(
        "with:\nthis is life 11\nthe disk is gone"
    )


async def test_what_has_not_worked_yet_is_given_up_although_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, _, message = await supervised(tmp_path, 99, False, monkeypatch)
    assert node.starts == child_daemons.MOST_STARTS
    assert message.endswith("with:\nthis is life 4") and "by signal 6" in message


LISTENS = """
import json, os, signal, sys
where = sys.argv[sys.argv.index("--listen") + 1]
if where == "127.0.0.1:7600":
    print("error: the address is in use")
    raise SystemExit(5)
path = sys.argv[sys.argv.index("--ready-file") + 1]
with open(path + ".tmp", "w") as file:
    json.dump({"address": where}, file)
"""


async def test_one_whose_port_is_taken_takes_another(tmp_path: Path) -> None:
    (tmp_path / "scripted.py").write_text(LISTENS + RENAME + "signal.pause()\n")
    node = ChildDaemon("node", "scripted", [], tmp_path, listen={"--listen": "127.0.0.1:7600"})
    assert await node.start_anywhere(60) == "127.0.0.1:0"
    await node.stop()
    assert await node.start_anywhere(60) == "127.0.0.1:0", "it stays there"
    await node.stop()


async def test_it_takes_its_ports_again_on_the_addresses_it_was_given(tmp_path: Path) -> None:
    """The URL names what others dial, which may be one of several addresses that it listens at."""
    (tmp_path / "scripted.py").write_text(
        READY.replace('"pid": os.getpid()', '"gateway": "https://myhost.local:8443"')
        + "with open('seen', 'w') as file:\n    json.dump(sys.argv, file)\n"
        + RENAME
        + "signal.pause()\n"
    )
    first = ["--http-listen", "127.0.0.1:8000", "--http-listen", "0.0.0.0:0"]
    node = ChildDaemon("node", "scripted", first, tmp_path, listen={"--listen": "0.0.0.0:0"})
    await node.start()
    await node.wait_ready(60)
    await node.kill()
    node.keep_address()
    await node.start()
    await node.wait_ready(60)
    await node.kill()
    words = json.loads((tmp_path / "seen").read_text())
    assert words[-4:] == ["--listen", "0.0.0.0:41234", "--http-listen", "0.0.0.0:8443"]


async def test_an_error_is_no_port_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "scripted.py").write_text(
        "open('tries', 'a').write('x')\nprint('error: no'); raise SystemExit(5)\n"
    )
    for listen, tries in (("127.0.0.1:0", 1), ("127.0.0.1:7600", 2)):
        (tmp_path / "tries").unlink(missing_ok=True)
        with pytest.raises(UnavailableError):
            await ChildDaemon(
                "node", "scripted", [], tmp_path, listen={"--listen": listen}
            ).start_anywhere(60)
        assert len((tmp_path / "tries").read_text()) == tries


async def test_the_operators_daemon_settings_do_not_leak_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESHARD__AGENT__MEMORY", "1GiB")
    monkeypatch.setenv("UNRELATED_SETTING", "kept")
    node = daemon(
        tmp_path,
        "import os\nprint(sorted(k for k in os.environ if 'E' in k))\nraise SystemExit(1)\n",
    )
    await node.start()
    with pytest.raises(FailedPreconditionError) as caught:
        await node.wait_ready(60)
    assert "UNRELATED_SETTING" in caught.value.message and "EDGESHARD__" not in caught.value.message


@pytest.mark.parametrize("layer_count", [1, 2, 3, 12, 13, 14])
def test_even_layers_cover_the_model(layer_count: int) -> None:
    stages = demo.even_layers(layer_count, ("a", "b", "c"))
    check_cover(stages, layer_count, "a")
    sizes = [len(stage.layers) for stage in stages]
    assert max(sizes) - min(sizes) <= 1 and len(sizes) == min(3, layer_count)


def test_twelve_layers_are_split_in_fours() -> None:
    assert [str(stage.layers) for stage in demo.even_layers(12, ("a", "b", "c"))] == [
        "0:4",
        "4:8",
        "8:12",
    ]


def test_a_given_model_directory_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    with demo.model_directory(Path("m")) as directory:
        assert directory == tmp_path / "m"


def test_an_installation_without_the_demo_model_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    with pytest.raises(NotFoundError, match="--model-dir"), demo.model_directory(None):
        pass


def test_python_is_the_one_that_runs_edgectl(tmp_path: Path) -> None:
    assert ChildDaemon("node", "m", [], tmp_path)._command[:4] == [sys.executable, "-P", "-m", "m"]
