"""The common part of routes that have answers generated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from edgeshard.domain.control.site import ServedModel
from edgeshard.domain.requests.generation import Generation
from edgeshard.gateway.access.auth import caller_of
from edgeshard.gateway.answers.response_writer import ResponseWriter, respond
from edgeshard.gateway.backend import Backend
from edgeshard.gateway.metrics import HttpMetrics


class GeneratingRoutes:
    """Routes whose answers `backend` generates."""

    def __init__(self, backend: Backend, metrics: HttpMetrics) -> None:
        self._backend = backend
        self._metrics = metrics

    async def _respond(
        self,
        request: Request,
        served: ServedModel,
        generations: Sequence[Generation],
        run: ResponseWriter,
        stream: bool,
    ) -> Response:
        """The response that `run` writes of these answers. Raises EdgeShardError."""
        identity = caller_of(request).identity
        opened = [partial(self._backend.generate, served.deployment, item, identity) for item in generations]
        return await respond(request, opened, run, self._metrics, stream=stream)
