"""FlexGen's theorem: the zig-zag block schedule reads at most twice the weights that any schedule
must read."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.flexgen_paper.machine import T4, TierModel, TierWorkload
from bench.flexgen_paper.offloading import FRACTIONS, Runtime, tier_costs

MODEL = TierModel("small", 2, 256, 1024, 2)
FROM_DISK = np.array(
    [float(name in ("weights_disk", "cache_gpu", "hidden_gpu")) for name in FRACTIONS]
)
"""Weights are read from the disk for each use; nothing else is on it."""


def zigzag_reads(sequences: int, tokens: int, layers: int, block: int) -> int:
    """Layers read: once for each token of each block."""
    return -(-sequences // block) * tokens * layers


def least_reads(sequences: int, tokens: int, layers: int, room: int) -> int:
    """The fewest reads of a layer by which all sequences compute all tokens, by Dijkstra's search.

    A sequence has as many units of cache as tokens computed or begun, from its first token until
    its last, and all together have at most `room` of them. One layer is in memory at a time and
    serves all sequences that wait for it.
    """
    last = tokens * layers

    def held(places: tuple[int, ...]) -> int:
        return sum(-(-place // layers) for place in places if 0 < place < last)

    start = (0,) * sequences, -1
    known = {start: 0}
    queue = [(0, start)]
    while queue:
        reads, state = heapq.heappop(queue)
        places, loaded = state
        if min(places) == last:
            return reads
        if reads > known[state]:
            continue
        following = [(reads + 1, (places, layer)) for layer in range(layers) if layer != loaded]
        for index, place in enumerate(places):
            if place < last and place % layers == loaded:
                moved = tuple(sorted((*places[:index], place + 1, *places[index + 1 :])))
                # The last step needs the memory of its token, too.
                peak = held(moved) + (tokens if place + 1 == last else 0)
                if peak <= room:
                    following.append((reads, (moved, loaded)))
        for cost, found in following:
            if cost < known.get(found, cost + 1):
                known[found] = cost
                heapq.heappush(queue, (cost, found))
    raise AssertionError("no sequence fits")


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 3),
    layers=st.integers(2, 3),
    block=st.integers(1, 2),
    blocks=st.integers(1, 2),
)
def test_zigzag_reads_at_most_twice_the_least(
    tokens: int, layers: int, block: int, blocks: int
) -> None:
    sequences = block * blocks
    least = least_reads(sequences, tokens, layers, block * tokens)
    zigzag = zigzag_reads(sequences, tokens, layers, block)
    assert least <= zigzag <= 2 * least


@pytest.mark.parametrize("batches", [1, 3, 8])
def test_the_cost_model_reads_a_layer_once_for_a_block(batches: int) -> None:
    """Its slowest station is the disk here, and a token of any block takes one read of each
    layer."""
    slow = replace(T4, disk_to_host=1e3)
    costs = tier_costs(slow, MODEL, TierWorkload(16, 2), Runtime(fixed={}), 1, batches)
    a_token_s = float(
        costs.seconds(FROM_DISK, MODEL.layers, 2) - costs.seconds(FROM_DISK, MODEL.layers, 1)
    )
    reads = zigzag_reads(batches, 1, MODEL.layers, batches)
    # The authors' disk gives weights 0.95 of its rate while tokens are generated.
    assert a_token_s == pytest.approx(reads * MODEL.layer_bytes / (0.95 * 1e3), rel=1e-6)
