"""An agent with failpoints:
`python -m tests.chaos.agent --failpoints DIR [--step-tokens N] OPTIONS...`

OPTIONS are the options of edgeshard-agent, whose own entry runs with them. Its failpoints go by its
`--name`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from edgeshard.rpc.environment import settle_grpc


def main(arguments: Sequence[str]) -> None:
    settle_grpc()
    from edgeshard_agent.entry import main as run

    from tests.chaos import census
    from tests.chaos.failpoints import Trap
    from tests.chaos.hooks import cut_prompts, hook_agent

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--failpoints", type=Path, required=True)
    parser.add_argument("--step-tokens", type=int)
    ours, options = parser.parse_known_args(arguments)
    name = options[options.index("--name") + 1]
    hook_agent(Trap(ours.failpoints, name))
    census.hook_agent(ours.failpoints, name)
    if ours.step_tokens is not None:
        cut_prompts(ours.step_tokens)
    sys.argv = ["edgeshard-agent", *options]
    run()


if __name__ == "__main__":
    main(sys.argv[1:])
