"""The placement problem as an integer program for CP-SAT: the cross-check of the solvers, which it shares nothing with.

A path through (layer, node): one variable for "node j holds blocks [a, b)" where that keeps j's memory, one for "j
hands over to k after block b". What ends on a node goes out from it, what comes in begins there, and a node holds one
range at most. All times are whole microseconds, so that "optimal" means equal. An answer is proven: a time limit that
is hit is an error.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from ortools.sat.python import cp_model

from edgeshard.domain.errors import EdgeShardError
from edgeshard.planning.solvers.instance import Floats, Instance


class _Held(NamedTuple):
    """Blocks [first, end) of a node."""

    node: int
    first: int
    end: int


class _Sent(NamedTuple):
    """After block `end` - 1 the sender hands over to the receiver."""

    sender: int
    receiver: int
    end: int


def least(instance: Instance, micro_batches: int | None = None, limit_s: float = 60.0) -> float | None:
    """The least R, or the least max(R, m B) with `micro_batches`, in seconds; None when infeasible.

    Raises EdgeShardError when nothing is proven within `limit_s` seconds.
    """
    program = _Program(instance)
    program.connect()
    program.minimise(micro_batches)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 2
    solver.parameters.max_time_in_seconds = limit_s
    status = solver.solve(program.model)
    if status == cp_model.INFEASIBLE:
        return None
    if status != cp_model.OPTIMAL:
        raise EdgeShardError(f"CP-SAT proved nothing in {limit_s:g} s: {solver.status_name(status)}")
    return solver.objective_value / 1e6


class _Program:
    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.model = cp_model.CpModel()
        self._done = np.zeros((instance.nodes, instance.layers + 1), dtype=np.int64)
        self._done[:, 1:] = np.cumsum(_micro(instance.compute_s), axis=1)
        self._held_bytes = np.concatenate([[0.0], np.cumsum(instance.layer_bytes)])
        self.held = {item: self.model.new_bool_var(f"{item}") for item in self._ranges() if self._fits(item)}
        self.sent = {
            item: self.model.new_bool_var(f"{item}")
            for end in range(1, instance.layers)
            for sender in range(instance.nodes)
            for receiver in range(instance.nodes)
            if (item := _Sent(sender, receiver, end))
            and receiver not in (sender, instance.source)
            and np.isfinite(instance.hop_s[sender, receiver])
        }
        self.returns = [self.model.new_bool_var(f"return {node}") for node in range(instance.nodes)]

    def connect(self) -> None:
        """One path from the source's first block to the return."""
        instance, model = self.instance, self.model
        of_node, ending, beginning, leaving, coming = (defaultdict(list) for _ in range(5))
        for held, chosen in self.held.items():
            of_node[held.node].append(chosen)
            ending[held.node, held.end].append(chosen)
            beginning[held.node, held.first].append(chosen)
        for sent, chosen in self.sent.items():
            leaving[sent.sender, sent.end].append(chosen)
            coming[sent.receiver, sent.end].append(chosen)
        for node in range(instance.nodes):
            if node == instance.source:
                model.add_exactly_one(of_node[node])
            else:
                model.add_at_most_one(of_node[node])
            for end in range(1, instance.layers):
                model.add(sum(ending[node, end]) == sum(leaving[node, end]))
                model.add(sum(beginning[node, end]) == sum(coming[node, end]))
            model.add(sum(ending[node, instance.layers]) == self.returns[node])
        model.add_exactly_one(self.returns)
        most = min(instance.nodes, instance.max_nodes)
        model.add_linear_constraint(sum(self.held.values()), instance.min_nodes, most)

    def minimise(self, micro_batches: int | None) -> None:
        instance, total = self.instance, cp_model.LinearExpr.sum
        hop, back, latency = (_micro(getattr(instance, name)) for name in ("hop_s", "return_s", "latency_s"))
        compute, send = (defaultdict[int, list[cp_model.LinearExpr]](list) for _ in range(2))
        delays: list[cp_model.LinearExpr] = []
        for held, chosen in self.held.items():
            compute[held.node].append(self._stage_us(held) * chosen)
        for sent, chosen in self.sent.items():
            ends = sent.sender, sent.receiver
            send[sent.sender].append(int(hop[ends]) * chosen)
            delays.append(int(latency[ends]) * chosen)
        for node, chosen in enumerate(self.returns):
            if node != instance.source:
                send[node].append(int(back[node, instance.source]) * chosen)
                delays.append(int(latency[node, instance.source]) * chosen)
        value = self.model.new_int_var(0, 1 << 40, "value")
        nodes = range(instance.nodes)
        self.model.add(value >= total([*delays, *(item for node in nodes for item in (*compute[node], *send[node]))]))
        if micro_batches is not None:
            for node in nodes:
                apart = (compute[node], send[node])
                for station in apart if instance.asynchronous else ([*compute[node], *send[node]],):
                    self.model.add(value >= micro_batches * total(station))
        self.model.minimize(value)

    def _ranges(self) -> list[_Held]:
        """The source begins at block 0 and no other node does."""
        source, layers = self.instance.source, self.instance.layers
        found = [_Held(source, 0, end) for end in range(1, layers + 1)]
        for node in range(self.instance.nodes):
            for first in range(1, layers) if node != source else ():
                found += [_Held(node, first, end) for end in range(first + 1, layers + 1)]
        return found

    def _ends(self, held: _Held) -> tuple[bool, bool]:
        """Whether this stage is the first, and whether it has the head."""
        first = held.node == self.instance.source
        return first, first if self.instance.head_on_source else held.end == self.instance.layers

    def _fits(self, held: _Held) -> bool:
        instance, (first, head) = self.instance, self._ends(held)
        need = instance.stage_bytes + self._held_bytes[held.end] - self._held_bytes[held.first]
        need += first * instance.embed_bytes + head * instance.head_bytes - (first and head) * instance.tied_bytes
        room = need <= instance.capacity_bytes[held.node]
        return bool(room and held.end - held.first <= instance.max_layers[held.node])

    def _stage_us(self, held: _Held) -> int:
        instance, (first, head) = self.instance, self._ends(held)
        total = self._done[held.node, held.end] - self._done[held.node, held.first]
        total += _micro(instance.overhead_s)[held.node]
        total += first * _micro(instance.embed_s)[held.node] + head * _micro(instance.head_s)[held.node]
        return int(total)


def _micro(seconds: Floats) -> npt.NDArray[np.int64]:
    return np.round(seconds * 1e6).astype(np.int64)
