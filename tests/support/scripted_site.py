"""A scripted site: a real gRPC server, in threads of its own, whose answers each test writes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc
import pytest

from edgeshard.debugging.dump import ProcessDump
from edgeshard.domain.audit import AuditCheck, AuditEntry
from edgeshard.domain.control.site import ReplanResult, SiteEvent, StoredLink, UnknownFigures
from edgeshard.domain.deployments.deployment import Deployment, DeploymentPhase, DeploymentSpec
from edgeshard.domain.deployments.placement import PlacedStage, Placement
from edgeshard.domain.deployments.traffic import NO_TRAFFIC, Traffic
from edgeshard.domain.errors import EdgeShardError, NotFoundError
from edgeshard.domain.ids import DeploymentName, Epoch, NodeId, NodeName, RequestId
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.models.packed_units import PackedOn, PackedUnit
from edgeshard.domain.nodes.device import DeviceFacts, HugePages, Node, StagePhase, StageStatus
from edgeshard.domain.nodes.profile import (
    ComputeProfile,
    LinkProfile,
    MeasuredLink,
)
from edgeshard.domain.requests.conversation import (
    AnswerFormat,
    ChatPrompt,
    GenerationDefaults,
    ToolFormat,
)
from edgeshard.domain.requests.generation import (
    Finished,
    FinishReason,
    GenerationEvent,
    StageTiming,
    Started,
    Token,
    TokenLogprob,
)
from edgeshard.domain.requests.trace import StageTrace
from edgeshard.proto.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    profile_pb2,
    store_pb2,
    store_pb2_grpc,
)
from edgeshard.wire.codec import to_failure
from edgeshard.wire.debug import dump_messages
from edgeshard.wire.generation import chat_prompt_to_wire, event_to_wire
from edgeshard.wire.site import (
    audit_checks_to_wire,
    audit_entry_to_wire,
    compute_profile_to_wire,
    deployment_to_wire,
    dtype_to_wire,
    node_to_wire,
    packed_on_to_wire,
    packed_unit_to_wire,
    placement_to_wire,
    replan_to_wire,
    site_event_to_wire,
    spec_from_wire,
    stored_link_to_wire,
    trace_to_wire,
    traffic_to_wire,
    unknown_figures_to_wire,
)
from edgeshard.wire.status import DETAILS_KEY, to_status

PROMPT_TOKENS = (5, 6, 7)
WORDS = ("Once", " upon", " a", " time", " é")
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 12,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True)
class Hold:
    """In a script of events: wait here until the test releases the stream or the client goes away.

    With `for_ever`, only until the client goes away.
    """

    for_ever: bool = False


def facts() -> DeviceFacts:
    return DeviceFacts("cpu", "Test CPU", 4, 8 << 30, 4 << 30, False, "Linux", "541e66e42b93265a")


def placement() -> Placement:
    stages = tuple(
        PlacedStage(
            index,
            NodeId(f"id-{name}"),
            NodeName(name),
            f"127.0.0.1:{7001 + index}",
            layers,
            1 << 20 + index,
            1 << 18,
        )
        for index, (name, layers) in enumerate([("a", LayerRange(0, 4)), ("b", LayerRange(4, 9))])
    )
    return Placement(stages, kv_block_tokens=16, kv_blocks=32, micro_batch=1, micro_batches=2)


def stage_status(phase: StagePhase, fetched: int = 0) -> StageStatus:
    return StageStatus(
        DeploymentName("tales"),
        Epoch(1),
        0,
        LayerRange(0, 4),
        phase,
        1 << 20,
        1 << 18,
        0,
        fetched,
        100,
    )


def deployment(
    phase: DeploymentPhase,
    failure: EdgeShardError | None = None,
    stages: tuple[StageStatus, ...] = (),
) -> Deployment:
    spec = DeploymentSpec(name="tales", model="fairy-tales", source="a", dtype=DType.FLOAT32)
    return Deployment(spec, phase, Epoch(1), placement(), failure, stages)


def told(
    node: str,
    done: int,
    what: str,
    finished: bool = False,
    failure: EdgeShardError | None = None,
    missed: tuple[str, ...] = (),
) -> Any:
    """The coordinator's report of a node being measured: `done` of 40."""
    return admin_pb2.ProfileResponse(
        node=node, done=done, total=40, what=what, finished=finished,
        failure=to_failure(failure) if failure is not None else None, missed_nodes=missed,
    )  # fmt: skip


def story() -> list[GenerationEvent | Hold]:
    """Five tokens on two stages: the first takes 40 ms of computing on stage 0, the others 2, and 4
    on stage 1."""
    events: list[GenerationEvent | Hold] = [
        Started(RequestId("r1"), DeploymentName("tales"), PROMPT_TOKENS, placement())
    ]
    for index, word in enumerate(WORDS):
        timings = (StageTiming(0, 0.001, 0.04 if index == 0 else 0.002), StageTiming(1, 0.0, 0.004))
        top = (TokenLogprob(10 + index, -0.5), TokenLogprob(99, -1.5))
        events.append(Token(len(PROMPT_TOKENS) + index, 10 + index, word, -0.5, top, timings))
    events.append(Finished(FinishReason.LENGTH, "!", len(PROMPT_TOKENS), len(WORDS)))
    return events


@dataclass
class ScriptedSite:
    """The server's answers, and the requests it received.

    `failures` maps a method's name to the error it ends with. `states` are the deployment's states,
    one for each question about it, the last one for ever; empty means that there is none.
    `compute_profile` makes the profile of a node that takes the given seconds for a block of
    CONFIG.
    """

    compute_profile: Callable[..., ComputeProfile]
    address: str = ""
    nodes: list[Node] = field(default_factory=list)
    models: list[admin_pb2.StoredModel] = field(default_factory=list)
    failures: dict[str, EdgeShardError] = field(default_factory=dict)
    states: list[Deployment] = field(default_factory=list)
    on_deploy: list[Deployment] = field(default_factory=list)
    """The states from the next call of Deploy on, if there are any."""
    gone_after_delete: bool = True
    replicas: list[Deployment] = field(default_factory=list)
    """Replicas of a name, instead of `states`; a deployed one is appended."""
    script: list[GenerationEvent | Hold] = field(default_factory=story)
    profiles: list[admin_pb2.StoredProfile] = field(default_factory=list)
    links: list[profile_pb2.MeasuredLink] = field(default_factory=list)
    unknown: UnknownFigures = field(default_factory=UnknownFigures)
    config: Any = field(default_factory=lambda: CONFIG)
    progress: list[Any] = field(default_factory=list)
    traces: list[StageTrace] = field(default_factory=list)
    packed: list[PackedUnit] = field(default_factory=list)
    packed_on: list[PackedOn] = field(default_factory=list)
    dumps: list[ProcessDump] = field(default_factory=list)
    audit: list[AuditEntry] = field(default_factory=list)
    checks: list[AuditCheck] | None = None
    """None if the coordinator is older than seals."""
    events: list[SiteEvent] = field(default_factory=list)
    placement: Placement = field(default_factory=placement)
    replan: ReplanResult | None = None
    traffic: Traffic = NO_TRAFFIC
    requests: list[Any] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)

    # The names that tests need to write scripts, so that they need not import this file.
    Hold = Hold
    story = staticmethod(story)
    deployment_in = staticmethod(deployment)
    stage_status = staticmethod(stage_status)
    told = staticmethod(told)

    def replicate(self, count: int, *gone: int) -> None:
        """The deployment as `count` replicas, all ready, without the numbers in `gone`."""
        ready = deployment(DeploymentPhase.READY)
        specs = replace(ready.spec, source="").numbered(count)
        there = [spec for spec in specs if spec.replica not in gone]
        self.replicas = [replace(ready, spec=replace(spec, source="a")) for spec in there]

    @staticmethod
    def stored_model(name: str) -> admin_pb2.StoredModel:
        return stored_model(name)

    def measured(self, quantisation: Quantisation | None = None, **block_s: float) -> None:
        """Nodes were measured for the model an hour ago, and all links between nodes two minutes
        ago."""
        names = [node.name for node in self.nodes]
        self.nodes = [replace(node, connected=True) for node in self.nodes]
        self.profiles = [
            admin_pb2.StoredProfile(
                node_id=f"id-{name}",
                profile=compute_profile_to_wire(
                    self.compute_profile(seconds, quantisation=quantisation)
                ),
                models=["fairy-tales"],
                age_s=3600,
            )
            for name, seconds in block_s.items()
        ]
        self.links = [
            stored_link_to_wire(
                StoredLink(
                    MeasuredLink(
                        NodeId(f"id-{x}"),
                        NodeId(f"id-{y}"),
                        LinkProfile(0.002, 1e8, 0.01, 9, 1 << 20),
                    ),
                    130,
                )
            )
            for x in names
            for y in names
            if x != y
        ]

    def hold_after(self, tokens: int) -> None:
        """Stop the stream after this many tokens."""
        self.script.insert(1 + tokens, Hold())

    def sent(self, kind: type) -> list[Any]:
        return [request for request in self.requests if isinstance(request, kind)]

    def next_state(self) -> Deployment:
        if not self.states:
            raise NotFoundError("deployment 'tales' does not exist", field="deployment")
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]


def answer(site: ScriptedSite, method: str, request: Any, context: grpc.ServicerContext) -> None:
    """Record the request, and end the call if the script has the method fail."""
    site.requests.append(request)
    if method in site.failures:
        fail(context, site.failures[method])


def fail(context: grpc.ServicerContext, error: EdgeShardError) -> None:
    context.set_trailing_metadata(((DETAILS_KEY, to_status(error).SerializeToString()),))
    context.abort(_CODES[int(error.code)], error.message)


def until_gone(
    site: ScriptedSite, script: list[Any], context: grpc.ServicerContext
) -> Iterator[Any]:
    """The script's items as far as the client stays to hear them; `site.cancelled` is set when it
    does not."""
    ended, gone = threading.Event(), threading.Event()

    def on_end() -> None:
        gone.set()
        site.released.set()
        if not ended.is_set():
            site.cancelled.set()

    if not context.add_callback(on_end):
        on_end()  # The client was quicker than this thread, and is gone already.
    for place, item in enumerate(script):
        if isinstance(item, Hold):
            site.held.set()
            (gone if item.for_ever else site.released).wait(120)
            if not context.is_active():
                return
        else:
            if place == len(script) - 1:
                # A client that has the last of it hangs up, maybe before this thread continues.
                ended.set()
            yield item
    ended.set()


class Admin(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, site: ScriptedSite) -> None:
        self.site = site

    def ListNodes(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer(self.site, "ListNodes", request, context)
        return admin_pb2.ListNodesResponse(nodes=[node_to_wire(node) for node in self.site.nodes])

    def GetNode(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer(self.site, "GetNode", request, context)
        for node in self.site.nodes:
            if request.node in (node.name, node.node_id):
                site = self.site
                return admin_pb2.GetNodeResponse(
                    node=node_to_wire(node),
                    profiles=[
                        profile for profile in site.profiles if profile.node_id == node.node_id
                    ],
                    links=[
                        link
                        for link in site.links
                        if node.node_id in (link.sender_id, link.receiver_id)
                    ],
                    unknown=unknown_figures_to_wire(site.unknown),
                )
        return fail(context, NotFoundError(f"node {request.node!r} is not known", field="node"))

    def ListPacked(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer(self.site, "ListPacked", request, context)
        return admin_pb2.ListPackedResponse(
            units=[packed_unit_to_wire(unit) for unit in self.site.packed]
        )

    def LabelNode(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer(self.site, "LabelNode", request, context)
        node = next(node for node in self.site.nodes if request.node in (node.name, node.node_id))
        kept = {key: value for key, value in node.labels.items() if key not in request.removed}
        labels = {**kept, **request.labels}
        self.site.nodes = [
            replace(one, labels=labels) if one is node else one for one in self.site.nodes
        ]
        return admin_pb2.LabelNodeResponse(node=node_to_wire(replace(node, labels=labels)))

    def DropPacked(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer(self.site, "DropPacked", request, context)
        chosen = [
            unit
            for unit in self.site.packed
            if (unit.id in request.ids if request.ids else not unit.in_use)
        ]
        self.site.packed = [unit for unit in self.site.packed if unit.in_use or unit not in chosen]
        return admin_pb2.DropPackedResponse(units=[packed_unit_to_wire(unit) for unit in chosen])

    def GetSite(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer(self.site, "GetSite", request, context)
        if request.model not in ("", *(model.name for model in self.site.models)):
            return fail(
                context,
                NotFoundError(f"model {request.model!r} is not in the store", field="model"),
            )
        return admin_pb2.GetSiteResponse(
            nodes=[node_to_wire(node) for node in self.site.nodes],
            links=self.site.links,
            profiles=self.site.profiles if request.model else [],
            config_json=json.dumps(self.site.config).encode() if request.model else b"",
            traffic=traffic_to_wire(self.site.traffic),
            manifest_digest="d" * 64 if request.model else "",
            packed=[packed_on_to_wire(on) for on in self.site.packed_on],
        )

    def Profile(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        answer(self.site, "Profile", request, context)
        yield from until_gone(self.site, self.site.progress, context)

    def ListModels(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer(self.site, "ListModels", request, context)
        return admin_pb2.ListModelsResponse(models=self.site.models)

    def DeleteModel(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer(self.site, "DeleteModel", request, context)
        return admin_pb2.DeleteModelResponse()

    def Plan(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer(self.site, "Plan", request, context)
        return admin_pb2.PlanResponse(placement=placement_to_wire(self.site.placement))

    def Deploy(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer(self.site, "Deploy", request, context)
        if self.site.replicas:
            self.site.replicas.append(
                replace(self.site.replicas[0], spec=spec_from_wire(request.spec))
            )
            return admin_pb2.DeployResponse(deployment=deployment_to_wire(self.site.replicas[-1]))
        if self.site.on_deploy:
            self.site.states, self.site.on_deploy = self.site.on_deploy, []
        state = replace(self.site.next_state(), spec=spec_from_wire(request.spec))
        return admin_pb2.DeployResponse(deployment=deployment_to_wire(state))

    def ListDeployments(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer(self.site, "ListDeployments", request, context)
        states = self.site.replicas or ([self.site.next_state()] if self.site.states else [])
        return admin_pb2.ListDeploymentsResponse(
            deployments=[deployment_to_wire(state) for state in states]
        )

    def GetDeployment(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer(self.site, "GetDeployment", request, context)
        named = [
            one
            for one in self.site.replicas
            if request.name in (one.spec.name, one.spec.served_name)
        ]
        if named:
            return admin_pb2.GetDeploymentResponse(deployment=deployment_to_wire(named[0]))
        try:
            return admin_pb2.GetDeploymentResponse(
                deployment=deployment_to_wire(self.site.next_state())
            )
        except NotFoundError as error:
            return fail(context, error)

    def Replan(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer(self.site, "Replan", request, context)
        assert self.site.replan is not None
        return replan_to_wire(self.site.replan)

    def Trace(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        answer(self.site, "Trace", request, context)
        for trace in self.site.traces:
            yield admin_pb2.TraceResponse(stage=trace_to_wire(trace))

    def Dump(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        answer(self.site, "Dump", request, context)
        for dump in self.site.dumps:
            yield from dump_messages(dump)

    def ListAudit(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer(self.site, "ListAudit", request, context)
        checks = self.site.checks if request.verify else None
        return admin_pb2.ListAuditResponse(
            entries=[audit_entry_to_wire(entry) for entry in self.site.audit],
            checks=None if checks is None else audit_checks_to_wire(tuple(checks)),
        )

    def ListEvents(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        answer(self.site, "ListEvents", request, context)
        events = [
            admin_pb2.ListEventsResponse(event=site_event_to_wire(event))
            for event in self.site.events
        ]
        yield from until_gone(self.site, events + [Hold(for_ever=True)] * request.follow, context)

    def DeleteDeployment(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer(self.site, "DeleteDeployment", request, context)
        if self.site.gone_after_delete:
            self.site.states.clear()
            self.site.replicas.clear()
        return admin_pb2.DeleteDeploymentResponse()


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, site: ScriptedSite) -> None:
        self.site = site

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        site = self.site
        answer(site, "Generate", request, context)
        script = [
            event if isinstance(event, Hold) else event_to_wire(event) for event in site.script
        ]
        yield from until_gone(site, script, context)
        if "GenerateEnd" in site.failures:
            fail(context, site.failures["GenerateEnd"])

    def Cancel(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer(self.site, "Cancel", request, context)
        return inference_pb2.InferenceServiceCancelResponse(cancelled=request.request_id == "r1")

    def ListModels(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer(self.site, "ServedModels", request, context)
        model = inference_pb2.ServedModel(deployment="tales", model="fairy-tales", max_context=512)
        return inference_pb2.InferenceServiceListModelsResponse(models=[model])

    def RenderChat(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer(self.site, "RenderChat", request, context)
        prompt = ChatPrompt(
            PROMPT_TOKENS, AnswerFormat(ToolFormat.TAGGED), GenerationDefaults(temperature=0.5), 100
        )
        return inference_pb2.RenderChatResponse(prompt=chat_prompt_to_wire(prompt))


class Store(store_pb2_grpc.ModelStoreServiceServicer):
    """A store that has every blob already."""

    def __init__(self, site: ScriptedSite) -> None:
        self.site = site

    def RegisterModel(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer(self.site, "RegisterModel", request, context)
        self.site.models.append(stored_model(request.manifest.name))
        return store_pb2.RegisterModelResponse(registered=True, manifest_digest="d" * 64)


def stored_model(name: str) -> admin_pb2.StoredModel:
    return admin_pb2.StoredModel(
        name=name,
        manifest_digest="d" * 64,
        architecture="llama",
        layer_count=12,
        parameter_count=6_520_000,
        stored_bytes=13_040_000,
        dtype=dtype_to_wire(DType.BFLOAT16),
        max_context=512,
    )


@pytest.fixture
def site(make_profile: Callable[..., ComputeProfile]) -> Iterator[ScriptedSite]:
    scripted = ScriptedSite(partial(make_profile, CONFIG))
    scripted.nodes = [
        Node(
            NodeId("id-a"), NodeName("a"), "127.0.0.1:7001", 1, facts(), True, 0.5, 3 << 30,
            (stage_status(StagePhase.ACTIVE),), HugePages(1200 << 20, 1130 << 20),
        ),
        Node(NodeId("id-b"), NodeName("b"), "127.0.0.1:7002", 1, facts(), False, 61.0, 4 << 30),
    ]  # fmt: skip
    scripted.models = [stored_model("fairy-tales")]
    scripted.states = [deployment(DeploymentPhase.READY)]
    # Clients ping every second; a server that has not agreed to that hangs up after a few.
    options = [
        ("grpc.so_reuseport", 0),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ]
    server = grpc.server(ThreadPoolExecutor(8), options=options)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(Admin(scripted), server)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Inference(scripted), server)
    store_pb2_grpc.add_ModelStoreServiceServicer_to_server(Store(scripted), server)
    scripted.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield scripted
    scripted.released.set()
    server.stop(None).wait()
