"""Logs of a daemon: structlog on stderr, JSON when that is not a terminal, and never what a user wrote."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

# Keys under which a prompt, generated text, token ids or a secret could reach a log line. They are dropped whatever the
# level: a log outlives the request, and other people read it.
PRIVATE_KEYS = frozenset(
    {
        "content",
        "emitted_tokens",
        "generation",
        "key",
        "message_text",
        "messages",
        "password",
        "prompt",
        "prompt_tokens",
        "secret",
        "stop_strings",
        "text",
        "token",
        "token_ids",
        "tokens",
    }
)


def drop_private(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor that removes every private key."""
    for key in PRIVATE_KEYS & event.keys():
        del event[key]
    return event


def configure_logging(level: str) -> None:
    """Send structlog and the standard library's logging to stderr, from `level` ("debug" to "error") up."""
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
    root.setLevel(level.upper())
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
