"""The coordinator as a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from edgeshard_coordinator.core.values.quotas import Quota
from edgeshard_coordinator.daemon import _assemble, _site
from edgeshard_coordinator.settings import CoordinatorSettings
from edgeshard_coordinator.store import ModelStore

from edgeshard.domain.identity import coordinator_of
from edgeshard.identity.authority import Authority, now
from edgeshard.process.about import Process
from edgeshard.process.machine_facts import Machine
from edgeshard.proto.v1 import admin_pb2, admin_pb2_grpc, store_pb2, store_pb2_grpc
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.tls_files import issue_files
from edgeshard.wire.status import from_rpc_error
from tests.support.http import Http

pytestmark = pytest.mark.timing

DEADLINE_S = 60.0


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    processes = []

    async def run(*arguments: str) -> Any:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "edgeshard_coordinator",
            *arguments,
            stderr=asyncio.subprocess.PIPE,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.wait()


def read_ready_file(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


async def wait_for_file(path: Path, process: Any) -> dict[str, Any]:
    """A file has no event to wait for."""
    async with asyncio.timeout(DEADLINE_S):
        while (content := read_ready_file(path)) is None:
            assert process.returncode is None, (await process.stderr.read()).decode()
            await asyncio.sleep(0.02)
    return content


async def end(process: Any) -> float:
    """The seconds that it takes to end in order."""
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
    took_s = time.monotonic() - began
    for line in (await process.stderr.read()).decode().splitlines():
        assert "event" in json.loads(line)
    return took_s


async def test_it_serves_and_ends_in_order(start: Any, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    arguments = (
        "--listen",
        "127.0.0.1:0",
        "--state-dir",
        str(tmp_path / "state"),
        "--ready-file",
        str(ready),
    )
    process = await start(*arguments)
    content = await wait_for_file(ready, process)
    assert content["pid"] == process.pid
    channel = open_channel(content["address"], None)
    answer = await admin_pb2_grpc.AdminServiceStub(channel).ListNodes(
        admin_pb2.ListNodesRequest(), timeout=DEADLINE_S
    )
    assert not answer.nodes
    with pytest.raises(Exception) as info:
        request = store_pb2.GetManifestRequest(model="nothing")
        await store_pb2_grpc.ModelStoreServiceStub(channel).GetManifest(request, timeout=DEADLINE_S)
    assert from_rpc_error(info.value).field == "model"  # type: ignore[arg-type]
    # A second one may have neither the address nor the state.
    taken = await start("--listen", content["address"], "--state-dir", str(tmp_path / "other"))
    _, stderr = await asyncio.wait_for(taken.communicate(), DEADLINE_S)
    assert (
        taken.returncode == 5
        and "error: listen" in stderr.decode()
        and content["address"] in stderr.decode()
    )
    sharing = await start("--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "state"))
    _, stderr = await asyncio.wait_for(sharing.communicate(), DEADLINE_S)
    assert sharing.returncode == 1 and "error: state-dir" in stderr.decode()
    took_s = await end(process)
    for _ in range(4):  # a busy machine holds some ends up, and not all of them
        if took_s < 2.0:
            break
        ready.unlink()
        again = await start(*arguments)
        async with open_channel((await wait_for_file(ready, again))["address"], None) as other:
            await admin_pb2_grpc.AdminServiceStub(other).ListNodes(
                admin_pb2.ListNodesRequest(), timeout=DEADLINE_S
            )
            took_s = await end(again)
    assert took_s < 2.0
    await channel.close()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--listen", "0.0.0.0:0"), 4, "error: listen 0.0.0.0:0 is beyond loopback"),
        (("--listen", "nonsense"), 2, "error: listen 'nonsense' is not HOST:PORT"),
        ((), 2, "error: --listen is required"),
        (("--listen", "127.0.0.1:0", "--tls-ca", "ca.pem"), 2, "error: --tls-cert is missing"),
        (("--listen", "127.0.0.1:0", "--config", "{config}"), 2, "unknown key 'lisen'"),
        (
            ("--listen", "127.0.0.1:0", "--quotas", "{config}"),
            2,
            "'coordinator' is not an identity",
        ),
        (
            ("--listen", "127.0.0.1:0", "--http-listen", "0.0.0.0:0"),
            4,
            "error: http-listen 0.0.0.0:0 is beyond loopback",
        ),
        (
            ("--listen", "127.0.0.1:0", "--http-listen", "nonsense"),
            2,
            "error: http-listen 'nonsense' is not HOST:PORT",
        ),
        (
            ("--listen", "127.0.0.1:0", "--quotas", "nowhere.toml"),
            2,
            "error: --quotas nowhere.toml: cannot be read",
        ),
    ],
)
@pytest.mark.one_in(3)
async def test_a_start_that_fails_says_why(
    start: Any, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    config = tmp_path / "site.toml"
    config.write_text('[coordinator]\nlisen = "127.0.0.1:0"\n')
    given = [argument.format(config=config) for argument in arguments]
    process = await start("--state-dir", str(tmp_path / "state"), *given)
    _, stderr = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == code
    assert message in stderr.decode()
    assert "Traceback" not in stderr.decode()


async def test_a_gateway_without_keys_is_for_loopback_alone(start: Any, tmp_path: Path) -> None:
    given = issue_files(Authority.create("here", now()), coordinator_of("here"), tmp_path / "pki")
    http = (
        "--http-listen",
        "0.0.0.0:0",
        "--http-tls-cert",
        str(given.cert),
        "--http-tls-key",
        str(given.key),
    )
    state = ("--state-dir", str(tmp_path / "state"))
    process = await start("--listen", "127.0.0.1:0", *state, *http, "--http-no-key")
    _, stderr = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 4 and "--http-no-key works on loopback only" in stderr.decode()


async def test_a_gateway_on_loopback_may_do_without_keys(start: Any, tmp_path: Path) -> None:
    ready, state = tmp_path / "ready.json", tmp_path / "state"
    process = await start(
        "--listen", "127.0.0.1:0", "--state-dir", str(state), "--ready-file", str(ready),
        "--http-listen", "127.0.0.1:0", "--http-no-key",
    )  # fmt: skip
    url = (await wait_for_file(ready, process))["gateway"]
    for key in (None, "none"):
        assert (await Http(url, key).get("/v1/models")).json == {"object": "list", "data": []}
    assert (await Http(url, "esk-000000000000-" + "x" * 43).get("/v1/models")).status == 401
    await end(process)


async def test_what_was_done_is_written_down(start: Any, tmp_path: Path) -> None:
    ready, state = tmp_path / "ready.json", tmp_path / "state"
    process = await start(
        "--listen", "127.0.0.1:0", "--state-dir", str(state), "--ready-file", str(ready)
    )
    async with open_channel((await wait_for_file(ready, process))["address"], None) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await admin.DeleteModel(
                admin_pb2.DeleteModelRequest(operation_id="o", name="none"), timeout=DEADLINE_S
            )
    await end(process)
    (line,) = (state / "audit" / "operators.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert (entry["what"], entry["target"], entry["result"]) == (
        "DeleteModel",
        "none",
        "MODEL_NOT_FOUND",
    )


async def test_the_file_of_quotas_is_what_requests_are_held_to(tmp_path: Path) -> None:
    (tmp_path / "quotas.toml").write_text('["*"]\nrequests = 7\n')
    settings = CoordinatorSettings(
        listen="127.0.0.1:0",
        state_dir=tmp_path / "state",
        quotas=tmp_path / "quotas.toml",
        plaintext=True,
    )
    machine, process = Machine("1", settings.state_dir, None), Process(settings, {}, ())
    coordinator = await _assemble(
        settings, _site(settings), ModelStore(settings.state_dir), 64, machine, process
    )
    assert coordinator.front.quotas._quotas.of("client/app") == Quota(requests=7)


async def test_an_address_in_use_by_something_else(start: Any, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        process = await start(
            "--listen", f"127.0.0.1:{port}", "--state-dir", str(tmp_path / "state")
        )
        _, stderr = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 5
    assert "in use" in stderr.decode() and "--listen" in stderr.decode()


async def test_a_coordinator_ends_in_order_when_its_terminal_is_gone(tmp_path: Path) -> None:
    terminal, its_end = os.openpty()
    ready = tmp_path / "ready"
    arguments = ("--plaintext", "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "state"))
    # The leader of a session of its own, at this terminal, as a shell starts it.
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-P",
            "-m",
            "edgeshard_coordinator",
            *arguments,
            "--ready-file",
            str(ready),
        ),
        preexec_fn=lambda: os.login_tty(its_end),
    )
    try:
        os.close(its_end)
        await wait_for_file(ready, process)
        process.send_signal(signal.SIGHUP)  # the terminal is there: settings are read again
        said = b""
        async with asyncio.timeout(DEADLINE_S):
            while b"settings_reloaded" not in said:
                said += await asyncio.to_thread(os.read, terminal, 1 << 16)
        assert process.returncode is None
        os.close(terminal)
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
