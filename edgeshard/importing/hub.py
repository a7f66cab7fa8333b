"""Models of the Hugging Face Hub, by huggingface_hub: its cache, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE.

The header of a GGUF model is read without its weights: for plans, and to refuse a family early.

A broken connection goes on where it stopped, five times without a byte. After a command that was
ended, whole files are kept.

Only safetensors and the small files of a model are fetched, or the GGUF files of one quantisation;
never code and never pickled weights. Each file is compared with the sha256 that the Hub names for
it. The snapshot is used where the cache has it.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeshard.architectures import parse_config
from edgeshard.domain.errors import (
    DataLossError,
    DeniedError,
    EdgeShardError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
    UnsupportedModelError,
    extra_line,
)
from edgeshard.importing import gguf_config
from edgeshard.importing.gguf_file import GgufFile, read_gguf
from edgeshard.importing.gguf_selection import select_gguf
from edgeshard.importing.imported import DOWNLOADING, Progress
from edgeshard.importing.older_settings import LIMIT_BYTES, OLDER_FILES
from edgeshard.importing.quantised import check_layout, checked_quantisation, without_quantisation
from edgeshard.importing.stores.ollama_forms import llama_cpp_form
from edgeshard.importing.tiktoken import RANKS_LIMIT_BYTES, check_kind, ranks_file
from edgeshard.storage.blobs import sha256_of
from edgeshard.storage.checkpoint import (
    CONFIG_LIMIT_BYTES,
    HEADER_LIMIT_BYTES,
    check_file_size,
    needed_files,
    read_config,
)
from edgeshard.storage.files import check_room, free_bytes
from edgeshard.storage.forms import (
    SMALL_FILES,
    TOKENIZER,
    TOKENIZER_SETTINGS,
    decode_text,
    parse_json_object,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi
import tempfile
from collections.abc import Callable
from functools import partial

from edgeshard.importing.gguf_file import parse_gguf

_FIRST_BYTES = 1 << 20
_GROWTH = 4
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""The tensors of a GGUF file that its config.json is made of."""
_FACTORS_LIMIT_BYTES = 4096
_PARTIAL_CONTENT = 206


@contextmanager
def remote_header(
    library: Any, name: str, commit: str, sizes: Mapping[str, int]
) -> Iterator[GgufFile]:
    """The header of a model in files of a repository, by name with their bytes; the first one is
    named first.

    `library` is huggingface_hub. The files are sparse, and are there while the context is open:
    headers have bytes, and of the tensors only those in `_FACTORS`. Raises as `read_gguf` and
    huggingface_hub do, and UnavailableError for a Hub that sends no ranges.
    """
    with tempfile.TemporaryDirectory(prefix="edgeshard-") as scratch:
        paths = {Path(scratch) / file.rpartition("/")[2]: file for file in sizes}

        def fetch(file: str, begin: int, count: int) -> bytes:
            return _range(library, library.hf_hub_url(name, file, revision=commit), begin, count)

        for path, file in paths.items():
            data = _header_of(path, sizes[file], partial(fetch, file))
            with path.open("wb") as stream:
                stream.write(data)
                stream.truncate(sizes[file])
        header = read_gguf(next(iter(paths)))
        by_name = {path.name: file for path, file in paths.items()}
        for tensor in _FACTORS:
            factors = header.tensors.get(tensor)
            if factors is None or factors.size > _FACTORS_LIMIT_BYTES:
                continue
            data = fetch(by_name[factors.path.name], factors.offset, factors.size)
            with factors.path.open("r+b") as file_with_gaps:
                file_with_gaps.seek(factors.offset)
                file_with_gaps.write(data)
        yield header


def _header_of(path: Path, size: int, fetch: Callable[[int, int], bytes]) -> bytes:
    """The first bytes of a file of `size` bytes, all of its header among them. `fetch` takes a
    place and a number."""
    length = min(_FIRST_BYTES, size)
    data = fetch(0, length)
    while True:
        try:
            parse_gguf(path, data, size)
        except DataLossError:
            if len(data) >= min(size, HEADER_LIMIT_BYTES):
                raise
            length = min(length * _GROWTH, size)
            data += fetch(len(data), length - len(data))
        else:
            return data


def _range(library: Any, url: str, begin: int, count: int) -> bytes:
    """`count` bytes of a file; fewer if the file ends before. No more are fetched."""
    headers = library.utils.build_hf_headers(library_name="edgeshard")
    headers["Range"] = f"bytes={begin}-{begin + count - 1}"
    data = bytearray()
    with library.utils.get_session().stream(
        "GET", url, headers=headers, follow_redirects=True
    ) as response:
        library.utils.hf_raise_for_status(response)
        if begin and response.status_code != _PARTIAL_CONTENT:
            raise UnavailableError(
                "the Hub sends no ranges; download the file and add it by path", field="model"
            )
        for piece in response.iter_bytes():
            data += piece
            if len(data) >= count:
                break
    return bytes(data[:count])


_CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_PARALLEL = 4
_MOVE_CACHE = "free space, or move the Hub's cache with HF_HOME"
_NO_EXTRA = (
    "models of the Hub need the package huggingface_hub, of the models extra: "
    f"{extra_line('models')}"
)


@dataclass(frozen=True, slots=True)
class Repository:
    """A model of the Hub as it was found: its commit, its files' sizes in bytes, and the sha256 of
    large ones."""

    name: str
    commit: str
    sizes: Mapping[str, int]
    sha256: Mapping[str, str]


def fetch(name: str, revision: str, progress: Progress, tag: str = "") -> Path:
    """The directory of the snapshot in the Hub's cache, with all files that EdgeShard needs; or its
    GGUF file.

    A repository with a `tag`, or without safetensors, gives the GGUF file that `select_gguf`
    selects, the first if the model has parts. Offline the cached snapshot is taken. Raises
    NotFoundError, DeniedError for a gated one, UnsupportedModelError for a model that is not run or
    has no safetensors (before any byte of weights is fetched), DataLossError for a file with
    another sha256 than the Hub's, UnavailableError, FailedPreconditionError without the package.
    """
    hub = _Hub(name, progress)
    with _translated(name, revision):
        repository = hub.find(revision)
    if repository is None:
        return hub.cached_gguf(revision, tag) or hub.cached(revision)
    if _is_gguf(repository, tag):
        return _fetch_gguf(hub, repository, revision, tag)
    if _CONFIG not in repository.sizes:
        raise NotFoundError(
            f"{name} has no config.json: it is not a model in Hugging Face's format", field="model"
        )
    _check_weights(repository)
    _check_sizes(repository)
    with _translated(name, revision):
        first = hub.config(repository, revision)
    _check_config(first)
    files = [file for file in (*SMALL_FILES, *OLDER_FILES) if file in repository.sizes]
    with _translated(name, revision):
        files += _ranks(hub, repository)
    with _translated(name, revision):
        if _SINGLE in repository.sizes:
            files.append(_SINGLE)
        else:
            hub.download(repository, [_INDEX])
            files += [_INDEX, *_shards(first, repository)]
        hub.progress_of(repository, files)
        return hub.download(repository, files)[0].parent


def _is_gguf(repository: Repository, tag: str) -> bool:
    """Whether the repository's GGUF files are the model, not its safetensors."""
    if tag:
        return True
    has_tensors = _SINGLE in repository.sizes or _INDEX in repository.sizes
    return not has_tensors and any(file.endswith(".gguf") for file in repository.sizes)


def _fetch_gguf(hub: _Hub, repository: Repository, revision: str, tag: str) -> Path:
    files = select_gguf(list(repository.sizes), tag, repository.name)
    if any(hub.cached_file(repository, file) is None for file in files):
        with _translated(repository.name, revision), hub.headers(repository, files) as header:
            gguf_config.config_of(llama_cpp_form(header)[0])
    hub.progress_of(repository, files)
    with _translated(repository.name, revision):
        path = hub.download(repository, files)[0]
    hub.note_revision(repository, revision)
    return path


@contextmanager
def gguf_header(name: str, revision: str, tag: str) -> Iterator[GgufFile | None]:
    """The header of the GGUF file that `fetch` would fetch; None if it would fetch safetensors.

    Its files are there while the context is open. Offline the cached file is read. Raises as
    `fetch` does.
    """
    hub = _Hub(name, lambda what, done, total: None)
    with _translated(name, revision):
        repository = hub.find(revision)
        if repository is None:
            cached = hub.cached_gguf(revision, tag)
            yield None if cached is None else read_gguf(cached)
        elif not _is_gguf(repository, tag):
            yield None
        else:
            with hub.headers(repository, select_gguf(list(repository.sizes), tag, name)) as header:
                yield header


def config_of(name: str, revision: str) -> dict[str, Any]:
    """The config.json alone, for planning; the cached one offline, whatever else is there. Raises
    as `fetch` does."""
    hub = _Hub(name, lambda what, done, total: None)
    with _translated(name, revision):
        repository = hub.find(revision)
        if repository is not None:
            _check_sizes(repository)
        directory = (
            hub.cached(revision, whole=False)
            if repository is None
            else hub.config(repository, revision)
        )
    return read_config(directory)


class _Hub:
    def __init__(self, name: str, progress: Progress) -> None:
        try:
            import huggingface_hub
        except ImportError:
            raise FailedPreconditionError(
                _NO_EXTRA, field="model", reason="MISSING_EXTRA"
            ) from None
        # It warns about retries and missing tokens on stderr, among the lines of our own progress.
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        self._name = name
        self._library = huggingface_hub
        self._api: HfApi = huggingface_hub.HfApi(library_name="edgeshard")
        self._tally = _Tally(progress)

    def find(self, revision: str) -> Repository | None:
        """The model at the Hub; None where it cannot be reached."""
        from httpx2 import ConnectError, TimeoutException
        from huggingface_hub.errors import OfflineModeIsEnabled

        try:
            info = self._api.model_info(self._name, revision=revision or None, files_metadata=True)
        except (OfflineModeIsEnabled, ConnectError, TimeoutException):
            return None
        # Large GGUF files lie in folders of the repository; everything else of a model is at its
        # top.
        siblings = [
            file
            for file in info.siblings or ()
            if "/" not in file.rfilename or _is_nested(file.rfilename)
        ]
        return Repository(
            self._name,
            info.sha or "",
            {file.rfilename: file.size or 0 for file in siblings},
            {file.rfilename: file.lfs.sha256 for file in siblings if file.lfs is not None},
        )

    def cached(self, revision: str, whole: bool = True) -> Path:
        """The snapshot of the last download. Raises UnavailableError unless its config.json is
        there, and all of it where it must be `whole`."""
        config = self._library.try_to_load_from_cache(
            self._name, _CONFIG, revision=revision or None
        )
        directory = Path(config).parent if isinstance(config, str) else None
        if directory is None or (whole and not _is_complete(directory)):
            raise UnavailableError(
                (
                    f"the Hub cannot be reached and {self._name} is not {'wholly ' * whole}in its "
                    "cache: go "
                    "online (HF_ENDPOINT names another Hub, HF_HUB_OFFLINE=1 forbids requests), or "
                    "give a "
                    "directory"
                ),
                field="model",
            )
        return directory

    def config(self, repository: Repository, revision: str) -> Path:
        """The snapshot's directory with its config.json; the cache notes the revision's commit."""
        directory = self._downloaded(_CONFIG, revision or "main").parent
        if directory.name != repository.commit:
            raise UnavailableError(
                f"{self._name} changed while it was downloaded: try again", field="model"
            )
        return directory

    def cached_gguf(self, revision: str, tag: str) -> Path | None:
        """The GGUF file of the last download, the first of its parts; None unless all of them are
        in the cache."""
        directory = self._snapshot(revision)
        files = sorted(
            str(path.relative_to(directory)) for path in directory.rglob("*.gguf") if path.is_file()
        )
        if not files or (not tag and _is_complete(directory)):
            return None
        return directory / select_gguf(files, tag, f"{self._name} in the Hub's cache")[0]

    def _snapshot(self, revision: str) -> Path:
        """The directory of a revision in the cache, whether it exists or not."""
        folder = _blobs(self._name).parent
        reference = folder / "refs" / (revision or "main")
        commit = reference.read_text().strip() if reference.is_file() else revision or "none"
        return folder / "snapshots" / commit

    def note_revision(self, repository: Repository, revision: str) -> None:
        """Write the commit of a revision's name into the cache, as a download by that name does."""
        if revision == repository.commit:
            return
        reference = _blobs(self._name).parent / "refs" / (revision or "main")
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(repository.commit)

    def headers(
        self, repository: Repository, files: Sequence[str]
    ) -> AbstractContextManager[GgufFile]:
        """The header of a GGUF model, as `remote_header` reads it."""
        sizes = {file: repository.sizes[file] for file in files}
        return remote_header(self._library, self._name, repository.commit, sizes)

    def progress_of(self, repository: Repository, files: Sequence[str]) -> None:
        """Tell the progress of these files from now on."""
        self._tally.done, self._tally.total = 0, sum(repository.sizes[file] for file in files)

    def download(self, repository: Repository, files: Sequence[str]) -> list[Path]:
        """The paths of these files in the snapshot, each with the sha256 that the Hub names.

        Raises ResourceExhaustedError before the first byte if the cache's disk has no room for
        those that are missing.
        """
        missing = [file for file in files if self.cached_file(repository, file) is None]
        begun = sum(path.stat().st_size for path in _blobs(self._name).glob("*.incomplete"))
        needed = sum(repository.sizes[file] for file in missing) - begun
        check_room(_blobs(self._name), self._name, needed, remedy=_MOVE_CACHE)
        with ThreadPoolExecutor(_PARALLEL) as pool:
            pending = [pool.submit(self._file, repository, file) for file in files]
            try:
                return [one.result() for one in pending]
            except BaseException:
                self._tally.stopped = True
                raise

    def cached_file(self, repository: Repository, file: str) -> Path | None:
        path = self._library.try_to_load_from_cache(self._name, file, revision=repository.commit)
        return Path(path) if isinstance(path, str) else None

    def _file(self, repository: Repository, file: str) -> Path:
        cached_path = self.cached_file(repository, file)
        if cached_path is not None:
            self._tally.add(repository.sizes[file])
            return cached_path
        path = self._downloaded(file, repository.commit)
        expected = repository.sha256.get(file)
        if expected is not None and sha256_of(path) != expected:
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise DataLossError(
                (
                    f"the sha256 of {file} of {self._name} differs from the Hub's; the file was "
                    "removed: try "
                    "again, or contact the operator of the Hub that HF_ENDPOINT names"
                ),
                field=file,
                reason="WRONG_SHA256",
            )
        return path

    def _downloaded(self, file: str, revision: str) -> Path:
        options: dict[str, Any] = {"tqdm_class": self._tally.bars(), "library_name": "edgeshard"}
        return Path(self._library.hf_hub_download(self._name, file, revision=revision, **options))


def _is_nested(file: str) -> bool:
    """Whether a file of a repository's folder is one of a GGUF model, at a path that stays in the
    snapshot."""
    return file.endswith(".gguf") and not file.startswith("/") and ".." not in file.split("/")


def _blobs(name: str) -> Path:
    """The folder of a model's files in the cache of huggingface_hub."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "blobs"


class _Tally:
    """The bytes of several downloads at once."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self.done = self.total = 0
        self.stopped = False
        """Whether the download of another file failed."""

    def add(self, count: float) -> None:
        """Count bytes that arrived. Raises UnavailableError once `stopped`."""
        with self._lock:
            self.done += int(count)
            done = self.done
        if self.stopped:
            raise UnavailableError("another file could not be downloaded", field="model")
        if self.total:
            self._progress(DOWNLOADING, min(done, self.total), self.total)

    def bars(self) -> type[Any]:
        """The class of a file's progress bar, as huggingface_hub wants one."""
        tally = self

        class Bar:
            def __init__(self, *args: object, initial: int = 0, **options: object) -> None:
                self.update(initial)

            def __enter__(self) -> Bar:
                return self

            def __exit__(self, *error: object) -> None:
                pass

            def update(self, count: float | None = 1) -> None:
                tally.add(count or 0)

        return Bar


def _check_weights(repository: Repository) -> None:
    if _SINGLE in repository.sizes or _INDEX in repository.sizes:
        return
    pickled = sorted(file for file in repository.sizes if file.endswith(_PICKLED))
    if pickled:
        raise UnsupportedModelError(
            f"{repository.name} has its weights as {pickled[0]} only, a format that can run code "
            "when it is read; take a "
            "revision with safetensors (many repositories have one at @refs/pr/1), or convert it",
            field="model",
            reason="PICKLED_WEIGHTS",
        )
    raise NotFoundError(f"{repository.name} has neither {_SINGLE} nor {_INDEX}", field="model")


def _ranks(hub: _Hub, repository: Repository) -> list[str]:
    """The file of tiktoken's, where it is the model's only tokenizer. One that cannot be read is
    refused now."""
    name = None if TOKENIZER in repository.sizes else ranks_file(repository.sizes)
    if name is None:
        return []
    settings: dict[str, Any] = {}
    if TOKENIZER_SETTINGS in repository.sizes:
        data = hub.download(repository, [TOKENIZER_SETTINGS])[0].read_bytes()
        settings = parse_json_object(decode_text(data, TOKENIZER_SETTINGS), TOKENIZER_SETTINGS)
    check_kind(name, settings)
    if repository.sizes[name] > RANKS_LIMIT_BYTES:
        raise InvalidArgumentError(f"{name} is too large", field=name, reason="FILE_TOO_LARGE")
    return [name]


def _check_sizes(repository: Repository) -> None:
    """Refuse files that would not be read, before they are fetched: anybody can make a
    repository."""
    limits = {
        _CONFIG: CONFIG_LIMIT_BYTES,
        _INDEX: HEADER_LIMIT_BYTES,
        **dict.fromkeys(OLDER_FILES, LIMIT_BYTES),
    }
    for file in (*SMALL_FILES, *limits):
        size = repository.sizes.get(file, 0)
        if size > limits.get(file, size):
            raise InvalidArgumentError(
                f"{file} has {size} bytes, too many", field=file, reason="FILE_TOO_LARGE"
            )
        check_file_size(file, size)


def _check_config(directory: Path) -> None:
    """Refuse a model that is not run, before its weights are fetched."""
    config = read_config(directory)
    checked_quantisation(config)
    parse_config(without_quantisation(config))


def _is_complete(directory: Path) -> bool:
    """Whether all weights are there."""
    if (directory / _SINGLE).is_file():
        return True
    if not (directory / _INDEX).is_file():
        return False
    named = _index_of(directory).get("weight_map")
    return isinstance(named, dict) and all(
        (directory / str(shard)).is_file() for shard in named.values()
    )


def _index_of(directory: Path) -> dict[str, Any]:
    with (directory / _INDEX).open("rb") as file:
        data = file.read(HEADER_LIMIT_BYTES + 1)
    if len(data) > HEADER_LIMIT_BYTES:
        raise InvalidArgumentError(f"{_INDEX} is too large", field=_INDEX, reason="FILE_TOO_LARGE")
    return parse_json_object(decode_text(data, _INDEX), _INDEX)


def _shards(directory: Path, repository: Repository) -> list[str]:
    """The files of the weights, sorted. Raises InvalidArgumentError for names of files that the
    model does not have."""
    named = _index_of(directory).get("weight_map")
    places = (
        named
        if isinstance(named, dict) and all(isinstance(file, str) for file in named.values())
        else {}
    )
    check_layout(places.keys())
    needed = needed_files(places, without_quantisation(read_config(directory)))
    shards = sorted(
        file for file in set(places.values()) if file in repository.sizes or file in needed
    )
    missing = [
        shard
        for shard in shards
        if shard not in repository.sizes or not shard.endswith(".safetensors")
    ]
    if missing or not shards:
        raise InvalidArgumentError(
            f"{_INDEX} of {repository.name} names files that it does not have: "
            f"{', '.join(missing[:3])[:200]}",
            field="weight_map",
            reason="MALFORMED_CHECKPOINT",
        )
    return shards


@contextmanager
def _translated(name: str, revision: str) -> Iterator[None]:
    """Turn the errors of huggingface_hub into typed ones with advice."""
    from huggingface_hub import errors

    try:
        yield
    except EdgeShardError:
        raise
    except (errors.HfHubHTTPError, errors.EntryNotFoundError, OSError, ValueError) as error:
        raise _typed(error, name, revision) from None


def _typed(error: Exception, name: str, revision: str) -> EdgeShardError:
    from huggingface_hub import constants, errors

    kind: type[EdgeShardError] = UnavailableError
    hub, reason = constants.ENDPOINT, ""
    match error:
        case errors.GatedRepoError():
            kind, reason = DeniedError, "GATED_REPOSITORY"
            what = (
                f"{name} is gated: accept its terms at {hub}/{name}, then give a token of that "
                "account in HF_TOKEN (or "
                "log in with `hf auth login`)"
            )
        case errors.RevisionNotFoundError():
            kind = NotFoundError
            what = f"{name} has no revision {revision[:80]}; {hub}/{name}/commits/main shows them"
        case errors.RepositoryNotFoundError():
            kind = NotFoundError
            what = (
                f"{name} is not at {hub}: check its name; a private one needs a token in HF_TOKEN"
            )
        case errors.LocalEntryNotFoundError():
            what = (
                f"the connection to the Hub at {hub} ended before all of {name} arrived; complete "
                "files are "
                "kept, try again"
            )
        case errors.EntryNotFoundError():
            kind, what = NotFoundError, f"{name} lacks a file that it lists: {_short(error)}"
        case errors.HfHubHTTPError():
            what = f"the Hub refused {name}: {_short(error)}; try again later"
        case errors.HFValidationError():
            kind, what = InvalidArgumentError, f"{name} is not a model name: {_short(error)}"
        case OSError(errno=errno.ENOSPC):
            kind, reason = ResourceExhaustedError, "DISK_FULL"
            free = free_bytes(Path(constants.HF_HUB_CACHE))
            what = (
                f"{name} has no room on the disk of the Hub's cache, where {free} bytes are "
                f"free; {_MOVE_CACHE}"
            )
        case _:
            what = (
                f"{name} could not be downloaded: {_short(error)}; whole files are kept, try again"
            )
    return kind(what, field="model", reason=reason)


def _short(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
