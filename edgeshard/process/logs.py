"""Logs of a daemon: structlog on stderr, JSON when that is not a terminal. Text of users is never logged."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from edgeshard.debugging.private import PRIVATE_KEYS

_OURS = ("edgeshard", "edgeshard_agent", "edgeshard_coordinator")


def drop_private(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor that removes every private key, whatever the level: a log outlives the request, and other
    people read it."""
    for key in PRIVATE_KEYS & event.keys():
        del event[key]
    return event


def debug_logged() -> bool:
    """Whether lines at debug go anywhere: ask before computing what they would say."""
    return logging.getLogger(_OURS[0]).isEnabledFor(logging.DEBUG)


def configure_logging(level: str) -> None:
    """Send structlog and the standard library's logging to stderr, from `level` ("debug" to "error") up.

    "debug" is for our own packages. What other libraries say then is a lot, and nobody knows that it is fit for a log.
    """
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        drop_private,
    ]
    terminal = sys.stderr.isatty()
    # A pretty traceback shows local variables, and a prompt may be one of them: plain ones only.
    renderer: Any = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if terminal
        else structlog.processors.JSONRenderer()
    )
    finish = [] if terminal else [structlog.processors.format_exc_info]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *finish, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel("INFO" if level == "debug" else level.upper())
    for name in _OURS:
        logging.getLogger(name).setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
