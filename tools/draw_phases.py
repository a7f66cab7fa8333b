"""Draw the phases of a deployment into ARCHITECTURE.md, from the coordinator's transitions table.

`tools/draw_phases.py` writes the picture; `--check` writes nothing and fails when the picture is not the table's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from edgeshard_coordinator.core.transitions import TRANSITIONS, Trigger

from edgeshard.domain.deployment import DeploymentPhase as Phase

DOCUMENT = Path(__file__).resolve().parents[1] / "ARCHITECTURE.md"
BEGIN = "<!-- phases: drawn by tools/draw_phases.py -->"
END = "<!-- end of phases -->"


def phase_graph(transitions: Mapping[tuple[Phase, Trigger], Phase]) -> str:
    """A mermaid state diagram with one arrow for each row. A phase that nothing leaves is followed by the end."""
    arrows = [f"    {phase} --> {after}: {trigger}" for (phase, trigger), after in transitions.items()]
    phases = dict.fromkeys([*(phase for phase, _ in transitions), *transitions.values()])
    last = [phase for phase in phases if all(phase is not before for before, _ in transitions)]
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.LOADING}", *arrows, *(f"    {phase} --> [*]" for phase in last)]
    return "```mermaid\n" + "\n".join(lines) + "\n```"


def with_graph(text: str, graph: str) -> str:
    """The document with `graph` between its two marks. Raises ValueError when it lacks one."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{DOCUMENT.name} must hold the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{graph}\n{END}{after}"


def main() -> int:
    text = DOCUMENT.read_text(encoding="utf-8")
    drawn = with_graph(text, phase_graph(TRANSITIONS))
    if "--check" in sys.argv[1:]:
        if drawn != text:
            print(f"{DOCUMENT.name} shows other phases than the table: run `make phases`", file=sys.stderr)
            return 1
        return 0
    DOCUMENT.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
