"""Random schedules through a simulated ring: nothing stands still, nothing leaks, every request
gets its own tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from edgeshard_agent.scheduler.batching import Batching
from edgeshard_agent.scheduler.chunking import Chunking
from edgeshard_agent.scheduler.scheduler import Limits
from edgeshard_agent.scheduler.swapping import Swapping

from edgeshard.domain.deployments.placement import Mode
from edgeshard.domain.deployments.step_cost import Piece
from edgeshard.domain.errors import ResourceExhaustedError
from edgeshard.domain.requests.generation import FinishReason
from tests.support.rig import Alone, Rig, Ring

SCHEDULES = 240
EOS = 96


def random_rig(make_rig: type[Rig], dice: random.Random) -> Rig:
    """A pipeline with any mode, window, batching, budget, pool and reservation, caching or not, of
    a model with states or without."""
    block_tokens = dice.choice([1, 2, 4])
    context = 32
    stages = dice.randint(1, 4)
    window = dice.randint(1, 5)
    caches = dice.random() < 0.75
    states = dice.choice([0, 1, 8, 16])
    chunking = Chunking(
        dice.randint(1, 24),
        max_step_tokens=32,
        least_tokens=dice.randint(1, 4),
        max_inter_token_latency_s=dice.choice([None, 0.5, 2.0]),
        inter_token_s=dice.choice([None, _cost]),
        slices=dice.choice([None, _halves]),
    )
    return make_rig(
        blocks=dice.randint(context, 5 * context // 4) // block_tokens,
        block_tokens=block_tokens,
        stages=stages,
        batching=Batching(
            dice.choice(list(Mode)), window, dice.randint(1, 4), dice.randint(1, window)
        ),
        chunking=chunking,
        limits=Limits(
            context,
            6,
            overcommit=dice.random() < 0.5,
            answer_tokens=dice.choice([1, 8, 128]),
            prefix_cache=caches,
            save_every=dice.randint(1, 2) * block_tokens if states else 0,
        ),
        eos=frozenset({EOS}),
        swapping=Swapping(
            dice.choice([0, 8, 100, 100]), block_s=0.02, compute_s=dice.choice([None, _alone])
        ),
        states=states,
    )


def _alone(pieces: Sequence[Piece]) -> float:
    return _cost(pieces, 1)


def _cost(pieces: Sequence[Piece], in_flight: int) -> float:
    return in_flight * (0.1 + 0.02 * sum(count for _, count in pieces))


def _halves(length: int) -> tuple[int, ...]:
    return (length - length // 2, length // 2) if length > 1 else (length,)


def random_request(dice: random.Random) -> dict[str, Any]:
    """Few first tokens, so that beginnings are equal."""
    trunk = [dice.randrange(2)] * dice.randint(0, 12)
    prompt = trunk + [dice.randrange(96) for _ in range(dice.randint(1, 8))]
    return {
        "prompt": prompt,
        "new": dice.randint(1, 32 - len(prompt)),
        "client": dice.choice("ab"),
        "priority": dice.choice([0, 0, 0, 1, -1]),
        "stop_tokens": tuple(dice.sample(range(96), dice.choice([0, 0, 4]))),
        "ignore_eos": dice.random() < 0.5,
    }


def cut(tokens: list[int], request: dict[str, Any]) -> list[int]:
    """A request's tokens up to its own stop."""
    stops = {*request["stop_tokens"], *(() if request["ignore_eos"] else (EOS,))}
    ends = [index for index, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.fixture(scope="module")
def seen() -> dict[str, int]:
    return {
        "schedules": 0,
        "preemptions": 0,
        "swaps": 0,
        "prefix_hit_tokens": 0,
        "saves": 0,
        "restores": 0,
        "cancelled": 0,
        "stopped": 0,
        "refused": 0,
    }


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_every_request_gets_the_tokens_it_gets_alone(
    make_rig: type[Rig], make_ring: type[Ring], alone: Alone, seen: dict[str, int], seed: int
) -> None:
    """Arrivals, cancels, stalled stages, late tokens, ends of sequence, stop tokens, prefix hits,
    saves, restores and preemptions, by dice."""
    dice = random.Random(seed)
    rig = random_rig(make_rig, dice)
    ring = make_ring(rig, dice)
    lateness = dice.choice([0.0, 0.0, 0.2, 0.7])
    rig.stages[-1].is_late = lambda: dice.random() < lateness
    requests = {f"r{number}": random_request(dice) for number in range(dice.randint(3, 14))}
    coming = list(requests)
    cancelled: set[str] = set()
    refused: set[str] = set()
    while coming or ring.enabled() or ring.stalled:
        event = dice.random()
        if coming and event < 0.1:
            name = coming.pop()
            request = requests[name]
            try:
                rig.submit(
                    name,
                    request["prompt"],
                    request["new"],
                    **{k: request[k] for k in list(request)[2:]},
                )
            except ResourceExhaustedError:
                refused.add(name)
            ring.pump()
        elif event < 0.12:
            name = dice.choice(list(requests))
            cancelled |= {name} if rig.cancel(name) else set()
            ring.pump()
        elif event < 0.15:
            ring.stalled ^= {dice.randrange(len(rig.stages))}
        else:
            ring.happen()
    rig.check_empty()
    for name, request in requests.items():
        right = cut(alone(request["prompt"], request["new"]), request)
        got, ends = rig.tokens(name), rig.ends(name)
        assert got == right[: len(got)]
        assert len(ends) == (name not in refused)
        assert len(got) == len(right) or name in cancelled | refused
        seen["stopped"] += any(end.reason is FinishReason.STOP for end in ends)
    stats = rig.scheduler.stats
    seen["schedules"] += 1
    seen["preemptions"] += stats.preemptions
    seen["swaps"] += stats.swaps
    seen["prefix_hit_tokens"] += stats.prefix_hit_tokens
    seen["saves"] += sum(len(step.plan.saves) for step in rig.steps)
    seen["restores"] += sum(len(step.plan.restores) for step in rig.steps)
    seen["cancelled"] += len(cancelled)
    seen["refused"] += len(refused)


def test_the_schedules_had_all_that_they_were_to_have(seen: dict[str, int]) -> None:
    if seen["schedules"] < SCHEDULES:
        pytest.skip("not all schedules were run")
    assert all(count > SCHEDULES / 10 for count in seen.values()), str(seen)


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("mode", list(Mode))
def test_the_ring_goes_on_however_full_its_inboxes_were(
    make_rig: type[Rig], make_ring: type[Ring], mode: Mode, stages: int, window: int
) -> None:
    """Stage after stage stands still until all that can be in front of it is; then everything must
    still come out."""
    for stalled in range(stages):
        rig = make_rig(
            blocks=60,
            stages=stages,
            batching=Batching(mode, window, 4, min(window, 2)),
            chunking=Chunking(6),
        )
        ring = make_ring(rig, random.Random(stalled))
        for number in range(8):
            rig.submit(f"r{number}", list(range(number, number + 15)), 6)
        ring.pump()
        ring.stalled = {stalled}
        while ring.happen():
            pass
        before = 1 if mode is Mode.SEQUENTIAL else window
        assert len(ring.inboxes[stalled]) == ring.in_flight == before, (
            "all that may be in flight waits there"
        )
        ring.stalled = set()
        while ring.happen():
            pass
        rig.check_empty()
        assert all(len(rig.tokens(f"r{number}")) == 6 for number in range(8))


def test_a_full_pool_holds_up_nobody_who_runs(make_rig: type[Rig], make_ring: type[Ring]) -> None:
    """A request too large for the remaining blocks waits; running requests continue and end."""
    rig = make_rig(
        blocks=12, stages=2, batching=Batching(Mode.NO_BUBBLES, 2, 4, 2), chunking=Chunking(8)
    )
    ring = make_ring(rig, random.Random(1))
    rig.submit("a", [1] * 8, 16)
    rig.submit("b", [2] * 8, 16)
    rig.submit("waits", [3] * 20, 20)
    assert rig.scheduler.stats.waiting == 1
    ring.pump()
    while not rig.ends("b"):
        assert ring.happen()
    while ring.happen():
        pass
    assert len(rig.tokens("waits")) == 20
    rig.check_empty()
