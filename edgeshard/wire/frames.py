"""Steps on the wire: cutting one into frames, and a reader that trusts nothing it is given.

A frame is a serialised header, raw little-endian tensor bytes and a crc32c over both; (pipeline,
epoch, step) is its key. `FrameReader` turns frames back into steps, each once and in order, even if
frames were duplicated, reordered, cut or flipped in transit. The error's class decides what happens
to the stream: `FrameDamagedError`, `FrameRefusedError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass, field
from typing import Any

import google_crc32c
from google.protobuf.message import DecodeError

from edgeshard.domain.errors import DataLossError, InvalidArgumentError
from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.requests.generation import Guide, StageTiming
from edgeshard.domain.requests.step import (
    ForwardStep,
    GuessedTokens,
    GuideFailure,
    KvGrant,
    ReturnedStep,
    SampledToken,
    Span,
    SpanLogprobs,
    StateCopy,
    StepPlan,
    StepResult,
    Targets,
    Tensor,
    WireStep,
)
from edgeshard.proto.v1 import common_pb2
from edgeshard.proto.v1 import stage_pb2 as pb
from edgeshard.wire.generation import (
    MAX_TIMINGS,
    guide_from_wire,
    guide_to_wire,
    prompt_logprobs_from_wire,
    prompt_logprobs_to_wire,
    sampling_from_wire,
    sampling_to_wire,
    timings_from_wire,
    top_from_wire,
    top_to_wire,
)
from edgeshard.wire.site import dtype_from_wire, dtype_to_wire

Frame = pb.Frame

PART_BYTES = 1 << 20
"""The most of a tensor in one frame, and what a sender takes that knows nothing of the link."""
LEAST_PART_BYTES = 16 << 10
"""No part except the last is smaller. Otherwise a step could arrive in frames that cost more than
their content."""
MAX_RANK = 4
MAX_SPANS = 4096
MAX_HEADER_BYTES = 4 << 20
MAX_SEEN_TOKENS = 1 << 20


class FrameDamagedError(DataLossError):
    """Bytes changed or went missing on the way: drop the stream, reconnect, and the sender
    resends."""

    default_reason = "FRAME_DAMAGED"


class FrameRefusedError(InvalidArgumentError):
    """An intact frame that breaks the contract: the sender is wrong, and resending would not
    help."""

    default_reason = "FRAME_REFUSED"


@dataclass(frozen=True, slots=True)
class FrameContract:
    """The limits of a receiver.

    `width` is the hidden states' last dimension, 0 on the return hop, which carries no tensor.
    `max_tokens` bounds the tokens of a step. `window` is the number of steps that may be ahead of
    the next one, and `max_timings` the number of stages that a step has passed.
    """

    pipeline: str
    epoch: int
    dtype: DType
    width: int
    max_tokens: int
    window: int
    max_timings: int = MAX_TIMINGS

    @property
    def max_bytes(self) -> int:
        """Bytes of a step's tensor."""
        return self.max_tokens * self.width * self.dtype.itemsize

    @property
    def max_parts(self) -> int:
        return max(1, -(-self.max_bytes // LEAST_PART_BYTES))


def encode_step(
    pipeline: str, epoch: int, step: WireStep, part_bytes: int = PART_BYTES
) -> list[pb.Frame]:
    """The frames of a step, each with at most `part_bytes` of payload, from `LEAST_PART_BYTES` to
    `PART_BYTES`."""
    data, described = b"", dict[str, Any]()
    if isinstance(step, ReturnedStep):
        described["result"] = _result_fields(step.result)
    else:
        described["forward"] = _plan_fields(step.plan, step.timings)
        if step.hidden is not None:
            data = step.hidden.data
            described["tensor"] = {
                "dtype": dtype_to_wire(step.hidden.dtype),
                "shape": step.hidden.shape,
            }
    parts = max(1, -(-len(data) // part_bytes))
    header = pb.FrameHeader(
        pipeline=pipeline, epoch=epoch, step=step.number, parts=parts, **described
    )
    if parts == 1:
        return [_seal(header, data)]
    frames = [_seal(header, data[:part_bytes])]
    for part in range(1, parts):
        rest = pb.FrameHeader(
            pipeline=pipeline, epoch=epoch, step=step.number, part=part, parts=parts
        )
        frames.append(_seal(rest, data[part * part_bytes : (part + 1) * part_bytes]))
    return frames


def encode_guesses(pipeline: str, epoch: int, step: int, guessed: GuessedTokens) -> pb.Frame:
    """The frame that sends a step's draft tokens to the stage that samples."""
    guesses = pb.StepGuesses(requests=_guessed_to_wire(guessed))
    return _seal(
        pb.FrameHeader(pipeline=pipeline, epoch=epoch, step=step, parts=1, guesses=guesses), b""
    )


def decode_guesses(frame: pb.Frame, pipeline: str, epoch: int) -> tuple[int, GuessedTokens] | None:
    """A step's number and its draft tokens; None if the frame is damaged or of another kind: then
    no draft token counts."""
    raw, payload = frame.header, frame.payload
    if len(raw) > MAX_HEADER_BYTES or _checksum(raw, payload) != frame.crc32c:
        return None
    try:
        header = pb.FrameHeader.FromString(raw)
    except DecodeError:
        return None
    if (header.pipeline, header.epoch, header.WhichOneof("body")) != (pipeline, epoch, "guesses"):
        return None
    return header.step, _guessed_from_wire(header.guesses.requests)


def _guessed_to_wire(guessed: GuessedTokens) -> list[pb.GuessedTokens]:
    return [pb.GuessedTokens(request=request, tokens=tokens) for request, tokens in guessed.items()]


def _guessed_from_wire(requests: Iterable[pb.GuessedTokens]) -> GuessedTokens:
    return {guessed.request: tuple(guessed.tokens) for guessed in requests}


def frame_bytes(frame: pb.Frame) -> int:
    """Bytes of a frame, its header included."""
    return frame.ByteSize()


def _seal(header: pb.FrameHeader, payload: bytes) -> pb.Frame:
    raw = header.SerializeToString()
    return pb.Frame(header=raw, crc32c=_checksum(raw, payload), payload=payload)


def _checksum(header: bytes, payload: bytes) -> int:
    return int(google_crc32c.extend(google_crc32c.value(header), payload))


@dataclass(frozen=True, slots=True)
class Accepted:
    """The outcome of a frame: `steps` in order, or `repeated`, a step that had been returned before
    and arrived again.

    `payload_bytes` are the bytes of tensor in the frame, `parts` the number of parts of its step.
    """

    steps: tuple[WireStep, ...] = ()
    repeated: int | None = None
    payload_bytes: int = 0
    parts: int = 1


@dataclass(slots=True)
class _Partial:
    """A step of which some parts are here. `part_bytes` is the size of each but the last, 0 until
    one is here."""

    parts: int
    part_bytes: int = 0
    first: pb.FrameHeader | None = None
    payloads: dict[int, bytes] = field(default_factory=dict)


class FrameReader:
    """Frames in, steps out: each step once, in order of its number.

    Pure state, no I/O. `next_step` is the number of the next step to be returned, which is also
    sent to a reconnecting sender. A frame that is refused changes nothing.
    """

    def __init__(self, contract: FrameContract, next_step: int = 0) -> None:
        self.contract = contract
        self.next_step = next_step
        self._partial: dict[int, _Partial] = {}

    def restart_stream(self) -> None:
        """Forget half-received steps: a new stream resends them from `next_step`."""
        self._partial.clear()

    def accept(self, frame: pb.Frame) -> Accepted:
        """Take a frame; return the steps that are now complete and in order.

        Raises FrameDamagedError for bytes that do not match their checksum. Raises
        FrameRefusedError for an intact frame of another pipeline or epoch, beyond the window, or
        with a tensor that is not the contract's.
        """
        # Once: each reading of a message's bytes copies them.
        payload = frame.payload
        header, size = self._open(frame, payload), len(payload)
        if header.step < self.next_step:
            return Accepted(
                (), header.step if header.part == header.parts - 1 else None, size, header.parts
            )
        if header.parts == 1 and header.step == self.next_step and header.step not in self._partial:
            self._check_first(header, size)
            step = _decode(header, payload)
            self.next_step += 1
            # Steps that arrived before their turn may follow it.
            return Accepted((step, *(self._take_complete() if self._partial else ())), None, size)
        partial = self._partial.get(header.step) or _Partial(header.parts)
        if partial.parts != header.parts:
            raise FrameRefusedError(
                f"step {header.step} arrived with two different part counts", field="parts"
            )
        if header.part in partial.payloads:
            return Accepted(payload_bytes=size, parts=header.parts)
        self._check_part(header, size, partial.part_bytes)
        if header.part == 0:
            self._check_first(header, size)
            partial.first = header
        else:
            self._check_continuation(header)
        if header.part < header.parts - 1:
            partial.part_bytes = size
        self._partial[header.step] = partial
        partial.payloads[header.part] = payload
        return Accepted(self._take_complete(), None, size, header.parts)

    def _open(self, frame: pb.Frame, payload: bytes) -> pb.FrameHeader:
        """The parsed header of an intact frame that belongs here."""
        raw = frame.header
        if len(raw) > MAX_HEADER_BYTES or len(payload) > PART_BYTES:
            raise FrameRefusedError("frame is larger than the protocol allows", field="payload")
        if _checksum(raw, payload) != frame.crc32c:
            raise FrameDamagedError("frame does not match its crc32c", field="crc32c")
        try:
            header = pb.FrameHeader.FromString(raw)
        except DecodeError:
            raise FrameRefusedError("frame header cannot be parsed", field="header") from None
        contract = self.contract
        if header.pipeline != contract.pipeline or header.epoch != contract.epoch:
            raise FrameRefusedError(
                f"frame is of {header.pipeline!r} epoch {header.epoch}, "
                f"this link of {contract.pipeline!r} epoch {contract.epoch}",
                field="epoch",
            )
        if header.step >= self.next_step + contract.window:
            raise FrameRefusedError(
                f"step {header.step} is beyond the window at {self.next_step}", field="step"
            )
        if not 0 < header.parts <= contract.max_parts or header.part >= header.parts:
            raise FrameRefusedError(
                f"part {header.part} of {header.parts} is impossible here", field="part"
            )
        return header

    def _check_first(self, header: pb.FrameHeader, payload_bytes: int) -> None:
        """Validate a step's description before a byte of its tensor is kept."""
        returning = self.contract.width == 0
        if header.WhichOneof("body") != ("result" if returning else "forward"):
            raise FrameRefusedError(
                "frame carries the wrong kind of step for this hop", field="body"
            )
        if returning:
            _check_result(header.result, max(MAX_SPANS, self.contract.max_tokens))
        timings = len(header.result.timings if returning else header.forward.timings)
        if timings > self.contract.max_timings:
            raise FrameRefusedError(
                f"step has {timings} timings, and passed {self.contract.max_timings} stages",
                field="timings",
            )
        tokens = 0 if returning else _check_plan(header.forward, self.contract.max_tokens)
        expected = self._tensor_bytes(header, tokens)
        if header.parts == 1 and payload_bytes != expected:
            raise FrameRefusedError(
                f"payload has {payload_bytes} bytes of a tensor of {expected}", field="payload"
            )
        if header.parts > 1 and header.parts != -(-expected // payload_bytes):
            raise FrameRefusedError(
                f"{expected} bytes do not travel in {header.parts} parts of {payload_bytes}",
                field="parts",
            )

    def _tensor_bytes(self, header: pb.FrameHeader, tokens: int) -> int:
        """Bytes of the tensor that goes with `tokens` positions; refuses any other."""
        if tokens == 0:
            if header.HasField("tensor"):
                raise FrameRefusedError("frame has a tensor but no spans", field="tensor")
            return 0
        contract, shape = self.contract, tuple(header.tensor.shape)
        if len(shape) > MAX_RANK or shape != (tokens, contract.width):
            raise FrameRefusedError(
                f"tensor shape {shape[: MAX_RANK + 1]} is not ({tokens}, {contract.width})",
                field="shape",
            )
        try:
            dtype = dtype_from_wire(header.tensor.dtype)
        except InvalidArgumentError as error:
            raise FrameRefusedError(error.message, field="dtype") from None
        if dtype is not contract.dtype:
            raise FrameRefusedError(
                f"tensor is {dtype}, this pipeline is {contract.dtype}", field="dtype"
            )
        return tokens * contract.width * dtype.itemsize

    def _check_part(self, header: pb.FrameHeader, payload_bytes: int, part_bytes: int) -> None:
        """Parts have one size, the last at most that; together they hold no more than the
        contract's largest step.

        `part_bytes` is the size of the parts that are here, 0 if none is.
        """
        if header.parts == 1:
            return  # the description has its number of bytes
        if header.part == header.parts - 1:
            fits = 0 < payload_bytes <= (part_bytes or PART_BYTES)
        else:
            others_bytes = (header.parts - 1) * payload_bytes
            is_like_others = payload_bytes == part_bytes or part_bytes == 0
            fits = (
                is_like_others
                and payload_bytes >= LEAST_PART_BYTES
                and others_bytes < self.contract.max_bytes
            )
        if not fits:
            raise FrameRefusedError(
                f"part {header.part} of {header.parts} has {payload_bytes} bytes, others "
                f"{part_bytes}",
                field="payload",
            )

    def _check_continuation(self, header: pb.FrameHeader) -> None:
        if header.WhichOneof("body") or header.HasField("tensor"):
            raise FrameRefusedError("a later part repeats the step's description", field="part")

    def _take_complete(self) -> tuple[WireStep, ...]:
        steps: list[WireStep] = []
        while (partial := self._partial.get(self.next_step)) is not None:
            if partial.first is None or len(partial.payloads) < partial.parts:
                break
            data = b"".join(partial.payloads[part] for part in range(partial.parts))
            try:
                step = _decode(partial.first, data)
            except FrameRefusedError:
                del self._partial[self.next_step]
                raise
            del self._partial[self.next_step]
            self.next_step += 1
            steps.append(step)
        return tuple(steps)


def _check_result(result: pb.StepResult, most: int) -> None:
    """Refuse a result with a list that is longer than any step's; what its own step is to bring the
    head knows."""
    scored = sum(len(item.prompt_logprobs.logprobs) for item in result.prompt_logprobs)
    drafted = sum(len(item.tokens) for item in result.forced)
    lists: tuple[Sized, ...] = (
        result.tokens,
        result.prompt_logprobs,
        result.guide_failures,
        result.pending,
        result.forced,
    )
    longest = max(scored, drafted, *map(len, lists))
    if longest > most:
        raise FrameRefusedError(
            f"result has {longest} items, more than the {most} of any step", field="result"
        )


def _check_plan(step: pb.Step, max_tokens: int) -> int:
    """Tokens of a plan; refuses one whose lists or spans are impossible."""
    parts = (step.spans, step.frees, step.grants, step.swap_outs, step.saves, step.restores)
    if max(map(len, parts)) > MAX_SPANS:
        raise FrameRefusedError(
            f"step has more than {MAX_SPANS} spans, grants, frees, swap-outs, saves or restores",
            field="spans",
        )
    tokens = 0
    for span in step.spans:
        count = span.token_count
        if count == 0:
            raise FrameRefusedError("span holds no token", field="token_count")
        if span.HasField("guesses"):
            _check_guesses(span)
        if span.HasField("sampling") and len(span.sampling.seen_tokens) > MAX_SEEN_TOKENS:
            raise FrameRefusedError("span names too many seen tokens", field="seen_tokens")
        if span.HasField("targets"):
            position, targets = span.targets.position, len(span.targets.tokens)
            behind = position - span.first_position
            if not (targets > 0 and 0 < behind <= behind + targets - 1 <= count):
                raise FrameRefusedError(
                    "span's targets do not follow its positions", field="targets"
                )
        tokens += count
    if tokens > max_tokens:
        raise FrameRefusedError(
            f"step has {tokens} tokens, this stage takes {max_tokens}", field="token_count"
        )
    return tokens


def _check_guesses(span: pb.Span) -> None:
    guesses, count = span.guesses, span.guesses.assumed_count
    certain = span.first_position + span.token_count - count
    if not (0 < count < span.token_count and span.sample):
        raise FrameRefusedError(
            "span's draft tokens do not follow an accepted token", field="guesses"
        )
    if guesses.confirmed != certain:
        raise FrameRefusedError(
            f"span confirms {guesses.confirmed} positions of {certain}", field="guesses"
        )


def _decode(header: pb.FrameHeader, data: bytes) -> WireStep:
    if header.WhichOneof("body") == "result":
        return ReturnedStep(header.step, _result_from_wire(header.result))
    hidden = None
    if header.HasField("tensor"):
        hidden = Tensor(dtype_from_wire(header.tensor.dtype), tuple(header.tensor.shape), data)
        if len(data) != hidden.shape[0] * hidden.shape[1] * hidden.dtype.itemsize:
            raise FrameRefusedError(
                f"step {header.step} has {len(data)} bytes of tensor", field="payload"
            )
    return ForwardStep(
        header.step,
        _plan_from_wire(header.forward),
        hidden,
        timings_from_wire(header.forward.timings),
    )


def _plan_fields(plan: StepPlan, timings: Iterable[StageTiming]) -> dict[str, Any]:
    """The fields of a plan's message, of which most steps have few. Messages within are given by
    their fields, too: one that is made apart is copied into the header."""
    fields: dict[str, Any] = {"timings": list(map(_timing_fields, timings))}
    if plan.spans:
        fields["spans"] = list(map(_span_fields, plan.spans))
    if plan.frees:
        fields["frees"] = plan.frees
    if plan.grants:
        fields["grants"] = list(map(_grant_fields, plan.grants))
    if plan.following:
        fields["following"] = plan.following
    if plan.swap_outs:
        fields["swap_outs"] = plan.swap_outs
    if plan.saves:
        fields["saves"] = list(map(_copy_to_wire, plan.saves))
    if plan.restores:
        fields["restores"] = list(map(_copy_to_wire, plan.restores))
    return fields


def _timing_fields(timing: StageTiming) -> dict[str, Any]:
    return {"stage": timing.stage, "wait_s": timing.wait_s, "compute_s": timing.compute_s}


def _grant_fields(grant: KvGrant) -> dict[str, Any]:
    return {
        "request": grant.request,
        "first_index": grant.first_index,
        "blocks": grant.blocks,
        "filled": grant.filled,
        "swapped": grant.swapped,
        "slot": grant.slot,
    }


def _copy_to_wire(copy: StateCopy) -> pb.StateCopy:
    return pb.StateCopy(request=copy.request, position=copy.position, slot=copy.slot)


def _span_fields(span: Span) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request": span.request,
        "first_position": span.first_position,
        "token_count": span.token_count,
        "sample": span.sample,
    }
    if span.sampling is not None:
        first: dict[str, Any] = {
            "sampling": sampling_to_wire(span.sampling),
            "seen_tokens": span.seen_tokens,
        }
        if span.guide is not None:
            first |= {"guide": guide_to_wire(span.guide), "party": span.party}
        fields["sampling"] = first | {"guided_tokens": span.answer_tokens}
    if span.targets is not None:
        fields["targets"] = {"position": span.targets.position, "tokens": span.targets.tokens}
    if span.guesses:
        fields["guesses"] = {"assumed_count": span.guesses, "confirmed": span.certain_position}
    return fields


def _plan_from_wire(step: pb.Step) -> StepPlan:
    return StepPlan(
        frees=tuple(step.frees),
        grants=tuple(map(_grant_from_wire, step.grants)),
        spans=tuple(_span_from_wire(span) for span in step.spans),
        following=step.following,
        swap_outs=tuple(step.swap_outs),
        saves=tuple(map(_copy_from_wire, step.saves)),
        restores=tuple(map(_copy_from_wire, step.restores)),
    )


def _copy_from_wire(copy: pb.StateCopy) -> StateCopy:
    return StateCopy(copy.request, copy.position, copy.slot)


def _grant_from_wire(grant: pb.KvGrant) -> KvGrant:
    slot = grant.slot if grant.HasField("slot") else None
    return KvGrant(
        grant.request, grant.first_index, tuple(grant.blocks), grant.filled, grant.swapped, slot
    )


def _span_from_wire(span: pb.Span) -> Span:
    targets = (
        Targets(span.targets.position, tuple(span.targets.tokens))
        if span.HasField("targets")
        else None
    )
    guesses = span.guesses.assumed_count if span.HasField("guesses") else 0
    if not span.HasField("sampling"):
        return Span(
            span.request,
            span.first_position,
            span.token_count,
            span.sample,
            targets=targets,
            guesses=guesses,
        )
    first = span.sampling
    return Span(
        request=span.request,
        first_position=span.first_position,
        token_count=span.token_count,
        sample=span.sample,
        sampling=sampling_from_wire(first.sampling),
        seen_tokens=tuple(first.seen_tokens),
        guide=_guide_from_wire(first.guide) if first.HasField("guide") else None,
        answer_tokens=tuple(first.guided_tokens),
        party=first.party,
        targets=targets,
        guesses=guesses,
    )


def _guide_from_wire(message: common_pb2.Guide) -> Guide:
    try:
        return guide_from_wire(message)
    except InvalidArgumentError as error:
        raise FrameRefusedError(error.message, field="guide") from None


def _result_fields(result: StepResult) -> dict[str, Any]:
    fields: dict[str, Any] = {"timings": list(map(_timing_fields, result.timings))}
    if result.tokens:
        fields["tokens"] = list(map(_sampled_fields, result.tokens))
    if result.prompt_logprobs:
        fields["prompt_logprobs"] = [
            {
                "request": item.request,
                "prompt_logprobs": prompt_logprobs_to_wire(item.prompt_logprobs),
            }
            for item in result.prompt_logprobs
        ]
    if result.guide_failures:
        fields["guide_failures"] = [
            {"request": f.request, "message": f.message} for f in result.guide_failures
        ]
    if result.pending:
        fields["pending"] = result.pending
    if result.forced:
        fields["forced"] = _guessed_to_wire(result.forced)
    return fields


def _sampled_fields(token: SampledToken) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request": token.request,
        "position": token.position,
        "token": token.token,
        "logprob": token.logprob,
    }
    if token.top:
        fields["top"] = top_to_wire(token.top)
    return fields


def _result_from_wire(message: pb.StepResult) -> StepResult:
    return StepResult(
        tokens=tuple(
            SampledToken(
                t.request, t.position, t.token, t.logprob, top_from_wire(t.top) if t.top else ()
            )
            for t in message.tokens
        ),
        timings=timings_from_wire(message.timings),
        prompt_logprobs=tuple(_span_logprobs_from_wire(item) for item in message.prompt_logprobs),
        guide_failures=tuple(GuideFailure(f.request, f.message) for f in message.guide_failures),
        pending=tuple(message.pending),
        forced=_guessed_from_wire(message.forced),
    )


def _span_logprobs_from_wire(message: pb.SpanLogprobs) -> SpanLogprobs:
    try:
        return SpanLogprobs(message.request, prompt_logprobs_from_wire(message.prompt_logprobs))
    except InvalidArgumentError as error:
        raise FrameRefusedError(error.message, field="prompt_logprobs") from None
