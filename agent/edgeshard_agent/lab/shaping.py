"""The lab's links in user space: bandwidth and delay of one direction, with frames in flight. Pure."""

from __future__ import annotations

from collections.abc import Callable

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.requests.step import ForwardStep, WireStep


class LinkShape:
    """When bytes put on the link now are all at the other end.

    The bytes occupy the link one frame after the other, at `bandwidth_bps` bits per second, and then travel for
    `latency_s` seconds without keeping the next frame waiting.
    """

    def __init__(self, bandwidth_bps: float, latency_s: float) -> None:
        if not 0 < bandwidth_bps < float("inf"):
            raise InvalidArgumentError(f"bandwidth_bps {bandwidth_bps} must be above 0", field="bandwidth_bps")
        if not 0 <= latency_s < float("inf"):
            raise InvalidArgumentError(f"latency_s {latency_s} must be 0 or more", field="latency_s")
        self.bandwidth_bps = bandwidth_bps
        self.latency_s = latency_s
        self._free_at = float("-inf")

    def arrival(self, now: float, size_bytes: int) -> float:
        """Time of arrival of a frame of `size_bytes` sent at `now`; takes its place on the link."""
        self._free_at = max(now, self._free_at) + 8 * size_bytes / self.bandwidth_bps
        return self._free_at + self.latency_s


class EmulatedLink(LinkShape):
    """A shaped link that pads steps to the size of the emulated model's.

    `activation_bytes` gives the bytes of the hidden states of so many tokens; a returned step has none.
    """

    def __init__(
        self, bandwidth_bps: float, latency_s: float, activation_bytes: Callable[[int], int], window: int
    ) -> None:
        super().__init__(bandwidth_bps, latency_s)
        self._activation_bytes = activation_bytes
        self._window = window
        self._tokens: dict[int, int] = {}

    def note(self, step: WireStep) -> None:
        self._tokens[step.number] = step.plan.token_count if isinstance(step, ForwardStep) else 0
        self._tokens.pop(step.number - 2 * self._window, None)

    def padding_bytes(self, step: int, size_bytes: int) -> int:
        return max(0, self._activation_bytes(self._tokens.get(step, 0)) - size_bytes)
