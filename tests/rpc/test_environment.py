"""The settings that entry points pass to gRPC through the environment, and their effect on the
installed gRPC."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

MESSAGES = 300
PING_PONG = f"""
import asyncio, contextlib, os
from pathlib import Path
from edgeshard.rpc.environment import settle_grpc

settle_grpc()
import grpc


def own_thread_waits() -> int:
    waits = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread may end since it was listed
            if (task / "comm").read_text().strip() == "event_engine":
                status = (task / "status").read_text().splitlines()
                waits += next(
                    int(line.split()[1])
                    for line in status
                    if line.startswith("voluntary_ctxt_switches")
                )
    return waits


async def echo(messages, context):
    async for message in messages:
        yield message


async def main() -> None:
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(echo)
    handlers = grpc.method_handlers_generic_handler("test.Echo", {{"Echo": handler}})
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{{port}}") as channel:
        call = channel.stream_stream("/test.Echo/Echo")()
        for number in range({MESSAGES} + 1):
            await call.write(b"ping")
            assert await call.read() == b"ping"
            if number == 0:
                before = own_thread_waits()
        print(own_thread_waits() - before)
        await call.done_writing()
    await server.stop(None)


asyncio.run(main())
"""


async def run(script: str, **environment: str) -> list[str]:
    """The words that a Python process prints, with only these variables of gRPC's."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, env=inherited | environment, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        stdout, _ = await process.communicate()
    assert process.returncode == 0
    return stdout.decode().split()


SHOW = """
import os
from edgeshard.rpc.environment import settle_grpc
settle_grpc()
print(os.environ["GRPC_VERBOSITY"], os.environ["GRPC_EXPERIMENTS"] or "none")
"""


async def test_what_the_operator_has_set_stays() -> None:
    verbosity, experiments = await run(SHOW)
    assert verbosity == "NONE" and "-event_engine_client" in experiments.split(",")
    assert await run(SHOW, GRPC_VERBOSITY="ERROR", GRPC_EXPERIMENTS="") == ["ERROR", "none"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts a thread's waits in /proc")
async def test_messages_do_not_pass_through_threads_of_grpcs_own() -> None:
    """Beside the same with gRPC's defaults, which shows that the count would tell."""
    assert int((await run(PING_PONG))[0]) < MESSAGES / 2
    assert int((await run(PING_PONG, GRPC_EXPERIMENTS=""))[0]) > MESSAGES
