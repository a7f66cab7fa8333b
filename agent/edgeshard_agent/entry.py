"""`edgeshard-agent`: the daemon of a box."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys

from edgeshard.errors import EdgeShardError

_NEEDED = ("torch", "transformers", "safetensors", "tokenizers", "psutil")


def main() -> None:
    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        sys.stderr.write("edgeshard-agent needs the agent extra: pip install 'edgeshard[agent]'\n")
        sys.exit(1)
    # gRPC's own log, on stderr and not in our format, says nothing that ours does not; read when grpc is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from edgeshard.config import load_settings
    from edgeshard.logs import configure_logging
    from edgeshard_agent.settings import AgentSettings

    try:
        settings = load_settings(AgentSettings, "edgeshard-agent")
        configure_logging(settings.log_level)
        from edgeshard_agent.daemon import run

        asyncio.run(run(settings))
    except EdgeShardError as error:
        sys.stderr.write(f"error: {error.message}\n")
        sys.exit(error.exit_code)
