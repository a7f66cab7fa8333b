"""Random sequences of a node that packs; `packed_sequences` runs more of them by hand."""

from __future__ import annotations

import pytest
from edgeshard_agent.ops.native import native_available

from tests.agent.hosting.packed_sequences import run_sequences
from tests.support.forms import in_form

SEQUENCES = in_form(15, 50)

pytestmark = pytest.mark.skipif(
    not native_available(), reason="packed files are for native kernels"
)


@pytest.mark.timeout(300)
def test_no_sequence_violates_anything() -> None:
    failed, met = run_sequences(0, SEQUENCES)
    assert not failed, "\n".join(failed)
    wanted = ("deploy_beside", "damage", "drop", "evict", "cache limit", "its standby")
    few = {what for what in wanted if met[what] < in_form(1, 5)}
    assert not few, f"hardly met: {few}"
