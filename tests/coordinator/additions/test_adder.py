"""Additions of models: converted by a process, stored by a thread, and one that ends early leaves
nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from edgeshard_coordinator.additions import adder as adder_module
from edgeshard_coordinator.additions.adder import ModelAdder
from edgeshard_coordinator.additions.addition_state import Addition, Phase
from edgeshard_coordinator.additions.conversion import NICENESS
from edgeshard_coordinator.additions.folders import ModelFolders
from edgeshard_coordinator.store.models import ModelStore
from gguf import GGMLQuantizationType

from edgeshard.domain.errors import EdgeShardError
from tests.support.chat_models import DEMO_MODEL
from tests.support.fp8_models import write_fp8_model
from tests.support.gguf_files import everywhere, write_demo_gguf
from tests.support.hub_server import serving

pytestmark = pytest.mark.timing

WHO = "operator/ann"
SOON_S = 120.0


class Adding:
    """A store and its adder."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.state = directory / "state"
        self.folder = directory / "folder"
        self.folder.mkdir(parents=True)
        self.store = ModelStore(self.state / "models", options.pop("kept_free_bytes", 0))
        self.store.open()
        options.setdefault("allow_hub", False)
        self.adder = ModelAdder(
            self.store, self.state / "additions", ModelFolders([self.folder]), **options
        )
        self.adder.open()
        self.ended: list[Addition] = []
        self.adder.on_end = self.ended.append

    async def queue(self, name: str, called: str = "", width: str = "int8") -> int:
        """The number of an addition of a model of the folder."""
        where, chosen = await self.adder.checked(str(self.folder / name), called, width)
        return self.adder.queue(where, chosen, width, WHO).number

    async def until(self, number: int, condition: Callable[[Addition], object]) -> Addition:
        async with asyncio.timeout(SOON_S):
            while not condition(self.adder.state.get(number)):  # noqa: ASYNC110 - nobody tells it
                await asyncio.sleep(0.01)
        return self.adder.state.get(number)

    async def ends(self, number: int) -> Addition:
        return await self.until(number, lambda addition: addition.has_ended)

    def left(self) -> list[str]:
        """Every file that the additions and the store have."""
        return sorted(
            str(path.relative_to(self.state)) for path in self.state.rglob("*") if path.is_file()
        )


@asynccontextmanager
async def adding_in(directory: Path, **options: Any) -> AsyncIterator[Adding]:
    adding = Adding(directory, **options)
    try:
        yield adding
    finally:
        await adding.adder.stop()


def children() -> list[int]:
    """The processes of conversions that this process started and that run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:  # it ended meanwhile
            continue
        if (
            b"edgeshard_coordinator.additions.conversion" in words
            and str(os.getpid()).encode() in words
        ):
            found.append(int(entry.name))
    return found


async def test_a_model_is_converted_with_progress_and_stored(tmp_path: Path) -> None:
    async with adding_in(tmp_path) as adding:
        write_fp8_model(adding.folder / "Fast-8", layers=4, hidden=1024)
        number = await adding.queue("Fast-8")
        running = await adding.until(number, lambda addition: addition.done_bytes)
        assert (
            running.phase in (Phase.CONVERTING, Phase.STORING)
            and running.done_bytes <= running.total_bytes
        )
        ended = await adding.ends(number)
        assert (ended.phase, ended.name, ended.error) == (Phase.DONE, "fast-8", None), ended
        assert any("became int8" in note for note in ended.notes)
        manifest, _ = adding.store.get("fast-8")
        assert any(tensor.integers for tensor in manifest.tensors)
        for tensor in manifest.tensors:
            location = adding.store.blobs.locate(tensor.sha256)
            assert location is not None and adding.store.blobs.is_intact(
                tensor.sha256, location.size
            )
        assert not any(name.startswith("additions") for name in adding.left()) and not children()
        assert [addition.phase for addition in adding.ended] == [Phase.DONE]


@pytest.mark.long
async def test_the_conversion_has_the_lowest_priority_and_goes_first_without_memory(
    tmp_path: Path,
) -> None:
    async with adding_in(tmp_path) as adding:
        write_fp8_model(adding.folder / "fast", layers=4, hidden=1024)
        number = await adding.queue("fast")
        await adding.until(number, lambda addition: addition.done_bytes)
        (child,) = children()
        assert os.getpriority(os.PRIO_PROCESS, child) == NICENESS
        assert Path(f"/proc/{child}/oom_score_adj").read_text().strip() == "1000"
        assert (
            "unlimited"
            not in next(
                line
                for line in Path(f"/proc/{child}/limits").read_text().splitlines()
                if line.startswith("Max data size")
            ).split()[3]
        )


@pytest.mark.parametrize(
    "phase", [Phase.CONVERTING, pytest.param(Phase.STORING, marks=pytest.mark.long)]
)
async def test_a_cancel_leaves_nothing(tmp_path: Path, phase: Phase) -> None:
    async with adding_in(tmp_path) as adding:
        before = adding.left()
        write_fp8_model(adding.folder / "fast", layers=4, hidden=1024)
        links = (adding.folder / "fast" / "model.safetensors").stat().st_nlink
        number = await adding.queue("fast")
        await adding.until(number, lambda addition: addition.phase is phase and addition.done_bytes)
        cancelled = await adding.adder.cancel(number)
        assert (cancelled.phase, cancelled.error) == (Phase.CANCELLED, None)
        assert adding.left() == before and not children() and not adding.store.list()
        assert (adding.folder / "fast" / "model.safetensors").stat().st_nlink == links
        assert await adding.adder.cancel(number) == cancelled, "a second cancel changes nothing"
        assert (await adding.ends(await adding.queue("fast"))).phase is Phase.DONE, (
            "its name is free"
        )


@pytest.mark.long
async def test_one_is_added_at_a_time_and_one_that_waits_is_cancelled_at_once(
    tmp_path: Path,
) -> None:
    async with adding_in(tmp_path) as adding:
        write_fp8_model(adding.folder / "fast", layers=4, hidden=1024)
        first, second, third = [
            await adding.queue("fast", name) for name in ("one", "two", "three")
        ]
        await adding.until(first, lambda addition: addition.done_bytes)
        assert adding.adder.state.get(second).phase is Phase.QUEUED and len(children()) == 1
        assert (await adding.adder.cancel(second)).phase is Phase.CANCELLED
        assert (await adding.ends(third)).phase is Phase.DONE
        assert [manifest.name for manifest, _ in adding.store.list()] == ["one", "three"]


@pytest.mark.long
async def test_additions_of_a_revoked_operator_end(tmp_path: Path) -> None:
    async with adding_in(tmp_path) as adding:
        write_fp8_model(adding.folder / "fast", layers=4, hidden=1024)
        first, second = [await adding.queue("fast", name) for name in ("one", "two")]
        await adding.adder.end_of("operator/bob")
        assert not adding.adder.state.get(first).has_ended
        await adding.adder.end_of(WHO)
        assert {adding.adder.state.get(number).phase for number in (first, second)} == {
            Phase.CANCELLED
        }
        assert not adding.store.list()


def wrong(directory: Path) -> None:
    write_fp8_model(directory)
    (directory / "config.json").write_text('{"model_type": "unheard-of"}')


def cut(directory: Path) -> None:
    write_fp8_model(directory)
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def pickled(directory: Path) -> None:
    write_fp8_model(directory)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


WRONG: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "an unknown family": (wrong, "UNSUPPORTED_MODEL", "unheard-of"),
    "a file that is cut": (cut, "TRUNCATED", "model.safetensors"),
    "pickled weights": (pickled, "PICKLED_WEIGHTS", "convert it to safetensors"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("what", WRONG)
async def test_a_wrong_model_fails_with_the_error_of_the_command_line(
    tmp_path: Path, what: str
) -> None:
    make, reason, told = WRONG[what]
    async with adding_in(tmp_path) as adding:
        before = adding.left()
        make(adding.folder / "wrong")
        ended = await adding.ends(await adding.queue("wrong"))
        assert ended.phase is Phase.FAILED and ended.error is not None
        assert ended.error.reason == reason and told in ended.error.message
        assert adding.left() == before and not children()


async def test_a_full_disk_ends_it_with_the_remedy(tmp_path: Path) -> None:
    """The coordinator's own state needs the room that is left."""
    async with adding_in(tmp_path, kept_free_bytes=1 << 60) as adding:
        before = adding.left()
        write_fp8_model(adding.folder / "fast", layers=4, hidden=1024)
        ended = await adding.ends(await adding.queue("fast"))
        assert ended.phase is Phase.FAILED and ended.error is not None
        assert (ended.error.reason, ended.error.field) == ("DISK_FULL", "state-dir")
        assert (
            "free space or move --state-dir" in ended.error.message
            and "TMPDIR" not in ended.error.message
        )
        assert adding.left() == before


@pytest.mark.long
async def test_a_conversion_without_memory_is_refused_by_name(tmp_path: Path) -> None:
    async with adding_in(tmp_path, memory_bytes=1 << 20) as adding:
        write_fp8_model(adding.folder / "fast", hidden=2048)
        ended = await adding.ends(await adding.queue("fast"))
        assert ended.error is not None and ended.error.reason in (
            "CONVERSION_MEMORY",
            "CONVERSION_KILLED",
        )
        assert "edgectl model add" in ended.error.message and not children()


@pytest.mark.long
async def test_a_killed_conversion_is_told_and_the_next_one_runs(tmp_path: Path) -> None:
    async with adding_in(tmp_path) as adding:
        write_fp8_model(adding.folder / "fast", layers=4, hidden=1024)
        number = await adding.queue("fast")
        await adding.until(number, lambda addition: addition.done_bytes)
        for child in children():
            os.kill(child, signal.SIGKILL)
        ended = await adding.ends(number)
        assert ended.error is not None and ended.error.reason == "CONVERSION_KILLED"
        assert (await adding.ends(await adding.queue("fast"))).phase is Phase.DONE


async def test_files_of_an_earlier_process_are_removed_at_the_start(tmp_path: Path) -> None:
    left = tmp_path / "state" / "additions" / "3" / "edgeshard-x" / "converted.tensors"
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(100))
    async with adding_in(tmp_path) as adding:
        assert adding.left() == []


async def test_what_cannot_be_added_is_refused_before_it_is_queued(tmp_path: Path) -> None:
    async with adding_in(tmp_path) as adding:
        (adding.folder / "demo").symlink_to(DEMO_MODEL)
        assert await refusal(adding, "demo") == "OUTSIDE_FOLDERS"
        write_fp8_model(adding.folder / "fast")
        assert await refusal(adding, "fast", width="int3") == "INVALID_ARGUMENT"
        assert await refusal(adding, "fast", called="No Name") == "INVALID_NAME"
        assert (await adding.ends(await adding.queue("fast"))).phase is Phase.DONE
        assert await refusal(adding, "fast") == "MODEL_EXISTS"
        number = await adding.queue("fast", "other")
        assert await refusal(adding, "fast", called="other") == "BEING_ADDED"
        await adding.ends(number)
        with pytest.raises(EdgeShardError) as refused:
            await adding.adder.checked("owner/name", "", "int8")
        assert refused.value.reason == "HUB_NOT_ALLOWED" and "--allow-hub" in refused.value.message
        assert len(adding.ended) == 2


async def refusal(adding: Adding, name: str, called: str = "", width: str = "int8") -> str:
    with pytest.raises(EdgeShardError) as refused:
        await adding.queue(name, called, width)
    return refused.value.reason


async def test_the_hub_s_token_is_for_conversions_that_may_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OTHER_SECRET", "x")
    for allowed in (False, True):
        async with adding_in(tmp_path / str(allowed), allow_hub=allowed) as adding:
            environment = adding.adder._environment(tmp_path)
            assert ("HF_TOKEN" in environment) == allowed and "OTHER_SECRET" not in environment
            where, name = (
                await adding.adder.checked("owner/Name@v1", "", "int8") if allowed else (None, "")
            )
            assert (name, where and where.revision) == (("name", "v1") if allowed else ("", None))


@pytest.mark.long
async def test_a_model_of_the_hub_is_added_and_its_download_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_fp8_model(tmp_path / "repository")
    with serving() as server:
        server.repositories["owner/Fast-1"] = tmp_path / "repository"
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        async with adding_in(tmp_path / "site", allow_hub=True) as adding:
            where, name = await adding.adder.checked("owner/Fast-1", "", "int8")
            ended = await adding.ends(adding.adder.queue(where, name, "int8", WHO).number)
            assert (ended.phase, ended.name, ended.source) == (
                Phase.DONE,
                "fast-1",
                "owner/Fast-1",
            ), ended.error
            assert server.served["model.safetensors"] > 0
            assert not any(name.startswith("additions") for name in adding.left())
            assert not list((tmp_path / "home").rglob("*.safetensors"))
            where, name = await adding.adder.checked("owner/missing", "", "int8")
            ended = await adding.ends(adding.adder.queue(where, name, "int8", WHO).number)
            assert ended.error is not None and ended.error.field == "model"


@pytest.mark.long
async def test_a_gguf_of_the_hub_is_added_by_its_quantisation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "repository").mkdir()
    for kind in (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0):
        write_demo_gguf(tmp_path / "repository" / f"tales-{kind.name}.gguf", everywhere(kind))
    with serving() as server:
        server.repositories["owner/Tales"] = tmp_path / "repository"
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        async with adding_in(tmp_path / "site", allow_hub=True) as adding:
            where, name = await adding.adder.checked("owner/Tales:Q4_0@main", "", "int8")
            ended = await adding.ends(adding.adder.queue(where, name, "int8", WHO).number)
            assert (ended.phase, ended.name) == (Phase.DONE, "tales-q4_0"), ended.error
            assert ended.source == "owner/Tales:Q4_0@main" and server.served.keys() == {
                "tales-Q4_0.gguf"
            }


def test_a_conversion_may_grow_by_gigabytes() -> None:
    """A 70B model's largest matrix is converted in float32 with two copies."""
    assert adder_module.MEMORY_BYTES >= 3 * 4 * 8192 * 28672
