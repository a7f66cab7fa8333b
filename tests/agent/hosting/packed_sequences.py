"""Random sequences of events on a node that packs, each decided by its seed: stages, standbys,
damage, eviction.

After each step, every stage computes the same as a stage loaded from the checkpoint. The cache is
within its limit, and its count equals the bytes on the disk. In the end nothing is held, open or
left over.

    python -m tests.agent.hosting.packed_sequences --sequences 2000 [--first SEED] [--trace]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest import mock

import structlog
from edgeshard_agent.engine.compute_thread import BackgroundThread, ComputeThread
from edgeshard_agent.store.blob_cache import BlobCache

from edgeshard.domain.control.commands import Command, CommandResult
from edgeshard.domain.errors import DataLossError, EdgeShardError
from edgeshard.domain.models.dtypes import DType, KvFormat, Quantisation
from edgeshard.domain.models.model import LayerRange
from tests.agent.hosting.packed_node import LAYERS, MODELS, Form, Node, model, reference

STEPS = 7
NAMES = ("a", "b")
_READING = ("weights-", "experts", "fill")
"""Threads that read for a stage."""
_SCHEMES = [
    (DType.FLOAT32, None),
    (DType.BFLOAT16, None),
    (DType.BFLOAT16, Quantisation.INT8),
    (DType.BFLOAT16, Quantisation.INT4),
    (DType.BFLOAT16, Quantisation.INT4_HEAD_INT4),
    (DType.FLOAT32, Quantisation.INT8_HEAD_WHOLE),
]
_CUTS = [LayerRange(0, LAYERS)] * 3 + [
    LayerRange(0, 1),
    LayerRange(0, 2),
    LayerRange(1, 2),
    LayerRange(1, LAYERS),
]


class Violation(AssertionError):
    """Something that must always hold did not."""


class Sequence:
    """One node, and the events that a seed draws for it."""

    def __init__(self, seed: int, node: Node) -> None:
        self._node = node
        self._random = random.Random(seed)
        self.met: Counter[str] = Counter()
        names = self._random.sample(list(MODELS), 2)
        # Few forms, so that one deployment finds the packed files of another.
        schemes = self._random.sample(_SCHEMES, 2)
        self._forms = [(name, *scheme) for name in names for scheme in schemes]
        self._spoilt = False
        self._threads = set(threading.enumerate())

    @staticmethod
    def limit(seed: int) -> int:
        """From a cache that hardly holds the blobs of a model to one that holds everything."""
        whole = max(model(name).blob_bytes for name in MODELS)
        return int(whole * random.Random(-seed - 1).choice([1.1, 1.6, 2.5, 4.0, 50.0]))

    async def run(self) -> None:
        steps: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self._deploy, 8),
            (self._deploy_beside, 6),
            (self._deploy_and_delete, 2),
            (self._standby, 2),
            (self._no_standby, 1),
            (self._delete, 4),
            (self._damage, 2),
            (self._drop, 2),
            (self._evict, 1),
        ]
        for _ in range(STEPS):
            (step,) = self._random.choices(
                [step for step, _ in steps], [weight for _, weight in steps]
            )
            self._say(step.__name__)
            await step()
            await self._check()
        for name in NAMES:
            await self._node.delete(name)
        await self._end()

    def _say(self, what: str, **details: object) -> None:
        self.met[what.strip("_")] += 1
        structlog.get_logger().debug(what, **details)

    # -- steps -------------------------------------------------------------------------------------

    async def _deploy(self) -> None:
        name, form = self._drawn_name(), self._drawn_form()
        self._say("form", name=name, form=form)
        before, free = self._expected(form), self._free(name)
        self._node.store.fetched.clear()
        result = await self._node.deploy(name, form)
        self._judge(result, form, free)
        if (
            result.failure is None
            and self._node.cache.limit_bytes > 20 * model(form.model).blob_bytes
        ):
            _demand(set(self._node.store.fetched) <= before, f"{form} fetched more than it lacked")

    async def _deploy_beside(self) -> None:
        """A load during a standby's load, a drop, damage, or an eviction."""
        name = self._drawn_name()
        form = self._drawn_form()
        free = 0
        free = self._free(name)
        beside = self._random.choice(
            ["standby", "its standby", "drop", "damage", "evict", "deploy"]
        )
        self._say(beside, name=name, form=form)
        other, other_form = next(one for one in NAMES if one != name), self._drawn_form()
        commands: dict[str, tuple[str, Command, Form]] = {
            "": (name, self._node.prepare(name, form), form)
        }
        if beside == "its standby":
            other_form = Form(form.model, self._random.choice(_CUTS), form.dtype, form.quantisation)
            commands[beside] = (name, self._node.standby(name, other_form), other_form)
        elif beside == "standby":
            commands[beside] = (other, self._node.standby(other, other_form), other_form)
        elif beside == "deploy":
            commands[beside] = (other, self._node.prepare(other, other_form), other_form)
        order = list(commands.items())
        self._random.shuffle(order)
        waiting = {}
        for key, (_, command, _) in order:
            waiting[key] = self._node.post(command)
            await self._pass_time()
        if beside == "drop":
            await asyncio.to_thread(self._node.cache.packed.drop_units, [])
        elif beside == "damage":
            await asyncio.to_thread(self._spoil_one)
        elif beside == "evict":
            await self._node.cache.make_room_for_packed(
                self._random.randrange(self._node.cache.limit_bytes)
            )
        if beside == "its standby":  # one that the load called off is answered with the next one
            await self._node.answer(waiting[""])
            await self._node.ask(self._node.standby(name, other_form, nothing=True))
        room = free - sum(
            _most_bytes(command_form, packs=True) for _, _, command_form in commands.values()
        )
        for key, (command_name, _, command_form) in commands.items():
            result = await self._node.answer(waiting[key])
            self._judge(result, command_form, room + _most_bytes(command_form, packs=True))
            if key in ("", "deploy"):
                self._node.held.pop(command_name, None)
                if result.failure is None:
                    self._node.held[command_name] = command_form

    async def _deploy_and_delete(self) -> None:
        name, form = self._drawn_name(), self._drawn_form()
        self._say("form", name=name, form=form)
        self._node.post(self._node.prepare(name, form))
        await self._pass_time()
        await self._node.delete(name)

    async def _standby(self) -> None:
        name, form = self._drawn_name(), self._drawn_form(streams=False)
        free = self._free(name)
        self._judge(await self._node.ask(self._node.standby(name, form)), form, free)

    async def _no_standby(self) -> None:
        name = self._drawn_name()
        failure = (
            await self._node.ask(self._node.standby(name, self._drawn_form(), nothing=True))
        ).failure
        _demand(failure is None, f"no standby: {failure}")

    async def _delete(self) -> None:
        await self._node.delete(self._drawn_name())

    async def _damage(self) -> None:
        self._spoil_one()

    async def _drop(self) -> None:
        units = self._node.cache.packed.units()
        some = self._random.sample(units, self._random.randint(0, len(units)))
        before = {unit.id for unit in units if unit.in_use}
        dropped = self._node.cache.packed.drop_units([unit.id for unit in some])
        _demand(
            {unit.id for unit in dropped if unit.in_use} <= before, "a unit that nobody uses stayed"
        )
        _demand(not {unit.id for unit in dropped if not unit.in_use} & before, "a unit in use went")

    async def _evict(self) -> None:
        await self._node.cache.make_room_for_packed(
            self._random.randrange(self._node.cache.limit_bytes)
        )

    # -- what they draw ----------------------------------------------------------------------------

    def _drawn_name(self) -> str:
        return self._random.choice(NAMES)

    def _drawn_form(self, *, streams: bool | None = None) -> Form:
        name, dtype, quantisation = self._random.choice(self._forms)
        kv = self._random.choice([None, None, KvFormat.INT4])
        layers = self._random.choice(_CUTS)
        may_stream = streams is not False and (layers == LayerRange(0, LAYERS) or name == "mixture")
        return Form(
            name, layers, dtype, quantisation, kv, may_stream and self._random.random() < 0.35
        )

    async def _pass_time(self) -> None:
        for _ in range(self._random.choice([0, 1, 3, 10, 30])):
            await asyncio.sleep(0)
        await asyncio.sleep(self._random.choice([0, 0.001, 0.01, 0.03]))

    def _spoil_one(self) -> None:
        paths = self._node.packed_paths()
        if not paths:
            return
        path = self._random.choice(paths)
        how = self._random.choice(["flip", "cut", "header", "gone"])
        try:
            if how == "gone":
                path.unlink()
            else:
                with path.open(
                    "r+b"
                ) as file:  # in its place: a file that is evicted meanwhile does not come back
                    size = file.seek(0, 2)
                    at = {
                        "flip": self._random.randrange(4096, size),
                        "header": 40,
                        "cut": size - 1,
                    }[how]
                    file.seek(at)
                    byte = file.read(1)[0] ^ 1
                    file.seek(at)
                    file.write(bytes([byte]))
                    file.truncate(size - 4096 if how == "cut" else size)
        except FileNotFoundError:
            return
        self._spoilt = True

    # -- what must hold ----------------------------------------------------------------------------

    def _free(self, name: str) -> int:
        """Bytes of the cache that are not pinned."""
        return self._node.cache.limit_bytes - self._node.pinned_bytes

    def _expected(self, form: Form) -> frozenset[str]:
        """Digests of the blobs that a load of this form has to fetch at most."""
        packed, sizes = self._node.packed_units(form), self._node.cache._sizes
        if self._spoilt:
            packed = set()
        lacking = form.digests([unit for unit in form.units if unit not in packed])
        return frozenset(digest for digest in lacking if digest not in sizes)

    def _judge(self, result: CommandResult, form: Form, free: int) -> None:
        failure = result.failure
        if failure is None:
            self.met["well"] += 1
        elif failure.reason == "CACHE_LIMIT":
            self.met["cache limit"] += 1
            _demand(
                _most_bytes(form) > free,
                f"{form} fits into {free} bytes that nobody held: {failure}",
            )
        else:
            _demand(failure.reason == "SUPERSEDED", f"{form}: {failure!r}")

    async def _check(self) -> None:
        node = self._node
        for name, form in list(node.held.items()):
            try:
                same = await node.computes(name)
            except EdgeShardError as error:
                _demand(
                    self._spoilt and form.streams and isinstance(error, DataLossError),
                    f"{name} of {form} does not compute: {error!r}",
                )
                self.met["a stream ended"] += 1
                free = self._free(name)
                result = await node.deploy(name, form)
                self._judge(result, form, free)
                if result.failure is not None:
                    continue
                same = await node.computes(name)
            _demand(same, f"{name} of {form} computes something else")
        counted = node.cache.used_bytes + node.cache.packed.used_bytes
        limit = node.cache.limit_bytes
        _demand(counted <= limit, f"{counted} bytes are counted, {limit} allowed")
        _demand(
            node.disk_bytes() <= limit,
            f"{node.disk_bytes()} bytes are on the disk, {limit} allowed",
        )

    async def _end(self) -> None:
        node = self._node
        await node.settled()
        for _ in range(1000):  # threads and descriptors of reads go a little later
            left = node.leftovers()
            begun = set(threading.enumerate()) - self._threads
            threads = [thread.name for thread in begun if thread.name.startswith(_READING)]
            if not left and not threads:
                break
            await asyncio.sleep(0.005)
        _demand(not left, f"left behind: {left}")
        _demand(not threads, f"threads that go on: {threads}")
        node.cache.packed.files()
        again = BlobCache(node.cache.directory, node.cache.limit_bytes)
        await again.start()
        for what, one, other in (
            ("blobs", node.cache.used_bytes, again.used_bytes),
            ("packed files", node.cache.packed.used_bytes, again.packed.used_bytes),
        ):
            _demand(one == other, f"{one} bytes of {what} were counted, {other} are there")


def _most_bytes(form: Form, *, packs: bool = False) -> int:
    """The most that a load may need of the cache: its blobs and, if it streams or `packs`, its
    packed files."""
    files = 0
    if form.streams or packs:
        files = reference(
            Form(form.model, form.layers, form.dtype, form.quantisation)
        ).parameter_bytes
        files += files // 16 + 4 * 4096 * len(form.units)
    return form.blob_bytes() + files


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


async def _run(
    seed: int, directory: Path, worker: ComputeThread, aside: BackgroundThread
) -> Counter[str]:
    node = Node(directory, Sequence.limit(seed), worker, aside)
    await node.start()
    sequence = Sequence(seed, node)
    try:
        await sequence.run()
    finally:
        await node.close()
    return sequence.met


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run_sequences(
    first: int, count: int, say: Callable[[str], None] = lambda text: None
) -> tuple[list[str], Counter[str]]:
    """Run the sequences of `count` seeds. Returns the violations, with their seeds, and the counts
    of events."""
    failed = list[str]()
    met = Counter[str]()
    worker = ComputeThread(1)
    aside, files = BackgroundThread(worker), 0
    # A node collects garbage when it lets a stage go: only its own here, not all that was imported.
    gc.collect()
    gc.freeze()
    with mock.patch("os.fsync", lambda file: None):
        for seed in range(first, first + count):
            with tempfile.TemporaryDirectory() as directory:
                try:
                    met += asyncio.run(_run(seed, Path(directory), worker, aside))
                except Exception as error:
                    failed.append(f"seed {seed}: {type(error).__name__}: {error}")
                    say(failed[-1])
            if seed == first:
                files = _open_files()
    if count > 1 and not failed and _open_files() > files + 8:
        failed.append(f"{_open_files()} files are open, {files} were after the first sequence")
    worker.close()
    gc.unfreeze()
    return failed, met


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=50, help="how many (50)")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first one (0)")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    options = parser.parse_args()
    if not options.trace:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    began = time.perf_counter()
    failed, met = run_sequences(options.first, options.sequences, _say)
    took = time.perf_counter() - began
    _say(
        f"{options.sequences} sequences in {took:.1f} s, {len(failed)} failed; "
        f"{dict(met.most_common())}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
