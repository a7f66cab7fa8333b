"""The site: who belongs to it, its nodes, its models, and what happens there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

from edgeshard.debugging.dump import ProcessDump
from edgeshard.domain.audit import AuditCheck, AuditEntry
from edgeshard.domain.control.site import (
    MeasureRequest,
    NodeDetails,
    NodeProgress,
    Site,
    SiteEvent,
    StoredModel,
)
from edgeshard.domain.errors import FailedPreconditionError, NotFoundError
from edgeshard.domain.identity import (
    ApiKey,
    DashboardLink,
    JoinToken,
    OpenToken,
    Role,
    TokenRequest,
    check_token_id,
)
from edgeshard.domain.ids import Digest
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.packed_units import DropCall, PackedUnit
from edgeshard.domain.nodes.device import Node
from edgeshard.domain.nodes.labels import LabelCall
from edgeshard.proto.v1 import admin_pb2, identity_pb2
from edgeshard.rpc.addresses import is_of_this_machine
from edgeshard.rpc.tls import split_address
from edgeshard.wire.debug import read_dumps
from edgeshard.wire.identity import (
    api_key_from_wire,
    api_key_to_wire,
    dashboard_link_from_wire,
    open_token_from_wire,
    token_from_wire,
    token_request_to_wire,
)
from edgeshard.wire.site import (
    audit_checks_from_wire,
    audit_entry_from_wire,
    drop_call_to_wire,
    label_call_to_wire,
    measure_request_to_wire,
    node_details_from_wire,
    node_from_wire,
    node_progress_from_wire,
    packed_unit_from_wire,
    site_event_from_wire,
    site_from_wire,
    stored_model_from_wire,
)

if TYPE_CHECKING:
    from edgeshard.client.uploads import Adding, Progress

from edgeshard.client.connection import Calls, operation_id


class SiteCalls(Calls):
    """An operator's calls, without those about deployments."""

    async def create_token(
        self, role: Role, name: str, ttl_s: float = 900.0, host: str = ""
    ) -> JoinToken:
        """A token that lets one process join, once, within `ttl_s` seconds: of an agent, `name` is
        its node's.

        `host` is the address that the process dials; "" for the coordinator's own choice. Raises
        FailedPreconditionError if the site makes no certificates.
        """
        request = token_request_to_wire(TokenRequest(role, name, ttl_s, host))
        response = await self._identity("CreateToken", request)
        return token_from_wire(response.token)

    async def open_tokens(self) -> tuple[OpenToken, ...]:
        """The tokens that still let a process in, without their secrets; the oldest first."""
        response = await self._identity("ListTokens", identity_pb2.ListTokensRequest())
        return tuple(open_token_from_wire(token) for token in response.tokens)

    async def revoke_token(self, token_id: str) -> None:
        """Refuse every join with this token from now on. Raises NotFoundError if no open token has
        this id."""
        request = identity_pb2.RevokeTokenRequest(token_id=check_token_id(token_id))
        await self._identity("RevokeToken", request)

    async def revoke(self, role: Role, name: str) -> None:
        """Refuse every certificate made so far for this principal, and end what it has open."""
        await self._identity("Revoke", identity_pb2.RevokeRequest(role=role, id=name))

    async def remove_node(self, node: str) -> None:
        """Remove a node (its name or id) from the site; deployments continue without it. Raises
        NotFoundError."""
        await self._identity("RemoveNode", identity_pb2.RemoveNodeRequest(node=node))

    async def create_key(
        self,
        name: str,
        models: Sequence[str] = (),
        *,
        tokens_per_minute: int | None = None,
        requests: int | None = None,
        metrics: bool = False,
    ) -> tuple[ApiKey, str]:
        """An API key for the HTTP gateway, and its text, which cannot be shown again.

        `models` are the deployments and models it may use (all, when none is named); `requests` are
        those at once. With `metrics` it reads all metrics of the site. Raises AlreadyExistsError
        for a name that has a key.
        """
        api_key = ApiKey(name, tuple(models), tokens_per_minute, requests, metrics=metrics)
        api_key.check()
        request = identity_pb2.CreateKeyRequest(key=api_key_to_wire(api_key))
        response = await self._identity("CreateKey", request)
        return api_key_from_wire(response.key), str(response.text)

    async def keys(self) -> tuple[ApiKey, ...]:
        """The site's API keys, without their secrets."""
        response = await self._identity("ListKeys", identity_pb2.ListKeysRequest())
        return tuple(api_key_from_wire(key) for key in response.keys)

    async def revoke_key(self, name: str) -> None:
        """Refuse an API key from now on, and end what it has running. Raises NotFoundError."""
        await self._identity("RevokeKey", identity_pb2.RevokeKeyRequest(name=name))

    async def dashboard_link(self) -> DashboardLink:
        """A way into the dashboard for a browser, good once and for a minute.

        Raises FailedPreconditionError if the coordinator serves none.
        """
        response = await self._identity(
            "CreateDashboardLink", identity_pb2.CreateDashboardLinkRequest()
        )
        return dashboard_link_from_wire(response.link)

    async def nodes(self) -> tuple[Node, ...]:
        response = await self._admin("ListNodes", admin_pb2.ListNodesRequest())
        return tuple(node_from_wire(node) for node in response.nodes)

    async def node(self, name: str) -> Node:
        """One node by name or id; raises NotFoundError."""
        return (await self.node_details(name)).node

    async def node_details(self, name: str) -> NodeDetails:
        """One node by name or id, with what was measured of it and of its links; raises
        NotFoundError."""
        return node_details_from_wire(
            await self._admin("GetNode", admin_pb2.GetNodeRequest(node=name))
        )

    async def label_node(
        self, node: str, labels: Mapping[str, str], removed: Sequence[str] = ()
    ) -> Node:
        """Set labels of a node (its name or id) and remove the labels of some keys, also the
        agent's own; returns the node.

        They outlive restarts of both daemons. Raises NotFoundError, InvalidArgumentError for an
        invalid label.
        """
        call = label_call_to_wire(LabelCall(node, labels, tuple(removed)))
        return node_from_wire((await self._admin("LabelNode", call)).node)

    async def packed_units(self, node: str) -> tuple[PackedUnit, ...]:
        """The packed units that a node (its name or id) keeps.

        Raises NotFoundError, UnavailableError for a node that is not connected, DeadlineError for
        one that is silent.
        """
        response = await self._admin("ListPacked", admin_pb2.ListPackedRequest(node=node))
        return tuple(packed_unit_from_wire(unit) for unit in response.units)

    async def drop_packed(
        self, node: str, ids: Sequence[str] | None = None
    ) -> tuple[PackedUnit, ...]:
        """Remove packed units of a node (its name or id) by their ids, or all that are not in use.

        Returns the requested units: one that is in use is still there, the others are gone. If an
        id does not exist, raises NotFoundError and removes none; raises otherwise as
        `packed_units`.
        """
        if ids is not None and not ids:
            return ()
        call = DropCall(operation_id(), node, tuple(ids or ()))
        response = await self._admin("DropPacked", drop_call_to_wire(call))
        return tuple(packed_unit_from_wire(unit) for unit in response.units)

    async def site(self, model: str = "") -> Site:
        """Nodes, links, and the nodes' profiles for a model of the store; raises NotFoundError for
        an unknown one."""
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
        """Have nodes (names or ids; all that are connected when none is named) measure themselves
        and their links.

        Without `model` only links are measured. `quick` takes fewer points; `again` measures
        although a profile of the same node and shape is remembered; `quantisation` measures weights
        kept as small integers. A node that cannot be measured reports the reason in its last
        `NodeProgress`, and the others continue. Leaving the loop ends the progress, not the
        measurement.

        Raises NotFoundError for an unknown model or node, UnavailableError when the coordinator
        goes away.
        """
        request = MeasureRequest(
            operation_id(), model, dtype, tuple(nodes), quick, again, quantisation
        )
        async with aclosing(
            self._connection.stream("Profile", measure_request_to_wire(request))
        ) as messages:
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
            f"model {name!r} is not in the store: add it with `edgectl model add DIR --name "
            f"{name}`",
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

        `source` is a Hugging Face directory, a GGUF file, `OWNER/NAME[:TAG][@REVISION]` of the Hub,
        `ollama:NAME` or `lmstudio:NAME` (docs/models.md).

        Only data that the store lacks is sent, and an interrupted upload resumes. See
        `edgeshard.client.uploads.add_model` for the errors and for `progress`.
        """
        from edgeshard.client import uploads
        from edgeshard.importing.model_sources import named_source

        channel = self._connection.open()
        named_source(source, name)
        # report a coordinator that cannot be reached before a conversion of minutes
        await self.stored_models()
        here = await asyncio.to_thread(
            is_of_this_machine, split_address(self._connection.target)[0]
        )
        return await uploads.add_model(
            channel, source, name, progress, here=here, adding=adding or uploads.Adding()
        )

    async def delete_model(self, name: str) -> None:
        """Remove a model from the store. Raises FailedPreconditionError while a deployment uses
        it."""
        await self._admin(
            "DeleteModel", admin_pb2.DeleteModelRequest(operation_id=operation_id(), name=name)
        )

    async def dump(self, timeout_s: float | None = None) -> tuple[ProcessDump, ...]:
        """Dumps of the coordinator, first, and of every node: state and latest events, without
        anything of users.

        A node that did not answer is there with its failure.
        `edgeshard.debugging.dump.site_document` makes one document of them. Raises UnavailableError
        when the coordinator goes away, DeadlineError after `timeout_s`.
        """
        async with aclosing(
            self._connection.stream("Dump", admin_pb2.DumpRequest(), timeout_s)
        ) as messages:
            return tuple([dump async for dump in read_dumps(messages)])

    async def audit(self, limit: int = 100) -> tuple[AuditEntry, ...]:
        """The newest entries of the coordinator's audit log, at most `limit` (1 to 1,000), the
        oldest first."""
        response = await self._admin("ListAudit", admin_pb2.ListAuditRequest(limit=limit))
        return tuple(audit_entry_from_wire(entry) for entry in response.entries)

    async def check_audit(self) -> tuple[AuditCheck, ...]:
        """The verdict of the seals on each file of the coordinator's audit log.

        Raises FailedPreconditionError if the log is not sealed, or the coordinator is too old to
        check.
        """
        response = await self._admin("ListAudit", admin_pb2.ListAuditRequest(limit=1, verify=True))
        if not response.HasField("checks"):
            raise FailedPreconditionError(
                "this coordinator does not seal its audit log: upgrade it",
                field="verify",
                reason="NO_SEALS",
            )
        return audit_checks_from_wire(response.checks)

    async def events(
        self, limit: int = 100, follow: bool = False
    ) -> AsyncGenerator[SiteEvent, None]:
        """Events of the site: the newest `limit` (at most 1,000) that its coordinator remembers,
        the oldest first; with `follow`, then each as it happens. Raises UnavailableError when the
        coordinator goes away."""
        request = admin_pb2.ListEventsRequest(limit=limit, follow=follow)
        async with aclosing(self._connection.stream("ListEvents", request)) as messages:
            async for message in messages:
                yield site_event_from_wire(message.event)
