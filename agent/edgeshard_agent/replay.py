"""`python -m edgeshard_agent.replay`: replays agents' parts of a dump. For
`edgectl debug replay`."""

from __future__ import annotations

from edgeshard.process.dump_replay import replay_stdin
from edgeshard_agent.core.node_state import machine

if __name__ == "__main__":
    replay_stdin(machine())
