"""Values to JSON and back: every event and every part of a state, and nothing that a user wrote."""

from __future__ import annotations

import dataclasses
import json
import random
import types
from collections.abc import Mapping
from enum import Enum
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NewType,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import pytest
from edgeshard_agent.core.events import Event as AgentEvent
from edgeshard_agent.core.node_actions import Action as AgentAction
from edgeshard_agent.core.node_state import AgentState
from edgeshard_coordinator.core.values.actions import Action as CoordinatorAction
from edgeshard_coordinator.core.values.events import Event as CoordinatorEvent
from edgeshard_coordinator.core.values.state import State

from edgeshard.debugging.codec import Codec
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.errors import (
    EdgeShardError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from edgeshard.domain.requests.generation import Generation, Sampling

MEMBERS = [
    (union, member)
    for union in (CoordinatorEvent, CoordinatorAction, AgentEvent, AgentAction)
    for member in get_args(union)
]
NAMES = NewType("NAMES", str)
ItemT = TypeVar("ItemT")


def sample(kind: Any, rng: random.Random) -> Any:
    """A value of a type, with every field drawn."""
    while isinstance(kind, NewType) or get_origin(kind) is Annotated:
        kind = kind.__supertype__ if isinstance(kind, NewType) else get_args(kind)[0]
    arguments = get_args(kind)
    origin: Any = get_origin(kind) or kind
    if origin in (Union, types.UnionType, Literal):
        chosen = rng.choice(arguments)
        return chosen if origin is Literal else sample(chosen, rng)
    if origin is tuple and arguments[-1] is Ellipsis:
        return tuple(sample(arguments[0], rng) for _ in range(rng.randrange(3)))
    if origin is tuple:
        return tuple(sample(argument, rng) for argument in arguments)
    if origin is frozenset:
        return frozenset(sample(arguments[0], rng) for _ in range(rng.randrange(3)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {
            sample(arguments[0], rng): sample(arguments[1], rng) for _ in range(rng.randrange(3))
        }
    if isinstance(origin, type) and issubclass(origin, Enum):
        return rng.choice(list(origin))
    if isinstance(origin, type) and issubclass(origin, EdgeShardError):
        return rng.choice(
            [
                NotFoundError("no", field="x"),
                UnavailableError("away", reason="R", retry_after_s=2.0),
            ]
        )
    if dataclasses.is_dataclass(origin):
        given = dict(zip(getattr(origin, "__parameters__", ()), arguments, strict=True))
        hints = get_type_hints(origin)
        fields = [field.name for field in dataclasses.fields(origin)]
        make: Any = origin
        return make(**{name: sample(given.get(hints[name], hints[name]), rng) for name in fields})
    if origin is DeploymentSpec:
        quantised: dict[str, Any] = {"b": "int8"} if rng.random() < 0.5 else {}
        return DeploymentSpec(
            name="d", model="m", source=str(rng.randrange(99)), quantisation=quantised
        )
    if origin is Any:
        return {"layers": [1, 2.5, None, {"on": True}], "name": "\u00e9"}
    number = rng.choice([rng.random(), float("inf")])
    scalars: dict[Any, Any] = {
        str: f"s{rng.randrange(1000)}\u2603", int: rng.randrange(1 << 60), float: number,
        bool: rng.random() < 0.5, bytes: rng.randbytes(4), type(None): None,
    }  # fmt: skip
    return scalars[origin]


@pytest.mark.parametrize(
    ("union", "member"), MEMBERS, ids=lambda value: getattr(value, "__name__", "")
)
def test_every_event_and_action_comes_back(union: Any, member: type) -> None:
    rng, codec = random.Random(member.__name__), Codec[Any](union)
    for _ in range(40):
        value = sample(member, rng)
        back = codec.decode(json.loads(json.dumps(codec.encode(value))))
        assert back == value and type(back) is member


@pytest.mark.parametrize("kind", [State, AgentState])
def test_states_come_back(kind: type) -> None:
    rng, codec = random.Random(1), Codec[Any](kind)
    for _ in range(60):
        value = sample(kind, rng)
        assert codec.decode(json.loads(json.dumps(codec.encode(value)))) == value


def made(hint: Any, name: str = "part") -> Any:
    """A class with one field."""
    return dataclasses.make_dataclass(
        "Made", [(name, hint)], frozen=True, namespace={"__module__": __name__}
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("prompt", str),
        ("tokens", tuple[int, ...]),
        ("token_ids", list),
        ("text", NAMES),
        ("secret", bytes),
        ("key", str | None),
        ("part", Generation),
        ("part", tuple[Sampling, ...]),
        ("part", made(made(str, "messages"), "inner")),
    ],
)
def test_what_could_hold_a_users_words_or_a_secret_is_refused_by_its_type(
    name: str, hint: Any
) -> None:
    with pytest.raises(TypeError, match="must not be in a dump") as refused:
        Codec(made(hint, name) | None)
    assert name in str(refused.value)


def test_numbers_of_tokens_are_fit_for_a_dump() -> None:
    kind = made(int, "prompt_tokens")
    assert Codec[Any](kind).encode(kind(7)) == {"type": "Made", "prompt_tokens": 7}


@pytest.mark.parametrize(
    "hint", [object, set[int], complex, int | str, made(str) | made(int), list[int]]
)
def test_a_type_without_a_form_is_refused_by_name(hint: Any) -> None:
    with pytest.raises(TypeError, match="part"):
        Codec(made(hint))


def test_generic_classes_keep_what_they_are_of() -> None:
    @dataclasses.dataclass(frozen=True)
    class Node(Generic[ItemT]):
        item: ItemT

    globals()["ItemT"] = ItemT
    assert Codec[Any](Node[tuple[int, ...]]).decode({"type": "Node", "item": [1, 2]}) == Node(
        (1, 2)
    )


@pytest.mark.parametrize(
    "plain",
    [
        None,
        7,
        {},
        {"type": "Nothing"},
        {"type": "DeploymentForgotten"},
        {"type": "Ticked", "now": 1.0},
    ],
)
def test_what_no_version_wrote_is_a_typed_error(plain: Any) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        Codec[Any](CoordinatorEvent).decode(plain)
    assert refused.value.reason == "UNKNOWN_VALUE"


def test_a_value_of_another_type_is_not_encoded() -> None:
    with pytest.raises(TypeError):
        Codec[Any](CoordinatorEvent).encode(AgentState())


def test_errors_that_say_the_same_are_equal() -> None:
    assert NotFoundError("no", field="x") == NotFoundError("no", field="x")
    assert (
        len(
            {NotFoundError("no"), NotFoundError("no"), UnavailableError("no"), NotFoundError("yes")}
        )
        == 3
    )
    assert NotFoundError("no") != UnavailableError("no", reason="NOT_FOUND")
