"""Bodies sent to the gateway's application in this process, without sockets."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.types import ASGIApp, Message

from edgeshard.chat.messages import check_sizes
from edgeshard.domain.requests.conversation import ChatPrompt, Conversation
from edgeshard.domain.requests.generation import Generation, GenerationEvent
from edgeshard.gateway.app import make_app
from tests.support.callback_watch import watched_callbacks
from tests.support.scripted_gateway import KEY, Keyed, Said

PIECE_BYTES = 64 << 10
"""The bytes of a body that arrive at a time."""


@dataclass(frozen=True)
class Exchange:
    """An answer; `longest_s` is the longest callback, in seconds of this thread's processor
    time."""

    status: int
    content_type: str
    body: bytes
    longest_s: float


class _Front(Said):
    """A front that keeps nothing, and looks at sizes as the site's does."""

    async def prompt(self, model: str, conversation: Conversation, identity: str) -> ChatPrompt:
        check_sizes(conversation)
        self.conversations.clear()
        return await super().prompt(model, conversation, identity)

    def generate(
        self, model: str, generation: Generation, identity: str
    ) -> AsyncGenerator[GenerationEvent, None]:
        self.asked.clear()
        return super().generate(model, generation, identity)


class Gateway:
    """The application before a front that answers with a few words."""

    def __init__(self) -> None:
        said = _Front()
        said.texts = ["a", "b"]
        self._app: ASGIApp = make_app(said, Keyed())
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        self._loop.close()

    def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> Exchange:
        """The answer to a body. Raises the application's errors."""
        gc.collect(1)  # Otherwise a callback pays for earlier garbage.
        pieces = [
            body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES)
        ] or [b""]
        with watched_callbacks() as watch:
            status, content_type, answer = self._loop.run_until_complete(
                self._post(path, pieces, headers or {})
            )
        return Exchange(status, content_type, answer, watch.longest_s)

    async def _post(
        self, path: str, pieces: list[bytes], headers: dict[str, str]
    ) -> tuple[int, str, bytes]:
        pieces.reverse()
        shown = {"authorization": f"Bearer {KEY}", "content-type": "application/json", **headers}
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "http_version": "1.1",
            "scheme": "http",
            "server": ("127.0.0.1", 80),
            "client": ("127.0.0.1", 1),
            "headers": [(name.encode(), value.encode()) for name, value in shown.items()],
            "state": {},
        }
        messages: list[Message] = []

        async def receive() -> Message:
            await asyncio.sleep(0)
            if pieces:
                piece = pieces.pop()
                return {"type": "http.request", "body": piece, "more_body": bool(pieces)}
            return await asyncio.Event().wait()  # type: ignore[return-value]  # the client stays

        async def send(message: Message) -> None:
            messages.append(message)

        await asyncio.create_task(self._app(scope, receive, send))  # type: ignore[arg-type]
        assert messages and messages[0]["type"] == "http.response.start", "there is no answer"
        names: dict[bytes, bytes] = dict(messages[0]["headers"])
        answer = b"".join(message.get("body", b"") for message in messages[1:])
        return messages[0]["status"], names.get(b"content-type", b"").decode(), answer
