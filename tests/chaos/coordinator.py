"""A coordinator with failpoints: `python -m tests.chaos.coordinator --failpoints DIR OPTIONS...`

OPTIONS are the options of edgeshard-coordinator, whose own entry runs with them. Its failpoints go
by `coordinator`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from edgeshard.rpc.environment import settle_grpc

NAME = "coordinator"


def main(arguments: Sequence[str]) -> None:
    settle_grpc()
    from edgeshard_coordinator.entry import main as run

    from tests.chaos import census
    from tests.chaos.calls import hook_calls
    from tests.chaos.failpoints import Trap
    from tests.chaos.hooks import hook_coordinator

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--failpoints", type=Path, required=True)
    ours, options = parser.parse_known_args(arguments)
    hook_coordinator(Trap(ours.failpoints, NAME))
    hook_calls(ours.failpoints)
    census.hook_coordinator(ours.failpoints, NAME)
    sys.argv = ["edgeshard-coordinator", *options]
    run()


if __name__ == "__main__":
    main(sys.argv[1:])
