"""Loading rate of a stage from packed files, compared with only reading them past the page cache.

    python -m bench.loading DIR [--rounds 5] [--layers 14] [--fresh-memory]

DIR takes a checkpoint of 2.3 GB and its packed files. In each round both read the same files in
turns, each time with none of them in the page cache (checked by `mincore`). Then the files are
loaded from the page cache, compared with loading the checkpoint from there.

A virtual machine whose host takes unused memory away has it back page by page when it is used, here
at 0.4 GB/s. So as much as a stage needs is taken and given back right before each load;
`--fresh-memory` leaves that out.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from edgeshard_agent.model.weights.weight_loading import Packing
from edgeshard_agent.model.weights.weights import StageWeights
from edgeshard_agent.ops.huge_pages import mapped
from edgeshard_agent.store.direct import CHUNK_BYTES, THREADS, cached_share
from edgeshard_agent.store.packed_units import PackedUnits
from edgeshard_agent.store.unit_sources import UnitSources

from bench.random_llama import CONFIG, write_checkpoint
from bench.safetensors_directory import SafetensorsDirectory
from bench.sizes import sized
from edgeshard.architectures import parse_config
from edgeshard.architectures.units import UnitForm, tensors_of_units
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.models.residency import in_disk_blocks

BIG_CONFIG: dict[str, Any] = {
    **CONFIG,
    "hidden_size": sized(2048, 256),
    "num_hidden_layers": 24,
    "intermediate_size": sized(5632, 512),
    "num_attention_heads": sized(32, 4),
    "num_key_value_heads": sized(8, 2),
}
"""1.15 G parameters in 24 layers: 90 MB a layer in bfloat16."""
MODEL = Digest("b16" + "0" * 61)
"""Stands for the digest of its manifest."""


def sources_in(
    directory: Path, layers: LayerRange, quantisation: Quantisation | None = None
) -> UnitSources:
    """The sources of the units of a stage in bfloat16, whose packed files are in the folder packed
    of `directory`."""
    form = UnitForm(MODEL, DType.BFLOAT16, quantisation, parse_config(BIG_CONFIG))
    sources = UnitSources(
        PackedUnits(directory / "packed"), form, tensors_of_units(BIG_CONFIG, layers, quantisation)
    )
    sources.choose()
    return sources


def load(
    directory: Path, layers: LayerRange, *, packed: bool = True
) -> tuple[float, float, UnitSources]:
    """Seconds, seconds of the processor, and the source of the weights: packed files, or the
    checkpoint."""
    gc.collect()
    began, used = time.perf_counter(), time.process_time()
    sources = sources_in(directory, layers)
    source = SafetensorsDirectory(directory / "checkpoint")
    packing = Packing(sources) if packed else None
    StageWeights.load(
        source, BIG_CONFIG, layers, dtype=DType.BFLOAT16, device="cpu", packing=packing
    )
    return time.perf_counter() - began, time.process_time() - used, sources


def read_direct(files: list[Path]) -> float:
    """Seconds to read them with O_DIRECT into memory that is there, by as many threads and in
    chunks as large."""
    memory = mapped(
        (in_disk_blocks(max(file.stat().st_size for file in files)),), torch.uint8
    ).fill_(0)
    view, began = memory.numpy().data, time.perf_counter()
    for path in files:
        file, size = os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size
        places, lock = iter(range(0, size, CHUNK_BYTES)), threading.Lock()

        def work(file: int = file, places=places, lock=lock) -> None:  # type: ignore[no-untyped-def]
            while True:
                with lock:
                    place = next(places, None)
                if place is None:
                    return
                os.preadv(file, [view[place : place + CHUNK_BYTES]], place)

        threads = [threading.Thread(target=work) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.close(file)
    return time.perf_counter() - began


def warm(size: int) -> None:
    """Make the system own this much unused memory."""
    mapped((size * 5 // 4,), torch.uint8).fill_(0)


def forget(files: list[Path]) -> None:
    """Take files out of the page cache."""
    for path in files:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
    assert all(cached_share(path) == 0.0 for path in files)


def remember(files: list[Path]) -> None:
    for path in files:
        path.read_bytes()
    assert all(cached_share(path) > 0.9 for path in files), [cached_share(path) for path in files]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--fresh-memory", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    checkpoint, layers = options.directory / "checkpoint", LayerRange(0, options.layers)
    write_checkpoint(checkpoint, BIG_CONFIG)
    everything = LayerRange(0, BIG_CONFIG["num_hidden_layers"])
    began = time.perf_counter()
    units = load(options.directory, everything)[2].kept
    print(f"packed {len(units)} units, or found them: {time.perf_counter() - began:.1f} s")
    sources = load(options.directory, layers)[2]
    mine = [file.path for unit in sources.kept if (file := sources.find(unit)) is not None]
    others = [path for path in (options.directory / "packed").iterdir() if path not in mine]
    size = sum(path.stat().st_size for path in mine)
    print(f"stage of {layers}: {len(mine)} files, {size / 1e9:.2f} GB; {os.cpu_count()} cores")
    ratios = []
    for number in range(options.rounds):
        took: dict[str, float] = {}
        for what in ("read", "load") if number % 2 else ("load", "read"):
            forget([*mine, *others])
            if what == "read":
                took[what] = read_direct(mine)
            else:
                if not options.fresh_memory:
                    warm(size)
                took[what], used = load(options.directory, layers)[:2]
                touched = sum(cached_share(path) > 0 for path in others)
        ratios.append(took["read"] / took["load"])
        print(
            f"  read {size / took['read'] / 1e9:.2f} GB/s, loaded {size / took['load'] / 1e9:.2f} "
            "GB/s "
            f"({used:.2f} s of processor): {ratios[-1]:.2f}; {touched} of {len(others)} other "
            "files touched"
        )
    print(f"cold load, median of {len(ratios)}: {statistics.median(ratios):.2f} of the disk's rate")
    gains = []
    for _ in range(options.rounds):
        remember([*mine, *(path for path in checkpoint.iterdir() if path.suffix == ".safetensors")])
        seconds = []
        for packed in (True, False):
            if not options.fresh_memory:
                warm(2 * size)
            seconds.append(load(options.directory, layers, packed=packed)[:2])
        (again, used), (today, today_used) = seconds
        gains.append(today / again)
        print(
            f"  from the page cache: packed {again:.2f} s ({used:.2f}), checkpoint {today:.2f} s "
            f"({today_used:.2f})"
        )
    print(f"second load, median of {len(gains)}: {statistics.median(gains):.1f} times as fast")


if __name__ == "__main__":
    main()
