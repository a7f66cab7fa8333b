"""Random sequences of a box that packs; `packed_sequences` runs more of them by hand."""

from __future__ import annotations

import pytest
from edgeshard_agent.ops import native_available

from tests.agent.hosting.packed_sequences import run_sequences

SEQUENCES = 50

pytestmark = pytest.mark.skipif(not native_available(), reason="packed files are for native kernels")


@pytest.mark.timeout(300)
def test_no_sequence_violates_anything() -> None:
    failed, met = run_sequences(0, SEQUENCES)
    assert not failed, "\n".join(failed)
    few = {what for what in ("deploy_beside", "damage", "drop", "evict", "cache limit", "its standby") if met[what] < 5}
    assert not few, f"hardly met: {few}"
