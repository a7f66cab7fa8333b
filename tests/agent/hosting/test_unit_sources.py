"""Each unit of a load comes from its packed file or from blobs: chosen once, fetched and read accordingly, and held."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from edgeshard_agent.engine.background_thread import BackgroundThread
from edgeshard_agent.engine.worker import ComputeThread
from edgeshard_agent.hosting import loading
from edgeshard_agent.model.weights import weight_loading
from edgeshard_agent.ops import native, native_available
from edgeshard_agent.store.packed import PackedFile
from edgeshard_agent.store.packed_units import PackedUnits

from edgeshard.architectures.units import EMBEDDING_UNIT, HEAD_UNIT
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from tests.agent.hosting.packed_box import LAYERS, Box, Form
from tests.support.forms import one_in

pytestmark = pytest.mark.skipif(not native_available(), reason="packed files are for native kernels")
WHOLE, FIRST, LAST = LayerRange(0, LAYERS), LayerRange(0, 1), LayerRange(1, LAYERS)
UNTIED = Form("untied", WHOLE)
AMPLE = 1 << 30


@pytest.fixture
async def make_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Awaitable[Box]]]:
    worker = ComputeThread(1)
    aside, made = BackgroundThread(worker), list[Box]()
    monkeypatch.setattr("os.fsync", lambda file: None)

    async def make(limit: int = AMPLE) -> Box:
        made.append(Box(tmp_path / "cache", limit, worker, aside))
        await made[-1].start()
        return made[-1]

    yield make
    for box in made:
        await box.close()
    worker.close()


async def serves(box: Box, form: Form, name: str = "a") -> set[str]:
    """Deploy it and compare what it computes; returns the digests of what was fetched."""
    box.store.fetched.clear()
    failure = (await box.deploy(name, form)).failure
    assert failure is None, failure
    assert await box.computes(name)
    return set(box.store.fetched)


async def kept_of(box: Box, form: Form, *units: str) -> None:
    """Have the packed files of these units of a form on the box, and nothing else."""
    await serves(box, form)
    await box.delete("a")
    for path in box.packed_paths():
        if path.stem not in {form.unit_form.name(unit) for unit in units}:
            path.unlink()
    await _forget_blobs(box)


async def _forget_blobs(box: Box) -> None:
    for digest in list(box.cache._sizes):
        await box.cache.discard(digest)


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
    # Where head and embedding are one matrix there is no embedding.
    one_in(
        4, [(form, unit) for form in FORMS for unit in (EMBEDDING_UNIT, HEAD_UNIT, "layer-1") if unit in form.units]
    ),
)
async def test_what_is_packed_is_read_and_the_rest_is_fetched(
    make_box: Callable[..., Awaitable[Box]], form: Form, kept: str
) -> None:
    box = await make_box()
    await kept_of(box, form, kept)
    lacking = [unit for unit in form.units if unit != kept]
    assert await serves(box, form) == form.digests(lacking)
    assert box.packed_units(form) == set(form.units)
    await box.delete("a")
    await _forget_blobs(box)
    assert await serves(box, form) == set(), "all of it is packed now"


async def test_an_untied_model_in_two_parts_one_after_the_other_and_then_whole(
    make_box: Callable[..., Awaitable[Box]],
) -> None:
    box = await make_box()
    first, last = Form("untied", FIRST), Form("untied", LAST)
    assert await serves(box, first) == first.digests()
    await box.delete("a")
    await _forget_blobs(box)
    assert await serves(box, UNTIED) == last.digests(), "nothing of what is packed is fetched"
    await box.delete("a")
    assert not box.leftovers()


async def test_another_quantisation_shares_the_embedding_and_fetches_the_rest(
    make_box: Callable[..., Awaitable[Box]],
) -> None:
    box = await make_box()
    int8, int4 = (Form("untied", WHOLE, DType.BFLOAT16, kind) for kind in (Quantisation.INT8, Quantisation.INT4))
    await serves(box, int8)
    await box.delete("a")
    await _forget_blobs(box)
    blocks = [unit for unit in int4.units if unit.startswith("layer")]
    assert await serves(box, int4) == int4.digests(blocks), "embedding and head of int8 are there"


async def test_packed_files_make_way_for_blobs_before_a_cache_is_too_small(
    make_box: Callable[..., Awaitable[Box]],
) -> None:
    """In float32 a file takes twice the room of its blobs, which are in bfloat16."""
    box = await make_box()
    await kept_of(box, UNTIED, HEAD_UNIT, "layer-1", "layer-2")
    box.cache.limit_bytes = UNTIED.blob_bytes()
    assert await serves(box, UNTIED) == UNTIED.digests()
    assert box.cache.used_bytes + box.cache.packed.used_bytes <= box.cache.limit_bytes
    await box.delete("a")
    box.cache.limit_bytes -= 1
    failure = (await box.deploy("a", UNTIED)).failure
    assert failure is not None and failure.reason == "CACHE_LIMIT"
    assert not box.leftovers()


async def test_files_that_are_smaller_than_their_blobs_stay_where_a_cache_is_too_small(
    make_box: Callable[..., Awaitable[Box]],
) -> None:
    form = Form("untied", WHOLE, DType.BFLOAT16, Quantisation.INT4)
    box = await make_box()
    await kept_of(box, form, "layer-1", "layer-2")
    box.cache.limit_bytes = form.blob_bytes([EMBEDDING_UNIT, HEAD_UNIT, "layer-0"])
    failure = (await box.deploy("a", form)).failure
    assert failure is not None and failure.reason == "CACHE_LIMIT"
    assert box.packed_units(form) == {"layer-1", "layer-2"}


def during(monkeypatch: pytest.MonkeyPatch, what: Callable[[], object], unit: str = "layer-1") -> None:
    """Have `what` happen in the first load from now on, when it comes to this unit."""
    real, done = weight_loading._WeightLoading._fill_unit, list[bool]()

    def fill(self: Any, which: Any) -> None:
        if which.name == unit and not done:
            done.append(True)
            what()
        real(self, which)

    monkeypatch.setattr(weight_loading._WeightLoading, "_fill_unit", fill)


async def test_what_an_operator_drops_while_a_stage_loads_stays_as_it_is_in_use(
    make_box: Callable[..., Awaitable[Box]], monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await make_box()
    await kept_of(box, UNTIED, HEAD_UNIT, "layer-1")
    dropped: list[Any] = []

    def drop() -> None:
        assert {unit.unit for unit in box.cache.packed.units()} == {EMBEDDING_UNIT, "layer-0", "layer-1", HEAD_UNIT}
        dropped.extend(box.cache.packed.drop_units([]))
        dropped.extend(box.cache.packed.drop_units([unit.id for unit in box.cache.packed.units()]))

    during(monkeypatch, drop)
    assert await serves(box, UNTIED) == UNTIED.digests([EMBEDDING_UNIT, "layer-0", "layer-2"])
    assert len(dropped) == 4 and all(unit.in_use for unit in dropped), "chosen ones, and those just written"
    assert box.packed_units(UNTIED) == set(UNTIED.units)


async def test_an_eviction_that_began_before_a_unit_was_chosen_leaves_it(
    make_box: Callable[..., Awaitable[Box]], monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await make_box()
    await kept_of(box, UNTIED, *UNTIED.units)
    looked, go_on, real = threading.Event(), threading.Event(), PackedUnits.files

    def files(self: PackedUnits) -> Any:
        found = real(self)
        looked.set()
        assert go_on.wait(30)
        return found

    with monkeypatch.context() as slow:
        slow.setattr(PackedUnits, "files", files)
        evicting = asyncio.create_task(asyncio.to_thread(box.cache.packed.make_room, 0))
        await asyncio.to_thread(looked.wait, 30)
    box.store.fetched.clear()
    await box.ask(box.prepare("a", UNTIED))
    go_on.set()
    await evicting
    assert box.packed_units(UNTIED) == set(UNTIED.units) and not box.store.fetched


@pytest.mark.parametrize("standby", [False, True])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
async def test_the_source_of_a_unit_is_chosen_again_when_its_file_is_damaged_in_the_load(
    make_box: Callable[..., Awaitable[Box]], monkeypatch: pytest.MonkeyPatch, damage: str, standby: bool
) -> None:
    box = await make_box()
    await kept_of(box, UNTIED, *UNTIED.units)
    (path,) = [path for path in box.packed_paths() if "-layer-2-" in path.name]

    def spoil() -> None:
        data = bytearray(path.read_bytes())
        data[-4000] ^= 1
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(data if damage == "flip" else data[:-4096])

    during(monkeypatch, spoil)
    if standby:
        box.store.fetched.clear()
        assert (await box.ask(box.standby("a", UNTIED))).failure is None
        assert set(box.store.fetched) == UNTIED.digests(["layer-2"])
        assert await serves(box, UNTIED) == set(), "taken from the standby"
    else:
        assert await serves(box, UNTIED) == UNTIED.digests(["layer-2"])
    assert box.packed_units(UNTIED) == set(UNTIED.units), "packed anew"


async def test_a_file_that_is_damaged_each_time_fails_the_load_by_name(
    make_box: Callable[..., Awaitable[Box]], monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await make_box()
    streamed = Form("untied", WHOLE, streams=True)
    await kept_of(box, UNTIED, *UNTIED.units)
    real = PackedFile.read_large

    def read(self: PackedFile, reader: Any, into: memoryview, **options: Any) -> None:
        with self.path.open("rb+") as file:
            file.seek(-4000, 2)
            file.write(b"spoilt")
        real(self, reader, into, **options)

    monkeypatch.setattr(PackedFile, "read_large", read)
    monkeypatch.setattr(PackedFile, "read_small", read)
    failure = (await box.deploy("a", streamed)).failure
    assert failure is not None and failure.reason == "PACKED_DAMAGED"
    assert not box.leftovers()


@pytest.mark.parametrize("form", [UNTIED, Form("untied", WHOLE, streams=True), Form("mixture", WHOLE, streams=True)])
@pytest.mark.parametrize("at", ["layer-0", HEAD_UNIT, "end"])
async def test_a_load_that_is_called_off_leaves_nothing(
    make_box: Callable[..., Awaitable[Box]], monkeypatch: pytest.MonkeyPatch, form: Form, at: str
) -> None:
    box = await make_box()
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
    box.post(box.prepare("a", form))
    await asyncio.wait_for(reached.wait(), 30)
    released = box.post(box.release("a"))
    go_on.set()
    assert (await box.answer(released)).failure is None
    await box.settled()
    assert not box.leftovers()
    await no_reads()
    monkeypatch.undo()
    await serves(box, form)


async def no_reads() -> None:
    """Wait for the end of the threads that read for stages."""
    async with asyncio.timeout(30):
        while any(thread.name.startswith(("weights-", "experts")) for thread in threading.enumerate()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("turns", range(4))
async def test_a_stage_that_streams_ends_when_what_was_to_follow_it_is_called_off(
    make_box: Callable[..., Awaitable[Box]], turns: int
) -> None:
    box = await make_box()
    await serves(box, Form("mixture", WHOLE, streams=True))
    busy = threading.Event()
    box.worker.submit(busy.wait, 30)  # another stage computes
    box.post(box.prepare("a", Form("mixture", WHOLE)))
    for _ in range(turns):
        await asyncio.sleep(0)
    released = box.post(box.release("a"))
    for _ in range(4):
        await asyncio.sleep(0)
    busy.set()
    assert (await box.answer(released)).failure is None
    await box.settled()
    await no_reads()
    assert not box.leftovers()


async def test_a_standby_that_changes_while_its_weights_are_lent_keeps_them_for_the_load(
    make_box: Callable[..., Awaitable[Box]], monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await make_box()
    assert (await box.ask(box.standby("a", UNTIED))).failure is None
    for path in box.packed_paths():
        path.unlink()
    reached, go_on = asyncio.Event(), threading.Event()
    loop, real = asyncio.get_running_loop(), loading.StageLoader._load_stage

    def load(self: Any, *arguments: Any) -> Any:
        loop.call_soon_threadsafe(reached.set)
        assert go_on.wait(30)
        return real(self, *arguments)

    monkeypatch.setattr(loading.StageLoader, "_load_stage", load)
    deployed = box.post(box.prepare("a", UNTIED))
    await asyncio.wait_for(reached.wait(), 30)
    changed = box.post(box.standby("a", Form("untied", LAST)))
    assert (await box.answer(changed)).failure is None
    go_on.set()
    failure = (await box.answer(deployed)).failure
    assert failure is None, failure
    box.held["a"] = UNTIED
    assert await box.computes("a")


async def test_weights_that_stream_are_not_taken_from_a_standby(make_box: Callable[..., Awaitable[Box]]) -> None:
    box = await make_box()
    streamed = Form("untied", WHOLE, streams=True)
    assert (await box.ask(box.standby("a", UNTIED))).failure is None
    await serves(box, streamed)
    assert [status.phase for status in box.hosting.statuses()] == ["ready"], "the standby's memory is the stage's"
    await serves(box, UNTIED)
    await serves(box, streamed)
    await box.delete("a")
    assert not box.leftovers()


async def test_without_native_kernels_packed_files_are_left_alone(
    make_box: Callable[..., Awaitable[Box]], monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await make_box()
    await kept_of(box, UNTIED, HEAD_UNIT)
    box.store.fetched.clear()
    monkeypatch.setenv(native.SWITCH, "0")
    failure = (await box.deploy("a", UNTIED)).failure
    assert failure is None, failure
    assert set(box.store.fetched) == UNTIED.digests()
    await box.delete("a")
    assert box.packed_units(UNTIED) == {HEAD_UNIT} and not box.leftovers()


async def test_two_loads_share_what_room_there_is(make_box: Callable[..., Awaitable[Box]]) -> None:
    """A standby beside a load, in a cache that has room for the blobs of both and hardly more."""
    other = Form("tied", WHOLE, DType.BFLOAT16)
    box = await make_box(UNTIED.blob_bytes() + other.blob_bytes() + 300_000)
    kept, deployed = box.post(box.standby("b", other)), box.post(box.prepare("a", UNTIED))
    for operation in (kept, deployed):
        failure = (await box.answer(operation)).failure
        assert failure is None, failure
    assert box.disk_bytes() <= box.cache.limit_bytes
    assert box.disk_bytes() == box.cache.used_bytes + box.cache.packed.used_bytes
