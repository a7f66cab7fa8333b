"""A process that has imported what daemons need, and forks them: `python -m tests.chaos.nursery`

A daemon that is started anew imports torch for seconds; one that is forked here is there at once. It is a process of
its own like any other, and runs the same entry. Requests come as lines of JSON on stdin, answers go to stdout. The
first line there says whether agents will run in the native kernels.

    {"role": "agent", "arguments": [...], "log": FILE, "directory": DIR}  ->  {"started": PID}
                                                            and at its end    {"ended": PID, "status": CODE}

CODE is an exit code, or the negative number of the signal that ended it. When stdin ends, all children are killed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import sys
from importlib import import_module
from typing import Any, NoReturn

from edgeshard.rpc.environment import settle_grpc

ROLES = ("agent", "coordinator")
PRELOADED = (
    "edgeshard_agent.daemon",
    "edgeshard_agent.hosting.tools",
    "edgeshard_coordinator.daemon",
    "tests.chaos.agent",
    "tests.chaos.coordinator",
    "tests.chaos.calls",
    "tests.chaos.hooks",
)


def main() -> None:
    # Fewer threads of numpy's library in a process that forks; agents compute with one as it is.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    settle_grpc()
    for name in PRELOADED:
        import_module(name)
    gc.freeze()
    Nursery().run()


class Nursery:
    def __init__(self) -> None:
        self._children: set[int] = set()
        self._wake, wake_end = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake_end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_end)
        self._descriptors = (self._wake, wake_end)

    def run(self) -> None:
        """Until stdin ends."""
        from edgeshard_agent.ops import native_available

        _say({"ready": os.getpid(), "native": native_available()})
        rest = b""
        while True:
            ready, _, _ = select.select([0, self._wake], [], [])
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 1024)
                self._reap()
            if 0 not in ready:
                continue
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                _say({"started": self._fork(json.loads(line))})
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        for pid in list(self._children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._children.discard(pid)
                _say({"ended": pid, "status": os.waitstatus_to_exitcode(status)})

    def _fork(self, request: dict[str, Any]) -> int:
        pid = os.fork()
        if pid == 0:
            self._become(request)
        self._children.add(pid)
        return pid

    def _become(self, request: dict[str, Any]) -> NoReturn:
        """In the child: a daemon and nothing of the nursery."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)  # a Ctrl-C in the terminal is for the run, which then stops its daemons in order
            log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (log, 1), (log, 2)):
                os.dup2(source, target)
            for descriptor in (*self._descriptors, log, null):
                os.close(descriptor)
            os.chdir(request["directory"])
            role = request["role"]
            if role not in ROLES:
                raise ValueError(f"{role!r} is none of {ROLES}")
            import_module(f"tests.chaos.{role}").main(request["arguments"])
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def _say(message: dict[str, int]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
