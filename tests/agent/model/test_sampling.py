"""Sampling: the right distribution, the same draw whatever else is in the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from edgeshard_agent.model.draws import arrivals, every_uniform, some_uniforms
from edgeshard_agent.model.sampling import RequestSampler, Sampler, candidates, winners

from edgeshard.domain.errors import InternalError, InvalidArgumentError
from edgeshard.domain.generation import Sampling

VOCAB = 50
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2


def choose(sampler: RequestSampler, logits: np.ndarray, position: int) -> int:
    return winners([sampler.draw(logits, position)], len(logits))[0]


def draw(sampling: Sampling, position: int, logits: torch.Tensor = LOGITS) -> int:
    return choose(RequestSampler(sampling, (), len(logits)), logits.numpy().astype(np.float64), position)


def counts(sampling: Sampling, draws: int = 4000) -> np.ndarray:
    sampler = RequestSampler(sampling, (), VOCAB)
    logits = LOGITS.numpy().astype(np.float64)
    drawn = winners((sampler.draw(logits, position) for position in range(draws)), VOCAB)
    return np.bincount(drawn, minlength=VOCAB)


def test_greedy_takes_the_largest() -> None:
    assert draw(Sampling(), 3) == int(LOGITS.argmax())


SPREAD = torch.from_numpy((np.arange(16_000) * 2_654_435_761 % 2**32 / 2**29).astype(np.float32))
"""Logits evenly spread from 0 to 8."""


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        (Sampling(temperature=0.8, seed=2**64 - 1), [15313, 1579, 3647, 6697, 9572]),
        (Sampling(temperature=0.8, top_p=0.95, seed=7), [4435, 3024, 11323, 152, 4731]),
        (Sampling(temperature=0.05, top_p=0.9, seed=7), [12310, 5545, 11323, 4846, 2728]),
        (Sampling(temperature=0.8, top_k=20, seed=3), [7142, 14517, 12920, 8739, 5168]),
        (
            Sampling(temperature=2.0, top_k=20, top_p=0.6, repetition_penalty=1.2, seed=3),
            [6765, 14517, 12920, 8739, 5168],
        ),
    ],
)
def test_a_seed_draws_what_it_always_drew(sampling: Sampling, tokens: list[int]) -> None:
    """A generation replayed after an upgrade, or half of it on another box, must go on as it began."""
    sampler = Sampler(len(SPREAD))
    sampler.open(1, sampling, (1, 2, 3))
    assert [sampler.sample(SPREAD[None], [(1, p)])[0].token for p in (0, 1, 2, 1000, 100_000)] == tokens


def test_arrivals_are_exponentially_distributed() -> None:
    uniform = [every_uniform(seed, position, 8) for seed in (0, 1, 2**64 - 1) for position in range(200)]
    values = arrivals(np.concatenate([*uniform, np.zeros(1)]))
    assert len(set(values)) == 4801 and (values > 0).all()
    assert abs(values.mean() - 1) < 0.05 and abs((values > 1).mean() - math.exp(-1)) < 0.03


def test_a_number_is_a_function_of_seed_position_and_token() -> None:
    """However many others are wanted, in whatever order, and by whichever of the two ways."""
    chance = np.random.default_rng(5)
    seeds = np.array([0, 1, 2**63 + 12_345, 2**64 - 1], dtype=np.uint64).repeat(300)
    positions = chance.integers(0, 2**31, 1200).astype(np.uint64)
    positions[::300] = 0, 1, 2**31, 2**40
    tokens = chance.integers(0, 3000, 1200)
    tokens[:5] = range(5)
    expected = [every_uniform(int(s), int(p), 3000)[t] for s, p, t in zip(seeds, positions, tokens, strict=True)]
    assert some_uniforms(seeds, positions, tokens).tolist() == expected
    assert np.array_equal(every_uniform(7, 3, 5), every_uniform(7, 3, 9)[:5])


@pytest.mark.parametrize("top_p", [0.95, 1.0])
def test_the_last_bits_of_the_logits_do_not_change_what_is_drawn(top_p: float) -> None:
    """As another batch, or a prefix computed again, may make them."""
    chance = np.random.default_rng(3)
    sampler = RequestSampler(Sampling(temperature=0.9, top_p=top_p, seed=7), (), 4096)
    for position in range(3000):
        logits = 2 * chance.normal(size=4096)
        other = logits + 3e-6 * chance.normal(size=4096)
        assert choose(sampler, logits, position) == choose(sampler, other, position)


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
    assert tokens.tolist() == sorted(order[:count].tolist())
    np.testing.assert_allclose(kept / kept.sum(), probabilities[tokens] / ordered[:count].sum())


@pytest.mark.parametrize("top_p", [0.05, 0.8, 0.999])
@pytest.mark.parametrize("scale", [0.0, 0.01, 5.0, 300.0])
def test_the_nucleus_of_a_large_vocabulary_is_that_of_sorting_all_of_it(scale: float, top_p: float) -> None:
    logits = np.random.default_rng(0).normal(size=5000).round(2) * scale  # rounded: many are equal
    probabilities = np.exp(logits - logits.max())
    order = np.argsort(-probabilities, kind="stable")
    count = int(np.searchsorted(probabilities[order].cumsum(), top_p * probabilities.sum())) + 1
    tokens, _ = candidates(logits, Sampling(temperature=1.0, top_p=top_p))
    assert tokens.tolist() == sorted(order[:count].tolist())


def test_top_k_and_top_p_together() -> None:
    tokens, _ = candidates(LOGITS.numpy().astype(np.float64), Sampling(temperature=1.0, top_k=4, top_p=0.5))
    best = LOGITS.double().topk(4)
    count = int((torch.softmax(best.values, -1).cumsum(0) < 0.5).sum()) + 1
    assert tokens.tolist() == sorted(best.indices[:count].tolist())


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
    assert choose(sampler, logits, 0) == second
    sampler.note(second)
    assert choose(sampler, logits, 1) not in (best, second)
    negative = -np.abs(logits) - 0.1
    top = int(negative.argmax())
    assert choose(RequestSampler(Sampling(repetition_penalty=2.0), (top,), VOCAB), negative, 0) != top


def test_a_seeded_request_is_the_same_in_any_batch() -> None:
    """In a vocabulary where some have few candidates, whose numbers are drawn together, and others many."""
    vocab = 4000
    rows = 3 * torch.randn(6, vocab, generator=torch.Generator().manual_seed(4))
    chosen = [
        Sampling(temperature=1.5, seed=9),
        Sampling(),
        Sampling(temperature=0.7, top_k=10, seed=1),
        Sampling(temperature=1.0, top_p=0.8, seed=1, top_logprobs=2),
        Sampling(temperature=1.0, repetition_penalty=1.4, seed=3),
        Sampling(logprobs=True),
    ]

    def run(order: list[int]) -> dict[int, object]:
        sampler = Sampler(vocab)
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
