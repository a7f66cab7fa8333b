"""The points at which a node's layers are measured, and the repeats of each, by the effort."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from edgeshard.domain.nodes.profile import Effort


@dataclass(frozen=True, slots=True)
class Repeats:
    """The repeats of one figure, in each of `passes` over all figures.

    Because of the passes, other work on the node disturbs some repeats of every figure, which a
    median ignores, and not all repeats of one. A pass takes `least` to `most` repeats, no more than
    `least` once `limit_s` seconds are over.
    """

    passes: int = 3
    least: int = 2
    most: int = 20
    limit_s: float = 0.7


@dataclass(frozen=True, slots=True)
class Grid:
    """The points that are measured. A point beyond the model's context is left out."""

    prefill_tokens: tuple[int, ...] = (1, 16, 64, 256, 512)
    prefill_contexts: tuple[int, ...] = (0, 64, 512)
    decode_batches: tuple[int, ...] = (1, 2, 4, 8)
    decode_contexts: tuple[int, ...] = (64, 512)
    repeats: Repeats = Repeats()
    caches: int = 4
    """A single layer timed repeatedly sits in a cache; copies worth more than this many caches do
    not."""
    effort: Effort = Effort.FULL
    deep: tuple[int, int] | None = None
    """Tokens and context of one prefill far into a prompt. With little context the time of
    attention is lost in the products' time, and slices of long prompts chosen from such figures are
    unreliable."""
    deep_decode: tuple[int, int] | None = None
    """Sequences and context of one decode far after a prompt, for the same reason. It takes no more
    KV memory than the other points."""

    def within(self, max_context: int) -> Grid:
        """Without the points a model of this context cannot run; at least one of each remains."""
        return replace(
            self,
            prefill_tokens=tuple(n for n in self.prefill_tokens if n <= max_context),
            prefill_contexts=tuple(n for n in self.prefill_contexts if n < max_context),
            decode_contexts=tuple(n for n in self.decode_contexts if n < max_context)
            or (max_context - 1,),
        )

    def prefill_points(self, max_context: int) -> list[tuple[int, int]]:
        points = [
            (n, c)
            for n in self.prefill_tokens
            for c in self.prefill_contexts
            if n + c <= max_context
        ]
        if self.deep is not None:
            tokens, context = self.deep[0], min(self.deep[1], max_context - self.deep[0])
            if context > max(self.prefill_contexts):
                points.append((tokens, context))
        return points

    def decode_points(self, max_context: int) -> list[tuple[int, int]]:
        points = [(n, c) for n in self.decode_batches for c in self.decode_contexts]
        if self.deep_decode is not None:
            sequences, context = self.deep_decode[0], min(self.deep_decode[1], max_context - 1)
            if context > max(self.decode_contexts):
                points.append((sequences, context))
        return points


FULL_GRID = Grid(deep=(256, 2048), deep_decode=(2, 2048))
QUICK_GRID = Grid(
    (1, 16, 128),
    (0, 128),
    (1, 2, 8),
    (64, 256),
    Repeats(2, 2, 8, 0.15),
    effort=Effort.QUICK,
    deep=(128, 2048),
    deep_decode=(1, 2048),
)
# As few as distinguish one row, many rows, and a pair of a query and a key.
FIRST_GRID = Grid(
    (1, 16, 128),
    (0,),
    (1, 2, 8),
    (64,),
    Repeats(1, 1, 8, 0.1),
    caches=1,
    effort=Effort.FIRST,
    deep=(16, 2048),
    deep_decode=(1, 2048),
)
GRIDS: Mapping[Effort, Grid] = {grid.effort: grid for grid in (FIRST_GRID, QUICK_GRID, FULL_GRID)}
