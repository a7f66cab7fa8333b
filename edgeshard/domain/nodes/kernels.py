"""The native kernels of a node's processor, as a value: which run, and how close their products are
to its limits."""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.domain.ids import Figure

ROW_SHARE, ROWS_SHARE = 0.35, 0.3
"""Shares of the limits below which products are slow: half of what they reach on the processors
that were measured."""


@dataclass(frozen=True, slots=True)
class KernelSpeed:
    """Native kernels and their rates, all of one thread; rates are 0 if the node computes with
    torch's operators.

    `name` is the instruction set of the kernels in use, "" for torch's operators, and `best_name`
    the best set that the processor runs. `compiler` is a name and a version. `row_gb_per_s` is the
    rate at which the product of one row reads bfloat16 weights, and its limit is `read_gb_per_s`;
    `rows_gflop_per_s` is the rate of the product of many rows, and its limit is `fma_gflop_per_s`.
    """

    name: str = ""
    best_name: str = ""
    compiler: str = ""
    read_gb_per_s: Figure = 0.0
    fma_gflop_per_s: Figure = 0.0
    row_gb_per_s: Figure = 0.0
    rows_gflop_per_s: Figure = 0.0

    @property
    def row_share(self) -> float:
        """The rate of one row as a share of the read rate; 0.0 if no limit was measured."""
        return self.row_gb_per_s / self.read_gb_per_s if self.read_gb_per_s else 0.0

    @property
    def rows_share(self) -> float:
        """The rate of many rows as a share of the rate of multiply-adds; 0.0 if no limit was
        measured."""
        return self.rows_gflop_per_s / self.fma_gflop_per_s if self.fma_gflop_per_s else 0.0

    @property
    def lacks_best(self) -> bool:
        """Whether the processor runs a better instruction set than the library has."""
        return bool(self.name) and self.name != self.best_name

    @property
    def is_slow(self) -> bool:
        """Whether products stay far below the limits that were measured."""
        too_slow_row = self.read_gb_per_s > 0.0 and self.row_share < ROW_SHARE
        return too_slow_row or (self.fma_gflop_per_s > 0.0 and self.rows_share < ROWS_SHARE)
