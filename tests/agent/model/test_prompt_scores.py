"""A prompt's tokens are scored in slices, which give what all positions at once would."""

from __future__ import annotations

import pytest
import torch
from edgeshard_agent.model import sampling
from edgeshard_agent.model.sampling import score, slice_positions

from edgeshard.domain.errors import InternalError
from edgeshard.domain.requests.step import Targets

VOCAB = 300
WIDTH = 8
COUNT = 100
CHANCE = torch.Generator().manual_seed(2)
WEIGHTS = torch.randn(WIDTH, VOCAB, generator=CHANCE)
HIDDEN = torch.randn(COUNT, WIDTH, generator=CHANCE)
TOKENS = tuple(torch.randint(0, VOCAB, (COUNT,), generator=CHANCE).tolist())


@pytest.mark.parametrize("slice_bytes", [1, 30 * 4 * VOCAB, 1 << 30])
@pytest.mark.parametrize("top", [0, 3])
def test_slices_are_scored_like_the_whole(
    slice_bytes: int, top: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "SLICE_BYTES", slice_bytes)
    rows: list[int] = []

    def head(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return hidden @ WEIGHTS

    parts = list(score(head, HIDDEN, Targets(7, TOKENS), top, VOCAB))
    assert (
        rows[0] == {1: 16, 30 * 4 * VOCAB: 30, 1 << 30: COUNT}[slice_bytes] and sum(rows) == COUNT
    )
    assert [part.position for part in parts] == list(range(7, 7 + COUNT, rows[0]))
    expected = (HIDDEN @ WEIGHTS).log_softmax(-1)
    found = torch.tensor([logprob for part in parts for logprob in part.logprobs])
    assert torch.allclose(found, expected.gather(1, torch.tensor(TOKENS)[:, None])[:, 0], atol=1e-5)
    best = [[entry.token for entry in row] for part in parts for row in part.top]
    assert best == expected.topk(top).indices.tolist()


def test_a_slice_has_at_most_256_positions_and_little_memory_where_the_vocabulary_is_large() -> (
    None
):
    assert [slice_positions(vocab) for vocab in (96, 32_000, 151_936, 1 << 20)] == [
        256,
        256,
        55,
        16,
    ]


def test_logits_that_are_not_finite_are_named() -> None:
    with pytest.raises(InternalError) as caught:
        list(
            score(
                lambda hidden: hidden @ WEIGHTS * float("nan"), HIDDEN, Targets(1, TOKENS), 0, VOCAB
            )
        )
    assert caught.value.reason == "LOGITS_NOT_FINITE"
