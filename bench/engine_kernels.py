"""The time of a step of half of the layers on a core, while the other core is idle and while it
does the same."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from bench.engine_site import CUT, LAYERS
from bench.engine_worker import Worker
from bench.sizes import sized

SECONDS = sized(0.5, 0.0)
ROWS = (1, 2, 4, 8, 16)


class Kernels:
    """Two processes with half of the layers each, to measure a step with the other core idle and
    busy."""

    def __init__(self, workers: list[Worker], rows: tuple[int, ...]) -> None:
        self._workers, self._rows = workers, rows
        self._alone: dict[int, list[tuple[float, ...]]] = defaultdict(list)
        self._together: dict[int, list[tuple[float, ...]]] = defaultdict(list)

    def measure(self) -> None:
        """Once for every number of rows."""
        for worker in self._workers:
            worker.ask({"rows": 1, "seconds": SECONDS})  # warms up
        for rows in self._rows:
            question = {"rows": rows, "seconds": SECONDS}
            self._alone[rows].append(
                tuple(worker.ask(question)["step_s"] for worker in self._workers)
            )
            for worker in self._workers:
                worker.send(question)
            self._together[rows].append(
                tuple(worker.receive()["step_s"] for worker in self._workers)
            )

    def alone_s(self, rows: int) -> tuple[float, ...]:
        return _middle(self._alone[rows])

    def together_s(self, rows: int) -> tuple[float, ...]:
        return _middle(self._together[rows])

    def ratio(self, rows: int) -> float:
        """How many times the rate of one core with all layers two cores with half of them each
        reach."""
        pairs = zip(self._alone[rows], self._together[rows], strict=True)
        return statistics.median(sum(alone) / max(together) for alone, together in pairs)


def _middle(samples: list[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(statistics.median(values) for values in zip(*samples, strict=True))


@contextmanager
def kernels(prompt_tokens: int, new_tokens: int) -> Iterator[Kernels]:
    """With the contexts of the streams that they are compared with."""
    numbers = [str(number) for number in (max(ROWS), prompt_tokens, new_tokens)]
    with ExitStack() as stack:
        ranges = (f"0:{CUT}", f"{CUT}:{LAYERS}")
        workers = [
            stack.enter_context(Worker(core, "stage", part, *numbers))
            for core, part in enumerate(ranges)
        ]
        for worker in workers:
            worker.receive()
        yield Kernels(workers, ROWS)
