"""What the holder of an API key sees: its own models and what the key used. Nothing here names a
node, another deployment or another key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from edgeshard import __version__
from edgeshard.domain.identity import ApiKey, key_identity
from edgeshard.gateway.access.auth import opens
from edgeshard_coordinator.control.coordinator import Coordinator
from edgeshard_coordinator.control.requests.request_meter import KeyCounts
from edgeshard_coordinator.core.values.quotas import Quota
from edgeshard_coordinator.core.values.state import DeploymentRecord
from edgeshard_coordinator.dashboard.door import Session
from edgeshard_coordinator.dashboard.feed import Feed
from edgeshard_coordinator.dashboard.picture import known


class Applications:
    """One feed for each key with viewers."""

    def __init__(self, site: Coordinator) -> None:
        self._loop, self._front = site.loop, site.front
        self._feeds: dict[str, Feed] = {}

    def feed(self, session: Session) -> Feed:
        """The view of sessions with this key. Feeds without viewers are dropped."""
        self._feeds = {
            who: feed for who, feed in self._feeds.items() if feed.viewers or who == session.who
        }
        return self._feeds.setdefault(session.who, Feed(lambda: self._picture(session)))

    def usage_of(self, key: ApiKey) -> dict[str, Any]:
        """What a key used since the coordinator began, and its limits."""
        front = self._front
        identity = key_identity(key.name, key.key_id)
        counts = front.meter.of_key(identity)
        return usage_picture(counts, front.running_of(identity), front.quotas.of(identity))

    def _picture(self, session: Session) -> dict[str, Any]:
        front = self._front
        return application_picture(
            session.models,
            self._loop.state.deployments.values(),
            front.meter.of_key(session.who),
            front.running_of(session.who),
            front.quotas.of(session.who),
        )


def application_picture(
    models: frozenset[str] | None,
    deployments: Iterable[DeploymentRecord],
    used: KeyCounts,
    running: int,
    limits: Quota,
) -> dict[str, Any]:
    """`models` are those that the key may use, by the name of a deployment or a model; None for
    all. Tokens and requests are counted since the coordinator began."""
    own = [one for one in deployments if opens(models, one.served_name, one.model)]
    return {
        "site": {"version": __version__},
        "deployments": {
            str(one.name): {"model": str(one.model), "phase": one.phase.value} for one in own
        },
        "usage": usage_picture(used, running, limits),
    }


def usage_picture(used: KeyCounts, running: int, limits: Quota) -> dict[str, Any]:
    return known(
        requests=used.requests,
        running=running,
        prompt_tokens=used.prompt_tokens,
        new_tokens=used.new_tokens,
        tokens_per_minute=limits.tokens_per_minute,
        requests_at_once=limits.requests,
    )
