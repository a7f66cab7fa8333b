"""Both daemons as services of systemd: laid out, started, watched, stopped and removed, by the real
protocol."""

from __future__ import annotations

import asyncio
import signal
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgeshard.cli.main import app
from edgeshard.client import Client
from edgeshard.domain.identity import Role
from tests.support.forms import one_in
from tests.support.identities import Identities
from tests.support.units import PROGRAMS, Unit

OPTIONS = {
    "agent": ("--name", "a"),
    "coordinator": ("--listen", "127.0.0.1:0"),
}
# The part that hangs on SIGUSR1, and continues after SIGUSR2.
STUCK = {
    "agent": (
        "compute thread",
        """
import asyncio, signal, threading
from edgeshard_agent import daemon, entry
from edgeshard_agent.core import hanging

class Check(daemon.HangCheck):
    def __init__(self, stages, worker, clock):
        super().__init__(stages, worker, clock)
        loop, released = asyncio.get_running_loop(), threading.Event()

        def hang():
            self.call = loop.create_task(worker.run(released.wait))

        loop.add_signal_handler(signal.SIGUSR1, hang)
        loop.add_signal_handler(signal.SIGUSR2, released.set)

hanging.STILL_S, daemon.HangCheck = 1.0, Check
entry.main()
""",
    ),
    "coordinator": (
        "state loop",
        """
import asyncio, signal
from edgeshard_coordinator import daemon, entry
from edgeshard_coordinator.control.runtime import loop as loops

class Loop(loops.StateLoop):
    def __init__(self, *args):
        super().__init__(*args)
        self.goes = asyncio.Event()
        self.goes.set()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self.goes.clear)
        loop.add_signal_handler(signal.SIGUSR2, self.goes.set)
        self._inbox.get, self._get = self._wait, self._inbox.get

    async def _wait(self):
        await self.goes.wait()
        return await self._get()

from edgeshard_coordinator.control import coordinator
coordinator.StateLoop = Loop
entry.main()
""",
    ),
}

MakeUnit = Callable[..., Unit]


def edgectl(*arguments: str) -> list[str]:
    """Its output on stdout, without any other output."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def listing(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every file and directory, with its mode and content."""
    return {
        str(path.relative_to(root)): (
            stat.S_IMODE(path.stat().st_mode),
            b"" if path.is_dir() else path.read_bytes(),
        )
        for path in sorted(root.rglob("*"))
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine's files, as far as they matter."""
    root = tmp_path / "root"
    for name in ("etc/systemd/system/multi-user.target.wants", "var/lib"):
        (root / name).mkdir(parents=True)
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    return root


@pytest.fixture
async def make_unit(root: Path, tmp_path: Path) -> AsyncIterator[MakeUnit]:
    made: list[Unit] = []

    def make(daemon: str, script: str = "") -> Unit:
        directory = tmp_path / f"{daemon}-{len(made)}"
        directory.mkdir()
        made.append(Unit(root, f"edgeshard-{daemon}", directory, script=script))
        return made[-1]

    yield make
    for unit in made:
        await unit.close()


@pytest.mark.parametrize("daemon", OPTIONS)
async def test_a_service_serves_gets_on_and_stops(
    root: Path, make_unit: MakeUnit, daemon: str
) -> None:
    edgectl(
        "install", daemon, "--plaintext", "--root", str(root), "--bin", PROGRAMS, *OPTIONS[daemon]
    )
    unit = make_unit(daemon)
    await unit.start()
    ready = await unit.said()
    assert ready["READY"] == "1" and ready["STATUS"].startswith("serving on 127.0.0.1:")
    if daemon == "coordinator":
        async with Client(ready["STATUS"].removeprefix("serving on ")) as client:
            assert await client.nodes() == ()
    for _ in range(2):
        assert await unit.said() == {"WATCHDOG": "1"}
    unit.signal(signal.SIGSTOP)
    # Its output from before it stalled.
    await asyncio.sleep(0.2)
    unit.unread()
    await asyncio.sleep(2.0)
    assert unit.unread() == []
    unit.signal(signal.SIGCONT)
    await unit.until(WATCHDOG="1")
    assert await unit.stop() == 0


@pytest.mark.parametrize("daemon", one_in(2, STUCK))
async def test_the_watchdog_is_not_fed_while_a_part_is_stuck(
    root: Path, make_unit: MakeUnit, daemon: str
) -> None:
    edgectl(
        "install", daemon, "--plaintext", "--root", str(root), "--bin", PROGRAMS, *OPTIONS[daemon]
    )
    part, script = STUCK[daemon]
    unit = make_unit(daemon, script)
    await unit.start()
    await unit.until(WATCHDOG="1")
    unit.signal(signal.SIGUSR1)
    await unit.until(STATUS=f"no progress: {part}")
    await asyncio.sleep(3.0)  # two checks of its event loop, which runs all the time
    assert unit.unread() == []
    unit.signal(signal.SIGUSR2)
    await unit.until(WATCHDOG="1")
    assert "progress_stalled" in unit.log.read_text()
    assert await unit.stop() == 0


async def test_install_start_stop_uninstall_leaves_nothing_behind(
    root: Path, make_unit: MakeUnit, tmp_path: Path
) -> None:
    """With the credentials of a site that speaks TLS, and both daemons on one machine."""
    for daemon in OPTIONS:
        files = root / "etc/tls" / daemon
        files.mkdir(parents=True)
    identities = Identities(tmp_path)
    files_of = {"coordinator": identities.coordinator(), "agent": identities.of(Role.AGENT, "a")}
    for daemon in OPTIONS:
        issued = files_of[daemon]
        for name, path in (
            ("ca.pem", issued.ca),
            ("cert.pem", issued.cert),
            ("key.pem", issued.key),
        ):
            (root / "etc/tls" / daemon / name).write_bytes(path.read_bytes())
    before = listing(root)
    for daemon, options in OPTIONS.items():
        install = (
            "install",
            daemon,
            "--root",
            str(root),
            "--bin",
            PROGRAMS,
            "--credentials",
            f"/etc/tls/{daemon}",
        )
        untouched = listing(root)
        said = edgectl(*install, *options, "--dry-run")
        assert listing(root) == untouched
        assert edgectl(*install, *options) == said
        laid_out = listing(root)
        assert edgectl(*install, *options) == [] and listing(root) == laid_out
        assert edgectl("install", daemon, "--root", str(root)) == [], (
            "what was given the last time holds"
        )
    coordinator, agent = make_unit("coordinator"), make_unit("agent")
    await coordinator.start()
    address = (await coordinator.until(READY="1"))["STATUS"].removeprefix("serving on ")
    await agent.start("--coordinator", address)
    await agent.until(READY="1")
    operator = identities.of(Role.OPERATOR, "admin")
    async with Client(address, operator) as client, asyncio.timeout(60):
        while not [node for node in await client.nodes() if node.placeable]:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.05)
    assert await agent.stop() == 0 and await coordinator.stop() == 0
    for daemon in OPTIONS:
        said = edgectl("uninstall", daemon, "--root", str(root))
        assert [line for line in said if line.startswith("leave")] == [
            f"leave   /var/lib/edgeshard-{daemon}: its state; --purge removes it, and the user "
            "whom it belongs to"
        ]
        assert any((root / f"var/lib/edgeshard-{daemon}").iterdir())
        edgectl("uninstall", daemon, "--root", str(root), "--purge")
        assert edgectl("uninstall", daemon, "--root", str(root), "--purge") == []
    assert listing(root) == before
