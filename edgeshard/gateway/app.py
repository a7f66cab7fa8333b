"""All routes of the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, PlainTextResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from edgeshard import __version__
from edgeshard.domain.control.site import ServedModel
from edgeshard.domain.errors import (
    DeniedError,
    EdgeShardError,
    FailedPreconditionError,
    InternalError,
)
from edgeshard.gateway import document as forms
from edgeshard.gateway.access.auth import Authenticator, caller_of
from edgeshard.gateway.access.cors import NOBODY, Origins
from edgeshard.gateway.access.middleware import GatewayMiddleware, Pages
from edgeshard.gateway.answers.keepalive import in_time
from edgeshard.gateway.answers.response_writer import EVENT_STREAM, LINES
from edgeshard.gateway.backend import Backend
from edgeshard.gateway.document import answers_of, body_of, refusals_of
from edgeshard.gateway.errors import OLLAMA, error_body, error_response, json_response
from edgeshard.gateway.request_metrics import HttpMetrics
from edgeshard.gateway.routes.chat_completions import ChatCompletions, ChatRequest
from edgeshard.gateway.routes.completions import CompletionRequest, Completions
from edgeshard.gateway.routes.ollama import ChatBody, GenerateBody, Ollama, ShowBody
from edgeshard.gateway.routes.responses import Responses, ResponsesRequest
from edgeshard.gateway.routes.texts import DetokenizeRequest, Texts, TokenizeRequest
from edgeshard.metrics.exposition import Metrics


def make_app(
    backend: Backend,
    authenticator: Authenticator,
    site_metrics: Metrics | None = None,
    *,
    local_only: bool = False,
    origins: Origins = NOBODY,
    pages: Pages | None = None,
) -> ASGIApp:
    """The application. `/metrics` shows `site_metrics` too. `local_only` refuses requests that
    pages of other sites have a browser send to this machine, except pages of `origins`. `pages` are
    for people, separate from it."""
    metrics = HttpMetrics(site_metrics)
    app = FastAPI(
        title="EdgeShard",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_exception_handler(EdgeShardError, _refused)
    app.add_exception_handler(HTTPException, _not_a_route)
    app.add_exception_handler(Exception, _failed)
    site = SiteRoutes(backend, metrics)
    texts = Texts(backend)
    ollama = Ollama(backend, metrics)
    openai: _Posts = (
        (
            "/v1/completions",
            Completions(backend, metrics).answer,
            forms.CompletionObject,
            EVENT_STREAM,
        ),
        (
            "/v1/chat/completions",
            ChatCompletions(backend, metrics).answer,
            forms.ChatCompletionObject,
            EVENT_STREAM,
        ),
        ("/v1/responses", Responses(backend, metrics).answer, forms.ResponseObject, EVENT_STREAM),
        ("/tokenize", texts.tokenize, forms.Tokens, ""),
        ("/detokenize", texts.detokenize, forms.Text, ""),
    )
    of_ollama: _Posts = (
        ("/api/show", ollama.show, forms.OllamaModel, ""),
        ("/api/chat", ollama.chat, forms.OllamaAnswer, LINES),
        ("/api/generate", ollama.generate, forms.OllamaAnswer, LINES),
    )
    _add_site(app, site)
    _add_posts(app, openai)
    app.add_api_route(
        "/api/version", site.version, response_model=forms.Version, openapi_extra=forms.OPEN
    )
    for path, listed in (("/api/tags", ollama.tags), ("/api/ps", ollama.running)):
        app.add_api_route(path, listed, responses=answers_of(forms.OllamaModels, ollama=True))
    _add_posts(app, of_ollama)
    forms.describe(app, FORMS.values())
    app.add_api_route("/docs", partial(_docs, app), include_in_schema=False)
    if pages is not None:
        pages.api = app
    return GatewayMiddleware(
        app, authenticator, metrics, local_only=local_only, origins=origins, pages=pages
    )


MAX_NEAR_CHARACTERS = 200
"""The longest path for which a route of a similar path is searched."""
FORMS: Mapping[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/api/show": ShowBody,
    "/api/chat": ChatBody,
    "/api/generate": GenerateBody,
}
"""The forms of bodies, by the paths of their routes."""
_Posts = tuple[tuple[str, Any, type[BaseModel], str], ...]
"""Routes that read a body: path, function, form of the answer, media type of its stream or ""."""


def _add_posts(app: FastAPI, posts: _Posts) -> None:
    for path, route, answer_form, stream in posts:
        responses = answers_of(answer_form, stream=stream, ollama=path.startswith(OLLAMA))
        answer = in_time(route) if stream else route
        app.add_api_route(
            path, answer, methods=["POST"], responses=responses, openapi_extra=body_of(FORMS[path])
        )


def _add_site(app: FastAPI, site: SiteRoutes) -> None:
    app.add_api_route("/", site.here, include_in_schema=False)
    app.add_api_route("/health", site.health, response_model=forms.Health, openapi_extra=forms.OPEN)
    app.add_api_route(
        "/version", site.version, response_model=forms.Version, openapi_extra=forms.OPEN
    )
    app.add_api_route("/metrics", site.metrics, include_in_schema=False)
    app.add_api_route("/v1/models", site.models, responses=answers_of(forms.ModelList))
    app.add_api_route("/v1/models/{model}", site.model, responses=answers_of(forms.Model))
    app.add_api_route(
        "/v1/embeddings",
        site.embeddings,
        methods=["POST"],
        responses=refusals_of(),
        status_code=400,
    )


class SiteRoutes:
    """The routes about the site itself."""

    def __init__(self, backend: Backend, metrics: HttpMetrics) -> None:
        self._backend = backend
        self._metrics = metrics

    async def here(self) -> Response:
        """The page that Ollama's clients request first."""
        return PlainTextResponse("EdgeShard is running")

    async def health(self) -> Response:
        return json_response({"status": "ok"})

    async def version(self) -> Response:
        return json_response({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """The metrics of the whole site for a caller that reads them all, else those in which no
        request of another has its number of tokens. A key for some models only gets none."""
        caller = caller_of(request)
        if caller.models is not None and not caller.metrics:
            raise DeniedError(
                "this API key allows only some models", field="api_key", reason="KEY_SCOPE"
            )
        text = await self._metrics.text(everything=caller.metrics)
        caller.check()
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> Response:
        caller = caller_of(request)
        listed = [
            self._model(served) for served in self._backend.models() if caller.may_use(served)
        ]
        return json_response({"object": "list", "data": listed})

    async def model(self, model: str, request: Request) -> Response:
        return json_response(self._model(caller_of(request).find(self._backend, model)))

    async def embeddings(self) -> Response:
        raise FailedPreconditionError(
            "embeddings are not supported: the models of this site generate text",
            reason="UNSUPPORTED_ENDPOINT",
        )

    def _model(self, served: ServedModel) -> dict[str, Any]:
        return {
            "id": served.deployment,
            "object": "model",
            "created": int(self._backend.added_at(served.deployment)),
            "owned_by": "edgeshard",
            "root": served.model,
            "max_model_len": served.max_context,
        }


async def _docs(app: FastAPI) -> Response:
    return HTMLResponse(forms.page(app, FORMS), headers=forms.PAGE_HEADERS)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, EdgeShardError)
    return error_response(error, request.url.path)


async def _failed(request: Request, _error: Exception) -> Response:
    """The answer to a request at which the gateway failed; the entrance logs the error."""
    return error_response(
        InternalError("the gateway failed on this request; see its log"), request.url.path
    )


async def _not_a_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    message = str(error.detail)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        near = _near(request, path)
        message = f"{path[:200]} does not exist here" + (f": call {near}" if near else "")
    elif error.status_code == 405:
        message = f"{request.method} is not supported here"
        if "GET" in headers.get("Allow", ""):
            headers["Allow"] += ", HEAD"
    code = "unknown_url" if error.status_code == 404 else None
    body = (
        {"error": message}
        if path.startswith(OLLAMA)
        else error_body(message, "invalid_request_error", None, code)
    )
    return json_response(body, error.status_code, headers)


def _near(request: Request, path: str) -> str:
    """The probable path of a route if a caller's base URL lacks /v1, or has too much of it; "" if
    there is none."""
    if len(path) > MAX_NEAR_CHARACTERS:
        return ""
    shorter = [path[at:] for at, sign in enumerate(path) if sign == "/" and at > 0]
    for candidate in (f"/v1{path}", f"/api{path}", *shorter):
        if any(
            isinstance(route, Route) and route.path_regex.match(candidate)
            for route in request.app.routes
        ):
            return candidate
    return ""
