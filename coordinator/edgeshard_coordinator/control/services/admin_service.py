"""The service that operators call through edgectl."""

from __future__ import annotations

from edgeshard_coordinator.control.services.admin_deployments import DeploymentCalls
from edgeshard_coordinator.control.services.admin_models import ModelCalls
from edgeshard_coordinator.control.services.admin_nodes import NodeCalls
from edgeshard_coordinator.control.services.admin_observing import ObservingCalls


class AdminServicer(NodeCalls, ModelCalls, DeploymentCalls, ObservingCalls):
    """The admin service, whose calls are classes by subject."""
