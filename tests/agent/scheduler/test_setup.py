"""The head's scheduler gets the options of a deployment, as far as its placement allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from edgeshard_agent.scheduler.batching import MAX_MICRO_BATCH
from edgeshard_agent.scheduler.setup import (
    batching,
    make_scheduler,
    make_slices,
    swapping,
)
from edgeshard_agent.scheduler.swapping import DISK_BPS, MEMORY_BPS

from edgeshard.architectures import parse_config
from edgeshard.domain.control.commands import PrepareStage
from edgeshard.domain.deployments.deployment import (
    DEFAULT_TOKENS,
    MAX_SHORT_REQUESTS,
    DeploymentSpec,
)
from edgeshard.domain.deployments.placement import Mode, PlacedStage, Placement, Speculation
from edgeshard.domain.deployments.step_cost import StageCost
from edgeshard.domain.ids import Digest, Epoch, NodeId, NodeName
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.requests.step import STEP_TOKENS
from edgeshard.planning.costs.step_budget import step_tokens
from edgeshard.planning.inputs.shapes import BUILT_IN_CONFIGS
from tests.agent.model.families import decoder_of


def cost(hop_token_s: float) -> StageCost:
    return StageCost((1, 1024), (0.01, 1.0), (0.01, 1.0), 0.0, 0.0, 0.001, 0.001, hop_token_s)


def prepared(
    micro_batch: int = 1,
    micro_batches: int = 1,
    stages: int = 2,
    costs: bool = False,
    **options: Any,
) -> PrepareStage:
    placed = tuple(
        PlacedStage(
            i, NodeId(f"n{i}"), NodeName(f"n{i}"), "127.0.0.1:9", LayerRange(i, i + 1), 0, 0
        )
        for i in range(stages)
    )
    known = (cost(1e-6),) * stages if costs else ()
    placement = Placement(placed, 16, 64, micro_batch, micro_batches, costs=known)
    spec = DeploymentSpec(name="tales", model="m", source="n0", **options)
    return PrepareStage(spec, placement, 0, Epoch(1), Digest("0" * 64))


def test_the_placements_micro_batches_run() -> None:
    chosen = batching(prepared(4, 3, concurrency=12, mode="bubbles"))
    assert (chosen.mode, chosen.window, chosen.micro_batch, chosen.micro_batches) == (
        Mode.BUBBLES,
        3,
        4,
        3,
    )


def test_as_many_run_as_the_kv_pool_was_made_for() -> None:
    assert batching(prepared(1, 3, concurrency=8)).places == 9
    assert batching(prepared(1, 2, concurrency=8, kv_overcommit=True)).places == 16


def test_more_short_requests_run_than_the_pool_holds_long_ones() -> None:
    """The pool has 1024 tokens. By default a typical request has 128 in and 128 out."""
    assert batching(prepared(concurrency=2)).places == 4
    assert (
        batching(prepared(concurrency=2, prompt_tokens=20, new_tokens=80)).places
        == MAX_SHORT_REQUESTS
    )
    assert batching(prepared(concurrency=2, prompt_tokens=1000)).places == 2
    assert batching(prepared(concurrency=12, prompt_tokens=20, new_tokens=80)).places == 12


def test_what_was_promised_or_asked_for_stays_as_placed() -> None:
    assert batching(prepared(2, 3, concurrency=8, max_time_per_token_s=0.5)).places == 6
    assert batching(prepared(1, 1, concurrency=8, mode="sequential")).places == 1


def test_a_number_of_micro_batches_that_was_asked_for_is_not_changed_under_load() -> None:
    chosen = prepared(2, 4, concurrency=8)
    asked_for = replace(chosen, spec=replace(chosen.spec, micro_batches=4))
    assert batching(asked_for).fixed and not batching(chosen).fixed


def test_decodes_leave_room_for_prompts() -> None:
    assert batching(prepared(1, 1, concurrency=4096)).micro_batch == MAX_MICRO_BATCH < STEP_TOKENS


@pytest.mark.parametrize(("hop_token_s", "tokens"), [(1e-6, STEP_TOKENS), (0.01, 99), (0.5, 16)])
def test_a_step_does_not_occupy_a_slow_link_for_more_than_a_second(
    hop_token_s: float, tokens: int
) -> None:
    """But a block goes through, whatever the link."""
    assert step_tokens([cost(hop_token_s), cost(9.0)], 16) == tokens


def test_without_costs_a_step_has_its_budget() -> None:
    assert step_tokens((), 16) == STEP_TOKENS


def test_slices_need_costs_several_stages_and_steps_that_follow_each_other() -> None:
    assert make_slices(prepared(costs=True)) is not None
    assert make_slices(prepared(costs=False)) is None
    assert make_slices(prepared(costs=True, stages=1)) is None
    assert make_slices(prepared(costs=True, mode="sequential")) is None


def test_a_new_scheduler_has_the_placements_pool_and_nothing_to_do() -> None:
    scheduler = make_scheduler(
        prepared(costs=True), parse_config(BUILT_IN_CONFIGS["llama2-7b"]), frozenset(), None
    )
    assert scheduler.idle and scheduler.next_step() is None
    assert scheduler.limits.answer_tokens == DEFAULT_TOKENS
    assert scheduler.stats.kv_blocks_free == 64


@pytest.mark.parametrize(("saved_states", "asked"), [(0, True), (3, False), (3, True)])
def test_models_with_states_share_beginnings_where_there_is_room_to_save_them(
    saved_states: int, asked: bool
) -> None:
    prepare = prepared(prefix_cache=asked, max_context=512)
    placement = replace(prepare.placement, saved_states=saved_states)
    shape = decoder_of("qwen3_5-text").shape
    made = make_scheduler(replace(prepare, placement=placement), shape, frozenset(), None)
    assert made.limits.prefix_cache == (asked and saved_states > 0)
    assert made.allocator.slots == 2 + saved_states, (
        "for the requests of 512 tokens that 64 blocks hold, and for saves"
    )
    plain = make_scheduler(prepare, parse_config(BUILT_IN_CONFIGS["llama2-7b"]), frozenset(), None)
    assert (plain.limits.prefix_cache, plain.limits.save_every, plain.allocator.slots) == (
        asked,
        0,
        0,
    )


@pytest.mark.parametrize("speculation", list(Speculation))
def test_guesses_are_those_of_the_placement(speculation: Speculation) -> None:
    prepare = prepared(costs=True)
    placement = replace(prepare.placement, speculation=speculation)
    shape = parse_config(BUILT_IN_CONFIGS["llama2-7b"])
    guessing = make_scheduler(
        replace(prepare, placement=placement), shape, frozenset({2}), None
    ).guessing
    assert (guessing is not None) == (speculation is Speculation.GUESSES)
    if guessing is not None:
        assert (
            guessing.ends == {2} and guessing.inter_token_s is not None and guessing.slots is None
        )


@pytest.mark.parametrize("slots", [0, 3])
def test_guesses_for_requests_with_states_have_the_placements_slots(slots: int) -> None:
    prepare = prepared(costs=True)
    placement = replace(prepare.placement, speculation=Speculation.GUESSES, guess_slots=slots)
    shape = decoder_of("qwen3_5-text").shape
    guessing = make_scheduler(
        replace(prepare, placement=placement), shape, frozenset({2}), None
    ).guessing
    assert guessing is not None and guessing.slots == slots


def test_saves_are_as_far_apart_as_their_bytes_in_keys_and_values() -> None:
    """With Qwen3.5's default sizes; small states are not saved more often than once in a step."""
    text = {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_key_value_heads": 4,
    }
    shape = parse_config(text)
    whole = LayerRange(0, 32)
    saved = shape.state_bytes(whole, DType.BFLOAT16)
    token = shape.kv_bytes_per_token(whole, DType.BFLOAT16)
    every = shape.save_every(DType.BFLOAT16, DType.BFLOAT16, 16)
    assert (
        48 << 20 < saved < 51 << 20 and every % 16 == 0 and abs(every * token - saved) <= 16 * token
    )
    assert (
        decoder_of("qwen3_5-text").shape.save_every(DType.FLOAT32, DType.FLOAT32, 16) == STEP_TOKENS
    )


def swapped(*rates: tuple[float, float], **options: Any) -> float:
    """Seconds that a block of 1000 bytes on each stage takes there and back; `rates` are the rates
    of its disks."""
    prepare = prepared(stages=len(rates), kv_swap_bytes=1 << 20, **options)
    stages = tuple(
        replace(stage, kv_bytes=64_000, disk_read_bytes_per_s=read, disk_write_bytes_per_s=write)
        for stage, (read, write) in zip(prepare.placement.stages, rates, strict=True)
    )
    found = swapping(replace(prepare, placement=replace(prepare.placement, stages=stages)))
    assert found.blocks == (1 << 20) // 1000
    return found.block_s


def test_swapping_takes_what_the_slowest_disk_takes_as_measured() -> None:
    assert swapped((1e9, 5e8), (1e8, 5e7), kv_swap_on_disk=True) == pytest.approx(
        1000 * (1e-8 + 2e-8)
    )
    assert swapped((1e9, 0.0), kv_swap_on_disk=True) == pytest.approx(1000 * (1e-9 + 1 / DISK_BPS))
    assert swapped((0.0, 0.0), (1e9, 5e8), kv_swap_on_disk=True) == pytest.approx(2000 / DISK_BPS)
    assert swapped((1e3, 1e3)) == pytest.approx(2000 / MEMORY_BPS), "in memory, whatever the disk"
