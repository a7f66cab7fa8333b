"""Choosing the next token of each of several requests from their logits.

A draw for a position of a request is a function of (seed, position) alone: nothing is remembered
between draws, so a replay on another node, or beside other requests, draws the same.
`sampling_reference.py` is the definition; the native kernel (`sampling.h`) gives the same tokens,
and log-probabilities that differ in the last digits alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from edgeshard.domain.errors import InternalError, InvalidArgumentError
from edgeshard_agent.ops import layouts, native, sampling_reference
from edgeshard_agent.ops.sampling_reference import Flags, LikelyTokens, Offsets, SamplingOptions

_MOST_INT32 = 2**31 - 1


class RequestSampler:
    """One request's sampling parameters, and what its penalties count: tokens seen before, and
    those of its answer."""

    __slots__ = ("_struct", "_vocab_size", "address", "offsets", "sampling", "seen")

    def __init__(
        self,
        sampling: SamplingOptions,
        seen_tokens: Iterable[int],
        vocab_size: int,
        answer: Iterable[int] = (),
    ) -> None:
        self.sampling = sampling
        self._vocab_size = vocab_size
        self.seen: Flags | None = None
        if sampling.repetition_penalty != 1.0:
            self.seen = np.zeros(vocab_size, dtype=np.bool_)
            self.seen[np.fromiter(seen_tokens, dtype=np.int64)] = True
        moves = sampling.counts_answer or sampling.logit_bias
        self.offsets = Offsets(sampling, answer) if moves else None
        penalty, reach = sampling.repetition_penalty, sampling_reference.reach(sampling)
        flags_address = None if self.seen is None else self.seen.ctypes.data
        figures = min(sampling.top_k, _MOST_INT32), sampling.logprobs, sampling.top_logprobs
        temperature = 0.0 if sampling_reference.is_greedy(sampling) else sampling.temperature
        self._struct = layouts.ChoiceStruct(
            temperature,
            sampling.top_p,
            penalty,
            reach,
            sampling.seed,
            flags_address,
            None,
            None,
            *figures,
        )
        self.address = ctypes.addressof(self._struct)
        self._show_offsets()

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token is the largest logit and nothing else is asked."""
        return (
            sampling_reference.is_greedy(self.sampling)
            and not self.changes_logits
            and not self.wants_logprobs
        )

    @property
    def changes_logits(self) -> bool:
        """Whether it knows tokens of its vocabulary, whose logits it changes."""
        return self.seen is not None or self.offsets is not None

    def fits(self, vocab_size: int) -> bool:
        return not self.changes_logits or self._vocab_size == vocab_size

    @property
    def wants_logprobs(self) -> bool:
        return self.sampling.logprobs or self.sampling.top_logprobs > 0

    def note(self, token: int) -> None:
        """Count `token` as seen from now on, and as the answer's next one."""
        if self.seen is not None:
            self.seen[token] = True
        if self.offsets is not None:
            self.offsets.note(token)
            self._show_offsets()

    def _show_offsets(self) -> None:
        """Show the offsets to the kernel: they may have moved."""
        if self.offsets is not None:
            tokens, values = self.offsets.tokens, self.offsets.values
            self._struct.moved, self._struct.offsets = tokens.ctypes.data, values.ctypes.data
            self._struct.moved_count = len(tokens)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token, and the log-probabilities that its request asked for."""

    token: int
    logprob: float = 0.0
    top: LikelyTokens = ()


def sample_rows(
    logits: torch.Tensor, samplers: Sequence[RequestSampler], positions: Sequence[int]
) -> list[Chosen]:
    """A token of each request, for its position, from its row of `logits` [R, vocab] on the CPU.

    A row's token depends on that row alone. Threads share the rows. Raises InternalError when a row
    has no finite largest value, InvalidArgumentError where requests, positions and rows are not as
    many, or a request is of another vocabulary.
    """
    rows, vocab = logits.shape
    if len(samplers) != rows or len(positions) != rows:
        raise InvalidArgumentError(
            f"there are {rows} rows of logits for {len(samplers)} requests and {len(positions)} "
            "positions: they must "
            "be as many",
            field="logits",
        )
    if not all(sampler.fits(vocab) for sampler in samplers):
        raise InvalidArgumentError(
            f"a request's vocabulary is not that of its logits, {vocab} tokens", field="logits"
        )
    if logits.dtype not in native.ELEMENTS:
        logits = logits.float()
    library = native.active()
    if library is None:
        require_finite(logits)
        return [_reference(*row) for row in zip(logits, samplers, positions, strict=True)]
    return _native(
        library, logits if logits.stride(1) == 1 else logits.contiguous(), samplers, positions
    )


def require_finite(logits: torch.Tensor) -> None:
    """Raise InternalError when a row of `logits` [R, vocab] has no finite largest value."""
    if not bool(torch.isfinite(logits.amax(dim=-1)).all()):
        raise _not_finite()


def _native(
    library: ctypes.CDLL,
    logits: torch.Tensor,
    samplers: Sequence[RequestSampler],
    positions: Sequence[int],
) -> list[Chosen]:
    rows, vocab = logits.shape
    most = max((sampler.sampling.top_logprobs for sampler in samplers), default=0)
    tokens = np.empty((rows, most), np.int32)
    logprobs = np.empty((rows, most), np.float64)
    samples = (layouts.SampledStruct * rows)()
    for row in range(rows if most else 0):
        samples[row].top_tokens = tokens[row].ctypes.data
        samples[row].top_logprobs = logprobs[row].ctypes.data
    choices = (ctypes.c_void_p * rows)(*(sampler.address for sampler in samplers))
    at = (ctypes.c_uint64 * rows)(*positions)
    call = layouts.SampledRowsStruct(
        logits.data_ptr(),
        logits.stride(0),
        ctypes.addressof(choices),
        ctypes.addressof(at),
        ctypes.addressof(samples),
        vocab,
        native.ELEMENTS[logits.dtype],
    )
    library.edgeshard_sample(ctypes.addressof(call), rows, torch.get_num_threads())
    result = []
    for row, sampler in enumerate(samplers):
        token = samples[row].token
        if token == native.NOT_FINITE:
            raise _not_finite()
        if token == native.NOT_TAKEN:
            result.append(_reference(logits[row], sampler, positions[row]))
        elif not sampler.wants_logprobs:
            result.append(Chosen(token))
        else:
            count = min(sampler.sampling.top_logprobs, vocab)
            top = zip(tokens[row, :count].tolist(), logprobs[row, :count].tolist(), strict=True)
            result.append(Chosen(token, samples[row].logprob, tuple(top)))
    return result


def _reference(logits: torch.Tensor, sampler: RequestSampler, position: int) -> Chosen:
    """The same in numpy, for one row [vocab] at a time: it stays in the processor's cache."""
    row = logits.double().numpy()
    token = sampling_reference.drawn(row, sampler.sampling, sampler.seen, position, sampler.offsets)
    if not sampler.wants_logprobs:
        return Chosen(token)
    return Chosen(token, *sampling_reference.logprobs(row, sampler.sampling, token))


def _not_finite() -> InternalError:
    return InternalError(
        "the model's logits are not finite; try another dtype", reason="LOGITS_NOT_FINITE"
    )
