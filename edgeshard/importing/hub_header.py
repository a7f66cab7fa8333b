"""The header of a GGUF model of the Hub, read without its weights: for plans, and to refuse a family early."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from edgeshard.domain.errors import DataLossError, UnavailableError
from edgeshard.importing.gguf_file import GgufFile, parse_gguf, read_gguf
from edgeshard.storage.checkpoint import HEADER_LIMIT_BYTES

_FIRST_BYTES = 1 << 20
_GROWTH = 4
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""The tensors of a GGUF file that its config.json is made of."""
_FACTORS_LIMIT_BYTES = 4096
_PARTIAL_CONTENT = 206


@contextmanager
def remote_header(library: Any, name: str, commit: str, sizes: Mapping[str, int]) -> Iterator[GgufFile]:
    """The header of a model in files of a repository, by name with their bytes; the first one is named first.

    `library` is huggingface_hub. The files are sparse, and are there while the context is open: headers have bytes, and
    of the tensors only those in `_FACTORS`. Raises as `read_gguf` and huggingface_hub do, and UnavailableError for a
    Hub that sends no ranges.
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
    """The first bytes of a file of `size` bytes, all of its header among them. `fetch` takes a place and a number."""
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
    with library.utils.get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
        library.utils.hf_raise_for_status(response)
        if begin and response.status_code != _PARTIAL_CONTENT:
            raise UnavailableError("the Hub sends no ranges; download the file and add it by path", field="model")
        for piece in response.iter_bytes():
            data += piece
            if len(data) >= count:
                break
    return bytes(data[:count])
