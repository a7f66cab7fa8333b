"""The SDK: an async client of a coordinator, and a thin synchronous face of it."""

from __future__ import annotations

from edgeshard.client.batch import Chat, Prompt
from edgeshard.client.chat_completion import ChatCompletion
from edgeshard.client.client import Client
from edgeshard.client.completion import Completion
from edgeshard.client.sync import SyncClient
from edgeshard.domain.audit import AuditCheck, AuditEntry
from edgeshard.domain.control.site import (
    NodeDetails,
    NodeProgress,
    ServedModel,
    Site,
    StoredLink,
    StoredModel,
    StoredProfile,
    UnknownFigures,
    UnknownProfile,
    WeightsFile,
)
from edgeshard.domain.models.packed_units import PackedUnit
from edgeshard.domain.requests.conversation import (
    ChatFinished,
    ContentDelta,
    ReasoningDelta,
    ToolCall,
)
from edgeshard.domain.requests.generation import (
    Finished,
    GenerateOptions,
    Guide,
    GuideKind,
    Started,
    Token,
)
from edgeshard.rpc.tls import TlsFiles

__all__ = [
    "AuditCheck",
    "AuditEntry",
    "Chat",
    "ChatCompletion",
    "ChatFinished",
    "Client",
    "Completion",
    "ContentDelta",
    "Finished",
    "GenerateOptions",
    "Guide",
    "GuideKind",
    "NodeDetails",
    "NodeProgress",
    "PackedUnit",
    "Prompt",
    "ReasoningDelta",
    "ServedModel",
    "Site",
    "Started",
    "StoredLink",
    "StoredModel",
    "StoredProfile",
    "SyncClient",
    "TlsFiles",
    "Token",
    "ToolCall",
    "UnknownFigures",
    "UnknownProfile",
    "WeightsFile",
]
