"""The scheduler that a head runs, made from its deployment's placement. Pure."""

from __future__ import annotations

from functools import partial

from edgeshard.architectures import ModelShape
from edgeshard.domain.control.commands import PrepareStage
from edgeshard.domain.deployments.deployment import running_requests, typical_lengths
from edgeshard.domain.deployments.placement import Mode, PlacedStage, Speculation
from edgeshard.domain.deployments.step_cost import compute_s, inter_token_s
from edgeshard.domain.requests.step import MAX_STEP_TOKENS
from edgeshard.planning.costs.step_budget import step_tokens
from edgeshard_agent.scheduler.batching import MAX_MICRO_BATCH, Batching
from edgeshard_agent.scheduler.chunking import Chunking
from edgeshard_agent.scheduler.guessing import LONGEST_MATCH, Guessing, NgramDrafter
from edgeshard_agent.scheduler.kv_blocks import BlockAllocator
from edgeshard_agent.scheduler.scheduler import Limits, Scheduler
from edgeshard_agent.scheduler.slices import PromptSlices
from edgeshard_agent.scheduler.swapping import DISK_BPS, MEMORY_BPS, Swapping

WAITING_PER_PLACE = 4


def make_scheduler(
    prepare: PrepareStage,
    shape: ModelShape,
    eos_tokens: frozenset[int],
    slices: PromptSlices | None,
    drafts: bool = False,
) -> Scheduler:
    """If requests have states and there is no room to save any, requests share nothing with each
    other. With `drafts` there is a draft to query for guesses: the continuation of a short match is
    less likely than the draft's guess."""
    spec, placement = prepare.spec, prepare.placement
    longest = spec.max_context or shape.max_context
    waiting = WAITING_PER_PLACE * running_requests(spec, placement)
    limits = Limits(
        longest,
        waiting,
        shape.vocab_size,
        answer_tokens=typical_lengths(spec, placement)[1],
        overcommit=spec.kv_overcommit,
        prefix_cache=spec.prefix_cache and (not shape.states or placement.saved_states > 0),
        save_every=shape.save_every(spec.dtype, spec.effective_kv_dtype, placement.kv_block_tokens),
    )
    chunking = Chunking(
        step_tokens=step_tokens(placement.costs, placement.kv_block_tokens),
        max_step_tokens=MAX_STEP_TOKENS,
        least_tokens=placement.kv_block_tokens,
        max_inter_token_latency_s=spec.max_inter_token_latency_s,
        inter_token_s=partial(inter_token_s, placement.costs) if placement.costs else None,
        slices=slices,
        compute_s=partial(compute_s, placement.costs) if placement.costs else None,
    )
    slots = placement.slots_of(longest) if shape.states else 0
    allocator = BlockAllocator(placement.kv_blocks, placement.kv_block_tokens, slots)
    proposer = partial(NgramDrafter, LONGEST_MATCH) if drafts else NgramDrafter
    guess_slots = placement.used_guess_slots if shape.states else None
    guessing = Guessing(eos_tokens, chunking.inter_token_s, proposer, drafts, guess_slots)
    guesses = placement.speculation is Speculation.GUESSES
    return Scheduler(
        allocator,
        limits,
        batching(prepare),
        chunking,
        eos_tokens,
        swapping(prepare),
        guessing if guesses else None,
    )


def swapping(prepare: PrepareStage) -> Swapping:
    """The limits of keeping KV aside: as much as the stage with the largest blocks may keep; how
    long a block takes there and back, on the slowest."""
    spec, placement = prepare.spec, prepare.placement
    block_bytes = max(
        (stage.kv_bytes // placement.kv_blocks for stage in placement.stages), default=0
    )
    if not (spec.kv_swap_bytes and block_bytes):
        return Swapping()

    def block_s(stage: PlacedStage) -> float:
        out_bps = back_bps = MEMORY_BPS
        if spec.kv_swap_on_disk:  # at the measured rates, if there are any
            out_bps = stage.disk_write_bytes_per_s or DISK_BPS
            back_bps = stage.disk_read_bytes_per_s or DISK_BPS
        return stage.kv_bytes / placement.kv_blocks * (1 / out_bps + 1 / back_bps)

    costs = partial(compute_s, placement.costs) if placement.costs else None
    return Swapping(spec.kv_swap_bytes // block_bytes, max(map(block_s, placement.stages)), costs)


def make_slices(prepare: PrepareStage) -> PromptSlices | None:
    """None if slices would not follow each other through the stages, or if their cost is
    unknown."""
    placement = prepare.placement
    if (
        Mode(prepare.spec.mode) is not Mode.NO_BUBBLES
        or len(placement.stages) == 1
        or not placement.costs
    ):
        return None
    return PromptSlices(placement.costs)


def batching(prepare: PrepareStage) -> Batching:
    """The placement's (b, m), or a larger b so that as many requests run as the deployment has
    memory for.

    It stays as placed in sequential mode, and if a time per token was promised, which holds for
    that b. Otherwise the head chooses m while it runs, unless the spec names one.
    """
    spec, placement = prepare.spec, prepare.placement
    mode = Mode(spec.mode)
    micro_batch = placement.micro_batch
    micro_batches = placement.micro_batches
    is_free = mode is not Mode.SEQUENTIAL and spec.max_time_per_token_s is None
    if is_free:
        micro_batch = max(micro_batch, -(-running_requests(spec, placement) // micro_batches))
    fixed = spec.micro_batches > 0
    largest = min(micro_batch, MAX_MICRO_BATCH)
    # the micro-batches of a sweep share its reads: their number is the plan's
    if placement.sweep > 1:
        fixed = True
    return Batching(
        mode,
        placement.window,
        largest,
        micro_batches,
        fixed,
        is_free and not fixed,
        placement.sweep,
    )
