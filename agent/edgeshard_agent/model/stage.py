"""A contiguous range of a model's layers, ready to run steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from edgeshard.domain.errors import (
    EdgeShardError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
)
from edgeshard.domain.nodes.device import StageExperts, StageStreaming
from edgeshard.domain.requests.step import (
    GuessedTokens,
    Span,
    SpanLogprobs,
    StepPlan,
    StepResult,
    Targets,
    guessed_tokens,
)
from edgeshard_agent.guides.guides import Guides
from edgeshard_agent.model.attention.attention import StepAttention
from edgeshard_agent.model.attention.gathered import prepare_causal
from edgeshard_agent.model.attention.kv import KvMemory, KvPool
from edgeshard_agent.model.attention.states import States
from edgeshard_agent.model.modules import Batch
from edgeshard_agent.model.sampling import Sampler, Wanted, score
from edgeshard_agent.model.static_decode import Recorder, StaticDecode, recorder_for
from edgeshard_agent.model.tensors import TORCH_DTYPES
from edgeshard_agent.model.weights.weight_loading import Filled
from edgeshard_agent.model.weights.weight_store import ReadObserver
from edgeshard_agent.model.weights.weights import StageWeights
from edgeshard_agent.ops.native import idle_spin

TellGuesses = Callable[[], GuessedTokens]
"""Called when a step is computed; returns the guesses that the head has sent to the sampling stage
by then."""
StageInputs = npt.NDArray[np.int64] | torch.Tensor | None


@dataclass(frozen=True, slots=True)
class StageOutput:
    """The output of a step: `hidden` [T, width] for the next stage, or the last stage's result,
    without timings.

    `hidden` is None on the last stage and for a step without spans.
    """

    hidden: torch.Tensor | None = None
    result: StepResult = field(default_factory=StepResult)


@dataclass(slots=True)
class _Begun:
    """A step that was committed: what blocks take of it, if it has spans, and the hidden states [T,
    width] after."""

    plan: StepPlan
    inputs: StageInputs
    guess_source: TellGuesses
    batch: Batch | None = None
    hidden: torch.Tensor | None = None


class StageModel:
    """Blocks [layers.first, layers.end) with their KV pool; not safe for use by two threads at
    once.

    Made by `with_kv`. The pool's `bytes_in_use` and `bytes_capacity` are there for status reports.
    """

    def __init__(
        self,
        weights: StageWeights,
        pool: KvPool,
        recorder: Recorder | None = None,
        idle_spin_s: float = 0.0,
        guides: Guides | None = None,
    ) -> None:
        self.weights = weights
        self.shape, self.layers = weights.shape, weights.layers
        self._filled = weights.filled
        self.pool = pool
        modules = self._modules = weights.modules
        self._static = (
            StaticDecode(modules, pool, recorder)
            if recorder is not None and modules.is_static
            else None
        )
        self._sampler = Sampler(self.shape.vocab_size, guides)
        self._device = torch.device(modules.context.device)
        self._stay_awake_s = idle_spin_s if self._device.type == "cpu" else 0.0
        self.dtype = modules.context.dtype
        self._dtype = TORCH_DTYPES[self.dtype]

    @classmethod
    def with_kv(
        cls,
        weights: StageWeights,
        kv: KvMemory,
        recorder: Recorder | None = None,
        idle_spin_s: float = 0.0,
        guides: Guides | None = None,
    ) -> StageModel:
        """Take the memory for keys and values in addition to the weights. Raises
        ResourceExhaustedError when memory is short.

        `recorder` has steps of decodes run as `StaticDecode` does; CUDA has one unless another is
        given. For `idle_spin_s` after a step the processor's cores do not halt. `guides` are the
        guides of the last stage's requests.
        """
        device, shape = weights.modules.context.device, weights.shape
        prepare_causal(device)
        recorder = recorder or recorder_for(device)
        dtype = weights.modules.context.dtype
        states = States(kv.slots, shape.states_in(weights.layers), device, dtype, kv.guess_slots)
        heads = shape.kv_in(weights.layers)
        pool = KvPool(
            weights.layers, kv, heads, device, scratch=recorder is not None, states=states
        )
        return cls(weights, pool, recorder, idle_spin_s, guides)

    @property
    def is_first(self) -> bool:
        return self._modules.context.is_first

    @property
    def is_last(self) -> bool:
        return self._modules.context.is_last

    def take_forced(self, most: int) -> None:
        """Report the forced tokens of guided requests, at most `most`; 0 if the head guesses
        none."""
        self._sampler.most_forced = most

    @property
    def is_damaged(self) -> bool:
        """Whether weights could not be read from the disk, so that the stage must be loaded
        again."""
        return any(store.failure is not None for store in self._filled.stores)

    @property
    def streaming(self) -> StageStreaming | None:
        """The state of streamed layers; None if none pass through its memory."""
        store, residency = self._filled.store, self._filled.residency
        if store is None or residency is None:
            return None
        counts = store.counts
        return StageStreaming(
            residency.resident_bytes, store.streamed_bytes, counts.bytes_read, counts.waited_s
        )

    @property
    def experts(self) -> StageExperts | None:
        """The state of experts on the disk; None if there are none."""
        experts = self._filled.experts
        return None if experts is None else experts.status

    def observe_reads(self, observer: ReadObserver | None) -> None:
        """Tell `observer` of each layer, or expert, that is read from the disk from now on."""
        for store in self._filled.stores:
            store.observer = observer

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters on the device; a tied embedding counts once."""
        return self._modules.parameter_bytes

    def reset(self) -> None:
        """Forget every request: the weights and the KV arena serve another epoch."""
        for request in self.pool.requests:
            self.pool.free(request)
        self._sampler.close_all()

    def release(self) -> None:
        """Free the memory of weights and KV, even if other objects still refer to this stage. It
        can run no step any more.
        """
        self.retire().close()
        del self.weights

    def retire(self) -> StageWeights:
        """Give back the memory of KV, and get the weights for another stage. This one can run no
        step any more."""
        weights = self.weights
        self._sampler.retire()
        del self._modules, self._static
        self._filled = Filled()
        self.pool.release()
        return weights

    @torch.inference_mode()
    def execute(
        self, plan: StepPlan, inputs: StageInputs = None, guess_source: TellGuesses = dict
    ) -> StageOutput:
        """Run one step.

        `inputs` are token ids [T] (int64) on the first stage, and hidden states [T, width] in the
        stage's dtype on the others. They may be None if the step has no spans. A guess counts only
        if it was `guess_source`, or is among the token ids. Everything is validated first: a step
        refused with InvalidArgumentError or FailedPreconditionError has changed nothing.
        """
        return self.execute_sweep([(plan, inputs)], [guess_source])[0]

    @torch.inference_mode()
    def execute_sweep(
        self,
        steps: Sequence[tuple[StepPlan, StageInputs]],
        guess_sources: Sequence[TellGuesses] = (),
    ) -> list[StageOutput]:
        """Run consecutive steps layer by layer, so that streamed weights are read once for all of
        them.

        The results are the same as from `execute`, one by one, each with the guesses that
        `guess_sources` returned for it. Returns the results of as many steps as could run together,
        at least one. A step that frees, swaps out or saves a request of another step begins a new
        sweep, and so does a refused step. Raises as `execute` does, for the first step.
        """
        begun: list[_Begun] = []
        requests: set[int] = set()
        for index, (plan, inputs) in enumerate(steps):
            if requests.intersection(
                (*plan.frees, *plan.swap_outs, *(copy.request for copy in plan.saves))
            ):
                break
            try:
                begun.append(
                    self._begin(plan, inputs, guess_sources[index] if guess_sources else dict)
                )
            except EdgeShardError:
                if not begun:
                    raise
                break
            requests.update(span.request for span in plan.spans)
        self._run(begun)
        outputs = [self._output(step) for step in begun]
        if self._stay_awake_s:
            idle_spin(self._stay_awake_s, torch.get_num_threads())
        return outputs

    def _output(self, step: _Begun) -> StageOutput:
        plan = step.plan
        inputs = step.inputs
        hidden = step.hidden
        if not self.is_last:
            return StageOutput(hidden=hidden)
        if hidden is None and not self._sampler.has_late:
            return StageOutput()
        tokens = inputs if isinstance(inputs, np.ndarray) else None
        guessed = (
            step.guess_source() if tokens is None else guessed_tokens(plan.spans, tokens.tolist())
        )
        rows, row_places, assumed = _sampled_rows(plan.spans, guessed)
        try:
            prompt_logprobs = () if hidden is None else tuple(self._score(plan.spans, hidden))
            if not rows and not self._sampler.has_late:
                # a step that gives nothing to read would seem to take no time
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                return StageOutput(result=StepResult(prompt_logprobs=prompt_logprobs))
            logits = None
            if hidden is not None and rows:
                logits = self._modules.head(hidden if len(rows) == len(hidden) else hidden[rows])
            drawn = self._sampler.draw_behind_guesses(logits, row_places, assumed)
        except InternalError as error:
            raise self._blamed(error, inputs) from None
        return StageOutput(result=replace(drawn, prompt_logprobs=prompt_logprobs))

    def _score(self, spans: tuple[Span, ...], hidden: torch.Tensor) -> Iterator[SpanLogprobs]:
        """Log-probabilities of the spans' targets, from hidden states [T, width]."""
        end = 0
        for span in spans:
            begin, end = end, end + span.token_count
            if (targets := span.targets) is None:
                continue
            first = begin + targets.position - 1 - span.first_position
            rows = hidden[first : first + len(targets.tokens)]
            count = self._sampler.top_logprobs(span.request)
            for scores in score(self._modules.head, rows, targets, count, self.shape.vocab_size):
                yield SpanLogprobs(span.request, scores)

    def _blamed(self, error: InternalError, inputs: StageInputs) -> InternalError:
        """The same, with whose arithmetic broke: hidden states are only looked at once it has shown
        in the logits."""
        if error.reason != "LOGITS_NOT_FINITE":
            return error
        came_so = isinstance(inputs, torch.Tensor) and not bool(torch.isfinite(inputs).all())
        where = (
            f"in the layers before {self.layers.first}" if came_so else f"in layers {self.layers}"
        )
        return InternalError(
            f"{where} numbers became infinite or none at all (NaN); try a dtype of a wider range, "
            "such as bfloat16, or "
            "another checkpoint",
            field="dtype",
            reason=error.reason,
        )

    @torch.inference_mode()
    def logits(self, plan: StepPlan, inputs: StageInputs) -> torch.Tensor:
        """Run a step and return the logits [T, vocab] of every position instead of sampling; on the
        last stage only."""
        if not self.is_last:
            raise FailedPreconditionError(
                f"layers {self.layers} do not hold the LM head", field="layers"
            )
        step = self._begin(plan, inputs, dict)
        self._run([step])
        if step.hidden is None:  # of no spans
            return torch.empty(0, self.shape.vocab_size)
        return self._modules.head(step.hidden)

    def _run(self, steps: Sequence[_Begun]) -> None:
        """The blocks, for all steps that have spans."""
        through = [step for step in steps if step.batch is not None]
        batches = [step.batch for step in through if step.batch is not None]
        if batches:
            for step, hidden in zip(through, self._modules.run_sweep(batches), strict=True):
                step.hidden = hidden.squeeze(0)

    def _begin(self, plan: StepPlan, inputs: StageInputs, guess_source: TellGuesses) -> _Begun:
        """Validate and commit a step, and make its blocks' inputs. Raises as `execute` does,
        changing nothing."""
        tensor = self._check_inputs(plan.token_count, inputs)
        self._check_spans(plan)
        draft = self.pool.check(plan)
        self.pool.commit(draft)
        if self.is_last:
            self._apply_sampling(plan)
        if not plan.spans:
            return _Begun(plan, inputs, guess_source)
        if self._static is not None and self._static.takes(plan.spans):
            return _Begun(plan, inputs, guess_source, hidden=self._static.run(plan.spans, tensor))
        step = StepAttention(self.pool, plan.spans, self._device)
        positions = _positions(plan.spans, self._device)
        tensor = tensor.to(self._device).unsqueeze(0)
        hidden = self._modules.embed(tensor, positions) if self.is_first else tensor
        return _Begun(plan, inputs, guess_source, (hidden, positions, step))

    def _check_inputs(self, token_count: int, inputs: StageInputs) -> torch.Tensor:
        if inputs is None:
            inputs = (
                np.empty(0, np.int64)
                if self.is_first
                else torch.empty(0, self.shape.frame_width, dtype=self._dtype)
            )
        if self.is_first:
            if (
                not isinstance(inputs, np.ndarray)
                or inputs.dtype != np.int64
                or inputs.shape != (token_count,)
            ):
                raise InvalidArgumentError(
                    f"inputs must be {token_count} int64 token ids", field="inputs"
                )
            if token_count and not (inputs.min() >= 0 and inputs.max() < self.shape.vocab_size):
                raise InvalidArgumentError(
                    f"inputs holds a token id outside the vocabulary of {self.shape.vocab_size}",
                    field="inputs",
                    reason="TOKEN_OUT_OF_RANGE",
                )
            return torch.from_numpy(inputs)
        expected = (token_count, self.shape.frame_width)
        if (
            not isinstance(inputs, torch.Tensor)
            or inputs.dtype != self._dtype
            or tuple(inputs.shape) != expected
        ):
            raise InvalidArgumentError(
                f"inputs must be {self._dtype} hidden states of shape {expected}", field="inputs"
            )
        return inputs

    def _check_spans(self, plan: StepPlan) -> None:
        for span in plan.spans:
            if span.end_position > self.shape.max_context:
                raise InvalidArgumentError(
                    f"request {span.request} reaches position {span.end_position}, beyond the "
                    "model's context of "
                    f"{self.shape.max_context} tokens",
                    field="spans.token_count",
                    reason="CONTEXT_EXCEEDED",
                )
            if not self.is_last:
                continue
            if span.guesses and not (span.sample and span.guesses < span.token_count):
                raise InvalidArgumentError(
                    "draft tokens do not follow an accepted token", field="spans.guesses"
                )
            if span.targets is not None:
                self._check_targets(span, span.targets)
            if span.sampling is not None:
                self._sampler.check(span.sampling, span.seen_tokens, span.answer_tokens)
            elif (span.sample or span.targets is not None) and (
                span.request not in self._sampler or span.request in plan.frees
            ):
                raise FailedPreconditionError(
                    f"request {span.request} has no sampling parameters; give them on its first "
                    "span",
                    field="spans.sampling",
                    reason="NO_SAMPLING",
                )

    def _check_targets(self, span: Span, targets: Targets) -> None:
        behind = targets.position + len(targets.tokens)
        if not (
            targets.tokens
            and span.first_position < targets.position
            and behind <= span.end_position + 1
        ):
            raise InvalidArgumentError(
                "targets do not follow the span's positions", field="spans.targets"
            )
        if not 0 <= min(targets.tokens) <= max(targets.tokens) < self.shape.vocab_size:
            raise InvalidArgumentError(
                f"targets holds an id outside the vocabulary of {self.shape.vocab_size}",
                field="spans.targets",
            )

    def _apply_sampling(self, plan: StepPlan) -> None:
        for request in plan.frees:
            self._sampler.close(request)
        for span in plan.spans:
            if span.sampling is not None:
                self._sampler.open(
                    span.request, span.sampling, span.seen_tokens, span.answer_tokens
                )
                if span.guide is not None:
                    self._sampler.open_guide(
                        span.request, span.guide, span.answer_tokens, span.party
                    )


def _positions(spans: tuple[Span, ...], device: torch.device) -> torch.Tensor:
    """[1, T]: each packed token's position in its request."""
    packed = np.concatenate([np.arange(span.first_position, span.end_position) for span in spans])
    return torch.from_numpy(packed).to(device).unsqueeze(0)


def _sampled_rows(
    spans: tuple[Span, ...], guessed: GuessedTokens
) -> tuple[list[int], Sequence[Wanted], Sequence[int | None]]:
    """The packed rows of each span that samples: the row of its last certain token, and the row of
    each known guess after it.

    Each has the (request, position) that it samples for, and its own token if that is a guess.
    """
    rows: list[int] = []
    row_places: list[Wanted] = []
    assumed: list[int | None] = []
    end = 0
    for span in spans:
        end += span.token_count
        if span.sample:
            guesses, first = guessed.get(span.request, ())[: span.guesses], span.certain_position
            row = end - 1 - span.guesses
            rows += range(row, row + len(guesses) + 1)
            row_places += [
                (span.request, position) for position in range(first, first + len(guesses) + 1)
            ]
            assumed += [None, *guesses]
    return rows, row_places, assumed
