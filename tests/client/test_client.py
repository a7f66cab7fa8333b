"""The async client against a real server: streams, cancels, deployments and typed errors."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from edgeshard import Client
from edgeshard.domain import errors
from edgeshard.domain.deployments.deployment import Deployment, DeploymentPhase, DeploymentSpec
from edgeshard.domain.errors import (
    DeadlineError,
    DeniedError,
    EdgeShardError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PlacementError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.nodes.device import StagePhase
from edgeshard.domain.requests.generation import FinishReason, Started, Token
from edgeshard.proto.v1 import admin_pb2, inference_pb2
from edgeshard.proto.v1.inference_pb2_grpc import InferenceServiceStub

pytestmark = pytest.mark.timing

SPEC = DeploymentSpec(name="tales", model="fairy-tales", source="a")


async def happens(event: Any, seconds: float = 60.0) -> bool:
    """Wait for a threading.Event without blocking the loop."""
    return bool(await asyncio.to_thread(event.wait, seconds))


def keep_calls(client: Client) -> list[Any]:
    """Every call of the client, kept alive: gRPC also cancels garbage-collected calls, which this
    test is not about."""
    calls: list[Any] = []
    stub = client._connection._stub(InferenceServiceStub)
    generate = stub.Generate

    def keeping(*arguments: Any, **options: Any) -> Any:
        calls.append(generate(*arguments, **options))
        return calls[-1]

    stub.Generate = keeping
    return calls


async def test_tokens_arrive_while_the_server_is_still_generating(site: Any) -> None:
    site.hold_after(2)
    async with Client(site.address) as client:
        events = client.generate("tales", "Once")
        seen = [await anext(events) for _ in range(3)]
        assert isinstance(seen[0], Started) and [
            e.text for e in seen[1:] if isinstance(e, Token)
        ] == ["Once", " upon"]
        assert not site.released.is_set()
        site.released.set()
        assert len([event async for event in events]) == 4
    assert not site.cancelled.is_set()


async def test_closing_the_stream_early_cancels_at_the_server(site: Any) -> None:
    site.hold_after(1)
    async with Client(site.address) as client:
        calls = keep_calls(client)
        events = client.generate("tales", "Once")
        assert isinstance(await anext(events), Started)
        await events.aclose()
        assert len(calls) == 1
        assert await happens(site.cancelled)


async def test_leaving_the_loop_cancels_at_the_server(site: Any) -> None:
    site.hold_after(1)
    async with Client(site.address) as client:
        async for event in client.generate("tales", "Once"):
            if isinstance(event, Token):
                break
        assert await happens(site.cancelled)


async def test_cancelling_the_task_cancels_at_the_server(site: Any) -> None:
    site.hold_after(1)
    async with Client(site.address) as client:
        task = asyncio.create_task(client.complete("tales", "Once"))
        assert await happens(site.held)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await happens(site.cancelled)


async def test_closing_the_client_cancels_its_streams(site: Any) -> None:
    site.hold_after(0)
    client = Client(site.address)
    events = client.generate("tales", "Once")
    await anext(events)
    await client.close()
    assert await happens(site.cancelled)
    await events.aclose()


async def test_complete_collects_the_stream(site: Any) -> None:
    async with Client(site.address) as client:
        completion = await client.complete("tales", "Once", logprobs=True, top_logprobs=2)
    assert completion.text == "Once upon a time é!"
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.logprobs == (-0.5,) * 5
    assert 0 < completion.ttft_s <= completion.total_s
    assert [str(stage.layers) for stage in completion.placement.stages] == ["0:4", "4:9"]


async def test_every_option_reaches_the_server(site: Any) -> None:
    async with Client(site.address) as client:
        await client.complete(
            "tales",
            [1, 2, 3],
            max_new_tokens=9,
            temperature=0.5,
            top_k=40,
            top_p=0.75,
            repetition_penalty=1.25,
            seed=2**63,
            stop="end",
            stop_tokens=[4],
            top_logprobs=3,
            ignore_eos=True,
            priority=3,
            request_id="mine",
        )
    (request,) = site.sent(inference_pb2.GenerateRequest)
    generation, sampling = request.generation, request.generation.sampling
    assert (request.model, request.request_id) == ("tales", "mine")
    assert (list(generation.prompt_tokens), generation.prompt) == ([1, 2, 3], "")
    assert (generation.max_new_tokens, generation.ignore_eos, generation.priority) == (9, True, 3)
    assert (list(generation.stop_strings), list(generation.stop_tokens)) == (["end"], [4])
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 40, 0.75)
    assert (sampling.repetition_penalty, sampling.seed) == (1.25, 2**63)
    assert (sampling.logprobs, sampling.top_logprobs) == (True, 3)


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("", {}, "prompt"),
        ([], {}, "prompt"),
        ("x", {"temperature": -0.1}, "temperature"),
        ("x", {"top_p": -0.1}, "top_p"),
        ("x", {"max_new_tokens": 0}, "max_new_tokens"),
        ("x", {"stop": [""]}, "stop"),
        ("x", {"top_logprobs": 21}, "top_logprobs"),
        ("x", {"topk": 4}, "topk"),
        ("\udcff", {}, "prompt"),
        ("x", {"stop": ["end", "\udcff"]}, "stop"),
    ],
)
async def test_a_wrong_option_is_named_and_nothing_is_sent(
    site: Any, prompt: Any, options: dict[str, Any], field: str
) -> None:
    async with Client(site.address) as client:
        with pytest.raises(InvalidArgumentError) as caught:
            await client.complete("tales", prompt, **options)
    assert caught.value.field == field
    assert site.requests == []


@pytest.mark.parametrize("kind", sorted(errors.ERROR_BY_CODE.values(), key=str))
async def test_every_error_class_keeps_its_parts(site: Any, kind: type[EdgeShardError]) -> None:
    # UNAVAILABLE from the admin service is repeated by the channel, so the test uses the stream.
    site.failures["Generate"] = kind(
        "what went wrong", field="some-field", reason="SOME_REASON", retry_after_s=1.5
    )
    async with Client(site.address) as client:
        with pytest.raises(kind) as caught:
            await client.complete("tales", "Once")
    error = caught.value
    assert type(error) is kind
    assert (error.message, error.field, error.reason) == (
        "what went wrong",
        "some-field",
        "SOME_REASON",
    )
    assert error.retry_after_s == 1.5


async def test_a_failure_in_mid_stream_comes_after_the_tokens(site: Any) -> None:
    site.script = site.story()[:3]
    site.failures["GenerateEnd"] = UnavailableError("no node is left", reason="NOT_RECOVERED")
    seen = []
    async with Client(site.address) as client:
        with pytest.raises(UnavailableError, match="no node is left"):
            async for event in client.generate("tales", "Once"):
                seen.append(event)
    assert len(seen) == 3


async def test_a_completion_that_fails_has_the_text_until_then(site: Any) -> None:
    site.script = site.story()[:3]
    site.failures["GenerateEnd"] = UnavailableError(
        "no node is left", reason="NOT_RECOVERED", retry_after_s=5.0
    )
    async with Client(site.address) as client:
        with pytest.raises(UnavailableError) as failed:
            await client.complete("tales", "Once")
    said = "".join(event.text for event in site.story()[:3] if isinstance(event, Token))
    assert failed.value.partial_text == said != "" and failed.value.retry_after_s == 5.0


async def test_a_stream_that_ends_without_a_finish_is_an_error(site: Any) -> None:
    site.script = site.story()[:3]
    async with Client(site.address) as client:
        with pytest.raises(InternalError):
            await client.complete("tales", "Once")


async def test_a_request_beyond_its_time_is_a_deadline_error_and_is_cancelled(site: Any) -> None:
    site.hold_after(1)
    async with Client(site.address) as client:
        # Until the channel is connected, a request out of time is one that cannot reach the site.
        await client.nodes()
        with pytest.raises(DeadlineError, match=site.address):
            await client.complete("tales", "Once", timeout_s=2.0)
        assert await happens(site.cancelled)


async def test_a_model_is_not_opened_for_a_coordinator_that_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_nothing(*_: object) -> None:
        raise AssertionError("the model was opened")

    monkeypatch.setattr("edgeshard.client.uploads.opened", open_nothing)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with Client(f"127.0.0.1:{taken.getsockname()[1]}") as client:
            with pytest.raises(UnavailableError):
                await client.add_model(tmp_path, "tiny")
            with pytest.raises(NotFoundError):
                await client.add_model(str(tmp_path / "absent"))


async def test_an_unreachable_coordinator_is_named_within_seconds() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{taken.getsockname()[1]}"
        began = time.monotonic()
        async with Client(target) as client:
            with pytest.raises(UnavailableError, match=target):
                await client.nodes()
            with pytest.raises(UnavailableError, match=target):
                await client.complete("tales", "Once")
    # Two calls that nothing answers would take 30 s each.
    assert time.monotonic() - began < 25


async def test_a_host_that_accepts_but_never_answers_is_unreachable() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        async with Client(target, timeout_s=0.5) as client:
            with pytest.raises(UnavailableError, match=target):
                await client.nodes()


async def test_plaintext_beyond_loopback_is_refused() -> None:
    with pytest.raises(DeniedError) as caught:
        async with Client("192.0.2.1:7600"):
            pass
    assert (caught.value.field, caught.value.reason) == ("coordinator", "TLS_REQUIRED")


async def test_a_target_without_a_port_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="HOST:PORT"):
        await Client("localhost").nodes()


async def test_reading_calls_return_domain_values(site: Any) -> None:
    async with Client(site.address) as client:
        assert list(await client.nodes()) == site.nodes
        assert (await client.node("b")).connected is False
        (model,) = await client.stored_models()
        assert (model.name, model.layer_count, model.dtype) == ("fairy-tales", 12, DType.BFLOAT16)
        (served,) = await client.served_models()
        assert (served.deployment, served.model, served.max_context) == (
            "tales",
            "fairy-tales",
            512,
        )
        assert [d.phase for d in await client.deployments()] == [DeploymentPhase.READY]
        assert await client.cancel("r1") is True
        assert await client.cancel("unknown") is False
        with pytest.raises(NotFoundError) as caught:
            await client.node("zebra")
        assert caught.value.field == "node"
        with pytest.raises(NotFoundError, match="edgectl model add"):
            await client.stored_model("zebra")


async def test_deploy_waits_until_it_is_ready_and_tells_every_change(site: Any) -> None:
    loading, activating = DeploymentPhase.LOADING, DeploymentPhase.ACTIVATING
    half, whole = (site.stage_status(StagePhase.LOADING, fetched) for fetched in (50, 100))
    site.states = [
        site.deployment_in(loading),
        site.deployment_in(loading, stages=(half,)),
        site.deployment_in(loading, stages=(half,)),
        site.deployment_in(loading, stages=(whole,)),
        site.deployment_in(activating, stages=(whole,)),
        site.deployment_in(DeploymentPhase.READY, stages=(whole,)),
    ]
    changes: list[Deployment] = []
    async with Client(site.address) as client:
        deployment = await client.deploy(SPEC, on_change=changes.append)
    assert deployment.phase is DeploymentPhase.READY
    assert [change.phase for change in changes] == [
        loading,
        loading,
        loading,
        activating,
        DeploymentPhase.READY,
    ]
    (request,) = site.sent(admin_pb2.DeployRequest)
    assert len(request.operation_id) == 32 and request.spec.name == "tales"


async def test_deploy_raises_the_deployments_own_failure(site: Any) -> None:
    failure = ResourceExhaustedError("node b lacks 2 GiB", field="b", reason="NODE_MEMORY")
    site.states = [
        site.deployment_in(DeploymentPhase.LOADING),
        site.deployment_in(DeploymentPhase.FAILED, failure),
    ]
    async with Client(site.address) as client:
        with pytest.raises(ResourceExhaustedError) as caught:
            await client.deploy(SPEC)
    assert (caught.value.message, caught.value.field, caught.value.reason) == (
        "node b lacks 2 GiB",
        "b",
        "NODE_MEMORY",
    )


async def test_deploy_without_waiting_returns_the_first_state(site: Any) -> None:
    site.states = [site.deployment_in(DeploymentPhase.LOADING)]
    async with Client(site.address) as client:
        assert (await client.deploy(SPEC, wait=False)).phase is DeploymentPhase.LOADING
    assert site.sent(admin_pb2.GetDeploymentRequest) == []


async def test_deploy_stops_waiting_after_its_time(site: Any) -> None:
    site.states = [site.deployment_in(DeploymentPhase.WAITING)]
    async with Client(site.address) as client:
        with pytest.raises(DeadlineError, match=r"still waiting after 0\.2 s"):
            await client.deploy(SPEC, timeout_s=0.2)


async def test_a_refused_placement_keeps_its_field(site: Any) -> None:
    site.failures["Plan"] = PlacementError(
        "layers: no node holds layers 4:5", field="layers", reason="LAYER_GAP"
    )
    async with Client(site.address) as client:
        with pytest.raises(InvalidArgumentError) as caught:
            await client.plan(SPEC)
    assert (caught.value.field, caught.value.reason) == ("layers", "LAYER_GAP")


async def test_plan_returns_the_placement(site: Any) -> None:
    async with Client(site.address) as client:
        assert [stage.node_name for stage in (await client.plan(SPEC)).stages] == ["a", "b"]


async def test_delete_waits_until_the_deployment_is_gone(site: Any) -> None:
    async with Client(site.address) as client:
        await client.delete_deployment("tales")
        assert len(site.sent(admin_pb2.GetDeploymentRequest)) == 1
        site.gone_after_delete = False
        site.states = [site.deployment_in(DeploymentPhase.DELETING)]
        with pytest.raises(DeadlineError, match="still exists"):
            await client.delete_deployment("tales", timeout_s=0.1)
        await client.delete_deployment("tales", wait=False)
        await client.delete_model("fairy-tales")
    assert site.sent(admin_pb2.DeleteModelRequest)[0].name == "fairy-tales"
