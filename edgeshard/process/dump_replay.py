"""Replays of dumps in a process that knows the state machine: documents in, results out."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from edgeshard.debugging.dump import StateMachine
from edgeshard.domain.errors import EdgeShardError


def replay_stdin(machine: StateMachine[Any, Any]) -> None:
    """Read a JSON object of documents from stdin; write one of their results, or of why one cannot
    be replayed."""
    results: dict[str, Any] = {}
    for name, document in json.load(sys.stdin).items():
        try:
            results[name] = asdict(machine.replay(document))
        except EdgeShardError as error:
            results[name] = {"events": 0, "differs": [error.message]}
    sys.stdout.write(json.dumps(results))
