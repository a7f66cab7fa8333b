"""Nodes that keep states of requests are lost in any step: every client gets the tokens of an undisturbed run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from edgeshard_agent.ops.native import native_available

from tests.chaos.failpoints import Place
from tests.chaos.matrix import NEW_TOKENS, PROMPT, STAGES, Case, Dtype, Fault, asks
from tests.chaos.site import DEPLOYMENT, ChaosSite
from tests.chaos.trial import Stream, Trials
from tests.support.forms import in_form
from tests.support.hybrids import save_hybrid

LAYERS = "a=0:2,b=2:3,c=3:4"
SAVED = (PROMPT - 1) // 16 * 16
"""Where the prompt's states are saved: a request that begins so runs its positions from here on."""
STEPS = (SAVED, *range(PROMPT, PROMPT + NEW_TOKENS - 1))


class SavedTrials(Trials):
    """Before each case its prompt is run, so that the request of the case begins from saved states."""

    async def prepare(self, case: Case) -> None:
        await super().prepare(case)
        (ask,), _ = asks(case)
        stream = Stream(ask)
        await stream.run(self.site.client)
        assert stream.error is None and (await self.site.client.deployment(DEPLOYMENT)).placement.saved_states


def cases() -> Iterator[Case]:
    """Each stage, in every step of an answer of 32 tokens, by turns before it computes and after it sent."""
    for stage in range(STAGES):
        for number, position in enumerate(STEPS):
            place = (Place.BEFORE_COMPUTE, Place.AFTER_SEND)[(stage + number) % 2]
            yield Case("hybrid", Dtype.FP32, (Fault(stage, place, position),))


@pytest.mark.skipif(not native_available(), reason="torch's operators do not promise the bits")
@pytest.mark.timeout(1800)
async def test_no_token_of_a_hybrid_changes_whichever_node_is_lost(tmp_path: Path) -> None:
    every = list(cases())
    chosen = random.Random(5).sample(every, in_form(4, len(every)))
    save_hybrid(tmp_path / "model", vocab_size=4096, max_position_embeddings=256)
    (tmp_path / "site").mkdir()
    async with ChaosSite(tmp_path / "site", model=tmp_path / "model") as site:
        trials = SavedTrials(site, layers=LAYERS, prefix_cache=True)
        for case in chosen:
            outcome = await trials.run(case)
            assert (outcome.case.name, outcome.problems, outcome.kills) == (case.name, (), 1)
        assert await trials.nothing_left() == []
