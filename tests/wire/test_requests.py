"""Requests and specs cross the wire unchanged."""

from __future__ import annotations

from typing import Any

import pytest

from edgeshard.domain.deployments.deployment import DeploymentSpec
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.domain.ids import RequestId
from edgeshard.domain.requests.generation import Generation, Sampling
from edgeshard.domain.requests.head import HeadEvents, StartRequest
from edgeshard.proto.v1 import head_pb2
from edgeshard.wire.generation import generation_from_wire, generation_to_wire
from edgeshard.wire.head_stream import head_command_from_wire, head_message_from_wire
from edgeshard.wire.site import spec_from_wire, spec_to_wire

GENERATION = Generation(
    prompt=(1, 2),
    max_new_tokens=7,
    sampling=Sampling(temperature=0.5, top_k=3, top_p=0.5, seed=9),
    stop_tokens=(4,),
    stop_strings=("end",),
    ignore_eos=True,
    priority=-3,
)


def test_a_generation_comes_back_as_it_was() -> None:
    assert generation_from_wire(generation_to_wire(GENERATION)) == GENERATION


def test_a_head_hears_for_whom_a_request_is() -> None:
    start = head_pb2.StartRequest(
        request_id="r",
        generation=generation_to_wire(GENERATION),
        emitted_tokens=[5, 6],
        client="tenant",
    )
    assert head_command_from_wire(head_pb2.AttachResponse(start=start)) == StartRequest(
        RequestId("r"), GENERATION, (5, 6), "tenant"
    )


@pytest.mark.parametrize("priority", [-11, 11])
def test_a_priority_out_of_range_is_refused_by_name(priority: int) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        Generation("text", priority=priority).validate()
    assert refused.value.field == "priority"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "max_inter_token_latency_s": 0.25,
            "kv_overcommit": True,
            "prefix_cache": True,
            "micro_batches": 4,
        },
    ],
    ids=str,
)
def test_a_spec_comes_back_as_it_was(options: dict[str, Any]) -> None:
    spec = DeploymentSpec(name="tales", model="m", source="a", **options)
    assert spec_from_wire(spec_to_wire(spec)) == spec


@pytest.mark.parametrize(("epochs", "epoch"), [((3, 3), 3), ((3, 2), 0), ((2, 3), 0), ((3, 0), 0)])
def test_tokens_that_name_several_epochs_are_of_none(epochs: tuple[int, ...], epoch: int) -> None:
    """No head sends this. A token of a former epoch must not count because another one in its
    message is of this epoch.
    """
    tokens = [
        head_pb2.HeadToken(request_id="r", epoch=named, position=index)
        for index, named in enumerate(epochs)
    ]
    said = head_message_from_wire(head_pb2.AttachRequest(tokens=head_pb2.HeadTokens(tokens=tokens)))
    assert isinstance(said, HeadEvents) and said.epoch == epoch and len(said.events) == len(epochs)
