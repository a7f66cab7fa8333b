"""All routes of the gateway, and what they say of themselves in OpenAPI."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from edgeshard import __version__
from edgeshard.domain.errors import EdgeShardError, FailedPreconditionError, InternalError
from edgeshard.domain.site import ServedModel
from edgeshard.gateway.backend import Backend, Doors
from edgeshard.gateway.chat import Chats
from edgeshard.gateway.completions import Completions
from edgeshard.gateway.entrance import Entrance, caller_of
from edgeshard.gateway.errors import error_body, error_response, json_response
from edgeshard.gateway.metrics import HttpMetrics
from edgeshard.gateway.ollama import Ollama
from edgeshard.gateway.responses import Responses
from edgeshard.gateway.texts import Texts


def make_app(
    backend: Backend, doors: Doors, registry: CollectorRegistry | None = None, *, local_only: bool = False
) -> ASGIApp:
    """The application. `local_only` refuses what pages of other sites have a browser send to this machine."""
    metrics = HttpMetrics(registry or CollectorRegistry())
    app = FastAPI(title="EdgeShard", version=__version__, docs_url=None, redoc_url=None)
    app.add_exception_handler(EdgeShardError, _refused)
    app.add_exception_handler(HTTPException, _not_a_route)
    app.add_exception_handler(Exception, _failed)
    site = Site(backend, metrics)
    app.add_api_route("/health", site.health)
    app.add_api_route("/version", site.version)
    app.add_api_route("/metrics", site.metrics)
    app.add_api_route("/v1/models", site.models)
    app.add_api_route("/v1/models/{model}", site.model)
    app.add_api_route("/v1/embeddings", site.embeddings, methods=["POST"])
    app.add_api_route("/v1/completions", Completions(backend, metrics).answer, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", Chats(backend, metrics).answer, methods=["POST"], response_model=None)
    app.add_api_route("/v1/responses", Responses(backend, metrics).answer, methods=["POST"], response_model=None)
    texts, ollama = Texts(backend), Ollama(backend, metrics)
    app.add_api_route("/tokenize", texts.tokenize, methods=["POST"], response_model=None)
    app.add_api_route("/detokenize", texts.detokenize, methods=["POST"], response_model=None)
    app.add_api_route("/", site.here, methods=["GET", "HEAD"])
    app.add_api_route("/api/version", ollama.version)
    app.add_api_route("/api/tags", ollama.tags)
    app.add_api_route("/api/show", ollama.show, methods=["POST"], response_model=None)
    app.add_api_route("/api/chat", ollama.chat, methods=["POST"], response_model=None)
    app.add_api_route("/api/generate", ollama.generate, methods=["POST"], response_model=None)
    return Entrance(app, doors, metrics, local_only=local_only)


class Site:
    """What is said of the site itself."""

    def __init__(self, backend: Backend, metrics: HttpMetrics) -> None:
        self._backend = backend
        self._metrics = metrics
        self._began = int(time.time())

    async def here(self) -> Response:
        """What Ollama's clients ask for first."""
        return PlainTextResponse("EdgeShard is running")

    async def health(self) -> Response:
        return json_response({"status": "ok"})

    async def version(self) -> Response:
        return json_response({"version": __version__})

    async def metrics(self) -> Response:
        return PlainTextResponse(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        caller = caller_of(request)
        listed = [self._model(served) for served in self._backend.models() if caller.may_use(served)]
        return json_response({"object": "list", "data": listed})

    async def model(self, model: str, request: Request) -> Response:
        served = self._backend.find(model)
        caller_of(request).check(served)
        return json_response(self._model(served))

    async def embeddings(self) -> Response:
        raise FailedPreconditionError(
            "embeddings are not made here: the models of this site generate text", reason="UNSUPPORTED_ENDPOINT"
        )

    def _model(self, served: ServedModel) -> dict[str, Any]:
        return {
            "id": served.deployment,
            "object": "model",
            "created": self._began,
            "owned_by": "edgeshard",
            "root": served.model,
            "max_model_len": served.max_context,
        }


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, EdgeShardError)
    return error_response(error, request.url.path)


async def _failed(_request: Request, _error: Exception) -> Response:
    """The entrance logs it."""
    return error_response(InternalError("the gateway failed at this request; its log says where"))


async def _not_a_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: f"there is no {request.url.path[:200]} here", 405: f"{request.method} is not taken here"}
    message = what.get(error.status_code, str(error.detail))
    body = error_body(message, "invalid_request_error", None, "unknown_url" if error.status_code == 404 else None)
    return json_response(body, error.status_code, error.headers)
