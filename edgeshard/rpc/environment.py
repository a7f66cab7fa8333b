"""Settings of gRPC in the environment. gRPC reads them when it is imported, so entry points set
them before."""

from __future__ import annotations

import os

_SETTINGS = {
    # Its own log goes to stderr in another format, and adds nothing to ours.
    "GRPC_VERBOSITY": "NONE",
    # By default every message that arrives wakes three threads of gRPC before the event loop gets
    # it. These switches return the socket to the thread that waits for it. That matters if messages
    # arrive one by one: a single stream's token takes a quarter less processor time. gRPC ignores
    # names that it does not know.
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener,"
    "-event_engine_for_all_other_endpoints",
}


def settle_grpc() -> None:
    """Set the variables that the operator has not set. Has no effect once grpc is imported."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
