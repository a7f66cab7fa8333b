"""A model over the wire, as from another machine: one on the coordinator's own would be linked."""

from __future__ import annotations

from pathlib import Path

from edgeshard import Client
from edgeshard.client.uploads import add_model
from edgeshard.domain.ids import Digest


async def sent(client: Client, model: Path, name: str) -> Digest:
    """Add the model of a directory by the client's connection, its bytes included."""
    return await add_model(client._connection.open(), model, name)
