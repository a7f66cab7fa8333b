"""EdgeShard: run a large language model across the machines you already own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgeshard.client import Client, SyncClient
    from edgeshard.domain import errors

    __version__: str

__all__ = ["WIRE_VERSION", "Client", "SyncClient", "__version__", "errors"]

# The version of the frames and commands between processes. Two processes work together when theirs
# are equal.
WIRE_VERSION = 3


def __getattr__(name: str) -> Any:
    """Attributes that are imported at first use, so that `import edgeshard` stays quick and loads
    no gRPC."""
    if name == "__version__":
        from importlib.metadata import version

        return version("edgeshard")
    if name == "errors":
        import edgeshard.domain.errors

        return edgeshard.domain.errors
    if name in ("Client", "SyncClient"):
        import edgeshard.client

        return getattr(edgeshard.client, name)
    raise AttributeError(f"module 'edgeshard' has no attribute {name!r}")
