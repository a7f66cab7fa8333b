"""The output of commands, without parts that differ from run to run and from machine to machine."""

from __future__ import annotations

import json
import re
from typing import Any

_NUMBER = re.compile(r"(?<![\w.:=-])-?\d+(?:\.\d+)?(?:[KMB](?=\s|$))?(?![\w:])")
_TEXTS = (
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(\+00:00|Z)?( UTC)?"), "TIME"),
    (re.compile(r"\b127\.0\.0\.1:\d+"), "ADDRESS"),
    (re.compile(r"\b[0-9a-f]{64}\b"), "DIGEST"),
    (re.compile(r"\b[0-9a-f]{32}\b"), "ID"),
    (re.compile(r"\b[0-9a-f]{16}\b"), "BITS"),
    (re.compile(r"edgeshard \S+, torch \S+, Python [\w.+]+(, kernels .+)?"), "SOFTWARE"),
    (re.compile(r"edgectl \d\S* \(wire version \d+\)"), "edgectl VERSION (wire version N)"),
    (re.compile(r"edgeshard2-[\w-]+"), "TOKEN"),
    (re.compile(r"\b\d+(\.\d+)? (ns|µs|us|ms|s|min|h|d)\b"), "# s"),
    (re.compile(r"\b\d+(\.\d+)? ([KMG]?b/s)"), "# b/s"),
    (re.compile(r"\b\d+(\.\d+)? (B|[KMGT]iB)(?= |$|,|\)|/)"), "# B"),
    (re.compile(r"(?<=[\s(])\d+(\.\d+)? ?%"), "# %"),
)
_SOMETIMES = ("Huge pages", "Warning:")
"""Lines that only some machines have: a warning about kernels, for instance, on one that was
busy."""
_MACHINE = {
    "software",
    "bits_fingerprint",
    "bottleneck",
    "note",
    "doubts",
    "huge_pages",
    "text",
    "failure",
}
"""Keys whose values depend on the machine, or whose text depends on measurements."""


def masked_text(text: str) -> str:
    """Lines with the figures masked, and one gap between columns, whatever their width."""
    lines = []
    for line in text.splitlines():
        for pattern, name in _TEXTS:
            line = pattern.sub(name, line)
        line = re.sub(
            r"^(Device|Kernels|Bottleneck|Note|Bits|Gap|Memory|Expected|Better|Not weighed): .*",
            r"\1: ...",
            line,
        )
        lines.append(re.sub(r" {2,}", "  ", _NUMBER.sub("#", line)).rstrip())
    return "".join(line + "\n" for line in lines if not line.startswith(_SOMETIMES))


def masked_json(value: Any, key: str = "") -> Any:
    """The keys and the sorts of values. A list has its first item for all that are alike."""
    match value:
        case dict() if key == "kernels":
            return dict.fromkeys(value, "...")
        case dict():
            return {name: masked_json(item, name) for name, item in value.items()}
        case list():
            items: list[Any] = []
            for item in (masked_json(item, key) for item in value):
                if item not in items:
                    items.append(item)
            return items
        case _ if key in _MACHINE or (key == "model" and value not in ("fairy-tales", "cellar")):
            return "..."
        case bool() | None:
            return value
        case int() | float():
            return "#"
        case _:
            return masked_text(str(value)).rstrip("\n")


def json_text(stdout: str) -> str:
    return json.dumps(masked_json(json.loads(stdout)), indent=1, ensure_ascii=False) + "\n"
