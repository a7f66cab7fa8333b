"""Benchmarks. Each is a module that prints one JSON object: `python -m bench.hop`."""

import signal
import sys

from edgeshard.rpc.environment import settle_grpc

settle_grpc()  # as in the daemons and edgectl


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)


if "-m" in sys.orig_argv and any(word.startswith("bench.") for word in sys.orig_argv):
    # SIGTERM leaves as an exception does, so that processes started by a benchmark end with it.
    signal.signal(signal.SIGTERM, _leave)
