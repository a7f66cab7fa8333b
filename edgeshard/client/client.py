"""The async client: everything a coordinator offers, as domain values."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from edgeshard.client.arguments import Message, Tool, checked, checked_tokens, conversation_of
from edgeshard.client.batch import BatchProgress, BatchRequest, BatchResult, Prompt, run_batch
from edgeshard.client.chat import ChatBuilder, ChatCompletion, chat_events
from edgeshard.client.completion import Completion, CompletionBuilder
from edgeshard.client.connection import Connection
from edgeshard.client.options import generation_of
from edgeshard.client.resuming import resumed
from edgeshard.client.settings import access
from edgeshard.debugging.dump import ProcessDump
from edgeshard.domain.audit import AuditEntry
from edgeshard.domain.chat import ChatEvent, ChatPrompt, Conversation, TokenizeRequest
from edgeshard.domain.clock import Clock
from edgeshard.domain.deployment import Deployment, DeploymentPhase, DeploymentSpec
from edgeshard.domain.device import Node
from edgeshard.domain.dtypes import DType, Quantisation
from edgeshard.domain.errors import (
    AbortedError,
    DeadlineError,
    EdgeShardError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
)
from edgeshard.domain.generation import Finished, GenerateOptions, GenerateRequest, GenerationEvent, Token
from edgeshard.domain.identity import ApiKey, JoinToken, Role, TokenRequest
from edgeshard.domain.ids import Digest, OperationId
from edgeshard.domain.packed import DropCall, PackedUnit
from edgeshard.domain.placement import Placement
from edgeshard.domain.replan import NO_OPERATION, Replan, ReplanCall
from edgeshard.domain.site import MeasureRequest, NodeDetails, NodeProgress, ServedModel, Site, StoredModel
from edgeshard.domain.site_event import SiteEvent
from edgeshard.domain.trace import StageTrace
from edgeshard.process.clock import SystemClock
from edgeshard.proto.v1 import admin_pb2, identity_pb2, inference_pb2
from edgeshard.rpc.addresses import is_of_this_machine
from edgeshard.rpc.tls import TlsFiles, split_address
from edgeshard.wire.audit import audit_entry_from_wire
from edgeshard.wire.chat import chat_prompt_from_wire, conversation_to_wire, tokenize_request_to_wire
from edgeshard.wire.common import node_from_wire
from edgeshard.wire.debug import read_dumps
from edgeshard.wire.deployment import (
    deployment_from_wire,
    placement_from_wire,
    replan_call_to_wire,
    replan_from_wire,
    spec_to_wire,
)
from edgeshard.wire.identity import api_key_from_wire, api_key_to_wire, token_from_wire, token_request_to_wire
from edgeshard.wire.packed import drop_call_to_wire, packed_unit_from_wire
from edgeshard.wire.site import (
    measure_request_to_wire,
    node_details_from_wire,
    node_progress_from_wire,
    served_model_from_wire,
    site_from_wire,
    stored_model_from_wire,
)
from edgeshard.wire.site_event import site_event_from_wire
from edgeshard.wire.trace import trace_from_wire

if TYPE_CHECKING:
    from edgeshard.client.models import Adding, Progress

_FIRST_POLL_S = 0.05
_LONGEST_POLL_S = 0.5
_CONNECTS_S = 1.0


class Client:
    """A client of the coordinator at `target` (host:port).

    What is not given is looked for in `EDGESHARD__CLIENT__*`, then in what `edgectl join` wrote for this user. Without
    certificates `plaintext` must say so, and is for loopback only. A certificate is renewed in time where this process
    may write beside it.

    Use it as an async context manager, or call `close()`. `timeout_s` bounds each call except `generate`, whose bound
    is its own. Every failure is an `EdgeShardError` that names the field or the target at fault.
    """

    def __init__(
        self,
        target: str | None = None,
        tls: TlsFiles | None = None,
        *,
        plaintext: bool | None = None,
        timeout_s: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        self._connection = Connection(access(target, tls, plaintext))
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()

    @property
    def target(self) -> str:
        return self._connection.target

    async def __aenter__(self) -> Self:
        self._connection.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; requests still streaming are cancelled."""
        await self._connection.close()

    # --- generation

    async def generate(
        self, model: str, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Stream one request: a `Started`, the `Token`s one by one, and a `Finished`.

        `model` is a deployment's name, or a model's when one deployment serves it; `prompt` is text or token ids.
        Leaving the loop, or `aclose()`, cancels the request on every box at once. A request that has started outlives
        the loss of any box and of the coordinator: it pauses, and goes on with the next token.

        Options: those of `GenerateOptions`, such as `max_new_tokens` (128), `temperature` (0, greedy), `stop`, a string
        or strings that end the text, and `timeout_s` for the whole request (None, no bound). `edgectl generate --help`
        describes them with their defaults.

        Raises InvalidArgumentError naming the option at fault, NotFoundError for an unknown model, UnavailableError
        when a box or the coordinator is away, ResourceExhaustedError (with `retry_after_s`) when there is no room,
        DeadlineError after `timeout_s`.
        """
        request = GenerateRequest(
            checked("model", model, str), generation_of(prompt, options), options.get("request_id", "")
        )
        timeout_s, began_s = options.get("timeout_s"), self._clock.now()
        calls = resumed(self._connection.generate, request, timeout_s, self._clock)
        try:
            async with aclosing(calls) as events:
                async for event in events:
                    yield event
        except (DeadlineError, UnavailableError) as error:
            # A connection takes a moment: who has not answered within less than that is not known to be away.
            late = timeout_s is not None and self._clock.now() >= began_s + timeout_s
            if timeout_s is not None and late and (isinstance(error, DeadlineError) or timeout_s < _CONNECTS_S):
                raise DeadlineError(
                    f"not finished within {timeout_s:g} s by {self.target}: allow more time, or ask for fewer tokens",
                    field="timeout_s",
                ) from None
            raise

    async def complete(self, model: str, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Completion:
        """Run one request to its end; arguments and errors are those of `generate`, with the text until then."""
        wants_logprobs = options.get("logprobs", False) or options.get("top_logprobs", 0) > 0
        builder = CompletionBuilder(self._clock.now(), logprobs=wants_logprobs)
        try:
            async with aclosing(self.generate(model, prompt, **options)) as events:
                async for event in events:
                    builder.add(event, self._clock.now())
        except EdgeShardError as error:
            error.partial_text = builder.text
            raise
        return builder.build()

    async def text_stream(
        self, model: str, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[str, None]:
        """The text of one request, piece by piece; arguments, errors and cancelling are those of `generate`."""
        async with aclosing(self.generate(model, prompt, **options)) as events:
            async for event in events:
                if isinstance(event, Token | Finished) and event.text:
                    yield event.text

    # --- conversations

    async def chat(
        self,
        model: str,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        variables: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[ChatEvent, None]:
        """Stream the answer to a conversation: a `Started`, then `ReasoningDelta`, `ContentDelta` and `ToolCall` as
        they come, and a `ChatFinished` with the numbers of tokens.

        `messages` and `tools` are as in OpenAI's chat completions; a text is one message of the user's. The model's
        chat template makes the prompt, at the coordinator; `variables` are further variables of the template, such as
        `{"enable_thinking": False}`. Options are those of `generate`. One that is not given is what the model's
        generation_config.json recommends, if it says so, then the default of `generate`; `max_new_tokens` is what fits,
        at most 1024.

        Raises what `generate` raises; InvalidArgumentError naming `messages[2].content`, `tools` and the like;
        FailedPreconditionError for a model without a chat template.
        """
        conversation = conversation_of(messages, tools, variables)
        events = chat_events(self, self._clock, model, conversation, tools or (), options)
        async with aclosing(events) as following:
            async for event in following:
                yield event

    async def complete_chat(
        self,
        model: str,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        variables: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> ChatCompletion:
        """The whole answer to a conversation; arguments and errors are those of `chat`, with the text until then."""
        builder = ChatBuilder(self._clock.now())
        try:
            async with aclosing(self.chat(model, messages, tools=tools, variables=variables, **options)) as events:
                async for event in events:
                    builder.add(event, self._clock.now())
        except EdgeShardError as error:
            error.partial_text = builder.content
            raise
        return builder.build(self._clock.now())

    async def batch(
        self, requests: Sequence[BatchRequest], concurrency: int = 8, on_progress: BatchProgress | None = None
    ) -> list[BatchResult]:
        """Run many requests, `concurrency` of them at a time; the results stand in the order of the requests.

        A request that fails has its EdgeShardError for a result, and the others go on. One that the site has no room
        for is offered again, for five minutes, since it was not begun; others are not repeated. `on_progress` gets
        (done, in all) after each.
        """

        async def run(request: BatchRequest) -> Completion | ChatCompletion:
            if isinstance(request, Prompt):
                return await self.complete(request.model, request.prompt, **request.options)
            return await self.complete_chat(
                request.model, request.messages, tools=request.tools, variables=request.variables, **request.options
            )

        return await run_batch(run, requests, concurrency, on_progress, self._clock)

    async def render_chat(self, model: str, conversation: Conversation, timeout_s: float | None = None) -> ChatPrompt:
        """The tokens that a conversation becomes, and how to read the answer; raises as `chat` does."""
        request = inference_pb2.RenderChatRequest(
            model=checked("model", model, str), conversation=conversation_to_wire(conversation)
        )
        response = await self._connection.inference(
            "RenderChat", request, self._timeout_s if timeout_s is None else timeout_s
        )
        return chat_prompt_from_wire(response.prompt)

    async def tokenize(self, model: str, text: str, special: bool = True) -> tuple[int, ...]:
        """The token ids of a text, by the tokenizer of a served model; `special` adds those that stand around it."""
        wanted = TokenizeRequest(checked("model", model, str), checked("text", text, str), special)
        response = await self._connection.inference("Tokenize", tokenize_request_to_wire(wanted), self._timeout_s)
        return tuple(response.tokens)

    async def detokenize(self, model: str, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens as they are written. Raises InvalidArgumentError naming `tokens`."""
        request = inference_pb2.DetokenizeRequest(
            model=checked("model", model, str), tokens=checked_tokens("tokens", tokens)
        )
        response = await self._connection.inference("Detokenize", request, self._timeout_s)
        return str(response.text)

    async def cancel(self, request_id: str) -> bool:
        """Cancel a running request; False when there is none of this id."""
        request = inference_pb2.InferenceServiceCancelRequest(request_id=request_id)
        response = await self._connection.inference("Cancel", request, self._timeout_s)
        return bool(response.cancelled)

    async def served_models(self) -> tuple[ServedModel, ...]:
        """What can be generated with now."""
        request = inference_pb2.InferenceServiceListModelsRequest()
        response = await self._connection.inference("ListModels", request, self._timeout_s)
        return tuple(served_model_from_wire(model) for model in response.models)

    # --- boxes and models

    # --- who belongs to the site

    async def create_token(self, role: Role, name: str, ttl_s: float = 900.0, host: str = "") -> JoinToken:
        """A token that lets one process join, once, within `ttl_s` seconds: of an agent, `name` is its box's.

        `host` is what the process dials; "" for what the coordinator takes for its own address. Raises
        FailedPreconditionError where the site makes no certificates.
        """
        request = token_request_to_wire(TokenRequest(role, name, ttl_s, host))
        response = await self._connection.identity("CreateToken", request, self._timeout_s)
        return token_from_wire(response.token)

    async def revoke(self, role: Role, name: str) -> None:
        """Refuse every certificate made so far for this principal, and end what it has open."""
        await self._connection.identity("Revoke", identity_pb2.RevokeRequest(role=role, id=name), self._timeout_s)

    async def remove_node(self, node: str) -> None:
        """Take a box (its name or id) out of the site; deployments go on without it. Raises NotFoundError."""
        await self._connection.identity("RemoveNode", identity_pb2.RemoveNodeRequest(node=node), self._timeout_s)

    async def create_key(
        self,
        name: str,
        models: Sequence[str] = (),
        *,
        tokens_per_minute: int | None = None,
        requests: int | None = None,
    ) -> tuple[ApiKey, str]:
        """An API key for the HTTP gateway, and its text, which nobody can be shown again.

        `models` are the deployments and models it may use (all, when none is named); `requests` are those at once.
        Raises AlreadyExistsError for a name that has a key.
        """
        wanted = ApiKey(name, tuple(models), tokens_per_minute, requests)
        wanted.validate()
        request = identity_pb2.CreateKeyRequest(key=api_key_to_wire(wanted))
        response = await self._connection.identity("CreateKey", request, self._timeout_s)
        return api_key_from_wire(response.key), str(response.text)

    async def keys(self) -> tuple[ApiKey, ...]:
        """The site's API keys, without their secrets."""
        response = await self._connection.identity("ListKeys", identity_pb2.ListKeysRequest(), self._timeout_s)
        return tuple(api_key_from_wire(key) for key in response.keys)

    async def revoke_key(self, name: str) -> None:
        """Refuse an API key from now on, and end what it has running. Raises NotFoundError."""
        await self._connection.identity("RevokeKey", identity_pb2.RevokeKeyRequest(name=name), self._timeout_s)

    async def nodes(self) -> tuple[Node, ...]:
        response = await self._admin("ListNodes", admin_pb2.ListNodesRequest())
        return tuple(node_from_wire(node) for node in response.nodes)

    async def node(self, name: str) -> Node:
        """One box by name or id; raises NotFoundError."""
        return (await self.node_details(name)).node

    async def node_details(self, name: str) -> NodeDetails:
        """One box by name or id, with what was measured of it and of its links; raises NotFoundError."""
        return node_details_from_wire(await self._admin("GetNode", admin_pb2.GetNodeRequest(node=name)))

    async def packed_units(self, node: str) -> tuple[PackedUnit, ...]:
        """The packed units that a box (its name or id) keeps.

        Raises NotFoundError, UnavailableError for a box that is not connected, DeadlineError for one that is silent.
        """
        response = await self._admin("ListPacked", admin_pb2.ListPackedRequest(node=node))
        return tuple(packed_unit_from_wire(unit) for unit in response.units)

    async def drop_packed(self, node: str, ids: Sequence[str] | None = None) -> tuple[PackedUnit, ...]:
        """Remove packed units of a box (its name or id) by their ids, or all that are not in use.

        Returns those that were asked for: one that is in use is still there, the others are gone. Where an id is not
        there, raises NotFoundError and removes none; raises otherwise as `packed_units`.
        """
        if ids is not None and not ids:
            return ()
        call = DropCall(_operation_id(), node, tuple(ids or ()))
        response = await self._admin("DropPacked", drop_call_to_wire(call))
        return tuple(packed_unit_from_wire(unit) for unit in response.units)

    async def site(self, model: str = "") -> Site:
        """Boxes, links, and the boxes' profiles for a model of the store; raises NotFoundError for an unknown one."""
        return site_from_wire(await self._admin("GetSite", admin_pb2.GetSiteRequest(model=model)))

    async def profile(
        self,
        model: str = "",
        nodes: Sequence[str] = (),
        *,
        dtype: DType = DType.BFLOAT16,
        quick: bool = False,
        again: bool = False,
        quantisation: Quantisation | None = None,
    ) -> AsyncGenerator[NodeProgress, None]:
        """Have boxes (names or ids; all that are connected when none is named) measure themselves and their links.

        Without `model` only links are measured. `quick` takes fewer points; `again` measures although a profile of the
        same box and shape is remembered; `quantisation` measures weights kept as small integers. A box that cannot be
        measured says so in its last `NodeProgress`, and the others go on. Leaving the loop ends the progress, not the
        measurement.

        Raises NotFoundError for an unknown model or box, UnavailableError when the coordinator goes away.
        """
        request = MeasureRequest(_operation_id(), model, dtype, tuple(nodes), quick, again, quantisation)
        async with aclosing(self._connection.profile(measure_request_to_wire(request))) as messages:
            async for message in messages:
                yield node_progress_from_wire(message)

    async def stored_models(self) -> tuple[StoredModel, ...]:
        response = await self._admin("ListModels", admin_pb2.ListModelsRequest())
        return tuple(stored_model_from_wire(model) for model in response.models)

    async def stored_model(self, name: str) -> StoredModel:
        """One model of the store; raises NotFoundError."""
        for model in await self.stored_models():
            if model.name == name:
                return model
        raise NotFoundError(
            f"model {name!r} is not in the store: add it with `edgectl model add DIR --name {name}`",
            field="model",
            reason="UNKNOWN_MODEL",
        )

    async def add_model(
        self,
        source: Path | str,
        name: str | None = None,
        progress: Progress | None = None,
        adding: Adding | None = None,
    ) -> Digest:
        """Register a model with the coordinator; returns the manifest's digest.

        `source` is a Hugging Face directory, a GGUF file, or `OWNER/NAME[@REVISION]` of the Hub (docs/models.md).

        Only what the store lacks is sent, and an interrupted upload goes on where it stopped. See
        `edgeshard.client.models.add_model` for the errors and for `progress`.
        """
        from edgeshard.client import models

        channel = self._connection.open()
        here = await asyncio.to_thread(is_of_this_machine, split_address(self._connection.target)[0])
        return await models.add_model(channel, source, name, progress, here=here, adding=adding or models.Adding())

    async def delete_model(self, name: str) -> None:
        """Remove a model from the store. Raises FailedPreconditionError while a deployment uses it."""
        await self._admin("DeleteModel", admin_pb2.DeleteModelRequest(operation_id=_operation_id(), name=name))

    # --- deployments

    async def plan(self, spec: DeploymentSpec) -> Placement:
        """The placement `deploy` would make now; changes nothing. Raises as `deploy` does."""
        response = await self._admin("Plan", admin_pb2.PlanRequest(spec=spec_to_wire(spec)))
        return placement_from_wire(response.placement)

    async def deploy(
        self,
        spec: DeploymentSpec,
        wait: bool = True,
        timeout_s: float | None = None,
        on_change: Callable[[Deployment], None] | None = None,
    ) -> Deployment:
        """Place a model and load it; with `wait`, until it answers requests.

        `on_change` gets every new state on the way. `timeout_s` bounds the waiting (None, no bound); the deployment
        goes on loading after it. Raises PlacementError or ResourceExhaustedError when the placement cannot be
        (nothing is changed then), the deployment's own typed failure when a box could not load its share, and
        DeadlineError.
        """
        request = admin_pb2.DeployRequest(operation_id=_operation_id(), spec=spec_to_wire(spec))
        deployment = deployment_from_wire((await self._admin("Deploy", request)).deployment)
        if not wait:
            return deployment
        return await self._until_ready(deployment, timeout_s, on_change or (lambda _: None))

    async def wait_ready(
        self,
        name: str,
        timeout_s: float | None = None,
        on_change: Callable[[Deployment], None] | None = None,
    ) -> Deployment:
        """Wait until a deployment answers requests; arguments and errors are those of `deploy`, and NotFoundError."""
        return await self._until_ready(await self.deployment(name), timeout_s, on_change or (lambda _: None))

    async def deployments(self) -> tuple[Deployment, ...]:
        response = await self._admin("ListDeployments", admin_pb2.ListDeploymentsRequest())
        return tuple(deployment_from_wire(deployment) for deployment in response.deployments)

    async def deployment(self, name: str, outlook: bool = False) -> Deployment:
        """One deployment; with `outlook` also how it does for the traffic it has seen, beside other placements.

        Raises NotFoundError.
        """
        response = await self._admin("GetDeployment", admin_pb2.GetDeploymentRequest(name=name, outlook=outlook))
        return deployment_from_wire(response.deployment)

    async def delete_deployment(self, name: str, wait: bool = True, timeout_s: float | None = None) -> None:
        """Stop a deployment and free its memory on every box; with `wait`, until it is gone.

        Raises NotFoundError, and DeadlineError after `timeout_s` (None, no bound) of waiting.
        """
        request = admin_pb2.DeleteDeploymentRequest(operation_id=_operation_id(), name=name)
        await self._admin("DeleteDeployment", request)
        polls = _Polls(self._clock, timeout_s)
        while wait:
            try:
                await self.deployment(name)
            except NotFoundError:
                return
            if not await polls.next():
                raise DeadlineError(f"deployment {name} is still there after {timeout_s:g} s", reason="WAIT_TIMEOUT")

    async def replan(
        self,
        name: str,
        *,
        dry_run: bool = False,
        force: bool = False,
        wait: bool = True,
        timeout_s: float | None = None,
        on_change: Callable[[Deployment], None] | None = None,
    ) -> Replan:
        """Plan a deployment that is ready for the boxes that are there now, and move it where that gains 5 % or more.

        Its requests pause and go on with the next token. `force` moves it whatever the gain; `dry_run` only asks, which
        costs next to nothing while boxes, links and profiles stay as they were (`ReplanReason.NOTHING_NEW`). With
        `wait` it is ready when this returns; `on_change` gets every new state on the way.

        Raises NotFoundError, FailedPreconditionError for a deployment that was placed by hand or has failed,
        UnavailableError while it is not ready, AbortedError where other boxes could not take it over and it goes on
        elsewhere, and DeadlineError after `timeout_s` (None, no bound) of waiting.
        """
        call = ReplanCall(name, dry_run, force, NO_OPERATION if dry_run else _operation_id())
        replan = replan_from_wire(await self._admin("Replan", replan_call_to_wire(call)))
        if not (replan.changed and wait):
            return replan
        failed: list[EdgeShardError] = []

        def changed(deployment: Deployment) -> None:
            failed.extend([deployment.failure] if deployment.failure is not None else [])
            if on_change is not None:
                on_change(deployment)

        ready = await self._until_ready(await self.deployment(name), timeout_s, changed)
        wanted, got = (
            [(stage.node_name, stage.layers) for stage in placement.stages]
            for placement in (replan.found, ready.placement)
        )
        if got != wanted:
            where = ",".join(f"{node}={layers}" for node, layers in got)
            why = failed[0].message if failed else "a box failed"
            raise AbortedError(
                f"deployment {name} did not move ({why}); it goes on with {where}", field="name", reason="NOT_MOVED"
            )
        return replan

    async def trace(self, name: str, seconds: float = 5.0) -> tuple[StageTrace, ...]:
        """What each stage of a deployment does in the next `seconds` (0.1 to 60), on the boxes' own clocks.

        `edgeshard.domain.trace.aligned` puts them on one. Recording costs the boxes next to nothing. Raises
        InvalidArgumentError naming `seconds`, NotFoundError, FailedPreconditionError when the deployment is not ready,
        AbortedError when it stops running meanwhile or another trace of it begins, DeadlineError.
        """
        request = admin_pb2.TraceRequest(deployment=name, seconds=seconds)
        async with aclosing(self._connection.trace(request)) as messages:
            return tuple([trace_from_wire(message.stage) async for message in messages])

    async def dump(self, timeout_s: float | None = None) -> tuple[ProcessDump, ...]:
        """What the coordinator, first, and every box know and did lately, without anything of users; for debugging.

        A box that did not answer is there with its failure. `edgeshard.debugging.dump.site_document` makes one document
        of them. Raises UnavailableError when the coordinator goes away, DeadlineError after `timeout_s`.
        """
        async with aclosing(self._connection.dump(admin_pb2.DumpRequest(), timeout_s)) as messages:
            return tuple([dump async for dump in read_dumps(messages)])

    async def audit(self, limit: int = 100) -> tuple[AuditEntry, ...]:
        """The newest entries of the coordinator's audit log, at most `limit` (1 to 1,000), the oldest first."""
        response = await self._admin("ListAudit", admin_pb2.ListAuditRequest(limit=limit))
        return tuple(audit_entry_from_wire(entry) for entry in response.entries)

    async def events(self, limit: int = 100, follow: bool = False) -> AsyncGenerator[SiteEvent, None]:
        """What happened on the site: the newest `limit` (at most 1,000) of what its coordinator remembers, the oldest
        first; with `follow`, then each as it happens. Raises UnavailableError when the coordinator goes away."""
        request = admin_pb2.ListEventsRequest(limit=limit, follow=follow)
        async with aclosing(self._connection.events(request)) as messages:
            async for message in messages:
                yield site_event_from_wire(message.event)

    async def _until_ready(
        self, deployment: Deployment, timeout_s: float | None, on_change: Callable[[Deployment], None]
    ) -> Deployment:
        name = deployment.spec.name
        polls = _Polls(self._clock, timeout_s)
        on_change(deployment)
        while deployment.phase is not DeploymentPhase.READY:
            if deployment.phase is DeploymentPhase.FAILED:
                raise deployment.failure or FailedPreconditionError(f"deployment {name} failed", field="deployment")
            if not await polls.next():
                raise DeadlineError(
                    f"deployment {name} is still {deployment.phase} after {timeout_s:g} s; it goes on in the "
                    f"background: see `edgectl describe deployment {name}`",
                    reason="WAIT_TIMEOUT",
                )
            latest = await self.deployment(name)
            if (latest.phase, latest.stages) != (deployment.phase, deployment.stages):
                on_change(latest)
            deployment = latest
        return deployment

    async def _admin(self, method: str, request: Any) -> Any:
        return await self._connection.admin(method, request, self._timeout_s)


class _Polls:
    """Pauses between polls, growing from 0.05 to 0.5 s, until the time is over."""

    def __init__(self, clock: Clock, timeout_s: float | None) -> None:
        self._clock = clock
        self._deadline_s = None if timeout_s is None else clock.now() + timeout_s
        self._pause_s = _FIRST_POLL_S

    async def next(self) -> bool:
        """Wait for the next poll; False, at once, when the time is over."""
        pause_s = self._pause_s
        if self._deadline_s is not None:
            left_s = self._deadline_s - self._clock.now()
            if left_s <= 0:
                return False
            pause_s = min(pause_s, left_s)
        await asyncio.sleep(pause_s)
        self._pause_s = min(self._pause_s * 1.3, _LONGEST_POLL_S)
        return True


def _operation_id() -> OperationId:
    return OperationId(uuid.uuid4().hex)
