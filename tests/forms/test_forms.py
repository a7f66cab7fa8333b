"""Values to JSON types and back under each policy: for everything that a site stores, sends and
dumps."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Literal, NewType, get_args

import pytest
from edgeshard_agent.core.events import Event as AgentEvent
from edgeshard_agent.core.node_state import AgentState
from edgeshard_agent.guides.guide_messages import Message
from edgeshard_agent.measuring.measuring_worker import MeasuringJob, Told
from edgeshard_coordinator.core.values.events import Event as CoordinatorEvent
from edgeshard_coordinator.core.values.state import DeploymentRecord, KnownNode, State

from edgeshard.cli.render.output import plain
from edgeshard.debugging.codec import Codec
from edgeshard.domain.control.commands import PrepareStage, ProfileReport, TraceSteps
from edgeshard.domain.deployments.deployment import Deployment, DeploymentSpec, parse_spec
from edgeshard.domain.deployments.traffic import Traffic
from edgeshard.domain.errors import (
    DataLossError,
    EdgeShardError,
    InternalError,
    InvalidArgumentError,
)
from edgeshard.domain.ids import Digest, NodeId
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import Node
from edgeshard.domain.nodes.profile import ComputeProfile, LinkProfile, MeasuredLink
from edgeshard.domain.requests.conversation import ChatPrompt
from edgeshard.forms import OWN, Forms
from tests.support.examples import Examples

SAVED = Forms("state", "restore it")
DUMPED = (State, AgentState, *get_args(CoordinatorEvent), *get_args(AgentEvent), DeploymentRecord)
KEPT = (
    *DUMPED,
    ComputeProfile,
    LinkProfile,
    Traffic,
    KnownNode,
    MeasuringJob,
    Told,
    ChatPrompt,
    *get_args(Message),
)
SHOWN = (Node, Deployment, ComputeProfile, LinkProfile, Traffic)


def spec(examples: Examples) -> DeploymentSpec:
    values = {
        "name": f"n{examples.number()}",
        "model": "tiny",
        "source": "a",
        "kv_dtype": "float16",
    }
    lists: dict[str, Any] = {
        "reserve": {"b": 7},
        "quantisation": {"*": "int8", "a": "none"},
        "layers": "a=0:4,b=4:12",
    }
    return parse_spec({**values, **lists, "max_time_per_token_s": 0.5, "standby": "b,c"})


MADE: dict[Any, Callable[[Examples], Any]] = {
    DeploymentSpec: spec,
    # The stored form of an error is its class's status.
    EdgeShardError: lambda examples: DataLossError(
        f"what {examples.number()}", field="f", reason="R"
    ),
    Digest: lambda examples: Digest(f"{examples.number():064x}"),
    # A node reports its own links.
    MeasuredLink: lambda examples: MeasuredLink(
        NodeId("a"), NodeId("b"), examples.of(LinkProfile)[0]
    ),
}
FIELDS: dict[tuple[type, str], Any] = {
    (PrepareStage, "stage"): 1,
    (ProfileReport, "node_id"): "a",
    (TraceSteps, "seconds"): 2.5,
}


def examples_of(kind: Any) -> list[Any]:
    return [value for bare in (False, True) for value in Examples(MADE, FIELDS, bare=bare).of(kind)]


@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.__name__)
def test_what_is_kept_comes_back(kind: type) -> None:
    for value in examples_of(kind):
        assert SAVED.from_text(kind, SAVED.to_text(kind, value)) == value


@pytest.mark.parametrize("kind", DUMPED, ids=lambda kind: kind.__name__)
def test_what_is_dumped_comes_back(kind: type) -> None:
    codec = Codec[Any](kind)
    for value in examples_of(kind):
        assert codec.decode(json.loads(json.dumps(codec.encode(value)))) == value


@pytest.mark.parametrize("kind", SHOWN, ids=lambda kind: kind.__name__)
def test_what_is_shown_is_what_is_kept_but_for_layers_and_errors(kind: type) -> None:
    def shown(value: Any, kept: Any) -> Any:
        if isinstance(value, LayerRange | EdgeShardError):
            return plain(value)
        if dataclasses.is_dataclass(value) or isinstance(value, DeploymentSpec):
            return {name: shown(getattr(value, name), part) for name, part in kept.items()}
        return (
            [shown(*pair) for pair in zip(value, kept, strict=True)]
            if isinstance(value, tuple)
            else kept
        )

    for value in examples_of(kind):
        expected = shown(value, SAVED.write(kind, value))
        assert plain(value) == expected
        assert json.dumps(plain(value)) == json.dumps(expected), (
            "the keys are in the order of the fields"
        )


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


Name = NewType("Name", str)


def even(value: int, path: str) -> int:
    if value % 2:
        raise InvalidArgumentError(f"{path} is odd", field=path)
    return value


@dataclass(frozen=True)
class Leaf:
    count: Annotated[int, even]
    colour: Colour = Colour.RED


@dataclass(frozen=True)
class Tree:
    leaves: tuple[Leaf, ...] = ()
    pair: tuple[int, str] = (1, "a")
    named: Mapping[Name, Leaf] = field(default_factory=dict)
    placed: Mapping[tuple[int, int], float] = field(default_factory=dict)
    members: frozenset[Name] = frozenset()
    data: bytes = b""
    mode: Literal["one", "two"] = "one"
    either: Leaf | None = None
    extra: Any = None


FULL = Tree(
    leaves=(Leaf(2), Leaf(4, Colour.BLUE)),
    named={Name("x"): Leaf(6)},
    placed={(1, 2): 0.5, (3, 4): -math.inf},
    members=frozenset({Name("b"), Name("a")}),
    data=b"\x00\xff",
    mode="two",
    extra={"layers": [1, 2.5, None]},
)
WRITTEN = {
    "leaves": [{"count": 2, "colour": "red"}, {"count": 4, "colour": "blue"}],
    "pair": [1, "a"],
    "named": {"x": {"count": 6, "colour": "red"}},
    "placed": [[[1, 2], 0.5], [[3, 4], "-inf"]],
    "members": ["a", "b"],
    "data": "AP8=",
    "mode": "two",
    "either": None,
    "extra": {"layers": [1, 2.5, None]},
}


def test_each_shape_has_its_json() -> None:
    assert SAVED.write(Tree, FULL) == WRITTEN
    assert SAVED.read(Tree, json.loads(json.dumps(WRITTEN))) == FULL


@dataclass(frozen=True)
class Kept:
    leaf: Leaf
    low: float = 0.0
    leaves: tuple[Leaf, ...] = ()
    named: Mapping[str, Leaf] = field(default_factory=dict)
    pair: tuple[int, str] = (1, "a")
    mode: Literal["one", "two"] = "one"
    data: bytes = b""

    def check(self) -> None:
        if self.low > 1:
            raise InvalidArgumentError("low is above 1", field="low")


def test_a_missing_field_has_its_default_and_an_unknown_one_is_ignored() -> None:
    assert SAVED.read(Kept, {"leaf": {"count": 2, "shade": 1}, "later": [1]}) == Kept(Leaf(2))


def test_a_dump_has_no_unknown_and_no_missing_keys() -> None:
    codec = Codec[Any](Leaf)
    written = codec.encode(Leaf(3))
    assert written == {"type": "Leaf", "count": 3, "colour": "red"} and codec.decode(
        written
    ) == Leaf(3)
    for wrong in (
        {**written, "shade": 1},
        {"type": "Leaf", "count": 3},
        {**written, "type": "Tree"},
    ):
        with pytest.raises(InvalidArgumentError) as refused:
            codec.decode(wrong)
        assert (refused.value.field, refused.value.reason) == ("dump", "UNKNOWN_VALUE")


@pytest.mark.parametrize(
    ("changes", "path", "why"),
    [
        ({"leaf": None}, "leaf", "should be an object"),
        ({"leaf": {}}, "leaf.count", "is missing"),
        ({"leaf": {"count": True}}, "leaf.count", "should be a valid integer"),
        ({"leaf": {"count": 2.0}}, "leaf.count", "should be a valid integer"),
        ({"leaf": {"count": 2, "colour": []}}, "leaf.colour", "should be one of red, blue"),
        ({"low": "1"}, "low", "should be a valid number"),
        ({"low": 10**400}, "low", "should be a valid number"),
        ({"leaves": {}}, "leaves", "should be a valid array"),
        (
            {"leaves": [{"count": 2}, {"count": "2"}]},
            "leaves[1].count",
            "should be a valid integer",
        ),
        ({"named": []}, "named", "should be an object"),
        ({"named": {"x": {}}}, "named.x.count", "is missing"),
        ({"pair": [1]}, "pair", "should be a valid array"),
        ({"pair": [1, 2]}, "pair[1]", "should be a valid string"),
        ({"mode": "three"}, "mode", "should be one of one, two"),
        ({"data": "A"}, "data", "should be base64"),
    ],
)
def test_what_cannot_be_read_is_named_by_its_path(
    changes: dict[str, Any], path: str, why: str
) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        SAVED.read(Kept, {"leaf": {"count": 2}, **changes})
    assert refused.value.field == path
    assert refused.value.message.startswith(f"{path} of the state {why}")
    assert refused.value.message.endswith("; restore it")


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "is not JSON: "), ("[" * 100_000, "is not JSON"), ("[]", "should be an object; ")],
)
def test_a_text_that_is_no_object_is_refused_as_a_whole(text: str, why: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        SAVED.from_text(Kept, text)
    assert refused.value.field == "state" and refused.value.message.startswith(f"the state {why}")


def test_figures_and_values_are_checked_where_they_come_in() -> None:
    with pytest.raises(InvalidArgumentError, match=r"leaves\[1\]\.count is odd"):
        SAVED.read(Kept, {"leaf": {"count": 2}, "leaves": [{"count": 2}, {"count": 3}]})
    with pytest.raises(InvalidArgumentError, match="low of the state is above 1"):
        SAVED.read(Kept, {"leaf": {"count": 2}, "low": 2})
    assert Codec[Any](Kept).decode(Codec[Any](Kept).encode(Kept(Leaf(3), 2.0))) == Kept(
        Leaf(3), 2.0
    )


def test_only_some_fields_of_a_class_may_be_kept() -> None:
    forms = Forms("state", "restore it", {Kept: ("leaf", "low")})
    assert forms.write(Kept, Kept(Leaf(2), 0.5, data=b"x")) == {
        "leaf": {"count": 2, "colour": "red"},
        "low": 0.5,
    }
    assert forms.read(Kept, {"leaf": {"count": 2}, "data": "AP8="}) == Kept(Leaf(2))


def test_classes_have_names_where_several_could_be_meant() -> None:
    either: Any = Leaf | Kept | None
    assert SAVED.write(either, Leaf(2)) == {"type": "Leaf", "count": 2, "colour": "red"}
    assert SAVED.read(either, {"type": "Kept", "leaf": {"count": 2}}) == Kept(Leaf(2))
    assert SAVED.read(either, None) is None
    wrong: Any
    for wrong in ({"type": "Tree"}, {}, 7, [], "Leaf"):
        with pytest.raises(InvalidArgumentError):
            SAVED.read(either, wrong)
    with pytest.raises(TypeError):
        SAVED.write(either, FULL)
    with pytest.raises(TypeError, match="have the same form in JSON"):
        SAVED.of(Leaf | str)


def test_an_error_has_the_code_of_its_class() -> None:
    error = DataLossError("tensor x is corrupt", field="x", reason="CORRUPT_TENSOR")
    written = {
        "code": 15,
        "reason": "CORRUPT_TENSOR",
        "field": "x",
        "message": "tensor x is corrupt",
    }
    assert OWN.write(EdgeShardError, error) == written
    assert OWN.read(EdgeShardError, written) == error
    unknown = OWN.read(EdgeShardError, {**written, "code": 99})
    assert unknown == InternalError("tensor x is corrupt", field="x", reason="CORRUPT_TENSOR")
    wrong: Any
    for wrong in (
        None,
        [],
        {},
        {**written, "message": 7},
        {**written, "field": None},
        {**written, "code": []},
    ):
        with pytest.raises(InvalidArgumentError):
            OWN.read(EdgeShardError, wrong)


def test_a_spec_keeps_its_bounds() -> None:
    kept = SAVED.write(DeploymentSpec, parse_spec({"name": "d", "model": "m"}))
    assert SAVED.read(DeploymentSpec, {"name": "d", "model": "m"}) == SAVED.read(
        DeploymentSpec, kept
    )
    assert SAVED.read(DeploymentSpec, {**kept, "of_a_later_version": 1}) == SAVED.read(
        DeploymentSpec, kept
    )
    with pytest.raises(
        InvalidArgumentError, match="concurrency of the state must be 1 to 4096; restore it"
    ) as refused:
        SAVED.read(DeploymentSpec, {**kept, "concurrency": 0})
    assert refused.value.field == "concurrency"


def test_a_type_is_walked_at_its_first_use() -> None:
    forms = Forms("state", "restore it")
    assert forms.of(Kept) is forms.of(Kept)
    with pytest.raises(TypeError, match=r"Wrong\.part"):
        forms.of(
            dataclasses.make_dataclass(
                "Wrong", [("part", complex)], namespace={"__module__": __name__}
            )
        )
