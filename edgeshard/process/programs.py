"""The frame of every installed program: standard streams that may be lost, Ctrl-C, and PYTHONPATH.

Also the imports of a daemon's code: thousands of modules that stay until the process ends.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

_OWN = ("edgeshard", "edgeshard_agent", "edgeshard_coordinator")
_VARIABLE = "PYTHONPATH"


def prefer_installed() -> None:
    """Search the folders of PYTHONPATH last: other software sets it, and old packages there shadow
    installed ones.

    Call it before anything but the standard library and this package is imported. A folder that
    EdgeShard itself is in keeps its place.
    """
    sys.path[:] = installed_first(sys.path, os.environ)


def installed_first(path: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """`path` with the folders of PYTHONPATH after all others, except those that hold a package of
    EdgeShard."""
    folders = environment.get(_VARIABLE, "").split(os.pathsep)
    foreign = {Path(folder).resolve() for folder in folders if folder and not _holds_own(folder)}
    first = [folder for folder in path if Path(folder).resolve() not in foreign]
    last = [folder for folder in path if Path(folder).resolve() in foreign]
    return first + last


def _holds_own(folder: str) -> bool:
    return any((Path(folder) / name / "__init__.py").exists() for name in _OWN)


_INPUT = 0
_OUTPUT = 1
_ERRORS = 2
_SIGNALLED = 128
"""A shell reports this plus the number of the signal that ended a program."""
_CLOSED = "it is closed; send it to a file, or to /dev/null"


class OutputError(Exception):
    """Standard output cannot be written; `number` is the errno. No OSError: those are of a
    command's own files."""

    def __init__(self, error: OSError) -> None:
        why = _CLOSED if error.errno == errno.EBADF else os.strerror(error.errno or 0)
        super().__init__(f"cannot write standard output: {why}")
        self.number = error.errno


class _Output(io.FileIO):
    """Standard output, whose failures have a type of their own."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputError(error) from None


class _Errors(io.FileIO):
    """Standard error, which drops what cannot be written: a lost message ends no work."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(memoryview(data).cast("B"))


@contextmanager
def program() -> Iterator[None]:
    """Run an installed program, whose modules are imported inside the body.

    Folders of PYTHONPATH are searched last. A closed stream is opened on /dev/null, so that no file
    or socket takes its descriptor. Exits 1 with one line on standard error if standard output
    cannot be written, and 141 without a line if its reader has gone. Exits 130 without a line after
    a Ctrl-C that the body does not handle.
    """
    prefer_installed()
    _open_closed()
    # A caller in this process may have put streams of its own in their place.
    if sys.stdout is sys.__stdout__:
        sys.stdout = sys.__stdout__ = _text(_Output(_OUTPUT, "w", closefd=False), sys.stdout)  # type: ignore[misc]
    if sys.stderr is sys.__stderr__:
        sys.stderr = sys.__stderr__ = _text(_Errors(_ERRORS, "w", closefd=False), sys.stderr)  # type: ignore[misc]
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OutputError as error:
        _discard_output()
        if error.number == errno.EPIPE:
            sys.exit(_SIGNALLED + signal.SIGPIPE)
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(_SIGNALLED + signal.SIGINT)


def _open_closed() -> None:
    """Open /dev/null for closed streams. It is open for reading only in place of standard output:
    writes must fail."""
    for descriptor in (_INPUT, _OUTPUT, _ERRORS):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free descriptor is this one.
            os.open(os.devnull, os.O_WRONLY if descriptor == _ERRORS else os.O_RDONLY)


def _text(raw: io.FileIO, stream: TextIO | None) -> io.TextIOWrapper:
    """A text stream over a file, as Python made `stream` (None if it was closed)."""
    buffer = io.BufferedWriter(raw)
    if not isinstance(stream, io.TextIOWrapper):
        return io.TextIOWrapper(
            buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
    stream.flush()
    return io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _discard_output() -> None:
    """Discard output that is still buffered: Python would write it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _OUTPUT)
    os.close(nowhere)


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Stop the garbage collector while the body imports, which saves a tenth, and keep it from what
    was imported."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
