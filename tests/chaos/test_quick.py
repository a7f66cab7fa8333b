"""Nodes are lost in steps chosen by a seed, and every client gets the tokens of an undisturbed
run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from edgeshard_agent.ops.native import native_available

from tests.chaos import run
from tests.support.forms import day, in_form

SEED = "EDGESHARD_CHAOS_SEED"
"""Names the environment variable that chooses other cases."""


@pytest.mark.skipif(not native_available(), reason="torch's operators do not promise the bits")
@pytest.mark.timeout(900)
async def test_no_token_changes_whichever_node_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get(SEED, in_form(6, day())))
    with capsys.disabled():
        run.say(f"\n{SEED}={seed} chose these cases")
    assert await run.run(run.Options("quick", seed, keep=tmp_path, share=in_form(12, 2))) == 0, (
        capsys.readouterr().out
    )
