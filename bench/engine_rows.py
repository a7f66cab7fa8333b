"""The report of `bench.engine`: rows of medians, with what theory and simulator say of the same
pipeline."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from typing import Any

from bench.engine_cases import DECODING, SPLIT, Case
from bench.engine_kernels import Kernels
from bench.engine_streams import Sample, median_sample
from bench.engine_theory import ideal_tokens_per_s, simulated_tokens_per_s
from edgeshard.domain.deployments.placement import Mode

LLAMA_CPP = "llama.cpp-rpc"
TRANSFORMERS = "transformers"


class Rows:
    """Collects samples and makes the report of them."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._samples: dict[Case, list[Sample]] = defaultdict(list)
        self._beside: dict[Case, list[dict[str, float]]] = defaultdict(list)
        self._others: dict[tuple[str, int, int, str], list[Sample]] = defaultdict(list)
        self._loads: list[float] = []

    def add(self, case: Case, sample: Sample, beside: dict[str, float]) -> None:
        self._samples[case].append(sample)
        self._beside[case].append(beside)
        self._loads.append(os.getloadavg()[0])

    def add_other(
        self, engine: str, streams: int, prompt_tokens: int, sample: Sample, section: str = DECODING
    ) -> None:
        self._others[engine, streams, prompt_tokens, section].append(sample)

    def report(self) -> list[dict[str, Any]]:
        own = [self._row(case) for case in self._samples]
        return [*own, *(self._other_row(*other) for other in self._others)]

    def _row(self, case: Case) -> dict[str, Any]:
        setup, samples = case.setup, self._samples[case]
        sample, in_flight = median_sample(samples), setup.in_flight(case.streams)
        stage_s, hop_s = sample.stage_s, sample.hop_s
        decoding = case.section == DECODING
        ideal = None
        simulated = None
        if in_flight:  # the head's choice is unknown
            rows = -(-case.streams // in_flight)
            if setup.dtype == "bf16" and decoding:
                stage_s, hop_s = self._theory(case, rows)
            ideal = ideal_tokens_per_s(case.streams, in_flight, stage_s, hop_s)
            simulated = simulated_tokens_per_s(
                Mode(setup.mode), case.streams, in_flight, stage_s, hop_s
            )
        figures = _figures("edgeshard", setup.stages, case.streams, case.prompt_tokens, samples)
        figures.update(
            mode=setup.mode,
            dtype=setup.dtype,
            micro_batches=in_flight,
            stage_s=stage_s,
            hop_s=hop_s,
            efficiency=sample.tokens_per_s / ideal if decoding and ideal else None,
            bubble_share=sample.bubble_share if decoding else None,
            section=case.section,
            placed_micro_batches=setup.micro_batches,
            simulated_tokens_per_s=simulated,
            own_stage_s=sample.stage_s,
            own_hop_s=sample.hop_s,
            processor_s_per_token=_medians(self._beside[case]),
            load_1_minute=statistics.median(self._loads),
        )
        if in_flight and setup.stages > 1 and setup.dtype == "bf16" and decoding:
            figures["kernel_ratio"] = self._kernels.ratio(rows)
        return figures

    def _theory(self, case: Case, rows: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Stage times of the separate run, with the other core at work if it is in the pipeline.
        Hops of a single circulating micro-batch of as many streams (or the next smaller number
        measured)."""
        if case.setup.stages == 1:
            return (sum(self._kernels.alone_s(rows)),), ()
        alone = {other.streams: own for other, own in self._samples.items() if _is_alone(other)}
        fewer = [streams for streams in alone if streams <= rows]
        hop_s = median_sample(alone[max(fewer)] if fewer else self._samples[case]).hop_s
        in_flight = case.setup.in_flight(case.streams)
        return (
            self._kernels.together_s(rows) if in_flight > 1 else self._kernels.alone_s(rows)
        ), hop_s

    def _other_row(
        self, engine: str, streams: int, prompt_tokens: int, section: str
    ) -> dict[str, Any]:
        stages = 2 if engine == LLAMA_CPP else 1
        samples = self._others[engine, streams, prompt_tokens, section]
        figures = _figures(engine, stages, streams, prompt_tokens, samples)
        figures.update(mode="sequential", dtype="bf16", micro_batches=1, stage_s=[], hop_s=[])
        return {**figures, "efficiency": None, "bubble_share": None, "section": section}


def _is_alone(case: Case) -> bool:
    """Whether a single micro-batch is under way, in the mode and on the deployment that are
    compared."""
    setup = case.setup
    is_compared = (setup.stages, setup.mode, setup.dtype, case.section) == (
        2,
        SPLIT.mode,
        "bf16",
        DECODING,
    )
    return is_compared and setup.in_flight(case.streams) == 1


def _figures(
    engine: str, stages: int, streams: int, prompt_tokens: int, samples: list[Sample]
) -> dict[str, Any]:
    sample = median_sample(samples)
    return {
        "engine": engine,
        "stages": stages,
        "streams": streams,
        "prompt_tokens": prompt_tokens,
        "tokens_per_s": sample.tokens_per_s,
        "inter_token_latency_s": sample.inter_token_latency_s,
        "ttft_s": sample.ttft_s,
        "samples_tokens_per_s": [one.tokens_per_s for one in samples],
        "samples_ttft_s": [one.ttft_s for one in samples],
    }


def _medians(values: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(value[name] for value in values) for name in values[0]}
