"""`edgeshard-coordinator`: starts the daemon, or prints which extra is missing."""

from __future__ import annotations

import sys

from edgeshard.domain.errors import EdgeShardError, extra_line
from edgeshard.process.extras import missing
from edgeshard.process.programs import lasting_imports, program
from edgeshard.rpc.environment import settle_grpc


def main() -> None:
    with program():
        _run()


def _run() -> None:
    if missing("coordinator"):
        sys.stderr.write(
            f"edgeshard-coordinator needs the coordinator extra: {extra_line('coordinator')}\n"
        )
        sys.exit(1)
    settle_grpc()
    with lasting_imports():
        from edgeshard.process.logs import report_failure
        from edgeshard.process.private import keep_private
        from edgeshard_coordinator.daemon import run

    keep_private()
    try:
        run()
    except EdgeShardError as error:
        report_failure(error)
        sys.exit(error.exit_code)
