"""Adds models to the coordinator's store, one after the other: each is converted by a process and
stored by a thread.

An addition that ends early leaves nothing: its files are in a folder that is removed at its end,
and when the coordinator starts. A model's name is the last write to the store
(`ModelStore.add_local`).
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from edgeshard.domain.control.site import LocalModel
from edgeshard.domain.errors import (
    AbortedError,
    AlreadyExistsError,
    EdgeShardError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from edgeshard.domain.ids import check_name
from edgeshard.importing.blocks import Width
from edgeshard.importing.model_sources import Source, parse_repository
from edgeshard.storage.blobs import in_thread
from edgeshard.storage.files import full_disk
from edgeshard.wire.status import error_from_bytes
from edgeshard.wire.store import local_model_from_bytes
from edgeshard_coordinator.additions.addition_state import NO_ADDITIONS, Addition, Additions, Phase
from edgeshard_coordinator.additions.conversion import READY_FILE
from edgeshard_coordinator.additions.folders import FolderListing, ModelFolders
from edgeshard_coordinator.store.models import ModelStore

log = structlog.get_logger()

MEMORY_BYTES = 4 << 30
"""That a conversion may grow by, of addresses."""
HASHING = "hashing"
_ENVIRONMENT = (
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "VIRTUAL_ENV",
)
_HUB_ENVIRONMENT = (
    *("HOME", "HF_TOKEN", "HF_TOKEN_PATH", "HF_ENDPOINT", "HF_HUB_OFFLINE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"),
)
_MAX_LINE_BYTES = 1 << 20


class ModelAdder:
    """Adds models from `folders`, and from the Hub if `allow_hub`. `scratch` is a folder of its
    own.

    `on_end` is called with each addition that ended. Call `open` before the first addition, and
    `stop` at the end.
    """

    def __init__(
        self,
        store: ModelStore,
        scratch: Path,
        folders: ModelFolders,
        *,
        allow_hub: bool,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self.allow_hub = allow_hub
        self.folders = folders
        self.state: Additions = NO_ADDITIONS
        self.on_end: Callable[[Addition], None] = lambda addition: None
        self._store = store
        self._scratch = scratch
        self._memory_bytes = memory_bytes
        self._worker: asyncio.Task[None] | None = None
        self._running: tuple[int, asyncio.Task[None]] | None = None
        self._ending = threading.Event()

    def open(self) -> None:
        """Remove what an earlier process left. Blocking."""
        shutil.rmtree(self._scratch, ignore_errors=True)

    async def models(self) -> list[FolderListing]:
        """The models of each folder."""
        return await asyncio.to_thread(self.folders.list)

    async def checked(self, source: str, name: str, width: str) -> tuple[Source, str]:
        """The place of a model and its name in the store ("" takes the source's), before anything
        is queued.

        Raises InvalidArgumentError naming a field, FailedPreconditionError if the settings do not
        allow the source, AlreadyExistsError for a name of the store, and as `ModelFolders.check`
        does.
        """
        if width not in list(Width):
            raise InvalidArgumentError(
                f"width: {width[:40]!r} is unknown: use one of {', '.join(Width)}", field="width"
            )
        repository = None if source.startswith("/") else parse_repository(source)
        if repository is not None and not self.allow_hub:
            raise FailedPreconditionError(
                "source: the coordinator takes no models of the Hub: start it with --allow-hub, "
                "or run "
                f"`edgectl model add {source[:200]}`",
                field="source",
                reason="HUB_NOT_ALLOWED",
            )
        where = repository or Source(path=await asyncio.to_thread(self.folders.check, source))
        model_name = check_name(name or where.name, "name")
        if any(manifest.name == model_name for manifest, _ in self._store.list()):
            raise AlreadyExistsError(
                f"name: model {model_name} exists: choose another name, or first run `edgectl "
                f"delete model {model_name}`",
                field="name",
                reason="MODEL_EXISTS",
            )
        return where, model_name

    def queue(self, source: Source, name: str, width: str, who: str) -> Addition:
        """Queue a model that was `checked`. Raises as `Additions.queued` does."""
        self.state = self.state.queued(str(source), name, width, who)
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        return self.state.get(self.state.last)

    async def cancel(self, number: int) -> Addition:
        """End an addition, and return it when nothing of it is left. One that has ended stays as it
        is.

        Raises NotFoundError.
        """
        if self.state.get(number).phase is Phase.QUEUED:
            self._end(number, Phase.CANCELLED)
        elif self._running is not None and self._running[0] == number:
            task = self._running[1]
            if not self._ending.is_set():
                self._ending.set()
                task.cancel()
            await asyncio.wait({task})
        return self.state.get(number)

    async def end_of(self, who: str) -> None:
        """Cancel all additions of an operator."""
        for addition in self.state.open_of(who):
            await self.cancel(addition.number)

    async def stop(self) -> None:
        """Cancel all additions."""
        for addition in list(self.state.by_number.values()):
            await self.cancel(addition.number)

    async def _work(self) -> None:
        while (addition := self.state.waiting) is not None:
            self._ending = threading.Event()
            self.state = self.state.moved(addition.number, Phase.CONVERTING)
            task = asyncio.create_task(self._add(addition))
            self._running = (addition.number, task)
            await asyncio.wait({task})
            self._running = None
            if not self.state.get(addition.number).has_ended:  # it was cancelled before it began
                self._end(addition.number, Phase.CANCELLED)
        self._worker = None

    async def _add(self, addition: Addition) -> None:
        number = addition.number
        scratch = self._scratch / str(number)
        ending = self._ending
        is_stored = False

        def store(model: LocalModel) -> None:
            nonlocal is_stored

            def progress(done_bytes: int, total_bytes: int) -> None:
                if ending.is_set():
                    raise AbortedError(f"adding model {addition.name} was cancelled")
                loop.call_soon_threadsafe(self._progress, number, HASHING, done_bytes, total_bytes)

            self._store.add_local(model, progress)
            is_stored = True

        loop = asyncio.get_running_loop()
        phase = Phase.DONE
        error: EdgeShardError | None = None
        try:
            await in_thread(partial(scratch.mkdir, mode=0o700, parents=True))
            async with self._converted(addition, scratch) as (model, notes):
                self.state = self.state.moved(
                    number, Phase.STORING, notes=notes, work=HASHING, done_bytes=0, total_bytes=0
                )
                await in_thread(store, model)
        except (asyncio.CancelledError, AbortedError) as failure:
            if ending.is_set() or isinstance(failure, asyncio.CancelledError):
                phase = Phase.DONE if is_stored else Phase.CANCELLED
            else:
                phase, error = Phase.FAILED, failure
        except EdgeShardError as failure:
            phase, error = Phase.FAILED, failure
        except OSError as failure:
            phase = Phase.FAILED
            error = InternalError(f"model {addition.name} was not added: {failure}")
        finally:
            await in_thread(shutil.rmtree, scratch, ignore_errors=True)
        self._end(number, phase, error=error)

    def _end(self, number: int, phase: Phase, **changes: Any) -> None:
        self.state = self.state.moved(number, phase, **changes)
        ended = self.state.get(number)
        log.info(
            "model_addition_ended",
            model=ended.name,
            phase=ended.phase,
            error=str(ended.error or ""),
        )
        self.on_end(ended)

    def _progress(self, number: int, work: str, done_bytes: int, total_bytes: int) -> None:
        self.state = self.state.progressed(number, work, done_bytes, total_bytes)

    @asynccontextmanager
    async def _converted(
        self, addition: Addition, scratch: Path
    ) -> AsyncIterator[tuple[LocalModel, tuple[str, ...]]]:
        """The model and its notes, while the process that converted it keeps its files."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "edgeshard_coordinator.additions.conversion"),
            *(str(os.getpid()), str(self._memory_bytes)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=self._environment(scratch),
            limit=_MAX_LINE_BYTES,
        )
        try:
            assert process.stdin is not None and process.stdout is not None
            is_path = addition.source.startswith("/")
            question = {
                "path": addition.source if is_path else "",
                "repository": "" if is_path else addition.source,
                "name": addition.name,
                "width": addition.width,
            }
            process.stdin.write(json.dumps(question).encode() + b"\n")
            notes = await self._answered(addition.number, process.stdout, scratch)
            request = await in_thread((scratch / READY_FILE).read_bytes)
            yield local_model_from_bytes(request), notes
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _answered(
        self, number: int, lines: asyncio.StreamReader, scratch: Path
    ) -> tuple[str, ...]:
        """The notes of the ready model. Raises the conversion's error, and ResourceExhaustedError
        if it was killed or the disk is full."""
        async for line in lines:
            answer: Mapping[str, Any] = json.loads(line)
            if "error" in answer:
                raise error_from_bytes(base64.b64decode(answer["error"]))
            if "ready" in answer:
                return tuple(answer["notes"])
            self._progress(number, answer["work"], answer["done"], answer["total"])
            # The coordinator's own state must always find room.
            if not self._store.room_bytes():
                raise full_disk(scratch, "a conversion of the weights", usable_bytes=0)
        raise ResourceExhaustedError(
            "the conversion was killed, as the system does when memory runs out: free memory on "
            "the coordinator's "
            "machine and add the model again, or run `edgectl model add` on another machine",
            field="source",
            reason="CONVERSION_KILLED",
        )

    def _environment(self, scratch: Path) -> dict[str, str]:
        """Downloads are in the scratch folder, too, so that a cancel leaves nothing."""
        names = (*_ENVIRONMENT, *_HUB_ENVIRONMENT) if self.allow_hub else _ENVIRONMENT
        inherited = {name: os.environ[name] for name in names if name in os.environ}
        downloads = str(scratch / "hub")
        return {
            **inherited,
            "TMPDIR": str(scratch),
            "HF_HUB_CACHE": downloads,
            "HF_XET_CACHE": f"{downloads}-xet",
        }
