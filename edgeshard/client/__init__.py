"""The SDK: an async client of a coordinator, and a thin synchronous face of it."""

from __future__ import annotations

from edgeshard.client.client import Client
from edgeshard.client.completion import Completion
from edgeshard.client.options import GenerateOptions
from edgeshard.client.site import BoxProgress, NodeDetails, Site, StoredLink, StoredProfile
from edgeshard.client.sync import SyncClient
from edgeshard.client.values import ServedModel, StoredModel
from edgeshard.rpc.tls import TlsFiles

__all__ = [
    "BoxProgress",
    "Client",
    "Completion",
    "GenerateOptions",
    "NodeDetails",
    "ServedModel",
    "Site",
    "StoredLink",
    "StoredModel",
    "StoredProfile",
    "SyncClient",
    "TlsFiles",
]
