"""A gateway in this process with two keys, `honest` and `mallory`, whose prompts a real process
renders."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from edgeshard.chat.template_process import ChatProcess, ModelFiles
from edgeshard.domain.errors import UnauthenticatedError
from edgeshard.domain.ids import Digest
from edgeshard.domain.requests.conversation import ChatPrompt, Conversation
from edgeshard.gateway.access.auth import Caller, unending
from edgeshard.gateway.app import make_app
from edgeshard.gateway.connections.listen import HttpListen
from edgeshard.gateway.connections.server import GatewayServer
from tests.support.chat_models import DEMO_MODEL
from tests.support.clockwork import SERVED, Clockwork
from tests.support.http import Http


class TwoKeys:
    """Refuses every other key."""

    def enter(self, key: str | None, what: str, address: str) -> Caller:
        if key not in ("honest", "mallory"):
            raise UnauthenticatedError("no", reason="INVALID_API_KEY")
        return Caller(f"key/{key}", check=unending)


class Rendering(Clockwork):
    """Tokens by the clock, but prompts and token ids by the demo model's own files."""

    def __init__(self, template: Path) -> None:
        super().__init__(0.001, 4)
        self.process = ChatProcess()
        paths = {"tokenizer.json": DEMO_MODEL / "tokenizer.json", "chat_template.jinja": template}
        self._files = ModelFiles(Digest("d" * 64), paths, SERVED.max_context)

    async def prompt(self, model: str, conversation: Conversation, identity: str) -> ChatPrompt:
        return await self.process.prompt(self._files, conversation, identity)

    async def tokenize(
        self, model: str, text: str, special: bool, identity: str
    ) -> tuple[int, ...]:
        return await self.process.tokenize(self._files, text, special, identity)


@pytest_asyncio.fixture
async def http(tmp_path: Path) -> AsyncIterator[Http]:
    """An honest client of the gateway."""
    template = tmp_path / "chat_template.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content }}{% for k in m %}{{ x }}{% endfor %}{% endfor %}"
    )
    backend = Rendering(template)
    backend.start()
    server = GatewayServer(make_app(backend, TwoKeys()), HttpListen("127.0.0.1:0"))
    await server.start()
    yield Http(server.url, "honest")
    await server.stop()
    await backend.process.close()
