"""The measurements of a load on a deployment: figures, a table and a picture. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from edgeshard.cli.render.output import Column, human_seconds
from edgeshard.cli.render.svg import line_chart
from edgeshard.planning.simulation.serving import percentile

_CURVE = tuple(range(0, 101, 5))


@dataclass(frozen=True, slots=True)
class Served:
    """One request of the load: when it began, in seconds since the load did, and what became of it.

    `error` is the reason of its failure, '' if it was answered. `gaps_s` lie between its tokens as
    they arrived here.
    """

    began_s: float
    total_s: float = 0.0
    ttft_s: float = 0.0
    prompt_tokens: int = 0
    new_tokens: int = 0
    gaps_s: tuple[float, ...] = ()
    error: str = ""

    @property
    def inter_token_s(self) -> float:
        """The mean; 0 with fewer than two tokens."""
        return sum(self.gaps_s) / len(self.gaps_s) if self.gaps_s else 0.0


@dataclass(frozen=True, slots=True)
class Goal:
    """Limits of a good answer, in seconds; None if there is none."""

    ttft_s: float | None = None
    inter_token_s: float | None = None

    @property
    def is_set(self) -> bool:
        return self.ttft_s is not None or self.inter_token_s is not None

    def met_by(self, served: Served) -> bool:
        """Judged by its first token, and by the mean time between its tokens."""
        quick = self.ttft_s is None or served.ttft_s <= self.ttft_s
        return quick and (self.inter_token_s is None or served.inter_token_s <= self.inter_token_s)


@dataclass(frozen=True, slots=True)
class Spread:
    """The spread of one kind of time, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        p50, p90, p99 = (percentile(values, percent) for percent in (50, 90, 99))
        return cls(sum(values) / len(values), p50, p90, p99, max(values))


@dataclass(frozen=True, slots=True)
class Report:
    """Rates are over `seconds`, from the load's beginning to its last answer. `goodput` is None
    without a goal.

    `unfinished` are requests that still ran when the load was ended, and are in no figure.
    """

    deployment: str
    load: str
    seed: int
    seconds: float
    requests: int
    answered: int
    unfinished: int
    errors: dict[str, int]
    prompt_tokens: int
    new_tokens: int
    requests_per_s: float
    new_tokens_per_s: float
    ttft_s: Spread | None
    inter_token_s: Spread | None
    request_s: Spread | None
    goodput: float | None
    """Good answers a second."""
    good_share: float | None
    """Share of all requests that ended."""


def report(
    deployment: str, load: str, seed: int, served: Sequence[Served], unfinished: int, goal: Goal
) -> Report:
    """The figures of a load; `load` describes it in words."""
    good = [one for one in served if not one.error]
    seconds = max((one.began_s + one.total_s for one in served), default=0.0)
    met_count = sum(1 for one in good if goal.met_by(one))
    new_tokens = sum(one.new_tokens for one in good)
    return Report(
        deployment=deployment,
        load=load,
        seed=seed,
        seconds=seconds,
        requests=len(served) + unfinished,
        answered=len(good),
        unfinished=unfinished,
        errors=dict(Counter(one.error for one in served if one.error).most_common()),
        prompt_tokens=sum(one.prompt_tokens for one in good),
        new_tokens=new_tokens,
        requests_per_s=_rate(len(good), seconds),
        new_tokens_per_s=_rate(new_tokens, seconds),
        ttft_s=Spread.of([one.ttft_s for one in good if one.new_tokens]),
        inter_token_s=Spread.of([gap for one in good for gap in one.gaps_s]),
        request_s=Spread.of([one.total_s for one in good]),
        goodput=_rate(met_count, seconds) if goal.is_set else None,
        good_share=met_count / len(served) if goal.is_set and served else None,
    )


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


Row = tuple[str, Spread]
SPREAD_COLUMNS: list[Column[Row]] = [
    Column("TIME", lambda row: row[0]),
    Column("MEAN", lambda row: human_seconds(row[1].mean), right=True),
    Column("P50", lambda row: human_seconds(row[1].p50), right=True),
    Column("P90", lambda row: human_seconds(row[1].p90), right=True),
    Column("P99", lambda row: human_seconds(row[1].p99), right=True),
    Column("MOST", lambda row: human_seconds(row[1].most), right=True),
]


def rows(load_report: Report) -> list[Row]:
    named = (
        ("first token", load_report.ttft_s),
        ("between tokens", load_report.inter_token_s),
        ("request", load_report.request_s),
    )
    return [(name, spread) for name, spread in named if spread is not None]


def fields(load_report: Report) -> dict[str, str]:
    """Everything but the times."""
    texts = {
        "Deployment": load_report.deployment,
        "Load": f"{load_report.load}, seed {load_report.seed}",
        "Requests": f"{load_report.answered} answered of {load_report.requests} in "
        f"{load_report.seconds:.1f} s"
        + (f", {load_report.unfinished} not finished" if load_report.unfinished else ""),
        "Rate": f"{load_report.requests_per_s:.2f} requests/s, {load_report.new_tokens_per_s:.1f} "
        "tokens/s "
        f"({load_report.prompt_tokens} tokens in, {load_report.new_tokens} out)",
    }
    if load_report.goodput is not None and load_report.good_share is not None:
        texts["Goodput"] = (
            f"{load_report.goodput:.2f} requests/s within the goal, "
            f"{100 * load_report.good_share:.0f} % of them"
        )
    if load_report.errors:
        texts["Errors"] = ", ".join(
            f"{count} {reason}" for reason, count in load_report.errors.items()
        )
    return texts


def picture(load_report: Report, served: Sequence[Served]) -> str:
    """An SVG of the share of first tokens and of tokens that arrived within each time. '' if no
    token arrived."""
    good = [one for one in served if not one.error]
    times = {
        "first token": [one.ttft_s for one in good if one.new_tokens],
        "between tokens": [gap for one in good for gap in one.gaps_s],
    }
    lines = {
        name: [(max(1e-6, percentile(values, percent)), float(percent)) for percent in _CURVE]
        for name, values in times.items()
        if values
    }
    if not lines:
        return ""
    title = (
        f"{load_report.deployment}: {load_report.load}, {load_report.new_tokens_per_s:.1f} tokens/s"
    )
    return line_chart(lines, title, "seconds", "% within", log_x=True)
