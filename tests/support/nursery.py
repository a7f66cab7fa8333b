"""A process that has imported what EdgeShard's processes need, and forks them.

A newly started process imports torch for seconds of a core; a process forked here is ready at once.
It is a process of its own like any other, with its own arguments, environment, directory, output
and network namespace, and it runs the module as `python -m` does. `shared()` is the nursery of this
test process; within `forking_daemons` it also serves those who start daemons by asyncio.

The protocol: datagrams of JSON over a socket pair. A request carries the three standard streams.

    {"module": "edgeshard_agent", "arguments": [...], "directory": DIR,
     "environment": {...}, "namespace": NAME}
                                                        ->  {"started": PID}
                                and at the child's end      {"ended": PID, "status": CODE}

CODE is an exit code, or the negative number of the signal that ended it. When the test process
ends, all children are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import IO, Any, NoReturn

from edgeshard.rpc.environment import settle_grpc

ROOT = Path(__file__).resolve().parents[2]
PATHS = (ROOT, ROOT / "agent", ROOT / "coordinator")
PRELOADED = (
    "edgeshard.cli.main",
    "edgeshard.client",
    "edgeshard.gateway.app",
    "edgeshard_agent.daemon",
    "edgeshard_agent.hosting.loading",
    "edgeshard_coordinator.daemon",
    "tests.chaos.agent",
    "tests.chaos.coordinator",
    "tests.chaos.calls",
    "tests.chaos.census",
    "tests.chaos.hooks",
)
DAEMONS = ("edgeshard_agent", "edgeshard_coordinator")
_MOST_BYTES = 1 << 17
_CLONE_NEWNET = 0x40000000
_DIRECTORY_OF_NAMESPACES = Path("/run/netns")


@functools.cache
def shared() -> Nursery:
    """The nursery of this process, started when first asked for."""
    return Nursery()


@contextlib.contextmanager
def forking_daemons(instead: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Meanwhile daemons that asyncio starts by `-m`, with output to files, are forked here.

    The shared nursery forks them. A daemon runs the module that `instead` names for its own.
    """
    start = asyncio.create_subprocess_exec

    async def started(program: str, *arguments: str, **options: Any) -> Any:
        at = arguments.index("-m") if "-m" in arguments[:2] else -1
        streams = {name: options.get(name) for name in ("stdin", "stdout", "stderr", "cwd", "env")}
        if (
            at < 0
            or arguments[at + 1] not in DAEMONS
            or options.get("pass_fds")
            or subprocess.PIPE in streams.values()
        ):
            return await start(program, *arguments, **options)
        nursery = await asyncio.to_thread(shared)
        words = [*arguments[at + 2 :]]
        if "--parent" in words:
            words[words.index("--parent") + 1] = str(nursery.pid)
        module = instead.get(arguments[at + 1], arguments[at + 1])
        child = await asyncio.to_thread(nursery.popen, module, words, **streams)
        return ForkedAsync(child.pid, child.end)

    asyncio.create_subprocess_exec = started  # type: ignore[assignment]
    try:
        yield
    finally:
        asyncio.create_subprocess_exec = start


class Nursery:
    """The test's side: it requests children, and receives their ends on a thread of its own."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment: dict[str, str] = {
            k: v for k, v in os.environ.items() if not k.startswith("EDGESHARD__")
        }
        environment["PYTHONPATH"] = os.pathsep.join(map(str, PATHS))
        command = (sys.executable, "-m", "tests.support.nursery")
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), env=environment, process_group=0
            )
        self.pid = self._process.pid
        first = json.loads(self._socket.recv(_MOST_BYTES) or "null")
        if first is None:
            raise RuntimeError("the process that forks daemons has ended; what it said is above")
        self.native = bool(first["native"])
        """Whether agents run in the native kernels."""
        self._turn = threading.Lock()
        self._started: SimpleQueue[int] = SimpleQueue()
        self._ended: dict[int, Future[int]] = {}
        threading.Thread(target=self._read, name="nursery", daemon=True).start()

    def popen(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        stdin: int | IO[bytes] | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        namespace: str | None = None,
    ) -> Forked:
        """Start `python -m MODULE ARGUMENTS`, in a process group of its own; pipes are not for it
        to make."""
        request = {
            "module": module,
            "arguments": list(arguments),
            "directory": str(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "namespace": namespace,
        }
        with Path(os.devnull).open("r+b", buffering=0) as null, self._turn:
            streams = [
                _descriptor(given, null, own) for own, given in enumerate((stdin, stdout, stderr))
            ]
            socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
            pid = self._started.get()
        return Forked(pid, self._ended[pid])

    def _read(self) -> None:
        while data := self._socket.recv(_MOST_BYTES):
            message = json.loads(data)
            if "started" in message:
                self._ended[message["started"]] = Future()
                self._started.put(message["started"])
            else:
                self._ended[message["ended"]].set_result(message["status"])

    async def ended(self, pid: int) -> int:
        """The exit code of a child, also if it ended before; the newest if the system used a pid
        twice."""
        return await asyncio.shield(asyncio.wrap_future(self._ended[pid]))


class Forked:
    """A child, as a `subprocess.Popen`."""

    def __init__(self, pid: int, ended: Future[int]) -> None:
        self.pid = pid
        self.end = ended

    @property
    def returncode(self) -> int | None:
        return self.end.result() if self.end.done() else None

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As a `subprocess.Popen` does."""
        try:
            return self.end.result(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired([], timeout or 0.0) from None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedAsync(Forked):
    """A child, as one of asyncio's processes."""

    async def wait(self) -> int:  # type: ignore[override]
        return await asyncio.shield(asyncio.wrap_future(self.end))


def _descriptor(given: int | IO[bytes] | None, null: IO[bytes], own: int) -> int:
    if given == subprocess.DEVNULL:
        return null.fileno()
    if given is None:
        return own
    return given if isinstance(given, int) else given.fileno()


class _Nurse:
    """The process that forks. It never starts a thread."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=0)
        self._children: set[int] = set()
        self._wake, self._wake_end = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._wake_end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_end)

    def run(self) -> None:
        """Until the other side is gone."""
        while True:
            ready, _, _ = select.select([self._socket.fileno(), self._wake], [], [])
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 1024)
                self._reap()
            if self._socket.fileno() not in ready:
                continue
            data, streams, _, _ = socket.recv_fds(self._socket, _MOST_BYTES, 3)
            if not data:
                break
            pid = os.fork()
            if pid == 0:
                self._become(json.loads(data), streams)
            for stream in streams:
                os.close(stream)
            self._children.add(pid)
            self._say({"started": pid})
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        for pid in list(self._children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._children.discard(pid)
                self._say({"ended": pid, "status": os.waitstatus_to_exitcode(status)})

    def _say(self, message: dict[str, int]) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._socket.send(json.dumps(message).encode())

    def _become(self, request: dict[str, Any], streams: list[int]) -> NoReturn:
        """In the child: the module's process and nothing of the nursery."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # a Ctrl-C in the terminal is for the run, which then stops its daemons in order
            os.setpgid(0, 0)
            self._socket.detach()
            for target, stream in enumerate(streams):
                os.dup2(stream, target)
            for descriptor in (self._wake, self._wake_end, *streams):
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(request["environment"])
            os.chdir(request["directory"])
            if request["namespace"]:
                _enter_network(request["namespace"])
            sys.argv = [request["module"], *request["arguments"]]
            settle_grpc()
            sys.modules.pop(request["module"], None)  # it becomes __main__
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def _enter_network(name: str) -> None:
    """As `ip netns exec` does, for the one thread there is."""
    library = ctypes.CDLL(None, use_errno=True)
    with (_DIRECTORY_OF_NAMESPACES / name).open("rb") as namespace:
        if library.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns", name)


def main() -> None:
    # Fewer threads of numpy's library in a process that forks; agents compute with one as it is.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    settle_grpc()
    for name in PRELOADED:
        import_module(name)
    from edgeshard_agent.ops.native import native_available

    nurse = _Nurse()
    nurse._say({"native": native_available()})
    gc.collect()
    gc.freeze()
    nurse.run()


if __name__ == "__main__":
    main()
