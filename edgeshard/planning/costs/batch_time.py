"""Time that a batch takes over one cut, and computing time of each of its nodes. Pure.

m micro-batches of b requests start together and go through two phases, their prompts and then their
tokens:

    seconds = R_pre + (m - 1) B_pre + (G - 1) max(R_dec, m B_dec)

A single request sends its prompt in the slices that its head would cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.planning.costs.costs import Costs, Load
from edgeshard.planning.costs.prompt_time import PromptTimes
from edgeshard.planning.inputs.problem import Objective
from edgeshard.planning.solvers.instance import Cut, Score
from edgeshard.planning.solvers.scoring import score


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """`prefill` and `decode` score one micro-batch's prompt and one token of it.

    `ttft_s` is the time until the last of the micro-batches has its first token, `request_s` until
    they have all their tokens. `computing_s` is the part of `request_s` in which each stage's node
    computes, all micro-batches together. `slices` are a single prompt's.
    """

    prefill: Score
    decode: Score
    ttft_s: float
    time_per_token_s: float
    request_s: float
    computing_s: tuple[float, ...]
    slices: tuple[int, ...] = ()


def batch_times(
    costs: Costs, cut: Cut, load: Load, prompts: PromptTimes | None = None
) -> BatchTimes:
    """The times of any cut under a load. `prompts` keeps the parts that cuts share, for callers
    with many cuts."""
    prefill = score(costs.prefill(load), cut, costs.names)
    decode = score(costs.decode(load), cut, costs.names)
    m, more = load.micro_batches, costs.problem.new_tokens - 1
    ttft, slices = prefill.round_s + (m - 1) * prefill.bottleneck_s, tuple[int, ...]()
    prompt_s = [m * seconds for seconds in prefill.stage_s]
    if costs.problem.goal is not Objective.THROUGHPUT and load.requests == 1:
        prompts = prompts or PromptTimes(costs)
        first = prompts.first_token(cut)
        ttft, slices = first.seconds, first.slices
        prompt_s = list(prompts.computing_s(cut))
    per_token = max(decode.round_s, m * decode.bottleneck_s)
    computing = tuple(
        prompt + m * more * token for prompt, token in zip(prompt_s, decode.stage_s, strict=True)
    )
    return BatchTimes(prefill, decode, ttft, per_token, ttft + more * per_token, computing, slices)
