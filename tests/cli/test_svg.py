"""Charts are well-formed, stay inside their frame, and put points at their values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from bench.made_rings import linear_hop, steady_stage
from edgeshard.cli.render import svg
from edgeshard.cli.render.svg import WIDTH, bar_chart, line_chart, timeline
from edgeshard.domain.errors import FailedPreconditionError, InvalidArgumentError
from edgeshard.planning.report.baselines import COMPARED
from edgeshard.planning.simulation.simulator import simulate
from edgeshard.planning.simulation.timing import Pipeline, SimulatedTraffic

SVG = "{http://www.w3.org/2000/svg}"
Box = tuple[float, float, float, float]
"""Least x and y, and greatest."""


def parsed(text: str) -> ElementTree.Element:
    root = ElementTree.fromstring(text)
    assert root.get("width") == f"{0.75 * WIDTH:g}pt"
    return root


def words(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def places(part: ElementTree.Element) -> list[tuple[float, float]]:
    """The points of the first path within."""
    path = next(part.iter(f"{SVG}path")).get("d", "")
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", path)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def points(root: ElementTree.Element) -> list[list[tuple[float, float]]]:
    return [places(part) for part in root.iter(f"{SVG}g") if part.get("id", "").startswith("line-")]


def named(root: ElementTree.Element) -> dict[str, Box]:
    """The places of the parts with a tooltip; all within the drawing."""
    found = {}
    _, _, wide, high = (float(number) for number in root.get("viewBox", "").split())
    for part in root.iter(f"{SVG}g"):
        if title := part.findtext(f"{SVG}title"):
            xs, ys = zip(*places(part), strict=True)
            found[title] = min(xs), min(ys), max(xs), max(ys)
            assert min(*xs, *ys) >= 0 and max(xs) <= wide + 0.01 and max(ys) <= high + 0.01
    return found


def test_a_line_goes_through_its_points() -> None:
    root = parsed(line_chart({"a <b>": [(10, 2), (0, 0), (20, 1)]}, "T & U", "x", "y"))
    (line,) = points(root)
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    assert line[1][0] - line[0][0] == pytest.approx(line[2][0] - line[1][0], abs=0.2)
    assert line[0][1] - line[2][1] == pytest.approx((line[0][1] - line[1][1]) / 2, abs=0.2)
    assert {"a <b>", "T & U", "x", "y"} <= set(words(root))


def test_each_strategy_of_a_comparison_has_a_colour_of_its_own() -> None:
    root = parsed(bar_chart({"a": dict.fromkeys(COMPARED, 1.0)}, "t", "y"))
    bars = [
        next(g.iter(f"{SVG}path"))
        for g in root.iter(f"{SVG}g")
        if g.find(f"{SVG}title") is not None
    ]
    assert len(bars) == len(COMPARED) == len({bar.get("style") for bar in bars})


def test_equal_factors_are_equal_steps_on_a_log_axis() -> None:
    (line,) = points(
        parsed(line_chart({"a": [(1, 1), (10, 10), (100, 100)]}, "t", "x", "y", True, True))
    )
    steps = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(line)]
    assert steps[0] == pytest.approx(steps[1], abs=0.2)


@pytest.mark.parametrize("count", [1, 12])
def test_many_names_wrap_in_the_legend(count: int) -> None:
    root = parsed(
        line_chart({f"a rather long name {n}": [(n, 1.0)] for n in range(count)}, "t", "x", "y")
    )
    found = [text for text in root.iter(f"{SVG}text") if (text.text or "").startswith("a rather")]
    assert len(found) == count
    for text in found:
        assert float(text.get("x", "")) + 5.3 * len(text.text or "") <= 0.75 * WIDTH


def test_bars_are_as_high_as_their_values_and_missing_ones_are_marked() -> None:
    root = parsed(
        bar_chart(
            {"7B": {"solo": 100.0, "ours": 50.0}, "70B": {"solo": None, "ours": 75.0}}, "t", "ms"
        )
    )
    heights = {title: bottom - top for title, (_, top, _, bottom) in named(root).items()}
    assert heights["7B, ours: 50"] == pytest.approx(heights["7B, solo: 100"] / 2, abs=0.05)
    assert len(heights) == 3
    assert "–" in words(root)


def test_a_timeline_shows_every_service_until_it_is_cut() -> None:
    pipeline = Pipeline(
        (steady_stage(1, 0.5),) * 2, (linear_hop(0.01),) * 2, names=("a", "b"), head_s=lambda b: 0.1
    )
    visits = simulate(
        pipeline, SimulatedTraffic(micro_batches=2, prompt_tokens=4, new_tokens=3, slices=(2, 2))
    ).timeline

    def shown(until_s: float | None) -> int:
        root = parsed(timeline(visits, "t", until_s))
        assert {"a", "b", "a -> b", "b -> a", "prefill", "micro-batch 0"} <= set(words(root))
        return len(named(root))

    assert shown(None) == len(visits)
    assert shown(4.5) == sum(visit.start_s < 4.5 for visit in visits) < len(visits)


def test_the_same_values_give_the_same_text() -> None:
    first, second = (bar_chart({"a": {"b": 1.0}}, "t & u", "y") for _ in range(2))
    assert first == second and "date" not in first


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svg, "find_spec", lambda name: None)
    with pytest.raises(FailedPreconditionError, match=r"pip install '\.\[drawings\]'"):
        line_chart({"a": [(1.0, 1.0)]}, "t", "x", "y")


@pytest.mark.parametrize("series", [{}, {"a": []}, {"a": [(1.0, float("nan"))]}])
def test_a_chart_of_nothing_is_refused(series: Mapping[str, list[tuple[float, float]]]) -> None:
    with pytest.raises(InvalidArgumentError):
        line_chart(series, "t", "x", "y")


def test_zero_is_refused_on_a_log_axis() -> None:
    with pytest.raises(InvalidArgumentError):
        line_chart({"a": [(0.0, 1.0)]}, "t", "x", "y", log_x=True)
    with pytest.raises(InvalidArgumentError):
        bar_chart({"a": {"b": 0.0}}, "t", "y", log_y=True)
    with pytest.raises(InvalidArgumentError):
        timeline([], "t")
