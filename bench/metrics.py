"""What metrics cost: the time of a token and of a step where they are counted, and of a scrape of a large site.

`python -m bench.metrics` prints JSON: nanoseconds, and milliseconds of a scrape whose text has so many bytes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from edgeshard_agent.engine.recording import StepCounts
from edgeshard_coordinator.control.requests.request_meter import RequestMeter

from bench.sizes import sized
from edgeshard.domain.ids import DeploymentName
from edgeshard.metrics.exposition import Metrics
from edgeshard.metrics.families import gauge, histogram
from edgeshard.metrics.histogram import LATENCY_S, Histogram

COUNT = sized(200_000, 1000)
NODES = 100
HISTOGRAMS = 100
"""Those of a dozen deployments."""


def each_ns(work: Callable[[int], None]) -> float:
    """The quickest of five rounds."""
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        for number in range(COUNT):
            work(number)
        rounds.append((time.perf_counter() - began) / COUNT)
    return round(1e9 * min(rounds), 1)


def main() -> None:
    times = RequestMeter().began(DeploymentName("tales"), "client/app", 0.0, resumed=False)
    clock, steps = time.monotonic, StepCounts()
    counted = [((f"d{number}",), Histogram(LATENCY_S)) for number in range(HISTOGRAMS)]
    metrics = Metrics(
        lambda: [
            *(gauge(f"edgeshard_g{k}", "A figure of each node.", ("node",), _of_nodes()) for k in range(20)),
            histogram("edgeshard_seconds", "Times.", ("deployment",), counted),
        ]
    )
    metrics.exposition()
    began = time.perf_counter()
    metrics.collected()
    read_ms = 1000 * (time.perf_counter() - began)
    text, _ = metrics.exposition()
    whole_ms = 1000 * (time.perf_counter() - began) - read_ms
    figures = {
        "token_ns": each_ns(lambda _: times.token(clock())),
        "step_ns": each_ns(lambda number: steps.ran(number, number + 0.1, number + 0.2)),
        "scrape_on_loop_ms": round(read_ms, 1),
        "scrape_ms": round(whole_ms, 1),
        "scrape_bytes": len(text),
    }
    print(json.dumps(figures, indent=1))


def _of_nodes() -> list[tuple[tuple[str], float]]:
    return [((f"node-{number}",), 1.0) for number in range(NODES)]


if __name__ == "__main__":
    main()
