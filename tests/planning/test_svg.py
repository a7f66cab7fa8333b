"""Charts are well-formed, stay inside their picture, and put points where their values say."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from bench.made_rings import linear_hop, steady_stage
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.planning.report.baselines import COMPARED
from edgeshard.planning.report.svg import WIDTH, bar_chart, line_chart, timeline
from edgeshard.planning.simulation.simulator import simulate
from edgeshard.planning.simulation.timing import Pipeline, Traffic

SVG = "{http://www.w3.org/2000/svg}"


def parsed(text: str) -> ElementTree.Element:
    root = ElementTree.fromstring(text)
    assert root.get("width") == str(WIDTH)
    return root


def words(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def check_inside(root: ElementTree.Element) -> None:
    height = float(root.get("height", "0"))
    for rect in root.findall(f"{SVG}rect"):
        x, y, wide, high = (float(rect.get(name, "0")) for name in ("x", "y", "width", "height"))
        assert min(x, y, wide, high) >= 0
        assert x + wide <= WIDTH + 0.01
        assert y + high <= height + 0.01


def points(root: ElementTree.Element) -> list[list[tuple[float, float]]]:
    found = []
    for line in root.iter(f"{SVG}polyline"):
        pairs = (pair.split(",") for pair in line.get("points", "").split())
        found.append([(float(x), float(y)) for x, y in pairs])
    return found


def test_a_line_goes_through_its_points() -> None:
    root = parsed(line_chart({"a <b>": [(10, 2), (0, 0), (20, 1)]}, "T & U", "x", "y"))
    check_inside(root)
    (line,) = points(root)
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    assert line[1][0] - line[0][0] == pytest.approx(line[2][0] - line[1][0], abs=0.2)
    assert line[0][1] - line[2][1] == pytest.approx((line[0][1] - line[1][1]) / 2, abs=0.2)
    assert {"a <b>", "T & U", "x", "y"} <= set(words(root))


def test_each_strategy_of_a_comparison_has_a_colour_of_its_own() -> None:
    root = parsed(bar_chart({"a": dict.fromkeys(COMPARED, 1.0)}, "t", "y"))
    bars = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert len(bars) == len(COMPARED) == len({rect.get("fill") for rect in bars})


def test_equal_factors_are_equal_steps_on_a_log_axis() -> None:
    (line,) = points(parsed(line_chart({"a": [(1, 1), (10, 10), (100, 100)]}, "t", "x", "y", True, True)))
    steps = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(line)]
    assert steps[0] == pytest.approx(steps[1], abs=0.2)


@pytest.mark.parametrize("count", [1, 12])
def test_many_names_wrap_in_the_legend(count: int) -> None:
    root = parsed(line_chart({f"a rather long name {n}": [(n, 1.0)] for n in range(count)}, "t", "x", "y"))
    assert sum(text.startswith("a rather long name") for text in words(root)) == count
    for element in root.iter(f"{SVG}text"):
        if (element.text or "").startswith("a rather"):
            assert float(element.get("x", "0")) + 7 * len(element.text or "") <= WIDTH


def test_bars_are_as_high_as_their_values_and_missing_ones_are_marked() -> None:
    root = parsed(bar_chart({"7B": {"solo": 100.0, "ours": 50.0}, "70B": {"solo": None, "ours": 75.0}}, "t", "ms"))
    check_inside(root)
    heights = {
        rect.findtext(f"{SVG}title"): float(rect.get("height", "0"))
        for rect in root.findall(f"{SVG}rect")
        if rect.findtext(f"{SVG}title")
    }
    assert heights["7B, ours: 50"] == pytest.approx(heights["7B, solo: 100"] / 2, abs=0.05)
    assert len(heights) == 3
    assert "–" in words(root)


def test_a_timeline_shows_every_service_until_it_is_cut() -> None:
    pipeline = Pipeline((steady_stage(1, 0.5),) * 2, (linear_hop(0.01),) * 2, names=("a", "b"), head_s=lambda b: 0.1)
    visits = simulate(pipeline, Traffic(micro_batches=2, prompt_tokens=4, new_tokens=3, slices=(2, 2))).timeline

    def shown(until_s: float | None) -> int:
        root = parsed(timeline(visits, "t", until_s))
        check_inside(root)
        assert {"a", "b", "a -> b", "b -> a", "prefill"} <= set(words(root))
        return len([rect for rect in root.findall(f"{SVG}rect") if rect.findtext(f"{SVG}title")])

    assert shown(None) == len(visits)
    assert shown(4.5) == sum(visit.start_s < 4.5 for visit in visits) < len(visits)


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
