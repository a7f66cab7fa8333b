"""Invariants of the paper's test bed, computed as `python -m bench.edgeshard_paper` does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.edgeshard_paper import bandwidth, by_lab, profiling, report
from bench.edgeshard_paper.__main__ import MEASURED, OUTPUT, TABLES
from bench.edgeshard_paper.experiments import Row, modes, paper_cluster, table
from bench.edgeshard_paper.paper_numbers import MODELS, PERFORMANCE, TITLES
from bench.pages import markdown_table, write_or_check
from edgeshard.domain.deployments.placement import Mode
from edgeshard.local.lab_site import LabFigures


@pytest.fixture(scope="module")
def small() -> dict[str, Row]:
    return {row.strategy: row for row in table("llama2-7b", paper_cluster())}


def milliseconds(row: Row) -> float:
    assert row.ms_per_token is not None
    return row.ms_per_token


def test_at_1_mbps_the_best_cut_with_the_cloud_is_the_source_alone(small: dict[str, Row]) -> None:
    assert small["cloud-edge-opt"].latency.placement == small["edge-solo"].latency.placement
    assert milliseconds(small["cloud-edge-opt"]) == milliseconds(small["edge-solo"])


def test_the_plan_goes_around_the_slow_link_and_needs_less_than_six_tenths(
    small: dict[str, Row],
) -> None:
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


def seconds_by_profile(case: profiling.Case) -> dict[str, float]:
    return {row.profile: row.seconds for row in profiling.profiling_of("llama2-7b", case)}


@pytest.mark.parametrize("case", [profiling.ONE, profiling.BATCH])
def test_with_the_papers_prompts_it_hardly_matters_which_profile_is_used(
    case: profiling.Case,
) -> None:
    found = seconds_by_profile(case)
    for name in (profiling.PREFILL, profiling.DECODE, profiling.MEAN):
        assert found[name] == pytest.approx(found[profiling.BOTH], rel=0.01)


@pytest.mark.parametrize("case", [profiling.LONG, profiling.RATE])
def test_where_prefill_is_unlike_decode_its_profile_costs_time(case: profiling.Case) -> None:
    found = seconds_by_profile(case)
    assert found[profiling.PREFILL] > 1.05 * found[profiling.BOTH]
    assert found[profiling.HOPS] > found[profiling.PREFILL]
    assert found[profiling.BOTH] == pytest.approx(min(found.values()), rel=0.01)


def test_long_prompts_and_batches_have_the_papers_premise_on_an_orin_alone() -> None:
    ratios = {(block.device, block.case): block.ratio for block in profiling.blocks("llama2-7b")}
    assert ratios["AGX Orin", profiling.ONE] == pytest.approx(1.0, abs=0.01)
    assert (
        7 < ratios["AGX Orin", profiling.BATCH] < 10 and 9 < ratios["AGX Orin", profiling.LONG] < 10
    )
    assert ratios["RTX 3090", profiling.LONG] < 5


def test_no_bubbles_gains_within_what_theory_allows() -> None:
    found = modes("llama2-7b")
    assert found.gain > 0
    assert found.gain_of_best > 0
    assert found.rates[Mode.NO_BUBBLES] <= found.rates[Mode.BUBBLES] * (
        2 - 1 / found.load.micro_batches
    )


def test_thirteen_billion_parameters_on_two_nodes_are_compared_without_the_limit_of_memory() -> (
    None
):
    rows = {
        row.strategy: row
        for row in table("llama2-13b", bandwidth.endless(paper_cluster()), bandwidth.PAIRS)
    }
    assert milliseconds(rows["cloud-edge-even"]) == pytest.approx(319.44, rel=0.15)


def test_a_faster_link_to_the_cloud_makes_no_plan_slower() -> None:
    times = []
    for mbps in (1, 50):
        rows = table("llama2-7b", paper_cluster(slow_mbps=mbps), ("edgeshard",))
        times += [milliseconds(row) for row in rows if row.strategy == "edgeshard"]
    assert times == sorted(times, reverse=True)


@pytest.mark.long
def test_the_page_has_what_is_computed_now(small: dict[str, Row]) -> None:
    """For 7B and one bandwidth, which is quick; `python -m bench.edgeshard_paper --check` looks at
    every file."""
    page = (OUTPUT / "README.md").read_text(encoding="utf-8")
    rows = list(small.values())
    found = [row for case in profiling.CASES for row in profiling.profiling_of("llama2-7b", case)]
    sweeps = {model: bandwidth.table_rows(bandwidth.sweep(model, (20,))) for model in MODELS}
    tables = json.loads((OUTPUT / TABLES).read_text(encoding="utf-8"))
    for model, swept in sweeps.items():
        assert all(row in tables[f"bandwidth, {TITLES[model]}"] for row in swept)
    expected = [
        *report.performance_rows("llama2-7b", rows),
        *profiling.table_rows(found),
        *(row for model in MODELS[:-1] for row in sweeps[model]),
    ]
    for row in expected:
        assert markdown_table(row, []).splitlines()[0] in page
    for part in report.lab_section(by_lab.lab_rows(rows, by_lab.read(MEASURED))):
        assert part in page


def test_a_check_names_what_would_change_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write_or_check(tmp_path, {"page.md": "one"}, check=True) == 1
    assert "differs" in capsys.readouterr().err and not (tmp_path / "page.md").exists()
    assert write_or_check(tmp_path, {"page.md": "one"}, check=False) == 0
    assert write_or_check(tmp_path, {"page.md": "one"}, check=True) == 0
    assert write_or_check(tmp_path, {"page.md": "two"}, check=True) == 1


def test_what_the_lab_measured_is_of_the_plans_there_are_now(small: dict[str, Row]) -> None:
    """Else `python -m bench.edgeshard_paper --lab` is to be run again."""
    rows = by_lab.lab_rows(list(small.values()), by_lab.read(MEASURED))
    assert {row.strategy for row in rows if row.run.streams == 1} == set(small)
    for row in rows:
        assert row.measured is not None, (
            f"{row.strategy}: {row.run.placement} with {row.run.streams} streams"
        )


def test_the_lab_is_asked_for_the_planners_own_figures(small: dict[str, Row]) -> None:
    alone = next(row for row in by_lab.lab_rows([small["edgeshard"]], {}) if row.run.streams == 1)
    assert alone.run.placement == small["edgeshard"].latency.placement
    assert 1e3 * alone.predicted.time_per_token_s == pytest.approx(
        milliseconds(small["edgeshard"]), rel=0.01
    )
    assert alone.measured is None and alone.deviation("ttft_s") is None


def test_measurements_come_back_from_their_file_as_they_were(
    small: dict[str, Row], tmp_path: Path
) -> None:
    rows = by_lab.lab_rows([small["edgeshard"]], {})
    measured = {row.run: LabFigures(0.5, 2 * row.predicted.time_per_token_s, 3.0) for row in rows}
    by_lab.write(tmp_path / "lab.json", measured)
    assert by_lab.read(tmp_path / "lab.json") == measured
    assert by_lab.read(tmp_path / "nothing.json") == {}
    again = by_lab.lab_rows([small["edgeshard"]], measured)
    assert again[0].deviation("time_per_token_s") == pytest.approx(-0.5)
