"""Times of a stage that are read from a table."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from edgeshard.domain.errors import invalid
from edgeshard.planning.inputs.table_fields import check_number


@dataclass(frozen=True, slots=True)
class TimeTable:
    """Measured seconds over two rising axes (tokens or batch; context), read between points on a
    straight line.

    Beyond an axis's end the line of the last two points continues; nothing is below 0. An axis of
    one point is constant.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def check(self) -> None:
        """Raise InvalidArgumentError naming the field at fault."""
        for name in ("rows", "columns"):
            axis = getattr(self, name)
            if not axis or any(left >= right for left, right in pairwise(axis)):
                raise invalid(name, f"{axis} must rise and hold at least one point")
        if len(self.seconds) != len(self.rows) or any(
            len(row) != len(self.columns) for row in self.seconds
        ):
            raise invalid(
                "seconds", f"must be {len(self.rows)} rows of {len(self.columns)} numbers"
            )
        for row, values in enumerate(self.seconds):
            for column, value in enumerate(values):
                check_number(value, f"seconds[{row}][{column}]", 0.0)

    def __call__(self, row: int, column: int) -> float:
        top, down = _place(self.rows, row)
        left, right = _place(self.columns, column)
        upper, lower = self.seconds[top], self.seconds[min(top + 1, len(self.rows) - 1)]
        last = min(left + 1, len(self.columns) - 1)
        first = upper[left] * (1 - right) + upper[last] * right
        second = lower[left] * (1 - right) + lower[last] * right
        return max(0.0, first * (1 - down) + second * down)


def _place(axis: Sequence[int], value: int) -> tuple[int, float]:
    """Index of the point before `value`, and how far `value` is towards the next one."""
    if len(axis) == 1:
        return 0, 0.0
    index = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return index, (value - axis[index]) / (axis[index + 1] - axis[index])
