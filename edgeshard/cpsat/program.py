"""A question about all cuts (`planning.solvers.linear`) as an integer program for CP-SAT.

A cut is a path through (layer, node). There is one variable for "node j holds blocks [a, b)" if
that keeps j's memory, and one for "j hands over to k after block b". A flow that ends on a node
leaves it, a flow that enters begins there, and a node holds one range at most.

Times are whole units, rounded down, of which the goal has at least 1 / UNIT. So a bound is never
above the truth, and below it by no more than `linear.ROUNDING`. Variables that cannot be part of a
cut below the best known one are left out (`walks_through`), as they are for the first good cut.
This keeps programs small.

Source of the form: the flow of a path with side constraints (docs/papers.md#plans-under-rules).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import NamedTuple

import numpy as np
from ortools.sat.python import cp_model

from edgeshard.planning.solvers.instance import Cut, Floats, Instance
from edgeshard.planning.solvers.linear import ROUNDING, GoalTerm, Linear, LinearAnswer, Question
from edgeshard.planning.solvers.scoring import SLACK

UNIT = 1e-8
"""Unit of a lower bound of the goal."""
LIMIT_UNITS = 10**11
"""Units of a limit."""
MOST = 1 << 50
"""Units; a longer time is taken for this one."""
_MOST_WEIGHT = 1 << 45
FIRST_EFFORT = 2.0
"""Effort in CP-SAT's deterministic time (about seconds), for a first good cut that then makes the
program smaller."""
LEAST_WALL_S = 0.1
"""With less time only the bound that needs no program is given."""
MEMORY_MB = 1536


class NodeBlocks(NamedTuple):
    """Blocks [first, end) of a node."""

    node: int
    first: int
    end: int


class Sent(NamedTuple):
    """After block `end` - 1 the sender hands over to the receiver."""

    sender: int
    receiver: int
    end: int


@dataclass(frozen=True, slots=True)
class SolveLimits:
    """Limits for one question: CP-SAT's deterministic time, and seconds on the clock."""

    deterministic: float
    wall_s: float


def answer(question: Question, effort: SolveLimits) -> LinearAnswer:
    """The best cut and a proven bound, within the effort; only a bound if no cut was found in
    it."""
    relaxed = _Relaxed(question)
    bound = max(relaxed.bound_s, 0.0)
    if bound >= question.below:
        return LinearAnswer(None, math.inf)
    if effort.wall_s < LEAST_WALL_S:
        return LinearAnswer(None, bound)
    if not question.sides or question.any_will_do:
        return _solved(question, relaxed, None, bound, effort)
    first = SolveLimits(min(FIRST_EFFORT, effort.deterministic), effort.wall_s / 4)
    solution = _solved(question, relaxed, None, bound, first)
    if solution.cut is None and solution.bound_s == math.inf:
        return solution
    value = (
        question.below
        if solution.cut is None
        else min(question.below, question.seconds(solution.cut))
    )
    if solution.bound_s >= value * (1 - ROUNDING):
        return solution
    rest = SolveLimits(effort.deterministic - first.deterministic, effort.wall_s - first.wall_s)
    if rest.deterministic <= 0:
        return solution
    again = _solved(
        replace(question, below=value * (1 + 4 * UNIT)),
        relaxed,
        solution.cut,
        solution.bound_s,
        rest,
    )
    if again.cut is None and again.bound_s == math.inf:  # none below the first one: it is the best
        return again if solution.cut is None else LinearAnswer(solution.cut, value)
    if again.cut is None:
        return LinearAnswer(solution.cut, max(solution.bound_s, again.bound_s))
    return LinearAnswer(again.cut, max(solution.bound_s, again.bound_s))


def _solved(
    question: Question, relaxed: _Relaxed, hint: Cut | None, bound_s: float, effort: SolveLimits
) -> LinearAnswer:
    program = _Program(question, relaxed, bound_s)
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = 1
    parameters.random_seed = 1
    parameters.linearization_level = 2
    # For a path, more of this finds nothing and takes most of the time.
    parameters.symmetry_level = parameters.cp_model_probing_level = (
        parameters.presolve_bve_threshold
    ) = 0
    parameters.merge_at_most_one_work_limit = 0.0
    parameters.max_presolve_iterations = 1
    parameters.stop_after_first_solution = question.any_will_do
    parameters.max_deterministic_time = effort.deterministic
    parameters.max_time_in_seconds = max(effort.wall_s, 0.01)
    parameters.max_memory_in_mb = MEMORY_MB
    if hint is not None:
        program.hint(hint)
    status = solver.solve(program.model)
    if status == cp_model.INFEASIBLE:
        return LinearAnswer(None, math.inf)
    bound_s = (
        max(bound_s, solver.best_objective_bound * program.unit_s) if question.sides else bound_s
    )
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return LinearAnswer(None, bound_s)
    return LinearAnswer(program.cut(solver), bound_s)


class _Times:
    """Seconds of a part's stages and hops, its weight in them."""

    def __init__(self, part: GoalTerm, ranges: Sequence[NodeBlocks], hops: Sequence[Sent]) -> None:
        instance, weight = part.instance, part.weight
        done = np.concatenate(
            [np.zeros((instance.nodes, 1)), np.cumsum(instance.compute_s, axis=1)], axis=1
        )
        nodes, firsts, ends = np.array(ranges, dtype=np.int64).reshape(-1, 3).T
        stage = done[nodes, ends] - done[nodes, firsts] + instance.overhead_s[nodes]
        source = nodes == instance.source
        stage = stage + np.where(source, instance.embed_s[nodes], 0.0)
        has_head = source if instance.head_on_source else ends == instance.layers
        self.stage: Floats = weight * (stage + np.where(has_head, instance.head_s[nodes], 0.0))
        senders, receivers, _ = np.array(hops, dtype=np.int64).reshape(-1, 3).T
        self.hop: Floats = weight * instance.hop_s[senders, receivers]
        self.delay: Floats = weight * instance.latency_s[senders, receivers]
        away = np.arange(instance.nodes) != instance.source
        self.back: Floats = weight * np.where(away, instance.return_s[:, instance.source], 0.0)
        self.back_delay: Floats = weight * np.where(
            away, instance.latency_s[:, instance.source], 0.0
        )


class _Relaxed:
    """The possible parts of a cut, and a lower bound of the goal through each: here a node may be
    visited repeatedly."""

    def __init__(self, question: Question) -> None:
        memory = question.memory
        self.memory = memory
        self.held = [item for item in _ranges(memory) if _fits(memory, item)]
        self.sent = [
            Sent(sender, receiver, end)
            for end in range(1, memory.layers)
            for sender in range(memory.nodes)
            for receiver in range(memory.nodes)
            if receiver not in (sender, memory.source)
            and np.isfinite(memory.hop_s[sender, receiver])
        ]
        self.returns = np.isfinite(memory.return_s[:, memory.source]) | (
            np.arange(memory.nodes) == memory.source
        )
        self.sides = [[(part, self.times(part)) for part in side] for side in question.sides]
        self.limits = [((part, self.times(part)), most) for part, most in question.limits]
        self.held_s, self.sent_s = self._least(self.sides)
        for one, most in self.limits:
            held_s, sent_s = self._least([[one]])
            self.held_s[held_s > most * (1 + SLACK)] = np.inf
            self.sent_s[sent_s > most * (1 + SLACK)] = np.inf
        begins = [
            bound for item, bound in zip(self.held, self.held_s, strict=True) if item.first == 0
        ]
        self.bound_s = float(min(begins, default=np.inf))

    def times(self, part: GoalTerm) -> _Times:
        return _Times(part, self.held, self.sent)

    def _least(self, sides: Sequence[Sequence[tuple[GoalTerm, _Times]]]) -> tuple[Floats, Floats]:
        """A lower bound of the goal of each cut with such a stage, and with such a hop."""
        held_s, sent_s = np.zeros(len(self.held)), np.zeros(len(self.sent))
        for side in sides or [[]]:
            rounds = [times for part, times in side if not part.busiest]
            sums = [
                walks_through(
                    self,
                    sum((one.stage for one in rounds), np.zeros(len(self.held))),
                    sum((one.hop + one.delay for one in rounds), np.zeros(len(self.sent))),
                    sum((one.back + one.back_delay for one in rounds), np.zeros(self.memory.nodes)),
                    add=True,
                )
            ]
            for part, one in side:
                if part.busiest:
                    sums.append(walks_through(self, one.stage, one.hop, one.back, add=False))
            held_s = np.maximum(held_s, sum(bounds[0] for bounds in sums))
            sent_s = np.maximum(sent_s, sum(bounds[1] for bounds in sums))
        return held_s, sent_s


def walks_through(
    relaxed: _Relaxed, stage: Floats, hop: Floats, back: Floats, *, add: bool
) -> tuple[Floats, Floats]:
    """The least sum (or the least largest) of seconds over the walks with such a stage, and with
    such a hop.

    A walk goes from the source through all layers as a cut does, but may return to a node.
    """
    nodes, layers = relaxed.memory.nodes, relaxed.memory.layers
    join = np.add if add else np.maximum
    cost = np.full((nodes, layers + 1, layers + 1), np.inf)  # [node, first, end]
    ranges = np.array(relaxed.held, dtype=np.int64).reshape(-1, 3)
    cost[ranges[:, 0], ranges[:, 1], ranges[:, 2]] = stage
    links = np.full((nodes, nodes), np.inf)
    hops = np.array(relaxed.sent, dtype=np.int64).reshape(-1, 3)
    links[hops[:, 0], hops[:, 1]] = hop
    coming = np.full((layers + 1, nodes), np.inf)  # before block a, on the node that has it
    departures = np.full((layers + 1, nodes), np.inf)  # after block b - 1, on the node that had it
    coming[0, relaxed.memory.source] = 0.0
    for layer in range(1, layers + 1):
        departures[layer] = join(coming[:layer].T, cost[:, :layer, layer]).min(axis=1)
        if layer < layers:
            coming[layer] = join(departures[layer][:, None], links).min(axis=0)
    left = np.full((layers + 1, nodes), np.inf)  # from the end of a stage on, its hop included
    begun = np.full((layers + 1, nodes), np.inf)  # from the begin of a stage on
    left[layers] = np.where(relaxed.returns, back, np.inf)
    for layer in range(layers - 1, -1, -1):
        begun[layer] = join(cost[:, layer, layer + 1 :], left[layer + 1 :].T).min(axis=1)
        if layer:
            left[layer] = join(links, begun[layer][None, :]).min(axis=1)
    node, first, end = ranges.T
    through = join(join(coming[first, node], stage), left[end, node])
    sender, receiver, at = hops.T
    across = join(join(departures[at, sender], hop), begun[at, receiver])
    return np.asarray(through), np.asarray(across)


class _Program:
    """The variables and constraints of a question."""

    def __init__(self, question: Question, relaxed: _Relaxed, bound_s: float) -> None:
        self.question = question
        self.relaxed = relaxed
        self.instance = question.memory
        self.model = cp_model.CpModel()
        self.unit_s = max(bound_s, 1e-12) * UNIT
        most_s = question.below * (1 + SLACK)
        self._held_at = [
            at for at, least in enumerate(relaxed.held_s) if least <= most_s and least < np.inf
        ]
        self._sent_at = [
            at for at, least in enumerate(relaxed.sent_s) if least <= most_s and least < np.inf
        ]
        self.held = {relaxed.held[at]: self.model.new_bool_var("") for at in self._held_at}
        self.sent = {relaxed.sent[at]: self.model.new_bool_var("") for at in self._sent_at}
        self.returns = [self.model.new_bool_var("") for _ in range(self.instance.nodes)]
        self._of_node = defaultdict[int, list[cp_model.IntVar]](list)
        for blocks, variable in self.held.items():
            self._of_node[blocks.node].append(variable)
        self._connect()
        for condition in question.conditions:
            self._keep(condition)
        for cut in question.without:
            self._leave_out(cut)
        for (part, times), most in relaxed.limits:
            self._at_most([(part, times)], most)
        if question.sides:
            self._minimise(bound_s)

    def _connect(self) -> None:
        """One path from the source's first block to the return."""
        instance, model = self.instance, self.model
        ending, beginning, leaving, coming = (
            defaultdict[tuple[int, int], list[cp_model.IntVar]](list) for _ in "1234"
        )
        for blocks, variable in self.held.items():
            ending[blocks.node, blocks.end].append(variable)
            beginning[blocks.node, blocks.first].append(variable)
        for hop, variable in self.sent.items():
            leaving[hop.sender, hop.end].append(variable)
            coming[hop.receiver, hop.end].append(variable)
        for node in range(instance.nodes):
            if node == instance.source:
                model.add_exactly_one(self._of_node[node])
            else:
                model.add_at_most_one(self._of_node[node])
            for end in range(1, instance.layers):
                if ending[node, end] or leaving[node, end]:
                    model.add(sum(ending[node, end]) == sum(leaving[node, end]))
                if beginning[node, end] or coming[node, end]:
                    model.add(sum(beginning[node, end]) == sum(coming[node, end]))
            model.add(sum(ending[node, instance.layers]) == self.returns[node])
        for end in range(1, instance.layers):
            # Every block is held once. This follows from the rest, but makes the linear relaxation
            # closer if stated.
            over = [
                variable
                for blocks, variable in self.held.items()
                if blocks.first < end <= blocks.end
            ]
            model.add_exactly_one(over)
        model.add_exactly_one(self.returns)
        for node in np.flatnonzero(~self.relaxed.returns).tolist():
            model.add(self.returns[node] == 0)
        most = min(instance.nodes, instance.max_nodes)
        model.add_linear_constraint(sum(self.held.values()), instance.min_nodes, most)

    def _keep(self, condition: Linear) -> None:
        numbers = [
            *condition.weights,
            *(end for end in (condition.least, condition.most) if end is not None),
        ]
        scale = _scale(numbers)
        terms = [
            _whole(weight, scale, up=condition.most is not None) * variable
            for node, weight in enumerate(condition.weights)
            for variable in self._of_node[node]
            if weight
        ]
        total = cp_model.LinearExpr.sum(terms) if terms else cp_model.LinearExpr.sum([])
        if condition.most is not None:
            self.model.add(total <= _whole(condition.most, scale, up=False))
        if condition.least is not None:
            self.model.add(total >= _whole(condition.least, scale, up=True))

    def _leave_out(self, cut: Cut) -> None:
        items = [
            NodeBlocks(*stage)
            for stage in zip(cut.nodes, (0, *cut.ends[:-1]), cut.ends, strict=True)
        ]
        if all(item in self.held for item in items):
            self.model.add(sum(self.held[item] for item in items) <= len(items) - 1)

    def _minimise(self, bound_s: float) -> None:
        low = int(bound_s / self.unit_s)
        high = (
            MOST
            if self.question.below == math.inf
            else min(MOST, math.ceil(self.question.below / self.unit_s))
        )
        value = self.model.new_int_var(min(low, high), high, "value")
        for side in self.relaxed.sides:
            self.model.add(value >= self._total(side, self.unit_s))
        self.model.minimize(value)

    def _at_most(self, side: Sequence[tuple[GoalTerm, _Times]], most_s: float) -> None:
        self.model.add(self._total(side, most_s / LIMIT_UNITS) <= LIMIT_UNITS)

    def _total(self, side: Sequence[tuple[GoalTerm, _Times]], unit_s: float) -> cp_model.LinearExpr:
        """A side in whole units, rounded down."""
        rounds = [times for part, times in side if not part.busiest]
        terms: list[cp_model.LinearExpr] = []
        if rounds:
            stage = np.sum([one.stage for one in rounds], axis=0)
            hop = np.sum([one.hop + one.delay for one in rounds], axis=0)
            back = np.sum([one.back + one.back_delay for one in rounds], axis=0)
            terms += [item for items in self._weighed(stage, hop, back, unit_s) for item in items]
        terms += [self._busiest(part, times, unit_s) for part, times in side if part.busiest]
        return cp_model.LinearExpr.sum(terms)

    def _busiest(self, part: GoalTerm, times: _Times, unit_s: float) -> cp_model.LinearExpr:
        busiest = self.model.new_int_var(0, MOST, "")
        stages, sends, returns = self._weighed(times.stage, times.hop, times.back, unit_s)
        computing, sending = (defaultdict[int, list[cp_model.LinearExpr]](list) for _ in "12")
        for at, item in zip(self._held_at, stages, strict=True):
            computing[self.relaxed.held[at].node].append(item)
        for at, item in zip(self._sent_at, sends, strict=True):
            sending[self.relaxed.sent[at].sender].append(item)
        for node, item in enumerate(returns):
            sending[node].append(item)
        for node in range(self.instance.nodes):
            apart = (computing[node], sending[node])
            for station in (
                apart if part.instance.asynchronous else ([*computing[node], *sending[node]],)
            ):
                if station:
                    self.model.add(busiest >= cp_model.LinearExpr.sum(station))
        return busiest

    def _weighed(
        self, stage: Floats, hop: Floats, back: Floats, unit_s: float
    ) -> tuple[list[cp_model.LinearExpr], list[cp_model.LinearExpr], list[cp_model.LinearExpr]]:
        """The seconds of stages, of hops and of returns in units, each times the variable that
        selects it."""

        def units(seconds: float) -> int:
            return math.floor(min(seconds / unit_s, MOST / 4))

        stage_terms = [units(stage[at]) * self.held[self.relaxed.held[at]] for at in self._held_at]
        hop_terms = [units(hop[at]) * self.sent[self.relaxed.sent[at]] for at in self._sent_at]
        returns = []
        for node, variable in enumerate(self.returns):
            returns.append((units(back[node]) if self.relaxed.returns[node] else 0) * variable)
        return stage_terms, hop_terms, returns

    def hint(self, cut: Cut) -> None:
        """Begin at a cut that is known."""
        stages = {
            NodeBlocks(*stage)
            for stage in zip(cut.nodes, (0, *cut.ends[:-1]), cut.ends, strict=True)
        }
        for blocks, variable in self.held.items():
            self.model.add_hint(variable, blocks in stages)

    def cut(self, solver: cp_model.CpSolver) -> Cut:
        """The cut that was found."""
        stages = sorted(
            (item for item, variable in self.held.items() if solver.value(variable)),
            key=lambda item: item.first,
        )
        return Cut(tuple(item.node for item in stages), tuple(item.end for item in stages))


def _ranges(instance: Instance) -> list[NodeBlocks]:
    """The source begins at block 0 and no other node does."""
    source, layers = instance.source, instance.layers
    ranges = [NodeBlocks(source, 0, end) for end in range(1, layers + 1)]
    for node in range(instance.nodes):
        for first in range(1, layers) if node != source else ():
            ranges += [NodeBlocks(node, first, end) for end in range(first + 1, layers + 1)]
    return ranges


def _fits(instance: Instance, blocks: NodeBlocks) -> bool:
    first = blocks.node == instance.source
    head = first if instance.head_on_source else blocks.end == instance.layers
    need = instance.stage_bytes + float(instance.layer_bytes[blocks.first : blocks.end].sum())
    need += (
        first * instance.embed_bytes
        + head * instance.head_bytes
        - (first and head) * instance.tied_bytes
    )
    room = need <= instance.capacity_bytes[blocks.node] * (1 + SLACK)
    return bool(room and blocks.end - blocks.first <= instance.max_layers[blocks.node])


def _scale(values: Sequence[float]) -> int:
    """What makes whole numbers of decimal ones, as far as they stay small enough."""
    digits = max(
        (-int(Decimal(repr(value)).normalize().as_tuple().exponent) for value in values), default=0
    )
    largest = max(map(abs, values), default=1.0) or 1.0
    room = int(math.log10(_MOST_WEIGHT / largest)) if largest < _MOST_WEIGHT else 0
    whole: int = 10 ** max(0, min(digits, room))
    return whole


def _whole(value: float, scale: int, *, up: bool) -> int:
    exact = Decimal(repr(value)) * scale
    return math.ceil(exact) if up else math.floor(exact)
