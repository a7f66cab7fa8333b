"""`edgeshard-agent`: the daemon of a node."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

from edgeshard.domain.errors import EdgeShardError, extra_line
from edgeshard.process.extras import missing
from edgeshard.process.programs import lasting_imports, program
from edgeshard.rpc.environment import settle_grpc


def main() -> None:
    with program():
        _run()


def _run() -> None:
    if missing("agent"):
        sys.stderr.write(f"edgeshard-agent needs the agent extra: {extra_line('agent')}\n")
        sys.exit(1)
    settle_grpc()
    from edgeshard.process.config import load_settings
    from edgeshard.process.logs import configure_logging, report_failure
    from edgeshard.process.parent import end_with
    from edgeshard.process.private import keep_private
    from edgeshard_agent.settings import AgentSettings

    keep_private()
    try:
        read = partial(load_settings, AgentSettings, "edgeshard-agent")
        settings = read()
        end_with(settings.parent)
        configure_logging(settings.log_level)
        with lasting_imports():
            from edgeshard_agent.daemon import run

        asyncio.run(run(settings, read))
    except EdgeShardError as error:
        report_failure(error)
        sys.exit(error.exit_code)
