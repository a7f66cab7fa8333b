"""docs/systems.md has a row for each system that the papers name, and each row leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house import documents

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/systems.md"
NAMES = (
    *("EdgeShard", "HPipe", "GPipe", "GP-B", "TeraPipe", "Megatron-LM", "TP-T", "Petals"),
    *(
        "FlexGen",
        "Accelerate",
        "DeepSpeed ZeRO-Inference",
        "HeteGen",
        "PowerInfer",
        "LLM in a flash",
    ),
    *("ServerlessLLM", "EdgeMoE", "MoQE", "IO-FREE", "IO-EXP", "STI"),
    *(
        "vLLM (PagedAttention)",
        "LightLLM",
        "vAttention",
        "FlashAttention",
        "FlashDecoding",
        "FlashDecoding++",
    ),
    *(
        "H2O",
        "Keyformer",
        "Quest",
        "PyramidInfer",
        "InfiniGen",
        "Infinite-LLM",
        "Lamina",
        "DéjàVu",
        "Mooncake",
    ),
    *("ORCA", "Sarathi", "FastGen", "FastServe", "DistServe", "Splitwise", "TetriInfer"),
)
LINK = re.compile(r"\]\(([^)#]*)#?([^)]*)\)")
FILE = re.compile(r"`([\w/]+\.py)`")


def rows_of(text: str) -> dict[str, str]:
    """The place of each system's idea that its row names."""
    cells = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| "))
    return {row[0]: row[2] for row in cells if len(row) == 4 and row[0] not in ("system", "---")}


def leads_somewhere(place: str) -> bool:
    """True if the row names a file, a page or a heading, and all that it names exist."""
    found = [(ROOT / name).is_file() for name in FILE.findall(place)]
    for name, anchor in LINK.findall(place):
        page = PAGE.parent / name
        found.append(page.exists() and (not anchor or anchor in documents.anchors(page)))
    return bool(found) and all(found)


def faults_of(text: str) -> list[str]:
    rows = rows_of(text)
    missing = [f"{name} has no row" for name in NAMES if name not in rows]
    return missing + [
        f"{name} leads nowhere: {place}"
        for name, place in rows.items()
        if not leads_somewhere(place)
    ]


def test_each_system_has_a_row_that_leads_somewhere() -> None:
    assert faults_of(PAGE.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("kept", "planted", "fault"),
    [
        ("| Quest | ", "| Quests | ", "Quest has no row"),
        ("scheduler/chunking.py", "scheduler/chunks.py", "Sarathi leads nowhere"),
        ("#slices-of-long-prompts)", "#slices)", "HPipe leads nowhere"),
        (
            "(decisions/state.md#choice-a-lost-node-is-replaced-by-replay)",
            "(decisions/state.md#choice-replay)",
            "DéjàVu leads nowhere",
        ),
    ],
)
def test_a_row_that_is_missing_or_leads_nowhere_is_found(
    kept: str, planted: str, fault: str
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert kept in text
    assert any(found.startswith(fault) for found in faults_of(text.replace(kept, planted)))
