"""Linear layers for `bench.kernels`: the matrices of a decoder block, in schemes and libraries that
take turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from edgeshard_agent.ops.linear import PackedLinear
from edgeshard_agent.ops.quantize import Scheme
from torch.nn.functional import linear

from bench.kernel_libraries import TORCH, Library, Turns, measure
from bench.sizes import sized

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = sized((1024, 16, 8, 64, 2816), (128, 4, 2, 64, 256))
SHAPES = (
    ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    (HIDDEN, HIDDEN),
    (2 * INNER, HIDDEN),
    (HIDDEN, INNER),
)
COPIES = sized(16, 1)
SCHEMES = (Scheme.BFLOAT16, Scheme.INT8, Scheme.INT4, Scheme.INT2)


@dataclass(frozen=True, slots=True)
class LinearRow:
    """One pass over all matrices. Rates and shares are of the median turn; `best_s` is the fastest
    one.

    `library` is a path, or "" for the checkout's own. The fraction of the read rate is set for one
    row, the fraction of the FMA rate for more rows. The other is None; `limit` is that rate, the
    median of those in the same rounds.
    """

    op: str
    scheme: str
    rows: int
    library: str
    compiler: str
    kernels: str
    median_s: float
    best_s: float
    weights_gb_per_s: float
    gflop_per_s: float
    ratio_to_torch: float | None
    share_of_read: float | None
    share_of_fma: float | None
    best_share: float | None
    limit: float | None


class Matrices:
    """Copies of a block's matrices, in bfloat16 and packed by every scheme."""

    def __init__(self, schemes: Sequence[Scheme], copies: int) -> None:
        self._generator = torch.Generator().manual_seed(0)
        shapes = SHAPES * copies
        self.plain = [
            (torch.randn(shape, generator=self._generator) * 0.05).bfloat16() for shape in shapes
        ]
        self.packed = {
            scheme: [PackedLinear.pack(weight, scheme) for weight in self.plain]
            for scheme in schemes
        }
        self.multiplications = sum(weight.numel() for weight in self.plain)

    def layers(self, scheme: Scheme, library: Library) -> list[PackedLinear]:
        """The layers of a scheme that call this library; their weights are shared."""
        layers = []
        with library.in_use():
            for layer in self.packed[scheme]:
                form = layer.form
                assert form is not None
                layers.append(PackedLinear.adopt(form, layer.packed_memory, None))
        return layers

    def inputs(self, rows: int) -> dict[int, torch.Tensor]:
        """Rows of every width that a matrix takes."""
        return {
            width: torch.randn(rows, width, generator=self._generator).bfloat16()
            for width in (HIDDEN, INNER)
        }


def linear_rows(
    matrices: Matrices,
    libraries: Sequence[Library],
    limits_by: Library,
    row_counts: Sequence[int],
    rounds: int,
) -> list[LinearRow]:
    """Measure every scheme and library with each number of rows; rows of torch are included if it
    takes part."""
    layers = {
        (scheme, library.name): matrices.layers(scheme, library)
        for scheme in matrices.packed
        for library in libraries
    }
    results = []
    for rows in row_counts:
        inputs = matrices.inputs(rows)
        contenders: dict[str, Callable[[], object]] = {TORCH: _torch_pass(matrices.plain, inputs)}
        for (scheme, name), own in layers.items():
            contenders[f"{scheme} {name}"] = _pass(own, inputs)
        turns = measure(
            contenders, rounds if rows <= 64 else max(min(5, rounds), rounds // 3), limits_by
        )
        results.append(_torch_row(matrices, rows, turns))
        for scheme in matrices.packed:
            for library in libraries:
                results.append(_row(matrices, scheme, library, rows, turns))
    return results


def _torch_pass(
    weights: Sequence[torch.Tensor], inputs: Mapping[int, torch.Tensor]
) -> Callable[[], None]:
    def run() -> None:
        for weight in weights:
            linear(inputs[weight.shape[1]], weight)

    return run


def _pass(layers: Sequence[PackedLinear], inputs: Mapping[int, torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        for layer in layers:
            layer(inputs[layer.in_features])

    return run


def _torch_row(matrices: Matrices, rows: int, turns: Turns) -> LinearRow:
    median_s = turns.median_s(TORCH)
    return LinearRow(
        op="linear",
        scheme="torch bf16",
        rows=rows,
        library="",
        compiler="",
        kernels="",
        median_s=median_s,
        best_s=turns.best_s(TORCH),
        weights_gb_per_s=2 * matrices.multiplications / median_s / 1e9,
        gflop_per_s=2 * matrices.multiplications * rows / median_s / 1e9,
        ratio_to_torch=None,
        share_of_read=None,
        share_of_fma=None,
        best_share=None,
        limit=None,
    )


def _row(
    matrices: Matrices, scheme: Scheme, library: Library, rows: int, turns: Turns
) -> LinearRow:
    name = f"{scheme} {library.name}"
    median_s = turns.median_s(name)
    best_s = turns.best_s(name)
    weights_gb = sum(layer.nbytes for layer in matrices.packed[scheme]) / 1e9
    gflop = 2 * matrices.multiplications * rows / 1e9
    share_of_read = weights_gb / median_s / turns.limits.read_gb_per_s if rows == 1 else None
    share_of_fma = gflop / median_s / turns.limits.fma_gflop_per_s if rows > 1 else None
    share = share_of_read if share_of_fma is None else share_of_fma
    assert share is not None
    return LinearRow(
        op="linear",
        scheme=scheme.value,
        rows=rows,
        library=library.name,
        compiler=library.compiler,
        kernels=library.kernels,
        median_s=median_s,
        best_s=best_s,
        weights_gb_per_s=weights_gb / median_s,
        gflop_per_s=gflop / median_s,
        ratio_to_torch=turns.median_s(TORCH) / median_s,
        share_of_read=share_of_read,
        share_of_fma=share_of_fma,
        best_share=share * median_s / best_s,
        limit=turns.limits.read_gb_per_s if rows == 1 else turns.limits.fma_gflop_per_s,
    )
