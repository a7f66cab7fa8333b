"""Choosing tokens: the right distribution, and the same token by every kernel, in any batch, on any
thread."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from edgeshard_agent.ops import native, sampling_reference
from edgeshard_agent.ops.sampling import Chosen, RequestSampler, sample_rows

from edgeshard.domain.errors import InternalError, InvalidArgumentError
from edgeshard.domain.requests.generation import Sampling
from tests.support.forms import one_in

VOCAB = 50
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2
SPREAD = torch.from_numpy((np.arange(16_000) * 2_654_435_761 % 2**32 / 2**29).astype(np.float32))
"""Logits evenly spread from 0 to 8."""


def chosen(
    sampling: Sampling, positions: range | list[int], logits: torch.Tensor = LOGITS
) -> list[int]:
    sampler = RequestSampler(sampling, (1, 2, 3), logits.shape[-1])
    rows = logits.expand(len(positions), -1)
    return [row.token for row in sample_rows(rows, [sampler] * len(positions), list(positions))]


def counts(sampling: Sampling, count: int = 4000) -> np.ndarray:
    return np.bincount(chosen(sampling, range(count)), minlength=VOCAB)


@pytest.fixture
def threads() -> Iterator[None]:
    """Leaves torch's number of threads as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# What a row of logits may look like.


def made_rows(kind: str, rows: int, vocab: int, seed: int) -> torch.Tensor:
    chance = np.random.default_rng(seed)
    normal = chance.normal(size=(rows, vocab))
    values = {
        "flat": 2 * normal,
        "peaked": -2.2 * np.log(1 + chance.permuted(np.tile(np.arange(vocab), (rows, 1)), axis=1))
        + 0.5 * normal,
        "ties": normal.round(1),
        "equal": np.full((rows, vocab), 3.5),
        "masked": np.where(chance.random((rows, vocab)) < 0.9, -np.inf, normal),
        "wide": 300 * normal,
        "rising": np.tile(np.arange(vocab) * 0.01 - 500, (rows, 1)),
    }[kind]
    values[:, vocab // 2] = values[:, vocab // 2].clip(min=-500)  # one of the masked is finite
    return torch.from_numpy(values.astype(np.float32))


KINDS = ("flat", "peaked", "ties", "equal", "masked", "wide", "rising")


def made_sampling(chance: np.random.Generator, vocab: int) -> Sampling:
    sampling = Sampling(
        temperature=float(chance.choice([0, 1e-6, 0.1, 0.5, 0.8, 1.0, 1.7, 100])),
        top_k=int(chance.choice([0, 0, 1, 5, 50, max(vocab - 1, 0), 2**32 - 1])),
        top_p=float(chance.choice([1, 1, 0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999])),
        min_p=float(chance.choice([0, 0, 0, 5e-324, 0.02, 0.1, 0.6, 1])),
        repetition_penalty=float(chance.choice([1, 1, 0.7, 1.3, 1e3])),
        presence_penalty=float(chance.choice([0, 0, 0, -2, 0.3, 2])),
        frequency_penalty=float(chance.choice([0, 0, 0, -0.7, 0.1, 2])),
        logit_bias=tuple(
            (int(token), float(chance.choice([-100, -0.3, 0.0, 1.7, 100])))
            for token in np.unique(chance.integers(0, vocab, chance.choice([0, 0, 1, 7])))
        ),
        seed=(0, 1, 2**63 + 12_345, 2**64 - 1)[chance.integers(4)],
        logprobs=bool(chance.integers(2)),
        top_logprobs=int(chance.choice([0, 0, 1, 20])),
    )
    sampling.validate()
    return sampling


def assert_as_the_reference(
    logits: torch.Tensor, samplers: list[RequestSampler], positions: list[int]
) -> None:
    found = sample_rows(logits, samplers, positions)
    for row, sampler, position, mine in zip(logits, samplers, positions, found, strict=True):
        wide = row.double().numpy()
        token = sampling_reference.drawn(
            wide, sampler.sampling, sampler.seen, position, sampler.offsets
        )
        assert mine.token == token, (sampler.sampling, position)
        if not sampler.wants_logprobs:
            assert mine == Chosen(token)
            continue
        logprob, top = sampling_reference.logprobs(wide, sampler.sampling, token)
        assert mine.logprob == pytest.approx(logprob, rel=1e-12, abs=1e-12)
        assert [best for best, _ in mine.top] == [best for best, _ in top]
        assert [value for _, value in mine.top] == pytest.approx(
            [value for _, value in top], rel=1e-12, abs=1e-12
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", one_in(3, [1, 2, 17, 255, 256, 1000, 257, 5003]))
def test_every_kernel_chooses_what_the_reference_does(
    vocab: int, dtype: torch.dtype, kernels: str
) -> None:
    chance = np.random.default_rng(vocab)
    for number, kind in enumerate(KINDS):
        logits = made_rows(kind, 24, vocab, 100 * vocab + number).to(dtype)
        samplers = [
            RequestSampler(
                made_sampling(chance, vocab),
                chance.integers(0, vocab, 5).tolist(),
                vocab,
                chance.integers(0, min(vocab, 20), chance.integers(0, 40)).tolist(),
            )
            for _ in range(len(logits))
        ]
        positions = [
            int(position) for position in chance.choice([0, 1, 77, 2**31, 2**40], len(logits))
        ]
        assert_as_the_reference(logits, samplers, positions)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 + 12_345, 2**64 - 1])
def test_a_number_is_a_function_of_seed_position_and_token(seed: int, kernels: str) -> None:
    """Of equal logits that token is drawn whose number is the least."""
    positions = [0, 1, 2, 3, 2**31, 2**40, 2**63, 2**64 - 1]
    expected = [
        int(sampling_reference.uniforms(seed, position, 3001).argmin()) for position in positions
    ]
    assert chosen(Sampling(temperature=1.0, seed=seed), positions, torch.zeros(3001)) == expected
    assert np.array_equal(
        sampling_reference.uniforms(seed, 3, 5), sampling_reference.uniforms(seed, 3, 9)[:5]
    )


def test_arrivals_are_exponentially_distributed() -> None:
    uniform = [
        sampling_reference.uniforms(seed, position, 8)
        for seed in (0, 1, 2**64 - 1)
        for position in range(200)
    ]
    values = sampling_reference.arrivals(np.concatenate([*uniform, np.zeros(1)]))
    assert len(set(values)) == 4801 and (values > 0).all()
    assert abs(values.mean() - 1) < 0.05 and abs((values > 1).mean() - math.exp(-1)) < 0.03


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
        (
            Sampling(
                temperature=1.1, min_p=0.5, frequency_penalty=0.7, logit_bias=((8739, 2.5),), seed=3
            ),
            [8739, 8739, 8739, 9260, 453],
        ),
    ],
)
def test_a_seed_draws_what_it_always_drew(
    sampling: Sampling, tokens: list[int], kernels: str
) -> None:
    """A generation replayed after an upgrade, or half of it on another node, must go on as it
    began."""
    sampler = RequestSampler(sampling, (1, 2, 3), len(SPREAD))
    for position, token in zip((0, 1, 2, 1000, 100_000), tokens, strict=True):
        assert sample_rows(SPREAD[None], [sampler], [position])[0].token == token
        sampler.note(token)


@pytest.mark.parametrize("top_p", [0.95, 1.0])
def test_the_last_bits_of_the_logits_do_not_change_what_is_drawn(
    top_p: float, kernels: str
) -> None:
    """As another batch, or a prefix computed again, may make them."""
    chance = np.random.default_rng(3)
    sampler = RequestSampler(Sampling(temperature=0.9, top_p=top_p, seed=7), (), 4096)
    for first in range(0, 2000, 200):
        logits = 2 * chance.normal(size=(200, 4096))
        other = logits + 3e-6 * chance.normal(size=(200, 4096))
        places = [sampler] * 200, list(range(first, first + 200))
        rows = [
            sample_rows(torch.from_numpy(values).float(), *places) for values in (logits, other)
        ]
        assert rows[0] == rows[1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_sampling_follows_the_softmax(temperature: float, kernels: str) -> None:
    count = 4000
    expected = torch.softmax(LOGITS.double() / temperature, -1).numpy() * count
    found = counts(Sampling(temperature=temperature, seed=11), count)
    # Cells expected to hold fewer than 5 are pooled, as Pearson's test wants.
    rare = expected < 5
    observed = np.append(found[~rare], found[rare].sum())
    wanted = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_greedy_takes_the_largest(kernels: str) -> None:
    assert chosen(Sampling(), [3]) == [int(LOGITS.argmax())]
    assert chosen(Sampling(), [3], torch.tensor([0.0, 2.0, -0.0, 2.0])) == [1], (
        "of equal ones the first"
    )


def test_top_k_keeps_the_k_likeliest(kernels: str) -> None:
    best = set(LOGITS.topk(5).indices.tolist())
    tokens, _ = sampling_reference.candidates(
        LOGITS.double().numpy(), Sampling(temperature=3.0, top_k=5)
    )
    assert set(tokens.tolist()) == best
    assert set(np.flatnonzero(counts(Sampling(temperature=3.0, top_k=5, seed=2), 500))) == best


def test_top_k_keeps_all_that_are_equal_at_its_edge(kernels: str) -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 0.0, 1.0] * 200)
    drawn = set(chosen(Sampling(temperature=50.0, top_k=201), range(4000), logits))
    assert 3 not in {token % 5 for token in drawn}
    assert len(drawn) > 700, "of 800"


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kernels: str) -> None:
    probabilities = torch.softmax(LOGITS.double(), -1)
    ordered, order = probabilities.sort(descending=True)
    count = int((ordered.cumsum(0) < top_p).sum()) + 1
    tokens, kept = sampling_reference.candidates(
        LOGITS.double().numpy(), Sampling(temperature=1.0, top_p=top_p)
    )
    assert tokens.tolist() == sorted(order[:count].tolist())
    np.testing.assert_allclose(kept / kept.sum(), probabilities[tokens] / ordered[:count].sum())
    drawn = chosen(Sampling(temperature=1.0, top_p=top_p, seed=5), range(2000))
    assert set(drawn) <= set(tokens.tolist())


@pytest.mark.parametrize("top_p", [0.05, 0.8, 0.999])
@pytest.mark.parametrize("scale", [0.0, 0.01, 5.0, 300.0])
def test_the_nucleus_of_a_large_vocabulary_is_that_of_sorting_all_of_it(
    scale: float, top_p: float
) -> None:
    logits = np.random.default_rng(0).normal(size=5000).round(2) * scale  # rounded: many are equal
    probabilities = np.exp(logits - logits.max())
    order = np.argsort(-probabilities, kind="stable")
    count = int(np.searchsorted(probabilities[order].cumsum(), top_p * probabilities.sum())) + 1
    tokens, _ = sampling_reference.candidates(logits, Sampling(temperature=1.0, top_p=top_p))
    assert tokens.tolist() == sorted(order[:count].tolist())


@pytest.mark.parametrize("gap", [7.0, 9.0])
def test_a_nucleus_reaches_as_far_down_as_it_must(gap: float, kernels: str) -> None:
    """Many tokens, each far less likely than the likeliest by a factor of e^gap, together as likely
    as it."""
    logits = torch.full((8000,), -gap)
    logits[5000] = 0.0
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=1)
    sampler = RequestSampler(sampling, (), len(logits))
    assert_as_the_reference(logits.expand(100, -1), [sampler] * 100, list(range(100)))
    drawn = chosen(sampling, range(100), logits)
    assert 5000 in drawn and len(set(drawn)) > 30


def test_of_equal_tokens_at_a_nucleus_edge_those_of_lower_id_are_kept(kernels: str) -> None:
    drawn = chosen(Sampling(temperature=1.0, top_p=0.5), range(3000), torch.zeros(600))
    assert max(drawn) < 300 and len(set(drawn)) == 300


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
def test_min_p_keeps_what_is_not_less_likely_than_the_likeliest_by_that_factor(
    min_p: float, temperature: float, kernels: str
) -> None:
    probabilities = torch.softmax(LOGITS.double() / temperature, -1)
    kept = set(
        torch.nonzero(probabilities >= min_p * probabilities.max() * (1 - 1e-12)).flatten().tolist()
    )
    sampling = Sampling(temperature=temperature, min_p=min_p, seed=2)
    tokens, _ = sampling_reference.candidates(LOGITS.double().numpy(), sampling)
    assert set(tokens.tolist()) == kept
    assert set(chosen(sampling, range(4000))) == kept


def test_top_k_and_top_p_together(kernels: str) -> None:
    sampling = Sampling(temperature=1.0, top_k=4, top_p=0.5)
    best = LOGITS.double().topk(4)
    count = int((torch.softmax(best.values, -1).cumsum(0) < 0.5).sum()) + 1
    assert sorted(set(chosen(sampling, range(400)))) == sorted(best.indices[:count].tolist())


def test_a_tiny_top_p_or_top_k_of_one_is_greedy(kernels: str) -> None:
    for sampling in (
        Sampling(temperature=5.0, top_p=1e-9),
        Sampling(temperature=5.0, top_k=1),
        Sampling(temperature=1e-6),
        Sampling(temperature=5e-324, top_p=0.5),
    ):
        assert set(chosen(sampling, range(30))) == {int(LOGITS.argmax())}


def test_repetition_penalty_pushes_seen_tokens_down(kernels: str) -> None:
    best, second = LOGITS.topk(2).indices.tolist()
    sampler = RequestSampler(Sampling(repetition_penalty=1000.0), (best,), VOCAB)
    assert sample_rows(LOGITS[None], [sampler], [0])[0].token == second
    sampler.note(second)
    assert sample_rows(LOGITS[None], [sampler], [1])[0].token not in (best, second)
    negative = -LOGITS.abs() - 0.1
    top = int(negative.argmax())
    sampler = RequestSampler(Sampling(repetition_penalty=2.0), (top,), VOCAB)
    assert sample_rows(negative[None], [sampler], [0])[0].token != top


def test_penalties_on_the_answer_count_its_tokens_once_and_as_often_as_they_stand_in_it(
    kernels: str,
) -> None:
    """Of logits 3, 2, 1: a token is taken until it has cost so much that another one is larger."""
    logits = torch.tensor([[3.0, 2.0, 1.0, -9.0]])

    def answer(sampling: Sampling, count: int) -> list[int]:
        sampler, tokens = RequestSampler(sampling, (0, 1, 2), 4), list[int]()
        for position in range(count):
            tokens.append(sample_rows(logits, [sampler], [position])[0].token)
            sampler.note(tokens[-1])
            again = RequestSampler(sampling, (0, 1, 2), 4, tokens)
            assert sample_rows(logits, [again], [position + 1]) == sample_rows(
                logits, [sampler], [position + 1]
            )
        return tokens

    assert answer(Sampling(), 3) == [0, 0, 0], "what the prompt has is not the answer's"
    assert answer(Sampling(presence_penalty=1.5), 5) == [0, 1, 0, 0, 0]
    assert answer(Sampling(frequency_penalty=0.75), 6) == [0, 0, 1, 0, 1, 2]
    assert answer(Sampling(presence_penalty=-1.5, logit_bias=((1, 1.25),)), 3) == [1, 1, 1]


def test_a_bias_of_100_takes_its_token_and_one_of_minus_100_bans_it(kernels: str) -> None:
    order = LOGITS.argsort(descending=True).tolist()
    drawn = counts(
        Sampling(temperature=2.0, logit_bias=tuple((token, -100.0) for token in sorted(order[:5]))),
        1000,
    )
    assert not drawn[order[:5]].any() and drawn[order[5:10]].any()
    assert (
        chosen(Sampling(temperature=2.0, logit_bias=((order[-1], 100.0),)), [1, 2, 3])
        == [order[-1]] * 3
    )
    masked = LOGITS.clone()
    masked[order[0]] = -math.inf
    assert chosen(Sampling(logit_bias=((order[0], 100.0),)), [1], masked) == [order[1]], (
        "a guide's ban stays"
    )


def test_log_probabilities_are_the_models_whatever_is_added(kernels: str) -> None:
    sampling = Sampling(logprobs=True, top_logprobs=3)
    moved = replace(sampling, logit_bias=((7, 100.0),), min_p=0.5, frequency_penalty=1.0)
    (plain, other) = (
        sample_rows(LOGITS[None], [RequestSampler(one, (), VOCAB)], [0])[0]
        for one in (sampling, moved)
    )
    assert other.token == 7 and other.top == plain.top
    assert other.logprob == pytest.approx(float(torch.log_softmax(LOGITS.double(), -1)[7]))


def test_a_penalty_beyond_the_range_of_floats_is_left_to_the_reference(kernels: str) -> None:
    logits = LOGITS.double().numpy() / np.where(LOGITS.numpy() > 0, 1e-300, 1e300)
    sampler = RequestSampler(Sampling(repetition_penalty=1e-300), range(VOCAB), VOCAB)
    assert sample_rows(LOGITS[None], [sampler], [0])[0].token == int(logits.argmax())


def test_top_logprobs_at_ties_and_beyond_the_vocabulary(kernels: str) -> None:
    samplers = [RequestSampler(Sampling(top_logprobs=count), (), 4) for count in (3, 20)]
    first, second = sample_rows(torch.zeros(2, 4), samplers, [0, 0])
    assert [token for token, _ in first.top] == [0, 1, 2]
    assert [token for token, _ in second.top] == [0, 1, 2, 3]
    assert [logprob for _, logprob in second.top] == pytest.approx([-math.log(4)] * 4)


def test_a_row_is_the_same_in_any_batch_and_on_any_number_of_threads(
    kernels: str, threads: None
) -> None:
    vocab = 4000
    rows = made_rows("flat", 6, vocab, 4)
    samplings = [
        Sampling(temperature=1.5, seed=9),
        Sampling(),
        Sampling(temperature=0.7, top_k=10, seed=1),
        Sampling(temperature=1.0, top_p=0.8, seed=1, top_logprobs=2),
        Sampling(temperature=1.0, repetition_penalty=1.4, seed=3, logprobs=True),
        Sampling(logprobs=True, presence_penalty=1.0, logit_bias=((5, 100.0),)),
    ]
    samplers = [RequestSampler(sampling, (1, 2, 3), vocab, (5, 5)) for sampling in samplings]
    torch.set_num_threads(1)
    alone = [sample_rows(rows[i : i + 1], samplers[i : i + 1], [40 + i])[0] for i in range(6)]
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 4, 2], [2, 2, 2]):
            together = sample_rows(
                rows[order], [samplers[i] for i in order], [40 + i for i in order]
            )
            assert together == [alone[i] for i in order]


def test_rows_may_be_a_view_of_wider_ones(kernels: str) -> None:
    wide = made_rows("flat", 4, 2000, 8)
    sampler = RequestSampler(Sampling(temperature=1.0, top_p=0.9), (), 700)
    places = [sampler] * 4, [0, 1, 2, 3]
    assert sample_rows(wide[:, 100:800], *places) == sample_rows(wide[:, 100:800].clone(), *places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 299, 599])
def test_logits_that_are_not_finite_are_an_error(
    place: int, bad: float, dtype: torch.dtype, kernels: str
) -> None:
    for sampling in (Sampling(), Sampling(temperature=1.0, repetition_penalty=2.0)):
        logits = torch.zeros(2, 600, dtype=dtype)
        logits[1, place] = bad
        samplers = [RequestSampler(replace(sampling, seed=seed), (), 600) for seed in range(2)]
        with pytest.raises(InternalError) as caught:
            sample_rows(logits, samplers, [1, 1])
        assert caught.value.reason == "LOGITS_NOT_FINITE"
    with pytest.raises(InternalError):
        sample_rows(torch.full((2, 600), -math.inf, dtype=dtype), samplers, [1, 1])


def test_rows_requests_and_vocabularies_must_fit(kernels: str) -> None:
    sampler = RequestSampler(Sampling(repetition_penalty=2.0), (), VOCAB)
    with pytest.raises(InvalidArgumentError, match="2 rows"):
        sample_rows(LOGITS.expand(2, -1), [sampler], [1])
    with pytest.raises(InvalidArgumentError, match="51 tokens"):
        sample_rows(torch.zeros(1, VOCAB + 1), [sampler], [1])
    with pytest.raises(InvalidArgumentError, match="51 tokens"):
        biased = RequestSampler(Sampling(logit_bias=((0, 1.0),)), (), VOCAB)
        sample_rows(torch.zeros(1, VOCAB + 1), [biased], [1])


def test_kernels_are_here_to_be_compared() -> None:
    """Where there is a compiler; without one only the fallback is tested above."""
    if native.library() is not None:
        assert native.kernel_names()[-1] == "portable"
