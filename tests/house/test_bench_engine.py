"""The engine benchmark's evaluation of samples with a known answer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from bench.engine_report import document
from bench.engine_streams import Arrival, Sample, Stream, median_sample, percentile, sample_of
from bench.engine_theory import ideal_tokens_per_s, simulated_tokens_per_s
from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.requests.generation import StageTiming


def stream(
    first_s: float, every_s: float, tokens: int, *compute_s: float, wait_s: float = 0.0
) -> Stream:
    """Its times say by their place which step they are of, so that two streams of one step say the
    same."""
    arrivals = []
    for number in range(tokens):
        at = first_s + number * every_s
        arrivals.append(
            Arrival(
                at, tuple(StageTiming(s, wait_s, c + 1e-12 * at) for s, c in enumerate(compute_s))
            )
        )
    return Stream(0.0, tuple(arrivals))


def test_a_rate_is_of_the_time_in_which_all_streams_generate() -> None:
    early, late = stream(1.0, 0.5, 12), stream(4.0, 0.25, 40)
    sample = sample_of([early, late])
    assert sample.tokens_per_s == pytest.approx(1 / 0.5 + 1 / 0.25)
    assert sample.ttft_s == pytest.approx(2.5)
    assert sample.inter_token_latency_s == pytest.approx(0.25), (
        "the late one has most of the tokens of that time"
    )


def test_streams_that_never_generate_together_have_no_rate() -> None:
    with pytest.raises(ValueError, match="more tokens"):
        sample_of([stream(0.0, 0.1, 5), stream(3.0, 0.1, 5)])


def test_what_is_neither_waiting_nor_computing_is_hops_and_idle_stages_are_bubbles() -> None:
    sample = sample_of([stream(1.0, 0.1, 21, 0.03, 0.05, wait_s=0.005)])
    assert sample.stage_s == pytest.approx((0.03, 0.05))
    assert sample.hop_s == pytest.approx((0.005, 0.005))
    assert sample.bubble_share == pytest.approx(1 - (0.3 + 0.5) / 2)


def test_a_step_of_several_streams_counts_once() -> None:
    one, two = stream(1.0, 0.1, 21, 0.08), stream(1.0, 0.1, 21, 0.08)
    assert sample_of([one, two]).bubble_share == pytest.approx(0.2)
    assert sample_of([one, two]).hop_s == (), "a single stage has no hop"


def test_each_figure_has_its_own_median() -> None:
    samples = [
        Sample(rate, 1 / rate, rate, (rate, 2.0), (0.1, 0.1), share)
        for rate, share in ((1, 0.5), (9, 0.1), (5, 0.9))
    ]
    assert median_sample(samples) == Sample(5, 0.2, 5, (5, 2.0), (0.1, 0.1), 0.5)


@pytest.mark.parametrize(("share", "value"), [(0.5, 51), (0.99, 100), (1.0, 100), (0.0, 1)])
def test_percentiles(share: float, value: int) -> None:
    assert percentile(range(100, 0, -1), share) == value


def test_the_ideal_is_a_round_or_all_turns_at_what_is_busiest() -> None:
    assert ideal_tokens_per_s(8, 1, [0.01, 0.03], [0.005, 0.005]) == pytest.approx(8 / 0.05)
    assert ideal_tokens_per_s(8, 2, [0.01, 0.03], [0.005, 0.005]) == pytest.approx(8 / 0.06)
    assert ideal_tokens_per_s(8, 1, [0.04], []) == pytest.approx(200)


def test_the_simulator_agrees_with_the_ideal_without_bubbles_and_not_with_them() -> None:
    times = ([0.02, 0.02], [0.001, 0.001])
    assert simulated_tokens_per_s(Mode.NO_BUBBLES, 16, 2, *times) == pytest.approx(
        ideal_tokens_per_s(16, 2, *times), rel=0.05
    )
    assert simulated_tokens_per_s(Mode.BUBBLES, 16, 2, *times) < 0.75 * ideal_tokens_per_s(
        16, 2, *times
    )


def row(engine: str = "edgeshard", rate: float = 10.0, **changes: Any) -> dict[str, Any]:
    values = {
        "engine": engine,
        "stages": 1,
        "mode": "no-bubbles",
        "dtype": "bf16",
        "streams": 1,
        "micro_batches": 1,
        "prompt_tokens": 128,
        "tokens_per_s": rate,
        "inter_token_latency_s": 1 / rate,
        "ttft_s": 0.5,
        "stage_s": [0.01, 0.01],
        "hop_s": [0.001, 0.001],
        "efficiency": 0.9,
        "bubble_share": 0.1,
        "section": "decoding",
        "placed_micro_batches": 1,
        "simulated_tokens_per_s": rate,
        "samples_tokens_per_s": [rate] * 3,
    }
    return {**values, **changes}


def test_the_page_has_ratios_and_leaves_out_what_was_not_measured() -> None:
    rows = [row("transformers", 5.0 * n, mode="sequential", streams=n) for n in (1, 8)]
    rows += [row(rate=20.0 * n, streams=n, load_1_minute=2.5) for n in (1, 8)]
    rows += [
        row(rate=40.0 * n, streams=n, stages=2, placed_micro_batches=2, kernel_ratio=1.8)
        for n in (1, 8)
    ]
    rows += [row(rate=50.0, dtype="int8"), row(rate=70.0, dtype="int4")]
    rows += [
        row(stages=2, mode=m, section="prompts", prompt_tokens=4096, ttft_s=t)
        for m, t in (("sequential", 8), ("no-bubbles", 4))
    ]
    page = document(rows)
    words = " ".join(page.split())
    assert (
        "--quick" in words and "medians of 3 rounds" in words and "was 2.5 in the median" in words
    )
    assert "| whole | 20.0 (4.0x) | 160.0 (4.0x) |" in page
    assert "| whole | int4 | 70.0 | 3.50 |" in page
    assert "| 4,096 | 2 stages, sliced | 4.00 | 0.50 |" in page
    assert "2.00 |" in next(
        line for line in page.splitlines() if line.startswith("| no-bubbles | 8 |")
    ), "of whole at 8"
    assert "A long prompt among streams" not in page


def test_the_page_tells_of_a_promised_latency() -> None:
    rows = [row(), row(dtype="int8")]
    limit: dict[str, Any] = {
        "max_inter_token_latency_s": 0.25,
        "p99_inter_token_latency_s": 0.271,
        "largest_inter_token_latency_s": 0.3,
    }
    rows.append(row(section="limit", streams=9, prompt_tokens=4096, ttft_alone_s=9.0, **limit))
    assert "0.271 s at the 99th" in " ".join(document(rows).split())


def test_the_short_run_has_every_engine_mode_and_weight_format() -> None:
    from bench.engine_cases import FULL, QUICK

    for plan in (FULL, QUICK):
        found = {(case.setup.mode, case.setup.dtype) for case in plan.cases}
        assert {mode for mode, _ in found} == {"sequential", "bubbles", "no-bubbles"}
        assert {dtype for _, dtype in found} == {"bf16", "int8", "int4"}
        for one, other in itertools.combinations(plan.cases + plan.long_cases, 2):
            assert one != other
            assert (one.setup.name == other.setup.name) == (one.setup == other.setup)
