"""A solver's input: one placement problem at one (batch, micro-batches in flight), as arrays. Pure.

Everything about models, devices and profiles has been turned into seconds and bytes before
(`planning.costs.costs`). Layers are 0..N-1 (decoder blocks); the embedding is glued to the first
stage, final norm and head to the last (or, with `head_on_source`, to the source). Nodes are 0..M-1;
`source` holds layer 0. A missing link is an infinite hop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Instance:
    """One micro-batch's step through a pipeline of N blocks over M nodes."""

    compute_s: Floats
    """[M, N] seconds that node j needs for block i."""
    embed_s: Floats
    """[M] seconds for the embedding, on the first stage."""
    head_s: Floats
    """[M] seconds for norm, LM head and sampling, on the last stage."""
    overhead_s: Floats
    """[M] seconds that a step costs a node whatever its layers."""
    hop_s: Floats
    """[M, M] seconds for which one hop's activations occupy the link k -> j (its serial station),
    without latency."""
    return_s: Floats
    """[M, M] the same for the last stage's answer to the source."""
    latency_s: Floats
    """[M, M] pure delay of the link k -> j; it is part of R, never of a station."""
    layer_bytes: Floats
    """[N] memory of block i on the node that holds it: weights and KV of all m micro-batches."""
    embed_bytes: float
    """Memory of the embedding; a tied embedding is in `head_bytes` too."""
    head_bytes: float
    """Memory of norm and head."""
    tied_bytes: float
    """Memory that is saved when embedding and head are on one node: a tied tensor, room to load the
    second one."""
    stage_bytes: float
    """Memory that a stage takes whatever its layers (workspace, resend buffer)."""
    capacity_bytes: Floats
    """[M] memory that stages on a node may use."""
    max_layers: npt.NDArray[np.int64]
    """[M] most blocks that a node may hold (N when unlimited)."""
    source: int = 0
    asynchronous: bool = True
    """Whether sending overlaps computing: then compute, uplink and downlink are stations of their
    own; otherwise a node's compute and its sends are one station."""
    head_on_source: bool = False
    """Whether the source computes norm and head: then hidden states return, and its station serves
    both."""
    min_nodes: int = 1
    """Least number of stages."""
    max_nodes: int = 1 << 30
    """Most stages."""
    stage_s: Floats | None = None
    """[M, N+1, N+1] seconds of a whole stage on node j with the blocks from n to e; infinite if the
    node cannot hold it.

    It includes the stage's overhead, embedding and head. It exists if a stage's time is no sum over
    blocks, because weights stream from a disk, and replaces the sums and the memory. None
    otherwise."""

    @property
    def others(self) -> list[int]:
        """The nodes but the source."""
        return [node for node in range(self.nodes) if node != self.source]

    @property
    def layers(self) -> int:
        return int(self.compute_s.shape[1])

    @property
    def nodes(self) -> int:
        return int(self.compute_s.shape[0])


STEP_TIMES = ("compute_s", "embed_s", "head_s", "overhead_s", "hop_s", "return_s", "latency_s")
"""The fields that are seconds of a step."""


def with_tokens(prompt: Instance, token: Instance, tokens: float) -> Instance:
    """The seconds of a prompt and `tokens` tokens after it, over one cut, under the memory of
    `token`."""
    names = [*STEP_TIMES, *([] if token.stage_s is None else ["stage_s"])]
    if not tokens:  # a missing link takes for ever, and no tokens over it would be no number
        return replace(token, **{name: getattr(prompt, name) for name in names})
    return replace(
        token, **{name: getattr(prompt, name) + tokens * getattr(token, name) for name in names}
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """A placement: node `nodes[s]` holds blocks [ends[s-1], ends[s]), the last end is N; the source
    is first."""

    nodes: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """R: seconds once around the ring; B: seconds of the busiest station, `bottleneck` its name in
    words.

    `stage_s` and `hop_s` are per stage and per hop (the return is the last hop).
    """

    round_s: float
    bottleneck_s: float
    bottleneck: str
    stage_s: tuple[float, ...]
    hop_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Solution:
    """`value_s` is the minimum that the solver found; `bound_s` a proven lower bound of it (equal
    when exact)."""

    cut: Cut
    score: Score
    value_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        """(value - bound) / value, 0 for an exact solution."""
        return gap_of(self.bound_s, self.value_s)


def gap_of(bound: float, value: float, rounding: float = 0.0) -> float:
    """How much a value is above its bound, as a part of the value; 0 if that is no more than
    rounding."""
    gap = 1.0 - bound / value if value > 0 else 0.0
    return gap if gap > rounding else 0.0
