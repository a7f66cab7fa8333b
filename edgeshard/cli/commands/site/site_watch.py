"""The reaction of `edgectl serve` to nodes that come and go: it reports them, prints the next join
command, and plans again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from edgeshard.cli.commands.deployments.replan import sentence_of_gain
from edgeshard.cli.render.views import layers_text
from edgeshard.domain.control.site import ReplanReason
from edgeshard.domain.deployments.deployment import EVERY_NODE
from edgeshard.domain.errors import DeadlineError, EdgeShardError, UnavailableError
from edgeshard.domain.identity import Role

if TYPE_CHECKING:
    from edgeshard.client import Client
    from edgeshard.domain.deployments.deployment import DeploymentSpec
    from edgeshard.domain.nodes.device import Node

Say = Callable[[str], None]

_FIRST_BACKOFF_S = 0.2
_LONGEST_BACKOFF_S = 10.0
_REST_S = 60.0
_TOKEN_TTL_S = 24 * 3600.0


async def measure(client: Client, spec: DeploymentSpec, say: Say) -> None:
    """Have the nodes measure the deployment's layers and their links, if these are unknown.

    Raises the error of the first node that could not.
    """
    say("measuring the nodes and their links")
    quantisation = spec.quantisation_of(EVERY_NODE)
    failures = []
    async for progress in client.profile(
        spec.model, dtype=spec.dtype, quick=True, quantisation=quantisation
    ):
        failures += [progress.failure] if progress.failure is not None else []
    for failure in failures:
        raise failure


class SiteWatch:
    """Reads the site whenever its coordinator reports a change, and acts on its state.

    The events only trigger a read of the site. The read after a reconnect thus sees everything that
    was missed. `next_name` is a free name for one more node.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        next_name: Callable[[set[str]], str],
        say: Say,
        *,
        grow: bool,
    ) -> None:
        self._client = client
        self._next_name = next_name
        self._say = say
        self._growth = _Growth(client, name, say, grow=grow)
        self._news = asyncio.Event()
        self._known: set[str] | None = None
        self._here: set[str] = set()
        self._offered = ""

    async def run(self) -> None:
        """Until it is cancelled. Raises the error of a call that no later one would mend."""
        following = asyncio.create_task(self._follow())
        try:
            while True:
                self._news.clear()
                again_s = None
                try:
                    await self._look()
                    again_s = self._growth.rest_s()
                except (UnavailableError, DeadlineError):
                    again_s = _LONGEST_BACKOFF_S
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), again_s)
        finally:
            following.cancel()

    async def _follow(self) -> None:
        """Wake `run` at each event of the site, and begin again whenever the stream ends."""
        pause_s = _FIRST_BACKOFF_S
        while True:
            began_s = time.monotonic()
            # Its end needs no message: the coordinator starts again, or its parent reports its end.
            with suppress(EdgeShardError):
                # The newest event arrives at once: a read after it misses nothing.
                async with aclosing(self._client.events(limit=1, follow=True)) as events:
                    async for _ in events:
                        self._news.set()
            lasted = time.monotonic() - began_s > _LONGEST_BACKOFF_S
            pause_s = _FIRST_BACKOFF_S if lasted else min(2 * pause_s, _LONGEST_BACKOFF_S)
            await asyncio.sleep(pause_s)

    async def _look(self) -> None:
        nodes = await self._client.nodes()
        here = {str(node.name) for node in nodes if node.connected}
        if self._known is None:
            self._known, self._here = {str(node.name) for node in nodes}, here
        for name in sorted(here - self._here):
            came = "is back" if name in self._known else "has joined"
            self._say(f"node {name} {came}")
        for name in sorted(self._here - here):
            self._say(f"node {name} is away")
        self._here = here
        self._known |= here
        if not self._offered or self._offered in self._known:
            await self._offer(self._known)
        await self._growth.consider(nodes)

    async def _offer(self, used_names: set[str]) -> None:
        """The line that joins one more node."""
        from edgeshard.client.joining import invitation_to_text, line_without_edgeshard

        name = self._next_name(used_names)
        token = await self._client.create_token(Role.AGENT, name, _TOKEN_TTL_S)
        self._offered = name
        text = invitation_to_text(token.invitation)
        bare = line_without_edgeshard(token)
        more = f"\n  or, on a machine without EdgeShard:\n  {bare}" if bare else ""
        self._say(
            f"another node joins with this line, once, within a day:\n  edgectl join {text}{more}"
        )


class _Growth:
    """Reports the gain from the site's present nodes, or moves the model to them."""

    def __init__(self, client: Client, name: str, say: Say, *, grow: bool) -> None:
        self._client = client
        self._name = name
        self._say = say
        self._grow = grow
        self._said = ""
        self._rests_until_s = 0.0

    def rest_s(self) -> float | None:
        """How long it makes no requests; None if it waits for no time."""
        left_s = self._rests_until_s - time.monotonic()
        return left_s if left_s > 0 else None

    async def consider(self, nodes: Sequence[Node]) -> None:
        """Nothing while something of a node that is here is still to be measured; it is news when
        that is done."""
        here = [node for node in nodes if node.connected]
        if (
            self.rest_s() is not None
            or len(here) < 2
            or any(_is_to_be_measured(node) for node in here)
        ):
            return
        name = self._name
        try:
            outcome = await self._client.replan(name, dry_run=True)
            if outcome.reason is ReplanReason.NOT_WEIGHED:
                self._say_once(
                    f"the gain of moving {name} is unknown, because a serving node is not "
                    "measured; `edgectl "
                    f"replan {name} --force` moves it to {layers_text(outcome.found)}"
                )
            if outcome.reason is not ReplanReason.WOULD_MOVE:
                return
            gain = f"{layers_text(outcome.found)}: {sentence_of_gain(outcome)}"
            if self._grow:
                self._say(f"moving {name} to {gain}")
                await self._client.replan(name)
                self._say(f"{name} has moved; running requests continued")
            else:
                self._say_once(
                    f"{name} would gain by {gain}; `edgectl replan {name}` moves it, --grow does "
                    "so itself"
                )
        except UnavailableError:
            pass  # it is loading, or the coordinator is away: it is news when that is over
        except EdgeShardError as error:
            # The move was reverted, or the request failed. It is not repeated soon, since a move
            # pauses running requests.
            self._rests_until_s = time.monotonic() + _REST_S
            self._say_once(f"{name} stays where it is: {error.message}")

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._say(text)


def _is_to_be_measured(node: Node) -> bool:
    """Whether its measurement is worth waiting for. A node that serves is measured when no request
    runs, which may never happen; it is planned with the known figures."""
    return (
        not node.placeable
        or node.unknown_links > 0
        or (node.unknown_profiles > 0 and not node.stages)
    )
