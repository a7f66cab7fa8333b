"""The section of docs/benchmarks.md that `bench.many_boxes` gives the rows for.

python -m bench.many_boxes_report ROWS DOCUMENT    puts it in place of that in the document, or at its end
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.pages import figures_comment

MANY_BOXES = """## Many nodes at one coordinator

A real coordinator, and the control clients of so many agents in one other process, each with a connection of its own.
Up to 30 nodes hold a stage at work and say so every 0.9 s, the others say every 1.8 s that they live. A heartbeat
is timed from its making to its being part of the coordinator's state; 0.07 s of that it may wait for others. A node
that falls silent with its connection open is lost after 10 s.

<!-- not run: it takes minutes, and wants idle cores -->
```console
$ python -m bench.many_boxes -o .benchmarks/nodes.json
$ python -m bench.many_boxes_report .benchmarks/nodes.json docs/benchmarks.md
```
"""


def many_boxes_section(rows: Sequence[dict[str, Any]]) -> str:
    """The section, '' without rows."""
    if not rows:
        return ""
    head = ["nodes", "heartbeats/s", "share of a core", "a heartbeat: median, p99, ms", "noticed after: closed, ms"]
    table = [[*head, "silent, s", "all back after a restart, s"]]
    for row in rows:
        times, noticed = row["heartbeat_milliseconds"], row["death_noticed_seconds"]
        back_s = row["seconds_until_all_are_back_after_a_restart"]
        table.append(
            [
                f"{row['nodes']:,}",
                f"{row['heartbeats_per_second']:.0f}",
                f"{100 * row['coordinator_processor_share']:.1f} %",
                f"{times['p50']:.0f}, {times['p99']:.0f}",
                f"{1000 * max(noticed['connection_closed']):.0f}",
                f"{max(noticed['silent']):.1f}",
                "-" if back_s is None else f"{back_s:.1f}",
            ]
        )
    first, *others = ["| " + " | ".join(line) + " |" for line in table]
    load = f"The load of the machine (one minute) was up to {max(row['load_1_minute'] for row in rows):.1f}.\n"
    measured = figures_comment("python -m bench.many_boxes", rows) + "\n"
    return "\n".join([MANY_BOXES, load, measured, first, "|" + " --- |" * len(table[0]), *others, ""])


def with_section(document: str, rows: Sequence[dict[str, Any]]) -> str:
    """The document with the section of these rows, where it was or at the end."""
    heading = MANY_BOXES.partition("\n")[0]
    section = many_boxes_section(rows)
    found = re.search(rf"^{re.escape(heading)}$.*?(?=^## |\Z)", document, re.MULTILINE | re.DOTALL)
    if found is None:
        return f"{document.rstrip()}\n\n{section}"
    behind = document[found.end() :]
    return document[: found.start()] + section + (f"\n{behind}" if behind else "")


if __name__ == "__main__":
    path = Path(sys.argv[2])
    path.write_text(with_section(path.read_text(encoding="utf-8"), json.loads(Path(sys.argv[1]).read_text())))
