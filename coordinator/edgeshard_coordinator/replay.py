"""`python -m edgeshard_coordinator.replay`: replays a coordinator's part of a dump. For
`edgectl debug replay`."""

from __future__ import annotations

from edgeshard.process.dump_replay import replay_stdin
from edgeshard_coordinator.core.machine.apply import machine

if __name__ == "__main__":
    replay_stdin(machine())
