"""The requests of a stage that samples. How a token is chosen is tested with the operators."""

from __future__ import annotations

import pytest
import torch
from edgeshard_agent.model.sampling import Sampler

from edgeshard.domain.errors import InternalError, InvalidArgumentError
from edgeshard.domain.requests.generation import Sampling
from edgeshard.domain.requests.step import SampledToken

VOCAB = 50
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2


def test_a_seeded_request_is_the_same_in_any_batch() -> None:
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

    def run(order: list[int]) -> dict[int, SampledToken]:
        sampler = Sampler(vocab)
        for i in order:
            sampler.open(i, chosen[i], (1, 2, 3))
        tokens = sampler.draw(rows[order], [(i, 40 + i) for i in order]).tokens
        return {token.request: token for token in tokens}

    together = run([0, 1, 2, 3, 4, 5])
    assert [together[i].position for i in range(6)] == [40, 41, 42, 43, 44, 45]
    assert run([5, 3, 1, 0, 4, 2]) == together
    for i in range(6):
        assert run([i])[i] == together[i]


def test_a_token_counts_as_seen_once_it_was_sampled() -> None:
    sampler = Sampler(VOCAB)
    best = LOGITS.topk(4).indices.tolist()
    sampler.open(1, Sampling(repetition_penalty=1000.0), best[:1])
    sampler.open(2, Sampling(), best[:1])
    steps = [sampler.draw(torch.stack([LOGITS, LOGITS]), [(1, p), (2, p)]).tokens for p in range(3)]
    assert [step[0].token for step in steps] == best[1:]
    assert [step[1].token for step in steps] == [best[0]] * 3


def test_logprobs_are_those_of_the_model() -> None:
    sampler = Sampler(VOCAB)
    penalty = Sampling(
        temperature=2.0, top_k=3, seed=5, logprobs=True, top_logprobs=4, repetition_penalty=1.5
    )
    sampler.open(1, penalty, (3, 4))
    sampler.open(2, Sampling(temperature=2.0, top_k=3, seed=5, repetition_penalty=1.5), (3, 4))
    token, bare = sampler.draw(torch.stack([LOGITS, LOGITS]), [(1, 8), (2, 8)]).tokens
    reference = torch.log_softmax(LOGITS.double(), -1)
    assert token.token == bare.token
    assert token.logprob == pytest.approx(reference[token.token].item())
    assert [entry.token for entry in token.top] == reference.topk(4).indices.tolist()
    assert [entry.logprob for entry in token.top] == pytest.approx(
        reference.topk(4).values.tolist()
    )
    assert (bare.logprob, bare.top) == (0.0, ())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    sampler = Sampler(VOCAB)
    sampler.open(1, Sampling(), ())
    logits = LOGITS.clone()
    logits[3] = bad
    with pytest.raises(InternalError):
        sampler.draw(logits[None], [(1, 0)])


def test_parameters_are_checked() -> None:
    sampler = Sampler(VOCAB)
    biased = Sampling(logit_bias=((VOCAB, 1.0),))
    for sampling, seen in (
        (Sampling(temperature=-1), ()),
        (Sampling(), (VOCAB,)),
        (Sampling(), (-1,)),
        (biased, ()),
    ):
        with pytest.raises(InvalidArgumentError):
            sampler.check(sampling, seen)
    with pytest.raises(InvalidArgumentError):
        sampler.check(Sampling(frequency_penalty=1), (), (VOCAB,))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.8, seed=3, top_logprobs=2)]
)
def test_logits_on_a_device_give_the_same_tokens(sampling: Sampling) -> None:
    sampler = Sampler(VOCAB)
    sampler.open(1, sampling, ())
    here, there = (
        sampler.draw(LOGITS[None].to(device), [(1, 7)]).tokens for device in ("cpu", "cuda")
    )
    assert here == there
