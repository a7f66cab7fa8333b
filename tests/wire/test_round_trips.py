"""Every value of the wire survives a round trip, with every field away from its default; nothing is
listed by hand.

The pairs of functions are found in edgeshard.wire, the fields of their values by reflection, and
the fields of the messages in the descriptors. If either direction forgets a field, a test fails.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

import edgeshard.proto.v1
import edgeshard.wire
from edgeshard.debugging.dump import ProcessDump
from edgeshard.domain.control.commands import PrepareStage, ProfileReport, TraceSteps
from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.deployments.rules import Rule, RuleKind
from edgeshard.domain.errors import InvalidArgumentError, UnavailableError
from edgeshard.domain.identity import OpenToken, Principal, Role, TokenRequest
from edgeshard.domain.ids import Digest, NodeName
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.models.model import ModelManifest
from edgeshard.domain.requests.step import ForwardStep, Span, Tensor, WireStep
from edgeshard.proto.v1 import stage_pb2
from edgeshard.wire.codec import from_failure, to_failure
from edgeshard.wire.debug import dump_messages
from edgeshard.wire.frames import Frame, FrameContract, FrameReader, encode_guesses, encode_step
from edgeshard.wire.site import spec_from_wire, spec_to_wire
from tests.support.examples import Examples, comparable

MADE: dict[Any, Callable[[Examples], Any]] = {
    Digest: lambda examples: Digest(f"{examples.number():064x}"),
    Rule: lambda examples: Rule(RuleKind.AT_MOST, (f"n{examples.number()}",), limit=1),
    Frame: lambda examples: Frame(header=b"h", crc32c=examples.number(), payload=b"p"),
}
FIELDS: dict[tuple[type, str], Any] = {
    # The only one that is supported; test_a_privacy_that_is_not_supported_arrives has the other.
    (DeploymentSpec, "privacy"): "open",
    (DeploymentSpec, "mode"): "bubbles",
    (DeploymentSpec, "concurrency"): 9,
    (DeploymentSpec, "micro_batches"): 3,
    (DeploymentSpec, "prompt_tokens"): 2,
    (DeploymentSpec, "new_tokens"): 1,
    # No rule has both names and a label.
    (DeploymentSpec, "rule"): (
        Rule(RuleKind.AT_MOST, ("r1", "r2"), limit=1),
        Rule(RuleKind.APART, label="zone"),
    ),
    (TokenRequest, "role"): Role.OPERATOR,
    (TokenRequest, "id"): "kim",
    (OpenToken, "role"): Role.OPERATOR,
    (OpenToken, "id"): "kim",
    (Principal, "site"): "mill",
    (Principal, "role"): Role.CLIENT,
    (Principal, "id"): "app",
    (ModelManifest, "config_json"): '{"a": 1}',
    (PrepareStage, "stage"): 1,
    # Its targets are after its positions.
    (Span, "token_count"): 200,
    (TraceSteps, "seconds"): 2.5,
}
# An envelope with more fields than this is a value, and needs a pair.
MOST_FIELDS_OF_AN_ENVELOPE = 2


def modules_of(package: Any) -> Iterator[Any]:
    for found in pkgutil.iter_modules(package.__path__):
        yield importlib.import_module(f"{package.__name__}.{found.name}")


def pairs() -> dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]]:
    """Each public pair of edgeshard.wire by its value's name."""
    found: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
        "error": (to_failure, from_failure)
    }
    alone: set[str] = set()
    for module in modules_of(edgeshard.wire):
        for name in vars(module):
            for suffix, other in (("_to_wire", "_from_wire"), ("_from_wire", "_to_wire")):
                value = name.removesuffix(suffix)
                if value == name or name.startswith("_"):
                    continue
                if hasattr(module, value + other):
                    found[value] = (
                        getattr(module, f"{value}_to_wire"),
                        getattr(module, f"{value}_from_wire"),
                    )
                else:
                    alone.add(value)
    assert not alone - found.keys(), f"{alone - found.keys()} are converted in one direction only"
    return found


PAIRS = pairs()


def arguments_of(to_wire: Callable[..., Any], *, bare: bool) -> list[tuple[Any, ...]]:
    examples = Examples(MADE, FIELDS, bare=bare)
    parameters = inspect.signature(to_wire, eval_str=True).parameters.values()
    choices = product(*(examples.of(parameter.annotation) for parameter in parameters))
    return [tuple(_possible(value) for value in choice) for choice in choices]


def _possible(value: Any) -> Any:
    """Adjust fields that determine each other."""
    if isinstance(value, ProfileReport):
        return replace(
            value, links=tuple(replace(link, sender=value.node_id) for link in value.links)
        )
    return value


@pytest.mark.parametrize("bare", [False, True], ids=["all fields", "defaults"])
@pytest.mark.parametrize("name", sorted(PAIRS))
def test_a_value_comes_back_as_it_was(name: str, bare: bool) -> None:
    to_wire, from_wire = PAIRS[name]
    for arguments in arguments_of(to_wire, bare=bare):
        back = from_wire(to_wire(*arguments))
        assert comparable(back) == comparable(arguments if len(arguments) > 1 else arguments[0])


def steps() -> list[WireStep]:
    """A step of each kind, with a tensor that fits its spans."""
    found = []
    for step in Examples(MADE, FIELDS).of(WireStep):
        if isinstance(step, ForwardStep):
            shape = step.plan.token_count, 3
            assert step.hidden is not None
            dtype = step.hidden.dtype
            step = replace(step, hidden=Tensor(dtype, shape, bytes(shape[0] * 3 * dtype.itemsize)))
        found.append(step)
    return found


@pytest.mark.parametrize("step", steps(), ids=lambda step: type(step).__name__)
def test_a_step_comes_back_as_it_was(step: WireStep) -> None:
    width, dtype = 0, DType.FLOAT32
    if isinstance(step, ForwardStep):
        assert step.hidden is not None
        width, dtype = 3, step.hidden.dtype
    contract = FrameContract("pipeline", 4, dtype, width, max_tokens=10_000, window=1)
    frames = encode_step("pipeline", 4, step)
    reader = FrameReader(contract, next_step=step.number)
    assert [item for frame in frames for item in reader.accept(frame).steps] == [step]


def test_a_privacy_that_is_not_supported_arrives() -> None:
    message = spec_to_wire(DeploymentSpec(name="n", model="m", source="s", privacy="source-only"))
    with pytest.raises(InvalidArgumentError, match="source-only") as refused:
        spec_from_wire(message)
    assert refused.value.field == "privacy"


def test_every_field_of_every_message_is_written() -> None:
    written: set[str] = set()
    for to_wire, _ in PAIRS.values():
        for arguments in arguments_of(to_wire, bare=False):
            _note(to_wire(*arguments), written)
    for step in steps():
        # A tensor of more than 1 MiB goes in parts.
        if isinstance(step, ForwardStep):
            assert step.hidden is not None
            step = replace(step, hidden=replace(step.hidden, data=bytes(3 << 20)))
        for frame in encode_step("pipeline", 4, step):
            _note(stage_pb2.FrameHeader.FromString(frame.header), written)
    _note(
        stage_pb2.FrameHeader.FromString(encode_guesses("pipeline", 4, 5, {6: (7,)}).header),
        written,
    )
    for dump in (
        ProcessDump(NodeName("a"), b"{}"),
        ProcessDump(NodeName("a"), failure=UnavailableError("away")),
    ):
        _note(list(dump_messages(dump)), written)
    # The service sets the version, and the interval is no longer set.
    register = "edgeshard.proto.v1.RegisterResponse"
    written |= {f"{register}.wire_version", f"{register}.heartbeat_interval_s"}
    assert {"Sampling", "DeploymentSpec", "Frame"} <= {kind.name for kind in messages()}
    fields = [item for kind in messages() for item in kind.fields]
    assert [item.full_name for item in fields if item.full_name not in written] == []


def messages() -> Iterator[Descriptor]:
    """Every message that is a value: all but envelopes that only wrap one or two."""
    for module in modules_of(edgeshard.proto.v1):
        # A module of stubs has none.
        for kind in (
            module.DESCRIPTOR.message_types_by_name.values()
            if hasattr(module, "DESCRIPTOR")
            else ()
        ):
            is_envelope = kind.name.endswith(("Request", "Response"))
            if not (is_envelope and len(kind.fields) <= MOST_FIELDS_OF_AN_ENVELOPE):
                yield kind


def _note(message: Any, written: set[str]) -> None:
    """Remember the fields that are set in a message, and in those it holds."""
    if isinstance(message, list | tuple):
        for item in message:
            _note(item, written)
    if not isinstance(message, Message):
        return
    for item, value in message.ListFields():
        written.add(item.full_name)
        if item.message_type is not None and not item.message_type.GetOptions().map_entry:
            _note(list(value) if item.is_repeated else value, written)
