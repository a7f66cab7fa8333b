"""Forked processes: gRPC keeps threads and locks that a forked child does not have, so its calls would hang."""

from __future__ import annotations

import os

from edgeshard.domain.errors import FailedPreconditionError


class _Process:
    """The process that first opened a channel; a forked child inherits its number."""

    number: int | None = None


def is_forked() -> bool:
    """Whether a parent process of this one had opened a channel when it forked."""
    return _Process.number not in (None, os.getpid())


def check_not_forked() -> None:
    """Note that this process uses the client. Raise FailedPreconditionError (FORKED) if its parent did before."""
    if is_forked():
        raise FailedPreconditionError(
            "this process was forked from one that had used EdgeShard's client, which does not survive a fork: start "
            "workers with multiprocessing.get_context('spawn'), or fork before the first call",
            field="process",
            reason="FORKED",
        )
    _Process.number = os.getpid()
