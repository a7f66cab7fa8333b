"""The SDK: an async client of a coordinator, and a thin synchronous face of it."""

from __future__ import annotations

from edgeshard.client.client import Client
from edgeshard.client.completion import Completion
from edgeshard.client.sync import SyncClient
from edgeshard.domain.audit import AuditEntry
from edgeshard.domain.generation import GenerateOptions, Guide, GuideKind
from edgeshard.domain.site import (
    NodeDetails,
    NodeProgress,
    ServedModel,
    Site,
    StoredLink,
    StoredModel,
    StoredProfile,
    UnknownFigures,
    UnknownProfile,
)
from edgeshard.rpc.tls import TlsFiles

__all__ = [
    "AuditEntry",
    "Client",
    "Completion",
    "GenerateOptions",
    "Guide",
    "GuideKind",
    "NodeDetails",
    "NodeProgress",
    "ServedModel",
    "Site",
    "StoredLink",
    "StoredModel",
    "StoredProfile",
    "SyncClient",
    "TlsFiles",
    "UnknownFigures",
    "UnknownProfile",
]
