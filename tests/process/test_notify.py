"""The messages to a service manager, over a real socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeshard.domain.errors import FailedPreconditionError
from edgeshard.process.watchdog import Notifier, StallDetector, feed_watchdog

pytestmark = pytest.mark.timing

DEADLINE_S = 60


@pytest.fixture(params=["path", "abstract"])
def manager(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[socket.socket, dict[str, str]]]:
    """The manager's end, and the environment that it gives."""
    address = (
        str(tmp_path / "notify") if request.param == "path" else f"@edgeshard-test-{os.getpid()}"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("\0" + address[1:] if address.startswith("@") else address)
        listening.settimeout(DEADLINE_S)
        yield (
            listening,
            {
                "NOTIFY_SOCKET": address,
                "WATCHDOG_USEC": "3000000",
                "WATCHDOG_PID": str(os.getpid()),
            },
        )


def test_each_message_arrives_and_the_variables_are_gone(
    manager: tuple[socket.socket, dict[str, str]],
) -> None:
    listening, environment = manager
    environment["HOME"] = "here"
    notifier = Notifier.from_environment(environment)
    assert environment == {"HOME": "here"} and notifier.watchdog_s == 3.0
    notifier.ready("serving on 127.0.0.1:1")
    notifier.beat()
    notifier.status("fine")
    notifier.stopping()
    assert [listening.recv(999).decode().splitlines() for _ in range(4)] == [
        ["READY=1", "STATUS=serving on 127.0.0.1:1"],
        ["WATCHDOG=1"],
        ["STATUS=fine"],
        ["STOPPING=1", "STATUS=stopping"],
    ]


@pytest.mark.parametrize(
    "changes", [{"WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": ""}]
)
def test_a_watchdog_of_somebody_else_or_none_is_not_fed(
    manager: tuple[socket.socket, dict[str, str]], changes: dict[str, str]
) -> None:
    assert Notifier.from_environment(manager[1] | changes).watchdog_s is None


def test_without_a_manager_nothing_is_said() -> None:
    notifier = Notifier.from_environment({"WATCHDOG_USEC": "3000000"})
    assert notifier.watchdog_s is None
    notifier.ready("serving")
    notifier.stopping()


def test_a_socket_that_nobody_reads_is_named(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError) as refused:
        Notifier.from_environment({"NOTIFY_SOCKET": str(tmp_path / "nothing")})
    assert refused.value.field == "NOTIFY_SOCKET" and "nothing" in refused.value.message


def test_a_manager_that_goes_or_does_not_read_holds_up_nobody(
    manager: tuple[socket.socket, dict[str, str]],
) -> None:
    listening, environment = manager
    notifier = Notifier.from_environment(environment)
    for _ in range(10_000):
        notifier.beat()
    listening.close()
    notifier.beat()


def test_every_part_must_have_done_something_since_the_last_look() -> None:
    progress = StallDetector({"loop": 3, "compute thread": 0})
    assert progress.stuck({"loop": 4, "compute thread": 0}) == ["compute thread"]
    assert progress.stuck({"loop": 5, "compute thread": 1}) == []
    assert progress.stuck({"loop": 5, "compute thread": 1}) == ["loop", "compute thread"]


async def test_the_watchdog_is_fed_while_there_is_progress_and_no_longer(
    manager: tuple[socket.socket, dict[str, str]],
) -> None:
    listening, environment = manager
    listening.setblocking(False)
    loop = asyncio.get_running_loop()

    async def said() -> str:
        async with asyncio.timeout(DEADLINE_S):
            return (await loop.sock_recv(listening, 999)).decode()

    looks = 0
    done = 0
    moving = True

    def counts() -> dict[str, int]:
        nonlocal looks, done
        looks, done = looks + 1, done + moving
        return {"loop": done}

    feeding = asyncio.create_task(
        feed_watchdog(Notifier.from_environment(environment | {"WATCHDOG_USEC": "30000"}), counts)
    )
    assert [await said() for _ in range(3)] == ["WATCHDOG=1"] * 3
    moving = False
    while (last := await said()) == "WATCHDOG=1":
        pass
    assert last == "STATUS=no progress: loop"
    before = looks
    while looks < before + 4:  # noqa: ASYNC110 (there is no event of a look)
        await asyncio.sleep(0.001)
    with pytest.raises(BlockingIOError):
        listening.recv(999)
    moving = True
    assert await said() == "WATCHDOG=1"
    assert await said() == "STATUS=serving"
    feeding.cancel()
