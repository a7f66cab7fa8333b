"""The same problem as a CP-SAT model, for the cross-check: nothing here is shared with the solvers but the instance.

A circuit over the boxes, self-loops for unused ones; the layers of a box start where its predecessor's ended. All times
are whole microseconds, all bytes whole, so that "optimal" means equal.
"""

from __future__ import annotations

import numpy as np
from ortools.sat.python import cp_model

from edgeshard.planning.instance import Instance


def micro(values: np.ndarray | float) -> np.ndarray:
    return np.round(np.asarray(values) * 1e6).astype(np.int64)


def least(instance: Instance, micro_batches: int | None = None, seconds: float = 60.0) -> float | None:  # noqa: C901
    """The least R, or the least max(R, m B) with `micro_batches`, in seconds; None when infeasible."""
    model = cp_model.CpModel()
    boxes, layers, source = instance.boxes, instance.layers, instance.source
    done = np.concatenate([np.zeros((boxes, 1), dtype=np.int64), np.cumsum(micro(instance.compute_s), axis=1)], axis=1)
    held = np.concatenate([[0], np.cumsum(np.round(instance.layer_bytes).astype(np.int64))])
    used = [model.new_bool_var(f"used{j}") for j in range(boxes)]
    start = [model.new_int_var(0, layers, f"start{j}") for j in range(boxes)]
    end = [model.new_int_var(0, layers, f"end{j}") for j in range(boxes)]
    # Node `boxes` is the ring's seam: from it the source, to it the last stage.
    arcs, last, hops = [], [], {}
    for j in range(boxes):
        arcs.append((j, j, used[j].negated()))
        last.append(model.new_bool_var(f"last{j}"))
        arcs.append((j, boxes, last[j]))
        for k in range(boxes):
            if j != k and k != source:
                hops[j, k] = model.new_bool_var(f"hop{j},{k}")
                arcs.append((j, k, hops[j, k]))
                model.add(start[k] == end[j]).only_enforce_if(hops[j, k])
    arcs.append((boxes, source, model.new_constant(1)))
    model.add_circuit(arcs)
    model.add(used[source] == 1)
    model.add(start[source] == 0)
    model.add(end[source] >= 1)
    model.add_linear_constraint(sum(used), instance.min_boxes, min(boxes, instance.max_boxes))
    stage, terms = [], []
    for j in range(boxes):
        model.add(end[j] == start[j]).only_enforce_if(used[j].negated())
        model.add(end[j] - start[j] <= int(instance.max_layers[j]))
        least_layers = 0 if instance.relays else 1
        model.add(end[j] - start[j] >= least_layers).only_enforce_if(used[j])
        model.add(end[j] == layers).only_enforce_if(last[j])
        model.add(end[j] > start[j]).only_enforce_if(last[j])
        model.add(end[j] < layers).only_enforce_if([used[j], last[j].negated()])
        seconds_at = [model.new_int_var(0, int(done[j, -1]), f"s{j}{side}") for side in range(2)]
        bytes_at = [model.new_int_var(0, int(held[-1]), f"b{j}{side}") for side in range(2)]
        for side, at in enumerate((start[j], end[j])):
            model.add_element(at, done[j].tolist(), seconds_at[side])
            model.add_element(at, held.tolist(), bytes_at[side])
        head = 1 * (j == source) if instance.head_on_source else last[j]
        first = int(j == source)
        tied = head * int(instance.tied_bytes) * first
        need = bytes_at[1] - bytes_at[0] + used[j] * int(instance.stage_bytes) + first * int(instance.embed_bytes)
        model.add(need + head * int(instance.head_bytes) - tied <= int(instance.capacity_bytes[j]))
        fixed = used[j] * int(micro(instance.overhead_s[j])) + first * int(micro(instance.embed_s[j]))
        stage.append(seconds_at[1] - seconds_at[0] + fixed + head * int(micro(instance.head_s[j])))
        terms.append(stage[j])
    outgoing = [[] for _ in range(boxes)]
    for (j, k), taken in hops.items():
        outgoing[j].append((int(micro(instance.hop_s[j, k])), taken))
        terms.append(taken * int(micro(instance.hop_s[j, k]) + micro(instance.latency_s[j, k])))
    for j in range(boxes):
        if j != source:
            back = int(micro(instance.return_s[j, source]))
            outgoing[j].append((back, last[j]))
            terms.append(last[j] * (back + int(micro(instance.latency_s[j, source]))))
    value = model.new_int_var(0, 1 << 40, "value")
    model.add(value >= sum(terms))
    if micro_batches is not None:
        for j in range(boxes):
            sent = sum(cost * taken for cost, taken in outgoing[j])
            if instance.asynchronous:
                model.add(value >= micro_batches * stage[j])
                model.add(value >= micro_batches * sent)
            else:
                model.add(value >= micro_batches * (stage[j] + sent))
    model.minimize(value)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = seconds
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    assert status == cp_model.OPTIMAL, solver.status_name(status)
    return solver.objective_value / 1e6
