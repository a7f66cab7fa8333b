"""Counts of requests for the metrics: their number, the times of their parts, and the losses of
their service.

A token costs a reading of the clock and an addition to a histogram. Labels are bounded: they hold
no request's id, no text, and only the role of a client. The usage of each API key is counted
separately, for the key's owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from edgeshard.domain.errors import Code, EdgeShardError
from edgeshard.domain.identity import KEY_ROLE
from edgeshard.domain.ids import DeploymentName, Epoch
from edgeshard.domain.requests.generation import FinishReason
from edgeshard.metrics.histogram import LATENCY_S, STEP_S, Histogram

EPOCH, STREAM = "epoch", "stream"
NO_ROLE = "none"
"""The role of callers in plaintext."""


CODES = tuple(code.name.lower() for code in Code)


def _latency() -> Histogram:
    return Histogram(LATENCY_S)


def _zeros(words: Iterable[str]) -> Counter[str]:
    """A word that never occurred is 0, not absent: rates need a beginning."""
    return Counter(dict.fromkeys(words, 0))


@dataclass(slots=True, eq=False)
class DeploymentCounts:
    """The counts of one deployment, since the coordinator began. Histograms are of seconds.

    `begun` is by the role of the caller, `finished` by the reason, `failed` by the error's code;
    `recovered` by whether another epoch took the service up or the same head attached again, after
    the `pauses`.
    """

    begun: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=lambda: _zeros(FinishReason))
    failed: Counter[str] = field(default_factory=lambda: _zeros(CODES))
    prompt_tokens: int = 0
    new_tokens: int = 0
    first_token: Histogram = field(default_factory=_latency)
    between_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_S))
    whole: Histogram = field(default_factory=_latency)
    queue: Histogram = field(default_factory=_latency)
    prefill: Histogram = field(default_factory=_latency)
    decode: Histogram = field(default_factory=_latency)
    recovered: Counter[str] = field(default_factory=lambda: _zeros((EPOCH, STREAM)))
    pauses: Histogram = field(default_factory=_latency)
    last_pause_s: float | None = None


@dataclass(slots=True)
class KeyCounts:
    """What one API key used, since the coordinator began."""

    requests: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0


class RequestTimes:
    """The times of one request's parts, in seconds of a steady clock. Of a request that its client
    `resumed`, only the times between its tokens are taken."""

    __slots__ = (
        "_admitted_at",
        "_counts",
        "_first_at",
        "_key",
        "_newest_at",
        "_resumed",
        "began_at",
    )

    def __init__(
        self, counts: DeploymentCounts, now: float, *, resumed: bool, key: KeyCounts | None = None
    ) -> None:
        self._counts = counts
        self._key = KeyCounts() if key is None else key
        self.began_at = now
        self._resumed = resumed
        self._admitted_at: float | None = None
        self._first_at: float | None = None
        self._newest_at = 0.0

    @classmethod
    def untold(cls) -> RequestTimes:
        """The times of a request that is not measured."""
        return cls(DeploymentCounts(), 0.0, resumed=True)

    @property
    def is_admitted(self) -> bool:
        """Whether the head computes it; for a resumed request, whether a token arrived."""
        return (self._first_at if self._resumed else self._admitted_at) is not None

    def accepted(self, prompt_tokens: int) -> None:
        """The head has tokenised it, for the first time."""
        if not self._resumed:
            self._counts.prompt_tokens += prompt_tokens
            self._key.prompt_tokens += prompt_tokens

    def admitted(self, now: float) -> None:
        """The head computes it from now on; only the first time counts."""
        if self._admitted_at is None and not self._resumed:
            self._admitted_at = now
            self._counts.queue.add(now - self.began_at)

    def token(self, now: float) -> None:
        counts = self._counts
        counts.new_tokens += 1
        self._key.new_tokens += 1
        if self._first_at is not None:
            counts.between_tokens.add(now - self._newest_at)
        else:
            self._first_at = now
            if not self._resumed:
                counts.first_token.add(now - self.began_at)
                if self._admitted_at is not None:
                    counts.prefill.add(now - self._admitted_at)
        self._newest_at = now

    def finished(self, reason: str, now: float) -> None:
        counts = self._counts
        counts.finished[reason] += 1
        if not self._resumed:
            counts.whole.add(now - self.began_at)
            if self._first_at is not None:
                counts.decode.add(self._newest_at - self._first_at)

    def failed(self, error: EdgeShardError) -> None:
        self._counts.failed[error.code.name.lower()] += 1


class RequestMeter:
    """The counts of all deployments. `refused` are requests that never began, by the error's
    code."""

    def __init__(self) -> None:
        self.refused = _zeros(CODES)
        self._counts: dict[DeploymentName, DeploymentCounts] = {}
        self._of_keys: dict[str, KeyCounts] = {}
        self._lost: dict[DeploymentName, tuple[Epoch, float]] = {}

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count an EdgeShardError that leaves the block as a request that never began."""
        try:
            yield
        except EdgeShardError as error:
            self.refused[error.code.name.lower()] += 1
            raise

    def of(self, deployment: DeploymentName) -> DeploymentCounts:
        counts = self._counts.get(deployment)
        if counts is None:
            counts = self._counts[deployment] = DeploymentCounts()
        return counts

    def began(
        self, deployment: DeploymentName, client: str, now: float, *, resumed: bool
    ) -> RequestTimes:
        """`client` is ROLE/ID, or '' in plaintext; only the role is kept, except for API keys."""
        counts, role = self.of(deployment), client.partition("/")[0] or NO_ROLE
        key = self._of_keys.setdefault(client, KeyCounts()) if role == KEY_ROLE else None
        if not resumed:
            counts.begun[role] += 1
            if key is not None:
                key.requests += 1
        return RequestTimes(counts, now, resumed=resumed, key=key)

    def of_key(self, identity: str) -> KeyCounts:
        """What an API key used."""
        return self._of_keys.get(identity, KeyCounts())

    def forget_key(self, identity: str) -> None:
        """Drop the counts of a deleted key; a new key of the same name starts at 0."""
        self._of_keys.pop(identity, None)

    def head_lost(self, deployment: DeploymentName, epoch: Epoch, now: float) -> None:
        self._lost.setdefault(deployment, (epoch, now))

    def head_back(self, deployment: DeploymentName, epoch: Epoch, now: float) -> None:
        """Its first head ever recovers nothing."""
        loss = self._lost.pop(deployment, None)
        if loss is not None:
            counts = self.of(deployment)
            counts.recovered[EPOCH if epoch > loss[0] else STREAM] += 1
            counts.last_pause_s = now - loss[1]
            counts.pauses.add(counts.last_pause_s)

    def kept(
        self, deployments: Collection[DeploymentName]
    ) -> dict[DeploymentName, DeploymentCounts]:
        """The counts of these deployments. The counts of others are dropped from now on: names
        change, and memory must not grow with them."""
        self._counts = {name: self.of(name) for name in deployments}
        self._lost = {name: loss for name, loss in self._lost.items() if name in deployments}
        return self._counts
