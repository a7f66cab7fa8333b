"""One case on a running site: requests, faults, their outcome, and the site whole again."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgeshard.domain.ids import ModelName
from edgeshard.domain.nodes.device import StagePhase
from tests.chaos import matrix
from tests.chaos.failpoints import Action, Failpoint
from tests.chaos.matrix import STAGES, Ask, Case, Dtype, LinkFault, LinkKind, Shape
from tests.chaos.proxy import Link
from tests.chaos.shapes import layers_of, save, slack_of
from tests.chaos.site import BACK_S, DEPLOYMENT, ChaosSite
from tests.support.checker import Reference, check, reference_of
from tests.support.load import Stream
from tests.support.site import COORDINATOR

REQUEST_S = 60.0
"""For a request to end, however many nodes it loses. A quiet machine needs a second or two."""
WATCH_S = 0.01
KV_GONE_S = 20.0
DELAY_S = 0.02
NARROW_BPS = 2e6
SLICE_BYTES = 7


def stream_of(ask: Ask, deployment: str = DEPLOYMENT) -> Stream:
    return Stream(deployment, ask.prompt, ask.options)


async def answered(site: ChaosSite, ask: Ask) -> Stream:
    """An undisturbed request at its end."""
    stream = await stream_of(ask).run(site.client)
    stream.raise_error()
    return stream


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """A request's right answer, and the median seconds between two of its tokens."""

    reference: Reference
    gap_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """`problems` is empty when the case holds. `pause_s` is the longest wait of any request for a
    token, less its wait when nothing goes wrong."""

    case: Case
    problems: tuple[str, ...]
    wrong_tokens: int
    kills: int
    pause_s: float
    wall_s: float
    streams: tuple[Stream, ...] = ()
    fault_at: float = 0.0
    """The time of the first fault, in seconds of the wall clock."""


class Trials:
    """Runs cases one after the other; cases of one shape and dtype share a deployment, whose spec
    has `fields`."""

    def __init__(self, site: ChaosSite, **fields: object) -> None:
        self.site = site
        self._fields = fields
        self._deployed: tuple[Shape | None, Dtype] | None = None
        self._undisturbed: dict[tuple[Shape | None, Dtype, Ask], Undisturbed] = {}
        self._count = 0
        self._disturbed_at: list[float] = []
        """When the faults of this case's links were set, in seconds of the wall clock."""
        self._flips: list[tuple[Link, int]] = []
        """Links that are to flip a bit, and how many they had flipped before."""

    async def prepare(self, case: Case) -> None:
        """Prepare everything for the case. It is deployed, and the spare node is warm if there is a
        standby. A shape's prompt is cached, since the end of an epoch clears it."""
        await self._deploy(case)
        if case.shape is not None:
            (ask,), _ = matrix.asks(case)
            await self._undisturbed_run(replace(ask, new_tokens=1))
        if self._fields.get("standby"):
            await self.site.until(self._warm, BACK_S)

    async def _warm(self) -> bool:
        stages = [stage for node in await self.site.client.nodes() for stage in node.stages]
        return any(stage.phase is StagePhase.STANDBY and stage.parameter_bytes for stage in stages)

    async def run(self, case: Case) -> Outcome:
        """The outcome of a case. The site is whole afterwards.

        Raises TimeoutError when that takes too long, and as the undisturbed requests do.
        """
        await self.prepare(case)
        first, late = matrix.asks(case)
        undisturbed = [await self._known(case, ask) for ask in (*first, *late)]
        self._count += 1
        self._disturbed_at, self._flips = [], []
        points = await self._arm(case)
        began = time.monotonic()
        streams = [stream_of(ask) for ask in (*first, *late)]
        problems = await self._serve(case, streams, len(first), set(points))
        wall_s = time.monotonic() - began
        marked = self.site.marks()
        problems += [
            f"the failpoint {point} did not act" for point in points if point not in marked
        ]
        if len(self._disturbed_at) < len(case.links):
            problems.append("a link's fault was never set")
        if any(link.up.flips_done == before for link, before in self._flips):
            problems.append("no bit was flipped: the byte never came")
        wrong = 0
        for number, (stream, known) in enumerate(zip(streams, undisturbed, strict=True)):
            slack = 0.0 if case.shape is None else slack_of(case.shape)
            verdict = check(stream.events, known.reference, whole=stream.error is None, slack=slack)
            wrong += verdict.wrong_tokens
            problems += [f"request {number}: {problem}" for problem in verdict.problems]
            if stream.error is not None:
                problems.append(
                    f"request {number} failed: {stream.error.reason}: {stream.error.message}"
                )
        await self.site.killed(points)
        await self.site.restore()
        pause_s = max(
            (
                max(stream.waits_s, default=0.0) - known.gap_s
                for stream, known in zip(streams, undisturbed, strict=True)
            ),
            default=0.0,
        )
        kills = sum(points[point] is Action.KILL for point in points if point in marked)
        faults = [mark.at for point, mark in marked.items() if point in points] + self._disturbed_at
        fault_at = min(faults, default=0.0)
        return Outcome(
            case, tuple(problems), wrong, kills, max(0.0, pause_s), wall_s, tuple(streams), fault_at
        )

    async def nothing_left(self) -> list[str]:
        """The faults of the site at rest: KV that a node still holds. A leak would stay for
        ever."""
        try:
            await self.site.kv_gone(KV_GONE_S)
        except TimeoutError:
            return [
                f"{name} holds KV" for name, held in (await self.site.kv_bytes()).items() if held
            ]
        return []

    def forget_site(self, site: ChaosSite) -> None:
        """Go on with a new site, on which nothing is deployed."""
        self.site, self._deployed = site, None

    async def _deploy(self, case: Case) -> None:
        """Three stages and a spare, as cases want them: with two nodes lost, those that are left
        share the layers."""
        wanted = case.shape, case.dtype
        if self._deployed != wanted or len(await self.site.stages()) != STAGES:
            fields = {} if case.shape is None else await self._add(case.shape)
            await self.site.deploy(**case.dtype.fields, **fields, **self._fields)
            self._deployed = wanted

    async def _add(self, shape: Shape) -> dict[str, object]:
        """Add the model of a shape to the site; return the fields of a deployment's spec that run
        it."""
        if ModelName(shape) not in {model.name for model in await self.site.client.stored_models()}:
            directory = self.site.directory / f"model of {shape}"
            save(shape, directory)
            await self.site.client.add_model(directory, shape)
        return {"model": shape, "layers": layers_of(shape), "prefix_cache": True}

    async def _known(self, case: Case, ask: Ask) -> Undisturbed:
        key = case.shape, case.dtype, ask
        if key not in self._undisturbed:
            stream = await self._undisturbed_run(ask)
            self._undisturbed[key] = Undisturbed(
                reference_of(stream.events), statistics.median(stream.waits_s[1:])
            )
        return self._undisturbed[key]

    async def _undisturbed_run(self, ask: Ask) -> Stream:
        async with asyncio.timeout(REQUEST_S):
            return await answered(self.site, ask)

    async def _arm(self, case: Case) -> dict[str, Action]:
        """The failpoints of a case, in the processes that they are of now: their ids and
        actions."""
        placed = await self.site.placed()
        by_process: dict[str, list[Failpoint]] = {}
        for number, fault in enumerate(case.faults):
            process = COORDINATOR if fault.at == matrix.COORDINATOR else placed[fault.at]
            point = Failpoint(
                f"{self._count}.{number} {fault.name}",
                fault.place,
                position=fault.position,
                what=fault.what,
                time=fault.time,
                action=fault.action,
            )
            by_process.setdefault(process, []).append(point)
        for process, points in by_process.items():
            self.site.arm(process, points)
        return {point.id: point.action for points in by_process.values() for point in points}

    async def _serve(
        self, case: Case, streams: Sequence[Stream], first: int, points: set[str]
    ) -> list[str]:
        """Run the requests under the case's faults, to the end of all."""
        client = self.site.client
        running = [asyncio.create_task(stream.run(client)) for stream in streams[:first]]
        ended = asyncio.Event()
        nurses = [asyncio.create_task(self._bring_back(None, [COORDINATOR], ended))]
        nurses.append(asyncio.create_task(self._bring_back(points, self.site.nodes, ended)))
        helpers = [asyncio.create_task(self._disturb(fault, streams[0])) for fault in case.links]
        try:
            async with asyncio.timeout(REQUEST_S):
                if first < len(streams):
                    await asyncio.gather(*(stream.has(2) for stream in streams[:first]))
                    running += [
                        asyncio.create_task(stream.run(client)) for stream in streams[first:]
                    ]
                await asyncio.gather(*running)
        except TimeoutError:
            waiting = [str(number) for number, stream in enumerate(streams) if not stream.over]
            return [f"after {REQUEST_S:g} s these requests had not ended: {', '.join(waiting)}"]
        finally:
            for task in (*running, *helpers):
                task.cancel()
            ended.set()  # and not cancelled: a daemon that it is starting must be known
            ends = await asyncio.gather(*nurses, *helpers, return_exceptions=True)
            broken = [end for end in ends if isinstance(end, Exception)]
        return [f"the harness itself failed: {error!r}" for error in broken]

    async def _bring_back(
        self, points: set[str] | None, names: Sequence[str], ended: asyncio.Event
    ) -> None:
        """A coordinator returns at once. If one spare is too few, nodes return when all that were
        to be lost are lost.
        """
        while not ended.is_set():
            if points is None or (len(points) > 1 and points <= self.site.marks().keys()):
                await self.site.start_dead(names)
            await asyncio.sleep(WATCH_S)

    async def _disturb(self, fault: LinkFault, stream: Stream) -> None:
        """Set the fault once the client has its tokens."""
        stages = await self.site.stages()
        link = self.site.proxies[stages[fault.to]].link(stages[fault.to - 1])
        await stream.has(fault.after_tokens)
        if not link.connections:
            raise RuntimeError(f"nothing goes over {fault.name}")
        self._disturbed_at.append(time.time())
        if fault.kind is LinkKind.DEAF:
            for name in self.site.daemons:
                disturb(self.site.proxies[stages[fault.to]].link(name), LinkKind.STALL)
        else:
            if fault.kind is LinkKind.FLIP:
                self._flips.append((link, link.up.flips_done))
            disturb(link, fault.kind, fault.detail)


def disturb(link: Link, kind: LinkKind, detail: int = 0) -> None:
    """Do this to a link; `detail` is of a flip: its byte."""
    match kind:
        case LinkKind.STALL:
            link.stall()
        case LinkKind.STALL_UP:
            link.up.stall()
        case LinkKind.STALL_DOWN:
            link.down.stall()
        case LinkKind.RESET:
            link.reset()
        case LinkKind.HALF_CLOSE:
            link.half_close()
        case LinkKind.SLICES:
            link.up.slice_bytes = link.down.slice_bytes = SLICE_BYTES
        case LinkKind.DELAY:
            link.up.delay_s = link.down.delay_s = DELAY_S
        case LinkKind.NARROW:
            link.up.bandwidth_bps = NARROW_BPS
        case LinkKind.FLIP:
            link.up.flip(detail, bit=detail % 8)
