"""The results of Zhang et al. ("EdgeShard", IEEE IoT-J 12(10), 2025), for comparison with the
computed ones.

Nothing is fitted to these numbers. `Tag` is the certainty of a number: from notes taken from the
paper, or recalled.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Tag(StrEnum):
    SOURCE = "S"
    """From notes taken from the paper."""
    RECALLED = "R"
    """Recalled, not checked against the paper."""


@dataclass(frozen=True, slots=True)
class Quoted:
    """A number of the paper."""

    value: float
    tag: Tag


@dataclass(frozen=True, slots=True)
class PaperRow:
    """Milliseconds per token and tokens a second; None if the paper reports "out of memory" (`tag`
    then refers to this report).
    """

    ms_per_token: Quoted | None
    tokens_per_s: Quoted | None
    tag: Tag


def _row(ms: float, ms_tag: str, tps: float, tps_tag: str) -> PaperRow:
    return PaperRow(Quoted(ms, Tag(ms_tag)), Quoted(tps, Tag(tps_tag)), Tag(ms_tag))


def _out_of_memory(tag: str) -> PaperRow:
    return PaperRow(None, None, Tag(tag))


MODELS = ("llama2-7b", "llama2-13b", "llama2-70b")
TITLES = {"llama2-7b": "7B", "llama2-13b": "13B", "llama2-70b": "70B"}
STRATEGIES = ("edge-solo", "cloud-edge-even", "cloud-edge-opt", "edgeshard")

PERFORMANCE: dict[tuple[str, str], PaperRow] = {
    ("llama2-7b", "edge-solo"): _row(140.34, "S", 24.36, "S"),
    ("llama2-7b", "cloud-edge-even"): _row(227.35, "S", 7.56, "R"),
    ("llama2-7b", "cloud-edge-opt"): _row(140.34, "S", 24.36, "R"),
    ("llama2-7b", "edgeshard"): _row(75.88, "S", 52.45, "S"),
    ("llama2-13b", "edge-solo"): _out_of_memory("R"),
    ("llama2-13b", "cloud-edge-even"): _row(319.44, "R", 4.68, "R"),
    ("llama2-13b", "cloud-edge-opt"): _row(243.45, "R", 4.74, "R"),
    ("llama2-13b", "edgeshard"): _row(173.43, "R", 10.45, "R"),
    ("llama2-70b", "edge-solo"): _out_of_memory("S"),
    ("llama2-70b", "cloud-edge-even"): _out_of_memory("S"),
    ("llama2-70b", "cloud-edge-opt"): _out_of_memory("S"),
    ("llama2-70b", "edgeshard"): _row(3086.43, "S", 1.25, "S"),
}
"""The performance table: source-cloud 1 Mb/s, every other link 50 Mb/s. 32 tokens in, 96 out. Batch
of at most 8."""

NO_BUBBLES_GAIN_TPS = {
    "llama2-7b": Quoted(6.96, Tag.SOURCE),
    "llama2-13b": Quoted(5.21, Tag.SOURCE),
}
"""Tokens a second that no-bubbles has more than bubbles."""

SOURCE_AGX_MS = Quoted(75.0, Tag.SOURCE)
SOURCE_NX_MS = Quoted(80.0, Tag.SOURCE)
"""EdgeShard's time per token of 7B with an AGX Orin or an Orin NX as the source, both "about"."""
SOURCE_OPT_APART_MS = Quoted(60.0, Tag.SOURCE)
"""How far apart Cloud-Edge-Opt's are, "about"."""
SOURCE_RATE_RATIOS = {
    "edgeshard": Quoted(2.0, Tag.SOURCE),
    "cloud-edge-opt": Quoted(6.0, Tag.SOURCE),
}
"""Throughput with the AGX as the source over that with the NX."""

PREFILL_OVER_DECODE = Quoted(10.0, Tag.RECALLED)
"""How much longer a layer's prefill takes than its decode, "about": the premise of figure 10."""

PROMPT_TOKENS = 32
NEW_TOKENS = 96
REQUESTS = 8
SLOW_LINK_BPS, LINK_BPS = 1e6, 50e6
