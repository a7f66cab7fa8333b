"""Compiled libraries of kernels that take turns in one process: of several compilers, or of several
sources."""

from __future__ import annotations

import ctypes
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from edgeshard_agent.ops import layouts, native

Contenders = Mapping[str, Callable[[], object]]
TORCH = "torch"
TORCH_S = 10.0
"""Processor seconds after which torch takes no more turns: on AVX2 one of its turns takes longer
than ten of ours."""


class LibraryError(Exception):
    """A library cannot take part; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class Library:
    """A library whose chosen kernels are `kernels`. `name` is its path, or "" for that of this
    checkout."""

    name: str
    loaded: ctypes.CDLL
    kernels: str

    @property
    def label(self) -> str:
        """The name among contenders."""
        return f"library {self.name}"

    @property
    def compiler(self) -> str:
        """The compiler and its version, such as "gcc 12.2.0"."""
        text: bytes = self.loaded.edgeshard_kernel_set()
        return " ".join(text.decode().split()[:2])

    @property
    def measures_limits(self) -> bool:
        """False for a library of sources without the functions."""
        return hasattr(self.loaded, "edgeshard_fma_rate") and hasattr(
            self.loaded, "edgeshard_read_rate"
        )

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Have the operators call this library."""
        with mock.patch.object(native, "library", lambda: self.loaded):
            yield


@dataclass(frozen=True, slots=True)
class Limits:
    """The capacity of one thread: GB/s of a stream from memory, and GFLOP/s of multiply-adds in
    float32."""

    read_gb_per_s: float
    fma_gflop_per_s: float


@dataclass(frozen=True, slots=True)
class Turns:
    """Processor seconds of each turn of each contender, and the machine's limits in the same
    rounds."""

    seconds: Mapping[str, list[float]]
    limits: Limits

    def median_s(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def best_s(self, name: str) -> float:
        return min(self.seconds[name])


def library_of_checkout(kernels: str | None) -> Library:
    """The library that the agent uses. Raises LibraryError if it is missing or lacks these
    kernels."""
    loaded = native.active()
    if loaded is None:
        raise LibraryError("there are no native kernels to measure: run hatch_build.py")
    return _with_kernels("", loaded, kernels)


def open_library(path: Path, kernels: str | None) -> Library:
    """A compiled library, also of older sources if its structs are the same.

    `kernels` is the name of an instruction set, and the default is the best one. Raises
    LibraryError.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A copy: of one file the system loads one library, and the choice of kernels would be
        # shared.
        copy = shutil.copy(path, Path(folder) / "library.so") if path.is_file() else path
        try:
            loaded = ctypes.CDLL(str(copy))
        except OSError as error:
            raise LibraryError(f"{path} does not load: {error}") from error
    for name, (result, arguments) in layouts.SIGNATURES.items():
        if (function := getattr(loaded, name, None)) is not None:
            function.restype, function.argtypes = result, arguments
    if not hasattr(loaded, "edgeshard_linear") or not hasattr(loaded, "edgeshard_kernel_set"):
        raise LibraryError(f"{path} is no library of EdgeShard's kernels")
    loaded.edgeshard_kernel_set.restype = ctypes.c_char_p
    return _with_kernels(str(path), loaded, kernels)


def _with_kernels(name: str, loaded: ctypes.CDLL, kernels: str | None) -> Library:
    loaded.edgeshard_kernel_set.restype = ctypes.c_char_p
    names: list[str] = []
    while (one := loaded.edgeshard_kernels(len(names))) is not None:
        names.append(one.decode())
    chosen = names[0] if kernels is None else kernels
    if chosen not in names:
        owner = name or "the library of this checkout"
        raise LibraryError(
            f"{owner} has no kernels {chosen!r} for this CPU: use one of {', '.join(names)}"
        )
    loaded.edgeshard_use_kernels(names.index(chosen))
    return Library(name, loaded, chosen)


def measure(contenders: Contenders, rounds: int, limits_by: Library) -> Turns:
    """Let the contenders take turns, and measure the limits once in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    read_rates: list[float] = []
    fma_rates: list[float] = []
    with limits_by.in_use():
        for _ in range(rounds):
            for name, run in contenders.items():
                if name == TORCH and sum(seconds[name]) > TORCH_S:
                    continue
                start = time.thread_time()
                run()
                seconds[name].append(time.thread_time() - start)
            read_rates.append(native.read_rate_gb_per_s())
            fma_rates.append(native.fma_rate_gflop_per_s())
    return Turns(seconds, Limits(statistics.median(read_rates), statistics.median(fma_rates)))
