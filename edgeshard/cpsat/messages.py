"""Questions and answers as JSON types, between the two ends of one installation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from edgeshard.planning.solvers.instance import Cut, Instance
from edgeshard.planning.solvers.linear import GoalTerm, Linear, LinearAnswer, Question

_COUNTS = ("max_layers",)
"""Fields of an Instance that are arrays of whole numbers."""


def question_values(question: Question) -> dict[str, Any]:
    """Each instance is in there once; parts have its index in `instances`."""
    instances = list({id(one): one for one in _instances(question)}.values())
    place = {id(one): at for at, one in enumerate(instances)}

    def part(one: GoalTerm) -> list[Any]:
        return [place[id(one.instance)], one.weight, one.busiest]

    return {
        "instances": [_instance_values(one) for one in instances],
        "memory": place[id(question.memory)],
        "sides": [[part(one) for one in side] for side in question.sides],
        "limits": [[part(one), most] for one, most in question.limits],
        "conditions": [[list(one.weights), one.least, one.most] for one in question.conditions],
        "without": [[list(cut.nodes), list(cut.ends)] for cut in question.without],
        "below": question.below,
        "any": question.any_will_do,
    }


def read_question(values: Mapping[str, Any]) -> Question:
    """The question that `question_values` was made of."""
    instances = [_read_instance(one) for one in values["instances"]]

    def part(one: list[Any]) -> GoalTerm:
        place, weight, busiest = one
        return GoalTerm(instances[place], weight, busiest)

    return Question(
        memory=instances[values["memory"]],
        sides=tuple(tuple(part(one) for one in side) for side in values["sides"]),
        limits=tuple((part(one), most) for one, most in values["limits"]),
        conditions=tuple(Linear(tuple(weights), least, most) for weights, least, most in values["conditions"]),
        without=tuple(Cut(tuple(nodes), tuple(ends)) for nodes, ends in values["without"]),
        below=values["below"],
        any_will_do=values["any"],
    )


def answer_values(answer: LinearAnswer) -> dict[str, Any]:
    cut = answer.cut
    return {"cut": None if cut is None else [list(cut.nodes), list(cut.ends)], "bound_s": answer.bound_s}


def read_answer(values: Mapping[str, Any]) -> LinearAnswer:
    """The answer that `answer_values` was made of."""
    cut = values["cut"]
    return LinearAnswer(None if cut is None else Cut(tuple(cut[0]), tuple(cut[1])), values["bound_s"])


def _instances(question: Question) -> list[Instance]:
    parts = [*(part for side in question.sides for part in side), *(part for part, _ in question.limits)]
    return [question.memory, *(part.instance for part in parts)]


def _instance_values(instance: Instance) -> dict[str, Any]:
    values = {field.name: getattr(instance, field.name) for field in fields(instance)}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def _read_instance(values: Mapping[str, Any]) -> Instance:
    instance_values: dict[str, Any] = {
        name: np.array(value, dtype=np.int64 if name in _COUNTS else np.float64) if isinstance(value, list) else value
        for name, value in values.items()
    }
    return Instance(**instance_values)
