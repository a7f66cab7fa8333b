"""The time until a single request has its first token, its prompt in the slices that its head would
cut. Pure.

Slices follow each other through the stages. A node computes one slice at a time and a link carries
one at a time; a link's pure delay occupies nothing. Only the last slice is sampled from, and its
token returns to the source. (docs/papers.md#slices-of-long-prompts)
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeshard.domain.requests.step import MAX_STEP_TOKENS
from edgeshard.planning.costs.costs import KV_BLOCK_TOKENS, Costs
from edgeshard.planning.costs.prompt_floor import step_room
from edgeshard.planning.costs.step_budget import (
    StageCosts,
    prompt_slices,
    rounded_prompt,
    slice_unit,
    step_tokens,
    with_rest,
)
from edgeshard.planning.inputs.problem import StepShape
from edgeshard.planning.solvers.instance import Cut
from edgeshard.planning.solvers.scoring import stages

_SAMPLED = StepShape(1, 1, 1, 1)
"""The one position of a single prompt that is sampled from."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Seconds from the start of a single prompt until its first token is at the source, and the
    prompt's slices."""

    seconds: float
    slices: tuple[int, ...]


class PromptTimes:
    """First tokens of one problem's prompts over any of its cuts. The parts that cuts share are
    computed once."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._stage_costs = StageCosts(costs)
        self._known: dict[Cut, FirstToken] = {}
        self._stage_s: dict[tuple[object, ...], float] = {}

    def first_token(self, cut: Cut) -> FirstToken:
        if cut not in self._known:
            tokens = self._costs.problem.prompt_tokens
            slices = self._slices(cut, tokens)
            self._known[cut] = FirstToken(self.seconds(cut, slices), slices)
        return self._known[cut]

    def _slices(self, cut: Cut, tokens: int) -> tuple[int, ...]:
        """The steps in which a head sends a prompt that no other request waits for: its slices, or
        as much as a step may have.

        As `scheduler.slices` and `chunking` do in the agent, but that a step's room is a multiple
        of the slices' unit.
        """
        costs_of_stages = self._stage_costs.of(cut)
        unit = slice_unit(tokens)
        room = step_room(step_tokens(costs_of_stages, KV_BLOCK_TOKENS), tokens)
        lengths: tuple[int, ...] = (tokens,)
        if self._costs.problem.sliced and len(cut.nodes) > 1 and tokens >= 2 * unit:
            slices = prompt_slices(costs_of_stages, rounded_prompt(tokens))
            if len(slices) > 1:
                lengths = with_rest(slices, tokens)
                room = max(room, MAX_STEP_TOKENS // unit * unit)
        return tuple(
            min(room, length - first) for length in lengths for first in range(0, length, room)
        )

    def seconds(self, cut: Cut, slices: tuple[int, ...]) -> float:
        """The first token's time with these slices, by the recurrence with every node and link a
        station.

        As many steps are in flight as there are stages, one if slices do not follow each other.
        """
        parts, count = stages(cut), len(cut.nodes)
        window = count if self._costs.problem.sliced else 1
        node_free = [0.0] * count
        link_free = [0.0] * count
        back = list[float]()
        first = 0
        for index, length in enumerate(slices):
            is_last = index == len(slices) - 1
            ready = back[index - window] if index >= window else 0.0
            for stage, (node, begin, end) in enumerate(parts):
                headed = (
                    is_last and self._costs.has_head(cut, stage) and not self._head_apart(count)
                )
                step_s = self._step_s(node, begin, end, stage == 0, headed, (first, length))
                node_free[stage] = ready = done = max(ready, node_free[stage]) + step_s
                if count == 1:
                    continue
                receiver, returns = cut.nodes[(stage + 1) % count], stage == count - 1
                size = self._costs.hop_bytes(is_last if returns else length, returns)
                hop_s = 8.0 * size / float(self._costs.bandwidth_bps[node, receiver])
                link_free[stage] = send_end = max(done, link_free[stage]) + hop_s
                if not self._costs.problem.asynchronous:
                    node_free[stage] = send_end
                ready = send_end + float(self._costs.delay_s[node, receiver])
            back.append(ready)
            first += length
        if self._head_apart(count):
            return max(back[-1], node_free[0]) + self._costs.times[cut.nodes[0]].head_s(_SAMPLED)
        return back[-1]

    def computing_s(self, cut: Cut) -> tuple[float, ...]:
        """Seconds that the node of each stage computes for the prompt, all its slices together."""
        slices, apart = self.first_token(cut).slices, self._head_apart(len(cut.nodes))
        stage_seconds = []
        for stage, (node, begin, end) in enumerate(stages(cut)):
            seconds, first = 0.0, 0
            for index, length in enumerate(slices):
                headed = index == len(slices) - 1 and self._costs.has_head(cut, stage) and not apart
                seconds += self._step_s(node, begin, end, stage == 0, headed, (first, length))
                first += length
            stage_seconds.append(seconds)
        if apart:
            stage_seconds[0] += self._costs.times[cut.nodes[0]].head_s(_SAMPLED)
        return tuple(stage_seconds)

    def _head_apart(self, count: int) -> bool:
        return self._costs.problem.head_on_source and count > 1

    def _step_s(
        self, node: int, begin: int, end: int, first: bool, headed: bool, piece: tuple[int, int]
    ) -> float:
        times = self._costs.times[node]
        key = (id(times), begin, end, first, headed, piece)
        if key not in self._stage_s:
            phase = StepShape.of_spans([(piece[1], piece[0])])
            hidden = phase.step_tokens * self._costs.hidden_bytes
            seconds = times.step_s(hidden) + (times.embedding_s(phase) if first else 0.0)
            kinds = self._stage_costs.kinds(begin, end)
            seconds += sum(number * times.block_s(block, phase) for block, number in kinds)
            self._stage_s[key] = seconds + (times.head_s(_SAMPLED) if headed else 0.0)
        return self._stage_s[key]
