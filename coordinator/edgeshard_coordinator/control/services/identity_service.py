"""The service for members and operators on the membership of the site."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import structlog

from edgeshard.domain.errors import DeniedError, FailedPreconditionError
from edgeshard.domain.identity import (
    DashboardLink,
    Principal,
    Role,
    WheelServer,
    check_token_id,
    parse_role,
)
from edgeshard.domain.ids import check_name
from edgeshard.proto.v1 import identity_pb2 as pb
from edgeshard.proto.v1 import identity_pb2_grpc
from edgeshard.rpc.access import caller
from edgeshard.wire.identity import (
    api_key_from_wire,
    api_key_to_wire,
    dashboard_link_to_wire,
    open_token_to_wire,
    token_request_from_wire,
    token_to_wire,
    wheel_server_to_wire,
)
from edgeshard_coordinator.control.persistence.persistence import StateStore
from edgeshard_coordinator.control.runtime.hub import ControlHub
from edgeshard_coordinator.control.runtime.loop import StateLoop
from edgeshard_coordinator.control.services.inference_service import client_name
from edgeshard_coordinator.core.values.events import NodeRemoved
from edgeshard_coordinator.core.values.state import KnownNode
from edgeshard_coordinator.membership.addresses import Addresses
from edgeshard_coordinator.membership.api_keys import KeyBook
from edgeshard_coordinator.membership.membership import Membership

log = structlog.get_logger()

NOBODY_TOLD = "operator"
"""An operator in plaintext, where callers cannot be distinguished."""


def operator_name(principal: Principal | None) -> str:
    """The name of an operator on the dashboard and in the audit log."""
    return NOBODY_TOLD if principal is None else client_name(principal)


@dataclass(eq=False)
class IdentityServicer(identity_pb2_grpc.IdentityServiceServicer):
    """`membership` is None in plaintext, since callers have no certificates there. `addresses` are
    set once both listen. `keys` is None if none are kept."""

    _loop: StateLoop
    _hub: ControlHub
    _store: StateStore
    _membership: Membership | None
    _keys: KeyBook | None = None
    addresses: Addresses | None = None
    links: Callable[[str], DashboardLink] | None = None
    """Makes a link to the dashboard for an operator; None if there is no dashboard."""

    async def CreateToken(
        self, request: pb.CreateTokenRequest, context: Any
    ) -> pb.CreateTokenResponse:
        token_request = token_request_from_wire(request)
        membership = self._checked()
        if self.addresses is None:
            raise FailedPreconditionError(
                "this coordinator does not enrol processes: start it with --enrol-listen HOST:PORT "
                "and --ca-key FILE",
                field="enrol-listen",
                reason="NO_ENROLMENT",
            )
        coordinator, enrolment = self.addresses.for_joiner(token_request.host)
        creator = operator_name(caller(context))
        token = await membership.create_token(token_request, coordinator, enrolment, creator)
        token = replace(
            token,
            packages=self.addresses.packages_for(token_request.host),
            bootstrap_sha256=self.addresses.bootstrap_sha256,
        )
        return pb.CreateTokenResponse(token=token_to_wire(token))

    async def ListTokens(
        self,
        request: pb.ListTokensRequest,
        context: Any,
    ) -> pb.ListTokensResponse:
        tokens = await self._checked().open_tokens()
        return pb.ListTokensResponse(tokens=[open_token_to_wire(token) for token in tokens])

    async def RevokeToken(
        self,
        request: pb.RevokeTokenRequest,
        context: Any,
    ) -> pb.RevokeTokenResponse:
        await self._checked().revoke_token(check_token_id(request.token_id))
        return pb.RevokeTokenResponse()

    async def Renew(self, request: pb.RenewRequest, context: Any) -> pb.RenewResponse:
        membership = self._checked()
        member = caller(context)
        # there is a membership only if every caller must have a certificate
        assert member is not None
        certificate, authorities = await membership.renew(
            member, request.request, lambda: membership.denials.check(context, member)
        )
        return pb.RenewResponse(certificate=certificate, authorities=authorities)

    async def FindWheels(
        self, request: pb.FindWheelsRequest, context: Any
    ) -> pb.FindWheelsResponse:
        server = WheelServer() if self.addresses is None else self.addresses.wheel_server()
        return wheel_server_to_wire(server)

    async def Revoke(self, request: pb.RevokeRequest, context: Any) -> pb.RevokeResponse:
        await self._checked().revoke(parse_role(request.role), check_name(request.id, "name"))
        return pb.RevokeResponse()

    async def RemoveNode(
        self, request: pb.RemoveNodeRequest, context: Any
    ) -> pb.RemoveNodeResponse:
        node = self._loop.state.node_named(request.node)
        if self._membership is None:
            await self.expel(node)
        else:
            await self._membership.revoke(Role.AGENT, node.name)  # which expels it
        return pb.RemoveNodeResponse()

    async def CreateKey(self, request: pb.CreateKeyRequest, context: Any) -> pb.CreateKeyResponse:
        key, text = await self._kept_keys().create(api_key_from_wire(request.key))
        return pb.CreateKeyResponse(key=api_key_to_wire(key), text=text)

    async def ListKeys(self, request: pb.ListKeysRequest, context: Any) -> pb.ListKeysResponse:
        return pb.ListKeysResponse(keys=[api_key_to_wire(key) for key in self._kept_keys().list()])

    async def RevokeKey(self, request: pb.RevokeKeyRequest, context: Any) -> pb.RevokeKeyResponse:
        await self._kept_keys().revoke(check_name(request.name, "name"))
        return pb.RevokeKeyResponse()

    async def CreateDashboardLink(
        self, request: pb.CreateDashboardLinkRequest, context: Any
    ) -> pb.CreateDashboardLinkResponse:
        if self.links is None:
            raise FailedPreconditionError(
                "this coordinator serves no dashboard: start it with --http-listen HOST:PORT and "
                "without "
                "--no-dashboard",
                field="http-listen",
                reason="NO_DASHBOARD",
            )
        return pb.CreateDashboardLinkResponse(
            link=dashboard_link_to_wire(self.links(operator_name(caller(context))))
        )

    def _kept_keys(self) -> KeyBook:
        if self._keys is None:
            raise FailedPreconditionError("this coordinator keeps no API keys", reason="NO_KEYS")
        return self._keys

    async def expel(self, node: KnownNode) -> None:
        """Forget a node, and have its agent stop. Deployments continue without it, in another
        epoch."""
        denial = DeniedError(
            f"node {node.name} was removed from the site; an operator can admit it again with "
            "edgectl token create",
            field="node",
            reason="REMOVED",
        )
        self._hub.fail(node.node_id, denial)
        await self._loop.ask(NodeRemoved(node.node_id, self._loop.now()))
        await self._store.forget_node(node.node_id)
        log.warning("node_removed", node_id=node.node_id, node=node.name)

    def _checked(self) -> Membership:
        if self._membership is None:
            raise FailedPreconditionError(
                "this site runs in plaintext, without certificates; see edgectl init",
                reason="NO_TLS",
            )
        return self._membership
