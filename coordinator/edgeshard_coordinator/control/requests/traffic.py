"""Lengths and draft tokens of requests that deployments served. They outlive a deployment: the next
one of its name is planned for them."""

from __future__ import annotations

from collections.abc import Mapping

from edgeshard.domain.deployments.guesses import MOST_GUESSES, NO_GUESSES, GuessCounts
from edgeshard.domain.deployments.traffic import NO_TRAFFIC, Traffic
from edgeshard.domain.ids import DeploymentName, ModelName

TrafficKey = tuple[DeploymentName, ModelName]
"""Another model under the same name starts at 0."""


class TrafficBook:
    """The traffic of all deployments, counted in memory. Its owner writes the `changed` traffic to
    the disk, and reports that here."""

    def __init__(self) -> None:
        self._known: dict[TrafficKey, Traffic] = {}
        self._changed: set[TrafficKey] = set()

    def restore(self, traffic: Mapping[TrafficKey, Traffic]) -> None:
        self._known = dict(traffic)

    def changed(self) -> dict[TrafficKey, Traffic]:
        """The traffic that is not on disk."""
        return {key: self._known[key] for key in self._changed}

    def saved(self, written: Mapping[TrafficKey, Traffic]) -> None:
        """Note that this traffic is on disk; requests that were counted since are not."""
        self._changed -= {key for key, traffic in written.items() if self._known[key] is traffic}

    def count(
        self,
        name: DeploymentName,
        model: ModelName,
        prompt_tokens: int,
        new_tokens: int,
        at_once: int,
        guesses: GuessCounts = NO_GUESSES,
    ) -> None:
        """Count a request that was served. One without a token does not count, and draft tokens do
        not if a head reports more of them than the request has."""
        if prompt_tokens > 0 and new_tokens > 0:
            key = name, model
            # Accepted draft tokens after the answer's end are dropped.
            believed = guesses if guesses.tokens <= new_tokens + MOST_GUESSES else NO_GUESSES
            self._known[key] = self._known.get(key, NO_TRAFFIC).after(
                prompt_tokens, new_tokens, at_once, believed
            )
            self._changed.add(key)

    def of(self, name: DeploymentName, model: ModelName) -> Traffic:
        return self._known.get((name, model), NO_TRAFFIC)

    def of_model(self, model: ModelName) -> Traffic:
        """The traffic of all deployments of a model, those that are gone included."""
        return Traffic.of_all(
            traffic for (_, served), traffic in self._known.items() if served == model
        )

    def guesses_of_model(self, model: ModelName) -> GuessCounts:
        return GuessCounts.of_all(
            traffic.guesses for (_, served), traffic in self._known.items() if served == model
        )
