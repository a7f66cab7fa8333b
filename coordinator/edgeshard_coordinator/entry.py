"""`edgeshard-coordinator`: starts the daemon, or says which extra is missing."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from edgeshard.errors import EdgeShardError

_NEEDED = ("psutil",)
"""Modules that come with the coordinator extra and not with the bare package."""


def main() -> None:
    if any(find_spec(name) is None for name in _NEEDED):
        sys.stderr.write("edgeshard-coordinator needs the coordinator extra: pip install 'edgeshard[coordinator]'\n")
        sys.exit(1)
    # gRPC's own log, on stderr and not in our format, says nothing that ours does not; read when grpc is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from edgeshard_coordinator.daemon import run

    try:
        run()
    except EdgeShardError as error:
        sys.stderr.write(f"error: {error.message}\n")
        sys.exit(error.exit_code)
