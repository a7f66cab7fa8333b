"""The operators with every kernel this machine has, and without any."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from edgeshard_agent.ops import native

FALLBACK = "torch"
KERNELS = native.kernel_names()


@pytest.fixture(params=[*KERNELS, FALLBACK])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of the kernels in use, "torch" for the fallback."""
    name: str = request.param
    if name == FALLBACK:
        monkeypatch.setenv(native.SWITCH, "0")
        yield name
        return
    native.use_kernels(name)
    yield name
    native.use_kernels(KERNELS[0])
