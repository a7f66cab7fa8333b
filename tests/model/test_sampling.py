"""Sampling: the right distribution, the same draw whatever else is in the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from edgeshard_agent.model.sampling import RequestSampler, Sampler, arrivals, candidates

from edgeshard.errors import InternalError, InvalidArgumentError
from edgeshard.generation import Sampling

VOCAB = 50
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2


def draw(sampling: Sampling, position: int, logits: torch.Tensor = LOGITS) -> int:
    return RequestSampler(sampling, (), len(logits)).choose(logits.numpy().astype(np.float64), position)


def counts(sampling: Sampling, draws: int = 4000) -> np.ndarray:
    sampler = RequestSampler(sampling, (), VOCAB)
    logits = LOGITS.numpy().astype(np.float64)
    return np.bincount([sampler.choose(logits, position) for position in range(draws)], minlength=VOCAB)


def test_greedy_takes_the_largest() -> None:
    assert draw(Sampling(), 3) == int(LOGITS.argmax())


def test_arrivals_are_a_function_of_seed_position_and_token() -> None:
    assert np.array_equal(arrivals(7, 3, 5), arrivals(7, 3, 9)[:5])
    values = np.concatenate([arrivals(seed, position, 8) for seed in (0, 1, 2**64 - 1) for position in range(200)])
    assert len(set(values)) == 4800 and (values > 0).all()
    assert abs(values.mean() - 1) < 0.05 and abs((values > 1).mean() - math.exp(-1)) < 0.03


@pytest.mark.parametrize("top_p", [0.95, 1.0])
def test_the_last_bits_of_the_logits_do_not_change_what_is_drawn(top_p: float) -> None:
    """As another batch, or a prefix computed again, may make them."""
    chance = np.random.default_rng(3)
    sampler = RequestSampler(Sampling(temperature=0.9, top_p=top_p, seed=7), (), 4096)
    for position in range(3000):
        logits = 2 * chance.normal(size=4096)
        assert sampler.choose(logits, position) == sampler.choose(logits + 3e-6 * chance.normal(size=4096), position)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_sampling_follows_the_softmax(temperature: float) -> None:
    draws = 4000
    expected = torch.softmax(LOGITS.double() / temperature, -1).numpy() * draws
    found = counts(Sampling(temperature=temperature, seed=11), draws)
    # Cells expected to hold fewer than 5 are pooled, as Pearson's test wants.
    rare = expected < 5
    observed = np.append(found[~rare], found[rare].sum())
    wanted = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_top_k_keeps_the_k_likeliest() -> None:
    best = set(LOGITS.topk(5).indices.tolist())
    tokens, _ = candidates(LOGITS.numpy().astype(np.float64), Sampling(temperature=3.0, top_k=5))
    assert set(tokens.tolist()) == best
    assert set(np.flatnonzero(counts(Sampling(temperature=3.0, top_k=5, seed=2), 500))) == best


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float) -> None:
    probabilities = torch.softmax(LOGITS.double(), -1)
    ordered, order = probabilities.sort(descending=True)
    count = int((ordered.cumsum(0) < top_p).sum()) + 1
    tokens, kept = candidates(LOGITS.numpy().astype(np.float64), Sampling(temperature=1.0, top_p=top_p))
    assert tokens.tolist() == order[:count].tolist()
    np.testing.assert_allclose(kept / kept.sum(), ordered[:count] / ordered[:count].sum())


def test_top_p_over_a_large_vocabulary_is_the_same_with_or_without_the_shortcut() -> None:
    generator = np.random.default_rng(0)
    for scale in (0.01, 5.0):
        logits = generator.normal(size=5000) * scale
        probabilities = np.exp(logits) / np.exp(logits).sum()
        order = np.argsort(-probabilities, kind="stable")
        count = int((probabilities[order].cumsum() < 0.8).sum()) + 1
        tokens, _ = candidates(logits, Sampling(temperature=1.0, top_p=0.8))
        assert tokens.tolist() == order[:count].tolist()


def test_top_k_and_top_p_together() -> None:
    tokens, _ = candidates(LOGITS.numpy().astype(np.float64), Sampling(temperature=1.0, top_k=4, top_p=0.5))
    best = LOGITS.double().topk(4)
    count = int((torch.softmax(best.values, -1).cumsum(0) < 0.5).sum()) + 1
    assert tokens.tolist() == best.indices[:count].tolist()


def test_a_tiny_top_p_or_top_k_of_one_is_greedy() -> None:
    for sampling in (
        Sampling(temperature=5.0, top_p=1e-9),
        Sampling(temperature=5.0, top_k=1),
        Sampling(temperature=1e-6),
    ):
        assert {draw(sampling, position) for position in range(30)} == {int(LOGITS.argmax())}


def test_repetition_penalty_pushes_seen_tokens_down() -> None:
    best, second = LOGITS.topk(2).indices.tolist()
    sampler = RequestSampler(Sampling(repetition_penalty=1000.0), (best,), VOCAB)
    logits = LOGITS.numpy().astype(np.float64)
    assert sampler.choose(logits, 0) == second
    sampler.note(second)
    assert sampler.choose(logits, 1) not in (best, second)
    negative = -np.abs(logits) - 0.1
    top = int(negative.argmax())
    assert RequestSampler(Sampling(repetition_penalty=2.0), (top,), VOCAB).choose(negative, 0) != top


def test_a_seeded_request_is_the_same_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(6, VOCAB, generator=generator)
    chosen = [
        Sampling(temperature=1.5, seed=9),
        Sampling(),
        Sampling(temperature=0.7, top_k=10, seed=1),
        Sampling(temperature=1.0, top_p=0.8, seed=1, top_logprobs=2),
        Sampling(temperature=1.0, repetition_penalty=1.4, seed=3),
        Sampling(logprobs=True),
    ]

    def run(order: list[int]) -> dict[int, object]:
        sampler = Sampler(VOCAB)
        for i in order:
            sampler.open(i, chosen[i], (1, 2, 3))
        tokens = sampler.sample(rows[order], [(i, 40 + i) for i in order])
        return {token.request: token for token in tokens}

    together = run([0, 1, 2, 3, 4, 5])
    assert run([5, 3, 1, 0, 4, 2]) == together
    for i in range(6):
        assert run([i])[i] == together[i]


def test_logprobs_are_those_of_the_model() -> None:
    sampler = Sampler(VOCAB)
    sampler.open(1, Sampling(temperature=2.0, top_k=3, seed=5, logprobs=True, top_logprobs=4), ())
    sampler.open(2, Sampling(temperature=2.0, top_k=3, seed=5), ())
    token, bare = sampler.sample(torch.stack([LOGITS, LOGITS]), [(1, 8), (2, 8)])
    reference = torch.log_softmax(LOGITS.double(), -1)
    assert token.token == bare.token
    assert token.logprob == pytest.approx(reference[token.token].item())
    assert [entry.token for entry in token.top] == reference.topk(4).indices.tolist()
    assert [entry.logprob for entry in token.top] == pytest.approx(reference.topk(4).values.tolist())
    assert (bare.logprob, bare.top) == (0.0, ())


def test_top_logprobs_at_ties_and_beyond_the_vocabulary() -> None:
    sampler = Sampler(4)
    sampler.open(1, Sampling(top_logprobs=3), ())
    sampler.open(2, Sampling(top_logprobs=20), ())
    first, second = sampler.sample(torch.zeros(2, 4), [(1, 0), (2, 0)])
    assert [entry.token for entry in first.top] == [0, 1, 2]
    assert [entry.token for entry in second.top] == [0, 1, 2, 3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    sampler = Sampler(VOCAB)
    sampler.open(1, Sampling(), ())
    logits = LOGITS.clone()
    logits[3] = bad
    with pytest.raises(InternalError):
        sampler.sample(logits[None], [(1, 0)])


def test_parameters_are_checked() -> None:
    sampler = Sampler(VOCAB)
    for sampling, seen in ((Sampling(temperature=-1), ()), (Sampling(), (VOCAB,)), (Sampling(), (-1,))):
        with pytest.raises(InvalidArgumentError):
            sampler.check(sampling, seen)
