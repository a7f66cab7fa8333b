"""Whether single neurons on the disk can pay (LLM in a flash, PowerInfer): on models that people run, and on this disk.

    python -m bench.neurons DIR [--bytes 20000]

A neuron is a row of up (and gate) and a column of down, bundled into one piece of a file. Reading only those that a
token needs pays if few are needed, and if pieces as small as a neuron are read nearly as fast as whole layers. Both
are measured here.

Needed: the demo model is a llama, whose MLP is gated by SiLU as in nearly all models of today. With each token every
MLP keeps only the largest of its inner numbers, chosen with full knowledge of them: no predictor can be better. Bits
per byte of the validation text say what that costs. How many inner numbers are exactly zero is counted too, which is
what models gated by ReLU live on.

The disk: reads past the page cache of pieces of 4 to 64 KiB at random places by many threads, beside whole chunks.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from edgeshard_agent.model.blocks import GatedMlp

from bench.quantisation import VALIDATION, bits_per_byte, demo_stage
from bench.sizes import sized

PIECES = (4 << 10, 8 << 10, 16 << 10, 64 << 10, 2 << 20)
"""Bytes of a bundled neuron: 8 KiB are a hidden width of 2,048 in bfloat16, up and down."""
KEPT = sized((1.0, 0.75, 0.5, 0.35, 0.25, 0.15), (1.0, 0.5))
_FILE_BYTES = sized(1 << 30, 4 << 20)
_READ_BYTES = sized(128 << 20, 1 << 20)


class Kept:
    """Stands for an MLP that computes only its largest inner numbers; counts those that are zero."""

    zeros = numbers = 0

    def __init__(self, mlp: GatedMlp, share: float) -> None:
        self._mlp, self._share = mlp, share

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._mlp.gate_up(x).chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
        Kept.zeros += int((inner == 0).sum())
        Kept.numbers += inner.numel()
        count = max(1, round(self._share * inner.shape[-1]))
        least = inner.abs().topk(count, dim=-1).values[:, -1:]
        result: torch.Tensor = self._mlp.down(torch.where(inner.abs() >= least, inner, torch.zeros_like(inner)))
        return result


def quality(text: str, share: float) -> float:
    """Bits per byte where each token's MLPs keep this share of their inner numbers."""
    stage = demo_stage("float32")
    for block in stage.weights.modules.layers.values():  # type: ignore[operator]
        mlp: GatedMlp = block.mlp
        kept = Kept(mlp, share)
        mlp.forward = kept.__call__  # type: ignore[method-assign]
        block.native = lambda: None  # else the MLP runs in the native call
    return bits_per_byte(stage, text)


def rate(path: Path, piece: int, threads: int) -> float:
    """Bytes a second of random reads of this size past the page cache."""
    chance, places = random.Random(piece), []
    for _ in range(max(32, _READ_BYTES // piece // (16 if piece < 1 << 20 else 1))):
        places.append(chance.randrange(_FILE_BYTES // piece) * piece)
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(mine: list[int]) -> None:
        memory = mmap.mmap(-1, max(piece, mmap.PAGESIZE))
        view = memoryview(memory)[:piece]
        for place in mine:
            os.preadv(file, [view], place)

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, [places[index::threads] for index in range(threads)]))
    took = time.perf_counter() - began
    os.close(file)
    return len(places) * piece / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--bytes", type=int, default=20_000, help="of the validation text")
    options = parser.parse_args()
    text = VALIDATION.read_text()[: options.bytes]
    whole = quality(text, 1.0)
    for share in KEPT:
        found = quality(text, share) if share < 1.0 else whole
        print(f"{100 * share:3.0f} % of neurons: {found:.4f} bits per byte, {100 * (2 ** (found - whole) - 1):+.1f} %")
    print(f"{Kept.zeros} of {Kept.numbers} inner numbers are zero")
    options.directory.mkdir(parents=True, exist_ok=True)
    path = options.directory / "neurons.bin"
    with path.open("wb") as file:
        for _ in range(_FILE_BYTES >> 20):
            file.write(os.urandom(1 << 20))
        os.fsync(file.fileno())
    for piece in PIECES:
        best = max((rate(path, piece, threads), threads) for threads in (4, 16, 32))
        print(f"pieces of {piece >> 10} KiB: {best[0] / 1e9:.3f} GB/s with {best[1]} threads")
    path.unlink()


if __name__ == "__main__":
    main()
