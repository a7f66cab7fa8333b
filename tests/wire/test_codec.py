"""The codec keeps the former meaning of messages, and refuses forbidden messages of a stranger and
values it cannot convert.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from edgeshard.domain.checks import checks_of
from edgeshard.domain.control.commands import (
    MAX_LISTED_PACKED,
    MAX_REPORTED_LINKS,
    MAX_REPORTED_PROFILES,
    MOST_PACKED,
    MOST_PART_BYTES,
    MOST_STAGES,
    ActivateHead,
    CommandProgress,
    CommandResult,
    ControlHello,
    DumpPart,
    Heartbeat,
    HeartbeatChange,
    KeepStandby,
    Peer,
    PrepareStage,
    ProbeLinks,
    ProfileReport,
    Registration,
    ReleaseStage,
    TraceSteps,
)
from edgeshard.domain.control.site import (
    BlobHeader,
    BlobRange,
    DeployCall,
    LocalFile,
    MeasureRequest,
)
from edgeshard.domain.deployments.deployment import Deployment, DeploymentSpec
from edgeshard.domain.deployments.guesses import GuessCounts
from edgeshard.domain.deployments.placement import LengthsFrom, PlacedDraft, Placement, Speculation
from edgeshard.domain.deployments.rules import Rule
from edgeshard.domain.deployments.step_cost import StageCost
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.identity import ApiKey, Enrolment, OpenToken, Role, TokenRequest, WheelServer
from edgeshard.domain.ids import MAX_EPOCH, MAX_TEXT, NodeId, NodeName, OperationId
from edgeshard.domain.models.packed_units import PackedUnit
from edgeshard.domain.nodes import profile
from edgeshard.domain.nodes.device import (
    Condition,
    DeviceFacts,
    StageExperts,
    StageFilling,
    StageKey,
    StagePhase,
    StageStatus,
    StageStreaming,
    Support,
    WeightLoadingWork,
)
from edgeshard.domain.nodes.kernels import KernelSpeed
from edgeshard.domain.nodes.labels import LabelCall
from edgeshard.domain.requests.conversation import ToolFormat
from edgeshard.domain.requests.generation import FinishReason
from edgeshard.domain.requests.head import (
    MAX_DIGEST_BYTES,
    MAX_HELD,
    HeadHello,
    HeldRequest,
    StartRequest,
)
from edgeshard.domain.requests.link import LinkHello, LinkSuspected
from edgeshard.domain.requests.trace import MOST_RECORDS, ReadRecord, StageTrace, StepRecord
from edgeshard.proto.v1 import admin_pb2, common_pb2, inference_pb2
from edgeshard.wire import codec
from edgeshard.wire.control import command_from_wire, command_to_wire
from tests.support.examples import Examples
from tests.wire.golden import GOLDEN, plain
from tests.wire.test_round_trips import FIELDS, MADE, PAIRS, arguments_of

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_a_message_of_an_earlier_version_means_what_it_meant(name: str) -> None:
    to_wire, from_wire = PAIRS[name]
    sample = to_wire(*arguments_of(to_wire, bare=True)[0])
    kind = type(sample[0] if isinstance(sample, list) else sample)
    for example in WRITTEN[name]:
        written = example["message"]
        texts = written if isinstance(written, list) else [written]
        messages = [kind.FromString(bytes.fromhex(text)) for text in texts]
        back = from_wire(messages if isinstance(written, list) else messages[0])
        meant = example["value"]
        assert _holds(plain(back), meant if len(meant) > 1 else meant[0]), plain(back)


def _holds(now: Any, then: Any) -> bool:
    """Whether a value has all that it had then; it may have fields that are newer."""
    if isinstance(then, dict):
        return isinstance(now, dict) and all(
            key in now and _holds(now[key], item) for key, item in then.items()
        )
    if isinstance(then, list):
        return isinstance(now, list) and len(now) == len(then) and all(map(_holds, now, then))
    return bool(now == then)


UNKNOWN: dict[str, Enum | None] = {
    "DataType": None,
    "DeploymentPhase": None,
    "Effort": None,
    "FillingWork": WeightLoadingWork.CONVERTING,
    "FinishReason": FinishReason.CANCELLED,
    "GuideKind": None,
    "ReplanReason": None,
    "StagePhase": StagePhase.FAILED,
    "ToolFormat": ToolFormat.NONE,
}
"""The replacement of a number that this version does not know; None if the message is refused."""


def forms() -> dict[tuple[Any, str], codec.MessageForm]:
    """All that the codec converts, once each pair was used."""
    for to_wire, from_wire in PAIRS.values():
        for arguments in arguments_of(to_wire, bare=False):
            from_wire(to_wire(*arguments))
    return dict(codec._FORMS)


FORMS = forms()


def form_of(kind: type) -> codec.MessageForm:
    return next(form for (found, _), form in FORMS.items() if found is kind)


def examples_of(kind: Any) -> list[Any]:
    return Examples(MADE, FIELDS).of(kind)


def numbered(message: Descriptor) -> Iterator[Any]:
    return (field for field in message.fields if field.enum_type is not None)


@pytest.mark.parametrize(
    "kind", [key for key in FORMS if is_dataclass(key[0])], ids=lambda key: key[1]
)
def test_a_number_that_is_not_known_is_taken_for_what_the_table_says(kind: tuple[Any, str]) -> None:
    form = FORMS[kind]
    for field in numbered(form.write(examples_of(kind[0])[0]).DESCRIPTOR):
        message = form.write(examples_of(kind[0])[0])
        setattr(message, field.name, 99)
        meaning = UNKNOWN[field.enum_type.name]
        if meaning is None:
            with pytest.raises(InvalidArgumentError, match="does not know") as refused:
                form.read(message, "")
            assert refused.value.field == field.name
        else:
            assert meaning in vars_of(form.read(message, ""))


def vars_of(value: Any) -> list[Any]:
    return [getattr(value, item.name) for item in fields(value)]


UNKNOWN_TEXTS: dict[type[Enum], Enum] = {
    LengthsFrom: LengthsFrom.DEFAULT,
    Speculation: Speculation.OFF,
    Support: Support.UNKNOWN,
}
"""The replacement of a text that this version does not know; other enumerations refuse it."""
TEXT = "of the future"


def text_fields() -> Iterator[tuple[Any, str, type[Enum]]]:
    """The fields that say a member of an enumeration as text: their class, their name, the
    enumeration."""
    for (kind, _), form in FORMS.items():
        if not is_dataclass(kind):
            continue
        message = form.write(examples_of(kind)[0]).DESCRIPTOR
        for name, hint in get_type_hints(kind).items():
            enums = [
                part
                for part in (hint, *get_args(hint))
                if isinstance(part, type) and issubclass(part, Enum)
            ]
            found = message.fields_by_name.get(name)
            if enums and found is not None and found.enum_type is None:
                yield kind, name, enums[0]


@pytest.mark.parametrize(("kind", "name", "enum"), list(text_fields()), ids=str)
def test_a_text_that_is_not_known(kind: Any, name: str, enum: type[Enum]) -> None:
    form = form_of(kind)
    message = form.write(examples_of(kind)[0])
    setattr(message, name, TEXT)
    if enum in UNKNOWN_TEXTS:
        assert getattr(form.read(message, ""), name) is UNKNOWN_TEXTS[enum]
        return
    with pytest.raises(InvalidArgumentError) as refused:
        form.read(message, "")
    assert refused.value.field == name and TEXT in refused.value.message


def test_a_text_that_is_not_known_has_a_reason() -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        PAIRS["site_event"][1](
            type(PAIRS["site_event"][0](examples_of(_kind("SiteEvent"))[0]))(subject="weather")
        )
    assert refused.value.reason == "UNKNOWN_SUBJECT"


def _kind(name: str) -> Any:
    return next(kind for kind, message in FORMS if message.endswith(f".{name}"))


TOO_MANY_STAGES = tuple(examples_of(StageStatus)[:1]) * (MOST_STAGES + 1)
COMPARED: tuple[tuple[type, str], ...] = (
    *((kind, "operation_id") for kind in (CommandProgress, CommandResult, DumpPart)),
    *((kind, name) for kind in (ControlHello, Heartbeat) for name in ("node_id", "incarnation")),
    *((kind, "deployment") for kind in (HeadHello, LinkSuspected, StageKey, StageStatus)),
    (HeadHello, "node_id"),
    *((HeldRequest, name) for name in ("request_id", "instance", "client")),
    *((profile.MeasuredLink, name) for name in ("sender", "receiver")),
)
"""Texts that are compared with known ones."""
TEXTS: dict[type, tuple[str, ...]] = {
    CommandProgress: ("what",),
    Condition: ("huge_pages", "version"),
    LinkSuspected: ("why",),
    PackedUnit: ("form", "model", "model_name", "unit"),
    StageStatus: ("failure_reason",),
    StageTrace: ("node",),
    profile.ComputeProfile: ("device", "fingerprint", "model_hash"),
    profile.EnergyProfile: ("source",),
}
"""Texts for people, which are cut and escaped."""
FIGURES: dict[type, tuple[str, ...]] = {
    Condition: (
        *(
            "certificate_due_s",
            "certificate_ends_s",
            "clock_ahead_s",
            "cpu_quota",
            "disk_write_bps",
            "utc_s",
        ),
    ),
    Heartbeat: ("others_share",),
    HeadHello: ("head_for_s",),
    HeartbeatChange: ("others_share",),
    KernelSpeed: ("fma_gflop_per_s", "read_gb_per_s", "row_gb_per_s", "rows_gflop_per_s"),
    StageExperts: ("waited_s",),
    StageFilling: ("left_s",),
    StageStatus: ("busy_share", "load_s", "step_age_s", "step_cpu_s"),
    StageStreaming: ("waited_s",),
}
"""Figures for people, which are 0 if JSON has no such number."""
OF_AN_EPOCH = (
    *(
        ActivateHead,
        Deployment,
        HeadHello,
        KeepStandby,
        LinkHello,
        LinkSuspected,
        PrepareStage,
        ReleaseStage,
    ),
    *(StageStatus, TraceSteps),
)
REFUSED: dict[tuple[type, str], Any] = {
    **{(kind, "epoch"): MAX_EPOCH + 1 for kind in OF_AN_EPOCH},
    **dict.fromkeys(COMPARED, "x" * (MAX_TEXT + 1)),
    (CommandResult, "packed"): tuple(examples_of(PackedUnit)[:1]) * (MAX_LISTED_PACKED + 1),
    (BlobHeader, "digest"): "../" * 22,
    (BlobRange, "digest"): "",
    (WheelServer, "port"): 65536,
    (DeployCall, "measure_s"): -1.0,
    (DumpPart, "part"): bytes(MOST_PART_BYTES + 1),
    (Enrolment, "token_id"): "",
    (Heartbeat, "stages"): TOO_MANY_STAGES,
    (GuessCounts, "steps"): (1.0,) * 37,
    (HeadHello, "held"): tuple(examples_of(HeldRequest)[:1]) * (MAX_HELD + 1),
    (HeldRequest, "digest"): bytes(MAX_DIGEST_BYTES + 1),
    (HeartbeatChange, "removed"): tuple(examples_of(StageKey)[:1]) * (MOST_STAGES + 1),
    (HeartbeatChange, "stages"): TOO_MANY_STAGES,
    (KeepStandby, "manifest_digest"): "a",
    (KeepStandby, "node"): "A",
    (LabelCall, "labels"): {"a b": "c"},
    (LocalFile, "head_sha256"): "a" * 63,
    (MeasureRequest, "operation_id"): "",
    (PackedUnit, "id"): "\n",
    (ProfileReport, "node_id"): "",
    (PlacedDraft, "manifest_digest"): "a" * 65,
    (Peer, "address"): "",
    (Peer, "name"): "../b",
    (Peer, "node_id"): "n" * 129,
    (PrepareStage, "manifest_digest"): "A" * 64,
    (Registration, "address"): "",
    (Registration, "incarnation"): "",
    (Registration, "labels"): {"zone": "\x1b"},
    (Registration, "name"): "a/b",
    (Registration, "node_id"): "",
    (StageTrace, "reads"): None,
    (StageTrace, "records"): None,
    (TokenRequest, "id"): "Kim",
    (TokenRequest, "role"): Role.COORDINATOR,
    (OpenToken, "id"): "Kim",
    (OpenToken, "role"): Role.COORDINATOR,
    (TraceSteps, "seconds"): math.nan,
    (ProfileReport, "compute"): tuple(examples_of(profile.ComputeProfile)[:1])
    * (MAX_REPORTED_PROFILES + 1),
    (ProfileReport, "links"): tuple(examples_of(profile.MeasuredLink)[:1])
    * (MAX_REPORTED_LINKS + 1),
    (profile.ComputeProfile, "layers"): tuple(examples_of(profile.LayerProfile)[:1])
    * (profile.MAX_LAYERS + 1),
    (profile.ComputeProfile, "others_share"): -1.0,
    (profile.ComputeProfile, "processor_share"): math.inf,
    (profile.ComputeProfile, "threads"): 0,
    (profile.DiskProfile, "read_bytes_per_s"): 0.0,
    (profile.DiskProfile, "write_bytes_per_s"): -1.0,
    (profile.EnergyProfile, "busy_w"): math.nan,
    (profile.EnergyProfile, "idle_w"): -0.5,
    (profile.LayerProfile, "decode"): (profile.Sample(1, 0, 1.0),) * (profile.MAX_SAMPLES + 1),
    (profile.LayerProfile, "layers"): 0,
    (profile.LayerProfile, "prefill"): (profile.Sample(1, 0, 1.0),) * (profile.MAX_SAMPLES + 1),
    (profile.LinkProfile, "bandwidth_bps"): 0.0,
    (profile.LinkProfile, "latency_s"): -1.0,
    (profile.LinkProfile, "samples"): 1,
    (profile.LinkProfile, "spread"): math.nan,
    (profile.Sample, "count"): 0,
    (profile.Sample, "repeats"): 0,
    (profile.Sample, "seconds"): 0.0,
    (profile.Sample, "spread"): math.inf,
    (profile.StepOverhead, "seconds"): math.nan,
    (profile.StepOverhead, "seconds_per_byte"): -1.0,
    (profile.StepOverhead, "spread"): -1.0,
}
"""A value of each field with a check, that the check refuses."""
TURNED: dict[tuple[type, str], tuple[Any, Any]] = {
    **{
        (kind, name): ("\x1b" + "x" * 300, "\\x1b" + "x" * 199)
        for kind in TEXTS
        for name in TEXTS[kind]
    },
    **{(kind, name): (-math.inf, 0.0) for kind in FIGURES for name in FIGURES[kind]},
    (Heartbeat, "packed"): (tuple(range(MOST_PACKED + 1)), tuple(range(MOST_PACKED))),
    (HeartbeatChange, "packed"): (tuple(range(MOST_PACKED + 1)), tuple(range(MOST_PACKED))),
    (HeldRequest, "scored"): (0, 1),
    (PlacedDraft, "kv_blocks"): (0, 1),
    (PlacedDraft, "layer_count"): (0, 1),
    (PlacedDraft, "requests"): (0, 1),
    (Placement, "sweep"): (0, 1),
    (StartRequest, "scored"): (0, 1),
}
"""The replacement of a value, for fields whose checks change it."""
UNSIGNED = {"parameters", "window", "rotated_bytes", "weight_bytes"}
UNSIGNED |= {"context", "total_bytes", "free_bytes", "daemon_bytes"}
"""Fields of profiles that no message can make less than 0."""


def checked() -> set[tuple[Any, str]]:
    """The fields with a check, of the classes that are read from a message."""
    found: set[tuple[Any, str]] = set()
    for kind, _ in FORMS:
        if is_dataclass(kind):
            for name, hint in get_type_hints(kind, include_extras=True).items():
                parts = (hint, *getattr(hint, "__args__", ()))
                if any(checks_of(part)[1] for part in parts) and name not in UNSIGNED | {
                    "largest_bytes"
                }:
                    found.add((kind, name))
    return found


def test_each_check_has_a_value_that_it_refuses() -> None:
    assert checked() == set(REFUSED) | set(TURNED)


@pytest.mark.parametrize("where", REFUSED, ids=lambda where: f"{where[0].__name__}.{where[1]}")
def test_a_check_refuses(where: tuple[type, str]) -> None:
    kind, name = where
    form = form_of(kind)
    value = examples_of(kind)[0]
    wrong = (
        REFUSED[where] if kind is not StageTrace else getattr(value, name)[:1] * (MOST_RECORDS + 1)
    )
    with pytest.raises(InvalidArgumentError) as refused:
        form.read(form.write(replace(value, **{name: wrong})), "")
    assert refused.value.field


@pytest.mark.parametrize("where", TURNED, ids=lambda where: f"{where[0].__name__}.{where[1]}")
def test_a_check_turns_a_value_into_another(where: tuple[type, str]) -> None:
    kind, name = where
    form = form_of(kind)
    said, taken = TURNED[where]
    assert (
        getattr(form.read(form.write(replace(examples_of(kind)[0], **{name: said})), ""), name)
        == taken
    )


@pytest.mark.parametrize("name", ["kind", "model", "software", "bits_fingerprint"])
@pytest.mark.parametrize("pair", ["registration", "report"])
def test_a_node_says_nothing_that_steers_a_terminal(pair: str, name: str) -> None:
    to_wire, from_wire = PAIRS[pair]
    message = to_wire(*arguments_of(to_wire, bare=False)[0])
    setattr(message.facts, name, "a\x1b[2J")
    with pytest.raises(InvalidArgumentError) as refused:
        from_wire(message)
    assert refused.value.field == f"facts.{name}" and refused.value.message.startswith(
        f"facts.{name} holds U+001B"
    )


def test_an_error_names_the_way_to_its_field() -> None:
    message = command_to_wire(
        OperationId("op"), ProbeLinks((Peer(NodeId("b"), NodeName("b"), "b:1"),))
    )
    message.probe.peers[0].address = ""
    with pytest.raises(InvalidArgumentError) as refused:
        command_from_wire(message)
    assert refused.value.field == "peers.address" and refused.value.message.startswith(
        "peers.address must have"
    )


def test_fields_that_must_fit_each_other_are_checked_where_they_stand() -> None:
    placement = PAIRS["placement"][0](examples_of(Placement)[0])
    del placement.costs[0].rows[0]
    with pytest.raises(InvalidArgumentError, match="differ in number") as refused:
        PAIRS["placement"][1](placement)
    assert refused.value.field == "costs.rows"


UNFIT: dict[type, dict[str, Any]] = {
    ApiKey: {"requests": 0},
    profile.ComputeProfile: {"layers": ()},
    profile.LayerProfile: {
        "decode": tuple(profile.Sample(count, 0, 1.0) for count in range(1, 34))
    },
    DeploymentSpec: {"concurrency": 0},
    PrepareStage: {"stage": 9},
    ProfileReport: {"links": (replace(examples_of(profile.MeasuredLink)[0], sender="another"),)},
    GuessCounts: {"steps": (math.nan,)},
    ReadRecord: {"began_s": math.inf},
    LabelCall: {"removed": ("a b",)},
    Rule: {"limit": None},
    Registration: {"facts": replace(examples_of(DeviceFacts)[0], kind="\n")},
    StageCost: {"rows": ()},
    StepRecord: {"returned_s": math.nan},
}
"""Fields that make a value one that the check of its class refuses."""


def test_each_class_with_a_check_has_a_value_that_it_refuses() -> None:
    assert {kind for kind, _ in FORMS if is_dataclass(kind) and hasattr(kind, "check")} == set(
        UNFIT
    )


@pytest.mark.parametrize("kind", UNFIT, ids=lambda kind: kind.__name__)
def test_a_check_of_a_class_refuses(kind: type) -> None:
    form, value = form_of(kind), examples_of(kind)[0]
    fit = replace(value, links=()) if kind is ProfileReport else value
    assert form.read(form.write(fit), "")
    with pytest.raises(InvalidArgumentError):
        form.read(form.write(replace(value, **UNFIT[kind])), "")


def test_what_is_absent_is_as_the_class_says() -> None:
    assert PAIRS["conversation"][1](inference_pb2.Conversation()).generation_prompt is True
    assert PAIRS["tokenize_request"][1](inference_pb2.TokenizeRequest()).special is True
    assert PAIRS["sampling"][1](common_pb2.Sampling()).top_p == 1.0
    assert PAIRS["site"][1](admin_pb2.GetSiteResponse()).config == {}
    spec = PAIRS["spec"][1](common_pb2.DeploymentSpec(name="a", model="m"))
    assert (spec.max_new_tokens, spec.concurrency, spec.kv_dtype) == (0, 8, None)


class _Later(StrEnum):
    NOW = "now"


@dataclass(frozen=True)
class _Other:
    wanted_bytes: int
    more: int


@dataclass(frozen=True)
class _OtherType:
    wanted_bytes: complex
    held_bytes: int


@dataclass(frozen=True)
class _OtherEnum:
    kind: _Later
    text: str


@pytest.mark.parametrize(
    ("value", "message", "why"),
    [
        (_Other(1, 2), common_pb2.HugePages, "HugePages has no field more"),
        (_OtherType(1j, 2), common_pb2.HugePages, "complex.* has no form"),
        (_OtherEnum(_Later.NOW, ""), common_pb2.Guide, "no number for"),
    ],
)
def test_a_class_that_does_not_fit_its_message_is_refused_on_first_use(
    value: Any, message: type[Message], why: str
) -> None:
    to_wire, _ = codec.pair(type(value), message)
    with pytest.raises(TypeError, match=why):
        to_wire(value)


ALONE = """
import importlib, os, pkgutil, sys
import edgeshard.wire
from tests.support.examples import Examples
wrong = []
for found in pkgutil.iter_modules(edgeshard.wire.__path__):
    child = os.fork()
    if child == 0:
        module = importlib.import_module(f"edgeshard.wire.{found.name}")
        for name, item in list(vars(module).items()):
            kind = getattr(item, "__annotations__", {}).get("value")
            if name.endswith("_to_wire") and isinstance(kind, type):
                for value in Examples({}, {}).of(kind):
                    item(value)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        wrong.append(found.name)
sys.exit(", ".join(wrong) or None)
"""
"""Run once for all, since each module is loaded in a child of its own."""


def test_each_module_converts_by_itself() -> None:
    """No other module must have been loaded before, for any nested values."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_a_node_that_takes_guesses_only_in_the_steps_themselves_takes_none() -> None:
    """An earlier version sent this in field 9."""
    older = common_pb2.DeviceFacts.FromString(bytes([9 << 3, 1]))
    read = form_of(DeviceFacts).read(older, "facts")
    assert (read.takes_guesses, read.keeps_states_of_guesses) == (False, False)
