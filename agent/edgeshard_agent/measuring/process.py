"""The agent's end of a measurement in a process of its own.

A process of its own can be ended at any moment, gives all its memory back, and does not keep the daemon's interpreter
or compute thread busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable

from edgeshard.domain.errors import EdgeShardError, InternalError, ResourceExhaustedError
from edgeshard.domain.nodes.profile import ComputeProfile
from edgeshard.forms import OWN
from edgeshard_agent.engine.worker import ComputeThread
from edgeshard_agent.measuring.giving_way import GivingWay, requests_ran
from edgeshard_agent.measuring.worker import MeasuringJob, Told

_LONGEST_LINE = 16 << 20

Tell = Callable[[int, int, str], None]
"""Figures done, figures in total, and the current one."""


async def measure_apart(job: MeasuringJob, tell: Tell, worker: ComputeThread) -> ComputeProfile:
    """Measure in a process that yields to the steps of this compute thread.

    Raises the profiler's typed errors, UnavailableError when it waited for too long. Cancelling ends the process before
    this returns.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "edgeshard_agent.measuring.worker", str(os.getpid()),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_LONGEST_LINE,
        start_new_session=True,  # a Ctrl-C at the agent's terminal is for the agent, which ends this process
    )  # fmt: skip
    last_progress = 0, 1, "start"

    def tell_and_keep(*progress: *tuple[int, int, str]) -> None:
        nonlocal last_progress
        last_progress = progress
        tell(*progress)

    def tell_stopped(stopped: bool) -> None:
        done, total, what = last_progress
        tell(done, total, "waits while requests run" if stopped else what)

    def send(number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(process.pid, number)

    way = GivingWay(worker, asyncio.get_running_loop(), send, tell_stopped)
    try:
        assert process.stdin is not None
        line = OWN.to_text(MeasuringJob, job).encode() + b"\n"
        process.stdin.write(line)  # stays open: its end would end the process
        with way:
            outcome = await _outcome(process, tell_and_keep)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    if way.gave_up:
        raise requests_ran()
    if isinstance(outcome, ComputeProfile):
        return outcome
    raise outcome


async def _outcome(process: asyncio.subprocess.Process, tell: Tell) -> ComputeProfile | EdgeShardError:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        message = OWN.from_text(Told, line)
        if message.progress is not None:
            tell(*message.progress)
        if (outcome := message.profile or message.error) is not None:
            return outcome
    code = await process.wait()
    if code == -signal.SIGKILL:
        return ResourceExhaustedError(
            "the measurement was killed, most likely because memory ran out; free memory, or give the "
            "agent less --memory",
            field="memory",
            reason="MEASUREMENT_KILLED",
        )
    return InternalError(f"the measurement ended with exit code {code}; see the node's log")
