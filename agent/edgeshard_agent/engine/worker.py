"""The compute thread of a box: every torch call of every stage runs here, never on the event loop.

The thread imports torch when it begins. This module does not: a box imports it before it joins its site.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from edgeshard.domain.errors import UnavailableError

P = ParamSpec("P")
T = TypeVar("T")


def step_hangs() -> UnavailableError:
    return UnavailableError(
        "a step hangs in the compute thread of this box, and nothing else can compute there; restart its agent",
        reason="STAGE_HUNG",
    )


class ComputeThread:
    """One thread, calls in order. `threads` is how many cores torch may use inside a call.

    It `hangs` from `give_up` until the call that it has returns after all.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.hangs = False
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="compute", initializer=self._prepare)

    def _prepare(self) -> None:
        import torch

        torch.set_num_threads(self._threads)

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call on the thread and wait for it. Cancelling the wait does not stop a call that has begun.

        Raises UnavailableError while the thread hangs.
        """
        if self.hangs:
            raise step_hangs()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def submit(self, function: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Run a call on the thread and do not wait. The call itself must report its result and its errors.

        Steps use this. Waiting for it with `run` costs two more turns of the event loop, a tenth of a
        millisecond each while the caches hold weights instead of Python.
        """
        self._executor.submit(function, *args, **kwargs)

    def give_up(self) -> None:
        """The call that the thread has does not seem to return."""
        self.hangs = True
        self._executor.submit(self._goes_on)

    def _goes_on(self) -> None:
        self.hangs = False

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
