"""Draw what ARCHITECTURE.md takes from code: the phases of a deployment, and who may import whom.

`make drawings` writes both; `--check`, which `make check` runs, writes nothing and fails when one is not as the code
says. Phases are the coordinator's transitions table, import rules the layers in `.importlinter`.
"""

from __future__ import annotations

import configparser
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from edgeshard_coordinator.core.deployments.transitions import TRANSITIONS, Trigger

from edgeshard.domain.deployments.deployment import DeploymentPhase as Phase

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "ARCHITECTURE.md"


def phase_graph(transitions: Mapping[tuple[Phase, Trigger], Phase]) -> str:
    """A mermaid state diagram with one arrow for each row. A phase that nothing leaves is followed by the end."""
    arrows = [f"    {phase} --> {after}: {trigger}" for (phase, trigger), after in transitions.items()]
    phases = dict.fromkeys([*(phase for phase, _ in transitions), *transitions.values()])
    last = [phase for phase in phases if all(phase is not before for before, _ in transitions)]
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.LOADING}", *arrows, *(f"    {phase} --> [*]" for phase in last)]
    return "```mermaid\n" + "\n".join(lines) + "\n```"


def import_layers(rules: str) -> str:
    """The layers of each container of the text of `.importlinter`, the highest first."""
    config = configparser.ConfigParser()
    config.read_string(rules)
    lines: list[str] = []
    for section in config.values():
        if section.get("type") == "layers" and "containers" in section:
            for number, layer in enumerate(section["layers"].strip().splitlines()):
                rooms = "  ".join(re.split(r"\s*\|\s*", layer.strip()))
                lines.append(f"{'' if number else section['containers'].strip():36}{rooms}".rstrip())
            lines.append("")
    return "```text\n" + "\n".join(lines).rstrip() + "\n```"


def drawings() -> dict[str, str]:
    """Each drawing by the name that its marks in the document have."""
    rules = (ROOT / ".importlinter").read_text(encoding="utf-8")
    return {"phases": phase_graph(TRANSITIONS), "imports": import_layers(rules)}


def with_drawing(text: str, name: str, drawing: str) -> str:
    """The document with `drawing` between its two marks. Raises ValueError when it lacks one."""
    first, last = f"<!-- {name}: drawn by tools/draw_architecture.py -->", f"<!-- end of {name} -->"
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"{DOCUMENT.name} must hold the lines {first} and {last}")
    return f"{before}{first}\n{drawing}\n{last}{after}"


def main() -> int:
    text = drawn = DOCUMENT.read_text(encoding="utf-8")
    for name, drawing in drawings().items():
        drawn = with_drawing(drawn, name, drawing)
    if "--check" in sys.argv[1:]:
        if drawn != text:
            print(f"{DOCUMENT.name} shows other phases or layers than the code: run `make drawings`", file=sys.stderr)
            return 1
        return 0
    DOCUMENT.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
