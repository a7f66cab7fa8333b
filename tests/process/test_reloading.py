"""The settings that a running daemon applies when it reads them again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from edgeshard_agent.settings import AgentSettings

from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.process.reloading import Reloading, changes

OLD = AgentSettings(name="a", state_dir=Path("/s"), cache_limit=1 << 30)
NEW = OLD.model_copy(
    update={"cache_limit": 2 << 30, "threads": 3, "name": "b", "log_level": "error"}
)


@pytest.fixture(autouse=True)
def same_level() -> Iterator[None]:
    loggers = [
        logging.getLogger(name)
        for name in (None, "edgeshard", "edgeshard_agent", "edgeshard_coordinator")
    ]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def test_what_needs_a_restart_stays_and_is_named() -> None:
    settings, taken, waiting = changes(OLD, NEW)
    assert settings == OLD.model_copy(update={"cache_limit": 2 << 30, "log_level": "error"})
    assert (set(taken), set(waiting)) == ({"cache_limit", "log_level"}, {"threads", "name"})
    assert changes(settings, settings)[1:] == ((), ())


def test_all_is_taken_up_or_nothing() -> None:
    read: list[AgentSettings | InvalidArgumentError] = []
    took: list[int] = []
    is_wrong = False

    def next_read() -> AgentSettings:
        found = read.pop()
        if isinstance(found, InvalidArgumentError):
            raise found
        return found

    def prepare(settings: AgentSettings) -> Callable[[], None]:
        if is_wrong:
            raise InvalidArgumentError("a file that it names is wrong", field="quotas")
        return lambda: took.append(settings.cache_limit)

    reloading = Reloading(OLD, next_read, prepare)
    read.append(InvalidArgumentError("no file of settings", field="config"))
    reloading.reload()
    is_wrong = True
    read.append(NEW)
    reloading.reload()
    assert (took, reloading.settings) == ([], OLD)
    assert logging.getLogger("edgeshard").level != logging.ERROR
    is_wrong = False
    read.append(NEW)
    reloading.reload()
    assert took == [2 << 30] and reloading.settings.cache_limit == 2 << 30
    assert logging.getLogger("edgeshard").level == logging.ERROR
