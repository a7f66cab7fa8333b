"""The limit of descriptors is raised, and connections leave some of them to others."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from edgeshard.process.descriptors import RESERVE, connection_cap

RAISED = """
import resource
from edgeshard.process.descriptors import raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))
print(raise_descriptor_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_own_limit_becomes_what_the_system_allows() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RAISED], capture_output=True, timeout=60, check=True, text=True
    )
    assert done.stdout.split() == ["300", "300", "300"]


@given(st.integers(400, 1 << 20))
def test_listeners_together_leave_the_reserve(descriptors: int) -> None:
    caps = [
        connection_cap(descriptors, part, most)
        for part, most in ((1 / 2, 4096), (1 / 8, 1024), (1 / 4, 2048))
    ]
    assert sum(caps) <= descriptors - RESERVE
    assert connection_cap(1 << 20, 1 / 2, 4096) == 4096
