"""What goes wrong in a run, as its seed says."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.simulator.watch import Watch

if TYPE_CHECKING:
    from tests.simulator.world import World

UNCOUNTED = ("Link beacon",)


class Fates:
    """What becomes of messages."""

    def __init__(self, seed: int, watch: Watch, quiet: bool) -> None:
        self.off = quiet
        self._dice = random.Random(f"fates {seed}")
        self._watch = watch

    def of(self, kind: str, again: bool) -> str:
        self._watch.met["message", kind, "sent"] = 1
        return ""


def plan(world: World) -> None:
    pass
