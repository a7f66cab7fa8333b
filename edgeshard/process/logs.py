"""Logs of a daemon: structlog on stderr, JSON when that is not a terminal. Text of users is never
logged.

A limit on too frequent lines is pure: times are seconds of one clock, as values.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, TextIO

import structlog

from edgeshard.debugging.private import PRIVATE_KEYS
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.ids import escaped
from edgeshard.process.clock import SystemClock


@dataclass(slots=True)
class _Period:
    ends: float
    lines: int = 0


class Folds:
    """Lines of one name pass `MOST_LINES` times in `PERIOD_S` from the first of them; the others
    are counted.

    Without the limit a caller could fill the disk, for example by connections that cannot be
    accepted. `MOST_NAMES` names are distinguished at a time; all further names count as one.
    """

    MOST_LINES = 100
    PERIOD_S = 60.0
    MOST_NAMES = 256

    def __init__(self) -> None:
        self._periods: dict[str, _Period] = {}

    def passes(self, name: str, now: float) -> bool:
        """Whether a line of that name is written. Call `over` with the same time before."""
        if name not in self._periods and len(self._periods) >= self.MOST_NAMES:
            name = "others"
        period = self._periods.setdefault(name, _Period(now + self.PERIOD_S))
        period.lines += 1
        return period.lines <= self.MOST_LINES

    def over(self, now: float) -> list[tuple[str, int]]:
        """Forget the periods that have ended; returns each name of which lines were left out, and
        their number."""
        left_out = []
        # All periods have the same length, so they end in the order in which they began.
        while self._periods:
            name, period = next(iter(self._periods.items()))
            if period.ends > now:
                break
            del self._periods[name]
            if period.lines > self.MOST_LINES:
                left_out.append((name, period.lines - self.MOST_LINES))
        return left_out


_OURS = ("edgeshard", "edgeshard_agent", "edgeshard_coordinator")
_NAME_CHARS = 80
MAX_VALUE_CHARACTERS = 1024
"""Most characters of one value in a line: the number of lines is bounded, and so is their
length."""
MAX_TRACEBACK_CHARACTERS = 16_384
_OWN_LINES = "\n\t"
"""Characters that `escaped` keeps in texts of several lines."""
_JOURNAL_ERROR = 3
_JOURNAL_LEVELS = {
    logging.DEBUG: 7,
    logging.INFO: 6,
    logging.WARNING: 4,
    logging.ERROR: _JOURNAL_ERROR,
}
"""Levels as the journal knows them, see sd-daemon(3)."""


def drop_private(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Remove every private key, at any level, as a structlog processor: other people read a log,
    and later."""
    for key in PRIVATE_KEYS & event.keys():
        del event[key]
    return event


def shorten_values(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Cut each text, list and table to `MAX_VALUE_CHARACTERS`, as a structlog processor: a stranger
    may have sent it. A traceback is made later: see `shorten_traceback`."""
    for key, value in event.items():
        text = (
            repr(value)
            if isinstance(value, list | tuple | set | frozenset | dict | bytes)
            else value
        )
        if isinstance(text, str) and len(text) > MAX_VALUE_CHARACTERS:
            event[key] = f"{text[:MAX_VALUE_CHARACTERS]}... ({len(text)} characters)"
    return event


def shorten_traceback(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Cut the middle of a long traceback, as a structlog processor: the errors in it may quote a
    stranger."""
    text = event.get("exception", "")
    if len(text) > MAX_TRACEBACK_CHARACTERS:
        part = MAX_TRACEBACK_CHARACTERS // 2
        event["exception"] = f"{text[:part]}\n... ({len(text)} characters)\n{text[-part:]}"
    return event


def escape_values(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Replace what steers a terminal in each text, as a structlog processor: a stranger may have
    sent it. JSON has escapes of its own."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = escaped(value, _OWN_LINES if key == "exception" else "")
    return event


def debug_logged() -> bool:
    """Whether lines at debug are written. Ask before an expensive one is put together."""
    return logging.getLogger(_OURS[0]).isEnabledFor(logging.DEBUG)


def stderr_is_journal() -> bool:
    """Whether stderr goes to systemd's journal, which takes a line's level from a prefix."""
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def tell_ready(text: str) -> None:
    """Print one line for a person who started this daemon on a terminal; programs read the log
    instead."""
    if sys.stderr.isatty() and not stderr_is_journal():
        sys.stderr.write(f"ready: {escaped(text)}\n")
        sys.stderr.flush()


def report_failure(error: EdgeShardError) -> None:
    """Print on stderr why this daemon cannot continue."""
    prefix = f"<{_JOURNAL_ERROR}>" if stderr_is_journal() else ""
    sys.stderr.write(f"{prefix}error: {escaped(error.message, _OWN_LINES)}\n")


class _FoldingHandler(logging.StreamHandler[TextIO]):
    """Leaves out too frequent lines, at any level except debug.

    It logs their number after their minute, with the next line of any kind.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._folds = Folds()
        self._clock = SystemClock()

    def emit(self, record: logging.LogRecord) -> None:
        now = self._clock.now()
        for name, count in self._folds.over(now):
            structlog.get_logger(_OURS[0]).warning(
                "lines_suppressed", of=name, lines=count, in_s=self._folds.PERIOD_S
            )
        if record.levelno <= logging.DEBUG or self._folds.passes(_name_of(record), now):
            super().emit(record)


def _name_of(record: logging.LogRecord) -> str:
    """The name of a kind of lines: the event, or the beginning of a library's text before it is
    filled in."""
    event = record.msg.get("event") if isinstance(record.msg, dict) else record.msg
    return str(event).partition("\n")[0][:_NAME_CHARS]


class _JournalFormatter(structlog.stdlib.ProcessorFormatter):
    """Puts the level in front of each line. A record is one line, tracebacks included, because it
    is JSON."""

    def format(self, record: logging.LogRecord) -> str:
        return f"<{_JOURNAL_LEVELS.get(record.levelno, _JOURNAL_ERROR)}>{super().format(record)}"


def configure_logging(level: str) -> None:
    """Send structlog and the standard library's logging to stderr, from `level` ("debug" to
    "error") up.

    "debug" is for our own packages: other libraries log much then, and their lines are not checked
    for secrets.
    """
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        drop_private,
        shorten_values,
    ]
    terminal = sys.stderr.isatty()
    # A pretty traceback shows local variables, and a prompt may be one of them: plain ones only.
    renderer: Any = (
        structlog.dev.ConsoleRenderer(
            colors=not os.environ.get("NO_COLOR"), exception_formatter=structlog.dev.plain_traceback
        )
        if terminal
        else structlog.processors.JSONRenderer()
    )
    finish: list[Any] = [structlog.processors.format_exc_info, shorten_traceback]
    if terminal:
        finish.append(escape_values)
    handler = _FoldingHandler(sys.stderr)
    formatter = _JournalFormatter if stderr_is_journal() else structlog.stdlib.ProcessorFormatter
    handler.setFormatter(
        formatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *finish,
                renderer,
            ],
        )
    )
    logging.getLogger().handlers[:] = [handler]
    set_level(level)
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


def set_level(level: str) -> None:
    """The least level of lines that are written from now on."""
    logging.getLogger().setLevel("INFO" if level == "debug" else level.upper())
    for name in _OURS:
        logging.getLogger(name).setLevel(level.upper())
