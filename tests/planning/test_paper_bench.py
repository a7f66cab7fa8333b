"""What must hold of the paper's test bed, computed as `python -m bench.edgeshard_paper` does."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.edgeshard_paper import by_lab
from bench.edgeshard_paper.__main__ import MEASURED
from bench.edgeshard_paper.experiments import Row, modes, paper_cluster, profiling, table, unlimited
from bench.edgeshard_paper.paper_numbers import PERFORMANCE
from edgeshard.cli.lab_site import LabFigures
from edgeshard.domain.mode import Mode


@pytest.fixture(scope="module")
def small() -> dict[str, Row]:
    return {row.strategy: row for row in table("llama2-7b", paper_cluster())}


def milliseconds(row: Row) -> float:
    assert row.ms_per_token is not None
    return row.ms_per_token


def test_at_1_mbps_the_best_cut_with_the_cloud_is_the_source_alone(small: dict[str, Row]) -> None:
    assert small["cloud-edge-opt"].latency.placement == small["edge-solo"].latency.placement
    assert milliseconds(small["cloud-edge-opt"]) == milliseconds(small["edge-solo"])


def test_the_plan_goes_around_the_slow_link_and_needs_less_than_six_tenths(small: dict[str, Row]) -> None:
    nodes = [stage.split("=")[0] for stage in small["edgeshard"].latency.placement.split(",")]
    assert nodes[0] == "agx-1"
    assert "cloud" in nodes[2:]
    assert milliseconds(small["edgeshard"]) < 0.6 * milliseconds(small["edge-solo"])


def test_no_strategy_is_better_than_the_plan(small: dict[str, Row]) -> None:
    best = small["edgeshard"]
    for row in small.values():
        assert milliseconds(best) <= milliseconds(row) * (1 + 1e-6)
        assert (best.tokens_per_s or 0) >= (row.tokens_per_s or 0) * 0.99


def test_rows_of_the_roofline_are_near_the_papers(small: dict[str, Row]) -> None:
    """The two rows that are all compute and one link; not a fit, so the limit is wide."""
    for name in ("edge-solo", "cloud-edge-even"):
        quoted = PERFORMANCE["llama2-7b", name].ms_per_token
        assert quoted is not None
        assert milliseconds(small[name]) == pytest.approx(quoted.value, rel=0.15)


def test_only_many_boxes_hold_the_largest_model() -> None:
    rows = {row.strategy: row for row in table("llama2-70b", paper_cluster())}
    for name in ("edge-solo", "cloud-edge-even", "cloud-edge-opt"):
        assert rows[name].ms_per_token is None
        assert "short" in rows[name].latency.reason
    assert rows["edgeshard"].latency.nodes >= 10


def test_which_profile_is_used_hardly_matters() -> None:
    found = {item.profile: item.ms_per_token for item in profiling("llama2-7b")}
    assert found["prefill"] == pytest.approx(found["decode"], rel=0.05)
    assert found["mean"] == pytest.approx(found["decode"], rel=0.05)


def test_no_bubbles_gains_within_what_theory_allows() -> None:
    found = modes("llama2-7b")
    assert found.gain > 0
    assert found.gain_of_best > 0
    assert found.rates[Mode.NO_BUBBLES] <= found.rates[Mode.BUBBLES] * (2 - 1 / found.load.micro_batches)


def test_thirteen_billion_parameters_on_two_boxes_are_compared_without_the_limit_of_memory() -> None:
    even = next(item for item in unlimited("llama2-13b") if item.strategy == "cloud-edge-even")
    assert even.ms_per_token == pytest.approx(319.44, rel=0.15)


def test_what_the_lab_measured_is_of_the_plans_there_are_now(small: dict[str, Row]) -> None:
    """Else `python -m bench.edgeshard_paper --lab` is to be run again."""
    rows = by_lab.lab_rows(list(small.values()), by_lab.read(MEASURED))
    assert {row.strategy for row in rows if row.run.streams == 1} == set(small)
    for row in rows:
        assert row.measured is not None, f"{row.strategy}: {row.run.placement} with {row.run.streams} streams"


def test_the_lab_is_asked_for_the_planners_own_figures(small: dict[str, Row]) -> None:
    alone = next(row for row in by_lab.lab_rows([small["edgeshard"]], {}) if row.run.streams == 1)
    assert alone.run.placement == small["edgeshard"].latency.placement
    assert 1e3 * alone.predicted.time_per_token_s == pytest.approx(milliseconds(small["edgeshard"]), rel=0.01)
    assert alone.measured is None and alone.deviation("ttft_s") is None


def test_measurements_come_back_from_their_file_as_they_were(small: dict[str, Row], tmp_path: Path) -> None:
    rows = by_lab.lab_rows([small["edgeshard"]], {})
    measured = {row.run: LabFigures(0.5, 2 * row.predicted.time_per_token_s, 3.0) for row in rows}
    by_lab.write(tmp_path / "lab.json", measured)
    assert by_lab.read(tmp_path / "lab.json") == measured
    assert by_lab.read(tmp_path / "nothing.json") == {}
    again = by_lab.lab_rows([small["edgeshard"]], measured)
    assert again[0].deviation("time_per_token_s") == pytest.approx(-0.5)
