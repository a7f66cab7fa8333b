"""Each unit of a load comes from its packed file or from blobs: chosen once, fetched and read
accordingly, and held."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from edgeshard_agent.engine.compute_thread import BackgroundThread, ComputeThread
from edgeshard_agent.hosting import loading
from edgeshard_agent.model.weights import weight_loading
from edgeshard_agent.ops import native
from edgeshard_agent.ops.native import native_available
from edgeshard_agent.store.packed_files import PackedFile
from edgeshard_agent.store.packed_units import PackedUnits

from edgeshard.architectures.units import EMBEDDING_UNIT, HEAD_UNIT
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from tests.agent.hosting.packed_node import LAYERS, Form, Node
from tests.support.forms import one_in

pytestmark = pytest.mark.skipif(
    not native_available(), reason="packed files are for native kernels"
)
WHOLE = LayerRange(0, LAYERS)
FIRST = LayerRange(0, 1)
LAST = LayerRange(1, LAYERS)
UNTIED = Form("untied", WHOLE)
AMPLE = 1 << 30


@pytest.fixture
async def make_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., Awaitable[Node]]]:
    worker = ComputeThread(1)
    aside, made = BackgroundThread(worker), list[Node]()
    monkeypatch.setattr("os.fsync", lambda file: None)

    async def make(limit: int = AMPLE) -> Node:
        made.append(Node(tmp_path / "cache", limit, worker, aside))
        await made[-1].start()
        return made[-1]

    yield make
    for node in made:
        await node.close()
    worker.close()


async def serves(node: Node, form: Form, name: str = "a") -> set[str]:
    """Deploy it and compare its results; return the digests of the fetched blobs."""
    node.store.fetched.clear()
    failure = (await node.deploy(name, form)).failure
    assert failure is None, failure
    assert await node.computes(name)
    return set(node.store.fetched)


async def kept_of(node: Node, form: Form, *units: str) -> None:
    """Have the packed files of these units of a form on the node, and nothing else."""
    await serves(node, form)
    await node.delete("a")
    for path in node.packed_paths():
        if path.stem not in {form.unit_form.name(unit) for unit in units}:
            path.unlink()
    await _forget_blobs(node)


async def _forget_blobs(node: Node) -> None:
    for digest in list(node.cache._sizes):
        await node.cache.discard(digest)


SCHEMES = [
    (DType.FLOAT32, None),
    (DType.BFLOAT16, None),
    (DType.BFLOAT16, Quantisation.INT8),
    (DType.BFLOAT16, Quantisation.INT4_HEAD_INT4),
    (DType.FLOAT32, Quantisation.INT4_HEAD_WHOLE),
]


UNITS = (EMBEDDING_UNIT, HEAD_UNIT, "layer-1")
FORMS = [Form(name, WHOLE, *scheme) for name in ("untied", "tied") for scheme in SCHEMES]


@pytest.mark.parametrize(
    ("form", "kept"),
    # If head and embedding are one matrix, there is no embedding.
    one_in(
        8,
        [
            (form, unit)
            for form in FORMS
            for unit in (EMBEDDING_UNIT, HEAD_UNIT, "layer-1")
            if unit in form.units
        ],
    ),
)
async def test_what_is_packed_is_read_and_the_rest_is_fetched(
    make_node: Callable[..., Awaitable[Node]], form: Form, kept: str
) -> None:
    node = await make_node()
    await kept_of(node, form, kept)
    lacking = [unit for unit in form.units if unit != kept]
    assert await serves(node, form) == form.digests(lacking)
    assert node.packed_units(form) == set(form.units)
    await node.delete("a")
    await _forget_blobs(node)
    assert await serves(node, form) == set(), "all of it is packed now"


async def test_an_untied_model_in_two_parts_one_after_the_other_and_then_whole(
    make_node: Callable[..., Awaitable[Node]],
) -> None:
    node = await make_node()
    first, last = Form("untied", FIRST), Form("untied", LAST)
    assert await serves(node, first) == first.digests()
    await node.delete("a")
    await _forget_blobs(node)
    assert await serves(node, UNTIED) == last.digests(), "nothing of what is packed is fetched"
    await node.delete("a")
    assert not node.leftovers()


async def test_another_quantisation_shares_the_embedding_and_fetches_the_rest(
    make_node: Callable[..., Awaitable[Node]],
) -> None:
    node = await make_node()
    int8, int4 = (
        Form("untied", WHOLE, DType.BFLOAT16, kind)
        for kind in (Quantisation.INT8, Quantisation.INT4)
    )
    await serves(node, int8)
    await node.delete("a")
    await _forget_blobs(node)
    blocks = [unit for unit in int4.units if unit.startswith("layer")]
    assert await serves(node, int4) == int4.digests(blocks), "embedding and head of int8 are there"


async def test_packed_files_make_way_for_blobs_before_a_cache_is_too_small(
    make_node: Callable[..., Awaitable[Node]],
) -> None:
    """In float32 a file takes twice the room of its blobs, which are in bfloat16."""
    node = await make_node()
    await kept_of(node, UNTIED, HEAD_UNIT, "layer-1", "layer-2")
    node.cache.limit_bytes = UNTIED.blob_bytes()
    assert await serves(node, UNTIED) == UNTIED.digests()
    assert node.cache.used_bytes + node.cache.packed.used_bytes <= node.cache.limit_bytes
    await node.delete("a")
    node.cache.limit_bytes -= 1
    failure = (await node.deploy("a", UNTIED)).failure
    assert failure is not None and failure.reason == "CACHE_LIMIT"
    assert not node.leftovers()


async def test_files_that_are_smaller_than_their_blobs_stay_where_a_cache_is_too_small(
    make_node: Callable[..., Awaitable[Node]],
) -> None:
    form = Form("untied", WHOLE, DType.BFLOAT16, Quantisation.INT4)
    node = await make_node()
    await kept_of(node, form, "layer-1", "layer-2")
    node.cache.limit_bytes = form.blob_bytes([EMBEDDING_UNIT, HEAD_UNIT, "layer-0"])
    failure = (await node.deploy("a", form)).failure
    assert failure is not None and failure.reason == "CACHE_LIMIT"
    assert node.packed_units(form) == {"layer-1", "layer-2"}


def during(
    monkeypatch: pytest.MonkeyPatch, what: Callable[[], object], unit: str = "layer-1"
) -> None:
    """Have `what` happen in the first load from now on, when it comes to this unit."""
    real, done = weight_loading._WeightLoading._fill_unit, list[bool]()

    def fill(self: Any, which: Any) -> None:
        if which.name == unit and not done:
            done.append(True)
            what()
        real(self, which)

    monkeypatch.setattr(weight_loading._WeightLoading, "_fill_unit", fill)


async def test_what_an_operator_drops_while_a_stage_loads_stays_as_it_is_in_use(
    make_node: Callable[..., Awaitable[Node]], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await make_node()
    await kept_of(node, UNTIED, HEAD_UNIT, "layer-1")
    dropped: list[Any] = []

    def drop() -> None:
        assert {unit.unit for unit in node.cache.packed.units()} == {
            EMBEDDING_UNIT,
            "layer-0",
            "layer-1",
            HEAD_UNIT,
        }
        dropped.extend(node.cache.packed.drop_units([]))
        dropped.extend(
            node.cache.packed.drop_units([unit.id for unit in node.cache.packed.units()])
        )

    during(monkeypatch, drop)
    assert await serves(node, UNTIED) == UNTIED.digests([EMBEDDING_UNIT, "layer-0", "layer-2"])
    assert len(dropped) == 4 and all(unit.in_use for unit in dropped), (
        "chosen ones, and those just written"
    )
    assert node.packed_units(UNTIED) == set(UNTIED.units)


async def test_an_eviction_that_began_before_a_unit_was_chosen_leaves_it(
    make_node: Callable[..., Awaitable[Node]], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await make_node()
    await kept_of(node, UNTIED, *UNTIED.units)
    looked = threading.Event()
    go_on = threading.Event()
    real = PackedUnits.files

    def files(self: PackedUnits) -> Any:
        found = real(self)
        looked.set()
        assert go_on.wait(30)
        return found

    with monkeypatch.context() as slow:
        slow.setattr(PackedUnits, "files", files)
        evicting = asyncio.create_task(asyncio.to_thread(node.cache.packed.make_room, 0))
        await asyncio.to_thread(looked.wait, 30)
    node.store.fetched.clear()
    await node.ask(node.prepare("a", UNTIED))
    go_on.set()
    await evicting
    assert node.packed_units(UNTIED) == set(UNTIED.units) and not node.store.fetched


@pytest.mark.one_in(2)
@pytest.mark.parametrize("standby", [False, True])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
async def test_the_source_of_a_unit_is_chosen_again_when_its_file_is_damaged_in_the_load(
    make_node: Callable[..., Awaitable[Node]],
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
    standby: bool,
) -> None:
    node = await make_node()
    await kept_of(node, UNTIED, *UNTIED.units)
    (path,) = [path for path in node.packed_paths() if "-layer-2-" in path.name]

    def spoil() -> None:
        data = bytearray(path.read_bytes())
        data[-4000] ^= 1
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(data if damage == "flip" else data[:-4096])

    during(monkeypatch, spoil)
    if standby:
        node.store.fetched.clear()
        assert (await node.ask(node.standby("a", UNTIED))).failure is None
        assert set(node.store.fetched) == UNTIED.digests(["layer-2"])
        assert await serves(node, UNTIED) == set(), "taken from the standby"
    else:
        assert await serves(node, UNTIED) == UNTIED.digests(["layer-2"])
    assert node.packed_units(UNTIED) == set(UNTIED.units), "packed anew"


async def test_a_file_that_is_damaged_each_time_fails_the_load_by_name(
    make_node: Callable[..., Awaitable[Node]], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await make_node()
    streamed = Form("untied", WHOLE, streams=True)
    await kept_of(node, UNTIED, *UNTIED.units)
    real = PackedFile.read_large

    def read(self: PackedFile, reader: Any, into: memoryview, **options: Any) -> None:
        with self.path.open("rb+") as file:
            file.seek(-4000, 2)
            file.write(b"spoilt")
        real(self, reader, into, **options)

    monkeypatch.setattr(PackedFile, "read_large", read)
    monkeypatch.setattr(PackedFile, "read_small", read)
    failure = (await node.deploy("a", streamed)).failure
    assert failure is not None and failure.reason == "PACKED_DAMAGED"
    assert not node.leftovers()


@pytest.mark.parametrize(
    "form", [UNTIED, Form("untied", WHOLE, streams=True), Form("mixture", WHOLE, streams=True)]
)
@pytest.mark.parametrize("at", ["layer-0", HEAD_UNIT, "end"])
async def test_a_load_that_is_called_off_leaves_nothing(
    make_node: Callable[..., Awaitable[Node]], monkeypatch: pytest.MonkeyPatch, form: Form, at: str
) -> None:
    node = await make_node()
    reached, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hold() -> None:
        loop.call_soon_threadsafe(reached.set)
        assert go_on.wait(30)

    if at == "end":
        real = loading.StageLoader._load_stage

        def load(self: Any, *arguments: Any) -> Any:
            made = real(self, *arguments)
            hold()
            return made

        monkeypatch.setattr(loading.StageLoader, "_load_stage", load)
    else:
        writes = PackedUnits.write

        def write(self: Any, name: str, *arguments: Any) -> Any:
            if f"-{at}-" in name:
                hold()
            return writes(self, name, *arguments)

        monkeypatch.setattr(PackedUnits, "write", write)
    node.post(node.prepare("a", form))
    await asyncio.wait_for(reached.wait(), 30)
    released = node.post(node.release("a"))
    go_on.set()
    assert (await node.answer(released)).failure is None
    await node.settled()
    assert not node.leftovers()
    await no_reads()
    monkeypatch.undo()
    await serves(node, form)


async def no_reads() -> None:
    """Wait for the end of the threads that read for stages."""
    async with asyncio.timeout(30):
        while any(  # noqa: ASYNC110
            thread.name.startswith(("weights-", "experts")) for thread in threading.enumerate()
        ):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("turns", range(4))
async def test_a_stage_that_streams_ends_when_what_was_to_follow_it_is_called_off(
    make_node: Callable[..., Awaitable[Node]], turns: int
) -> None:
    node = await make_node()
    await serves(node, Form("mixture", WHOLE, streams=True))
    busy = threading.Event()
    node.worker.submit(busy.wait, 30)  # another stage computes
    node.post(node.prepare("a", Form("mixture", WHOLE)))
    for _ in range(turns):
        await asyncio.sleep(0)
    released = node.post(node.release("a"))
    for _ in range(4):
        await asyncio.sleep(0)
    busy.set()
    assert (await node.answer(released)).failure is None
    await node.settled()
    await no_reads()
    assert not node.leftovers()


async def test_a_standby_that_changes_while_its_weights_are_lent_keeps_them_for_the_load(
    make_node: Callable[..., Awaitable[Node]], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await make_node()
    assert (await node.ask(node.standby("a", UNTIED))).failure is None
    for path in node.packed_paths():
        path.unlink()
    reached, go_on = asyncio.Event(), threading.Event()
    loop, real = asyncio.get_running_loop(), loading.StageLoader._load_stage

    def load(self: Any, *arguments: Any) -> Any:
        loop.call_soon_threadsafe(reached.set)
        assert go_on.wait(30)
        return real(self, *arguments)

    monkeypatch.setattr(loading.StageLoader, "_load_stage", load)
    deployed = node.post(node.prepare("a", UNTIED))
    await asyncio.wait_for(reached.wait(), 30)
    changed = node.post(node.standby("a", Form("untied", LAST)))
    assert (await node.answer(changed)).failure is None
    go_on.set()
    failure = (await node.answer(deployed)).failure
    assert failure is None, failure
    node.held["a"] = UNTIED
    assert await node.computes("a")


async def test_weights_that_stream_are_not_taken_from_a_standby(
    make_node: Callable[..., Awaitable[Node]],
) -> None:
    node = await make_node()
    streamed = Form("untied", WHOLE, streams=True)
    assert (await node.ask(node.standby("a", UNTIED))).failure is None
    await serves(node, streamed)
    assert [status.phase for status in node.hosting.statuses()] == ["ready"], (
        "the standby's memory is the stage's"
    )
    await serves(node, UNTIED)
    await serves(node, streamed)
    await node.delete("a")
    assert not node.leftovers()


async def test_without_native_kernels_packed_files_are_left_alone(
    make_node: Callable[..., Awaitable[Node]], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await make_node()
    await kept_of(node, UNTIED, HEAD_UNIT)
    node.store.fetched.clear()
    monkeypatch.setenv(native.SWITCH, "0")
    failure = (await node.deploy("a", UNTIED)).failure
    assert failure is None, failure
    assert set(node.store.fetched) == UNTIED.digests()
    await node.delete("a")
    assert node.packed_units(UNTIED) == {HEAD_UNIT} and not node.leftovers()


async def test_two_loads_share_what_room_there_is(
    make_node: Callable[..., Awaitable[Node]],
) -> None:
    """A standby beside a load, in a cache that has room for the blobs of both and hardly more."""
    other = Form("tied", WHOLE, DType.BFLOAT16)
    node = await make_node(UNTIED.blob_bytes() + other.blob_bytes() + 300_000)
    kept, deployed = node.post(node.standby("b", other)), node.post(node.prepare("a", UNTIED))
    for operation in (kept, deployed):
        failure = (await node.answer(operation)).failure
        assert failure is None, failure
    assert node.disk_bytes() <= node.cache.limit_bytes
    assert node.disk_bytes() == node.cache.used_bytes + node.cache.packed.used_bytes


async def test_a_node_keeps_its_share_once(make_node: Callable[..., Awaitable[Node]]) -> None:
    """Fetched tensors are removed once they are packed, unless they are pinned."""
    node = await make_node()
    await serves(node, UNTIED)
    assert node.cache.used_bytes == 0 and not [*node.cache.blobs.files()]
    assert node.cache.packed.used_bytes > 0
    other = Form("untied", FIRST, DType.BFLOAT16)
    held = node.cache.pin(Digest(digest) for digest in other.digests())
    await serves(node, other, "b")
    assert {file.digest for file in node.cache.blobs.files()} == other.digests()
    held.release()
