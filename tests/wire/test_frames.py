"""Frames: whatever the way does to them, a step comes out once, in order and unchanged, or the
frame is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeshard.domain.models.dtypes import DType
from edgeshard.domain.requests.generation import (
    PROMPT_LOGPROBS_POSITIONS,
    Guide,
    GuideKind,
    PromptLogprobs,
    Sampling,
    StageTiming,
    TokenLogprob,
)
from edgeshard.domain.requests.step import (
    ForwardStep,
    KvGrant,
    ReturnedStep,
    SampledToken,
    Span,
    SpanLogprobs,
    StateCopy,
    StepPlan,
    StepResult,
    Tensor,
    WireStep,
)
from edgeshard.proto.v1 import common_pb2
from edgeshard.proto.v1 import stage_pb2 as pb
from edgeshard.wire import frames as wire
from edgeshard.wire.frames import (
    MAX_SPANS,
    FrameContract,
    FrameDamagedError,
    FrameReader,
    FrameRefusedError,
    encode_step,
)

WIDTH = 8
CONTRACT = FrameContract("tales", 3, DType.BFLOAT16, WIDTH, max_tokens=32, window=4)
RETURN = FrameContract("tales", 3, DType.BFLOAT16, 0, max_tokens=32, window=4)


def forward(number: int, tokens: int = 3, seed: int = 0) -> ForwardStep:
    data = random.Random(seed + number).randbytes(tokens * WIDTH * 2)
    guide = Guide(GuideKind.REGEX, "a+")
    span = Span(
        7,
        5,
        tokens,
        True,
        Sampling(0.7, 5, 0.9, 1.1, 3, True, 2),
        (4, 9),
        guide,
        (6,),
        (1 << 64) - 3,
    )
    plan = StepPlan(
        (1, 2),
        (KvGrant(7, 0, (3,), 16), KvGrant(7, 1, (5,)), KvGrant(8, 0, (2,), 0, True)),
        (span,) if tokens else (),
        swap_outs=(9,),
        saves=(StateCopy(9, 32, 0), StateCopy(7, 5, (1 << 32) - 1)),
        restores=(StateCopy(8, 16, 3),),
    )
    hidden = Tensor(DType.BFLOAT16, (tokens, WIDTH), data) if tokens else None
    return ForwardStep(number, plan, hidden, (StageTiming(0, 0.5, 0.25),))


TIMINGS = (StageTiming(1, 0.0, 0.5),)


def returned(number: int) -> ReturnedStep:
    top = (TokenLogprob(5, -0.5),)
    return ReturnedStep(
        number,
        StepResult(
            (SampledToken(7, 8, 5, -0.5, top),), (StageTiming(1, 0.0, 0.5),), pending=(9, 11)
        ),
    )


PART = 64
LEAST_PART = 16


def sent(step: WireStep, part_bytes: int = PART) -> list[pb.Frame]:
    return encode_step("tales", 3, step, part_bytes)


def nearly(step: WireStep) -> object:
    """A step with its float32 fields as the wire rounds them."""
    if isinstance(step, ReturnedStep):
        return repr(step)
    sampling = [
        (
            s.sampling and (s.sampling.top_k, s.sampling.seed),
            s.seen_tokens,
            s.guide,
            s.answer_tokens,
            s.party,
        )
        for s in step.plan.spans
    ]
    copies = step.plan.saves, step.plan.restores
    return (
        step.number,
        step.hidden,
        step.plan.frees,
        step.plan.swap_outs,
        step.plan.grants,
        copies,
        sampling,
    )


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts per step without megabytes of test data."""
    monkeypatch.setattr(wire, "PART_BYTES", PART)
    monkeypatch.setattr(wire, "LEAST_PART_BYTES", LEAST_PART)


def test_steps_survive_the_way() -> None:
    reader = FrameReader(CONTRACT)
    for step in (forward(0), forward(1, 0), forward(2, 32)):
        out = [s for frame in sent(step) for s in reader.accept(frame).steps]
        assert [nearly(s) for s in out] == [nearly(step)]
    back = FrameReader(RETURN)
    assert back.accept(sent(returned(0))[0]).steps == (returned(0),)


def test_a_step_that_came_out_before_is_named_and_not_run_again() -> None:
    reader = FrameReader(CONTRACT)
    frames = sent(forward(0, 16))
    assert len(frames) == 4
    for frame in frames:
        reader.accept(frame)
    again = [reader.accept(frame) for frame in frames]
    assert [a.repeated for a in again] == [None, None, None, 0] and not any(a.steps for a in again)


def test_a_new_stream_resends_a_half_received_step() -> None:
    reader = FrameReader(CONTRACT)
    frames = sent(forward(0, 16))
    for frame in frames[:2]:
        reader.accept(frame)
    reader.restart_stream()
    out = [s for frame in sent(forward(0, 16)) for s in reader.accept(frame).steps]
    assert [nearly(s) for s in out] == [nearly(forward(0, 16))]


def reseal(
    frame: pb.Frame, change: Callable[[pb.FrameHeader], None], payload: bytes | None = None
) -> pb.Frame:
    """A frame changed by someone who can compute a checksum."""
    header = pb.FrameHeader.FromString(frame.header)
    change(header)
    return wire._seal(header, frame.payload if payload is None else payload)


def _targets(header: pb.FrameHeader, position: int, count: int) -> None:
    header.forward.spans[0].targets.CopyFrom(pb.SpanTargets(position=position, tokens=range(count)))


def _guesses(header: pb.FrameHeader, count: int, sample: bool = True, confirmed: int = 0) -> None:
    span = header.forward.spans[0]
    certain = span.first_position + span.token_count - count
    span.guesses.CopyFrom(pb.SpanGuesses(assumed_count=count, confirmed=certain + confirmed))
    span.sample = sample


FORGERIES: dict[str, tuple[str, Callable[[pb.FrameHeader], None]]] = {
    "pipeline": ("epoch", lambda h: setattr(h, "pipeline", "other")),
    "lower epoch": ("epoch", lambda h: setattr(h, "epoch", 2)),
    "higher epoch": ("epoch", lambda h: setattr(h, "epoch", 4)),
    "beyond the window": ("step", lambda h: setattr(h, "step", 4)),
    "no parts": ("part", lambda h: setattr(h, "parts", 0)),
    "too many parts": ("part", lambda h: setattr(h, "parts", 1 << 30)),
    "part out of range": ("part", lambda h: setattr(h, "part", 1)),
    "unknown dtype": ("dtype", lambda h: setattr(h.tensor, "dtype", 77)),
    "other dtype": ("dtype", lambda h: setattr(h.tensor, "dtype", common_pb2.DATA_TYPE_FLOAT32)),
    "rank": ("shape", lambda h: h.tensor.shape.extend([1, 1, 1])),
    "width": ("shape", lambda h: h.tensor.shape.__setitem__(1, 9)),
    "huge": ("shape", lambda h: h.tensor.shape.__setitem__(0, 1 << 60)),
    "token count": ("token_count", lambda h: setattr(h.forward.spans[0], "token_count", 1 << 30)),
    "targets before the span": ("targets", lambda h: _targets(h, 5, 1)),
    "targets beyond the span": ("targets", lambda h: _targets(h, 6, 4)),
    "no targets": ("targets", lambda h: _targets(h, 6, 0)),
    "a guide of another version": (
        "guide",
        lambda h: setattr(h.forward.spans[0].sampling.guide, "kind", 77),
    ),
    "no guesses": ("guesses", lambda h: _guesses(h, 0)),
    "a confirmed position": (
        "guesses",
        lambda h: setattr(h.forward.spans[0].guesses, "confirmed", 5),
    ),
    "only guesses": ("guesses", lambda h: _guesses(h, h.forward.spans[0].token_count)),
    "guesses that are not sampled behind": ("guesses", lambda h: _guesses(h, 1, sample=False)),
    "guesses that are confirmed": ("guesses", lambda h: _guesses(h, 1, confirmed=1)),
    "too many saves": ("spans", lambda h: h.forward.saves.extend([pb.StateCopy()] * 4097)),
    "empty span": ("token_count", lambda h: setattr(h.forward.spans[0], "token_count", 0)),
    "no spans": ("tensor", lambda h: h.forward.ClearField("spans")),
    "no body": ("body", lambda h: h.ClearField("forward")),
    "wrong kind": ("body", lambda h: h.result.SetInParent()),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_an_intact_frame_that_breaks_the_contract_is_refused_and_changes_nothing(name: str) -> None:
    field, change = FORGERIES[name]
    reader = FrameReader(CONTRACT)
    with pytest.raises(FrameRefusedError) as refusal:
        reader.accept(reseal(sent(forward(0))[0], change))
    assert refusal.value.field == field
    assert [nearly(s) for s in reader.accept(sent(forward(0))[0]).steps] == [nearly(forward(0))]


def test_a_payload_of_the_wrong_length_is_refused() -> None:
    reader = FrameReader(CONTRACT)
    for payload in (b"", b"x" * 10, b"x" * 65):
        with pytest.raises(FrameRefusedError):
            reader.accept(reseal(sent(forward(0))[0], lambda h: None, payload))


@pytest.mark.parametrize("part_bytes", range(LEAST_PART, PART + 1, 7))
@pytest.mark.parametrize("order", [1, -1], ids=["in order", "last part first"])
def test_a_sender_chooses_the_size_of_the_parts(part_bytes: int, order: int) -> None:
    reader = FrameReader(CONTRACT)
    for number, tokens in enumerate((32, 1, 4, 17)):
        step = forward(number, tokens)
        frames = sent(step, part_bytes)
        assert len(frames) == -(-tokens * WIDTH * 2 // part_bytes)
        accepted = [reader.accept(frame) for frame in frames[::order]]
        assert [nearly(s) for a in accepted for s in a.steps] == [nearly(step)]
        assert {a.parts for a in accepted} == {len(frames)}


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_parts_that_differ_in_size_are_refused(first: int) -> None:
    """Whichever of them comes first: 256 bytes as 64, 64, 64, 64."""
    frames = sent(forward(0, 16))
    for other in {0, 1, 2, 3} - {first}:
        reader = FrameReader(CONTRACT)
        reader.accept(frames[first])
        shorter = reseal(frames[other], lambda h: None, frames[other].payload[:48])
        if 3 not in (first, other):
            with pytest.raises(FrameRefusedError) as refusal:
                reader.accept(shorter)
            assert refusal.value.field in ("payload", "parts")
            continue
        # The last may be shorter by itself; then the whole has too few bytes.
        with pytest.raises(FrameRefusedError):
            for frame in (shorter, *frames):
                reader.accept(frame)


def test_small_parts_and_many_large_ones_are_refused() -> None:
    """Neither frames of a byte each, nor more bytes than the contract's largest step, are ever
    kept."""
    step = forward(0, 32)
    with pytest.raises(FrameRefusedError):
        FrameReader(CONTRACT).accept(sent(step, LEAST_PART - 1)[0])
    assert CONTRACT.max_bytes == 512 and CONTRACT.max_parts == 32
    for part in (1, 30):
        claim = pb.FrameHeader(pipeline="tales", epoch=3, step=0, part=part, parts=32)
        with pytest.raises(FrameRefusedError):
            FrameReader(CONTRACT).accept(wire._seal(claim, bytes(PART)))
        assert not FrameReader(CONTRACT).accept(wire._seal(claim, bytes(LEAST_PART))).steps


def test_a_tensor_on_the_return_hop_is_refused() -> None:
    with pytest.raises(FrameRefusedError):
        FrameReader(RETURN).accept(sent(forward(0))[0])


STEPS = [forward(n, tokens) for n, tokens in enumerate([1, 16, 0, 3, 32, 5, 0, 9])]


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.data())
def test_no_mishap_on_the_way_changes_a_step(rng: random.Random, data: st.DataObject) -> None:
    """Duplicates, reordering in the window, cuts, flipped bits, replays: the output is the steps,
    once, in order.

    A damaged or refused frame ends the stream; the sender then resends from `next_step`, as its
    outbox does.
    """
    reader = FrameReader(CONTRACT)
    out = list[WireStep]()
    streams = 0
    while reader.next_step < len(STEPS):
        streams += 1
        reader.restart_stream()
        window = STEPS[reader.next_step : reader.next_step + CONTRACT.window]
        stream = [frame for step in window for frame in sent(step, rng.randint(LEAST_PART, PART))]
        if streams < 8:
            stream += rng.choices(stream, k=data.draw(st.integers(0, 4)))
            stream += [f for step in STEPS[: reader.next_step] for f in sent(step)][
                : data.draw(st.integers(0, 3))
            ]
            if data.draw(st.booleans()):
                rng.shuffle(stream)
            stream = [_mishap(frame, rng) for frame in stream]
        for frame in stream:
            try:
                out += reader.accept(frame).steps
            except (FrameDamagedError, FrameRefusedError):
                break
    assert [nearly(step) for step in out] == [nearly(step) for step in STEPS]


def _mishap(frame: pb.Frame, rng: random.Random) -> pb.Frame:
    if rng.random() < 0.85:
        return frame
    damaged = pb.Frame.FromString(frame.SerializeToString())
    part = rng.choice(["header", "payload", "crc32c"])
    if part == "crc32c":
        damaged.crc32c ^= 1 << rng.randrange(32)
        return damaged
    raw = bytearray(getattr(damaged, part))
    if raw and rng.random() < 0.5:
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    else:
        raw = raw[: rng.randrange(len(raw) + 1)]
    setattr(damaged, part, bytes(raw))
    return damaged


def test_without_the_checksum_a_flipped_bit_would_go_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The property above can fail: with the checksum switched off, it does."""
    monkeypatch.setattr(wire, "_checksum", lambda header, payload: 0)
    reader = FrameReader(CONTRACT)
    frame = sent(forward(0))[0]
    frame.payload = bytes([frame.payload[0] ^ 1]) + frame.payload[1:]
    (step,) = reader.accept(frame).steps
    assert nearly(step) != nearly(forward(0))


def test_columns_of_prompt_logprobs_of_different_lengths_are_refused() -> None:
    reader = FrameReader(RETURN)
    scores = PromptLogprobs(1, (-0.5, -1.5), ((TokenLogprob(1, -0.25),), (TokenLogprob(2, -0.75),)))
    step = ReturnedStep(0, StepResult(prompt_logprobs=(SpanLogprobs(7, scores),)))
    (frame,) = sent(step)
    for name, column in (("top_tokens", [1]), ("top_logprobs", [])):

        def change(header: pb.FrameHeader, name: str = name, column: list[int] = column) -> None:
            columns = header.result.prompt_logprobs[0].prompt_logprobs
            columns.ClearField(name)
            getattr(columns, name).extend(column)

        with pytest.raises(FrameRefusedError) as refused:
            reader.accept(reseal(frame, change))
        assert refused.value.field == "prompt_logprobs"
    assert reader.accept(frame).steps == (step,)


def test_guesses_of_a_step_travel_apart_from_it_and_do_not_count_when_they_are_damaged() -> None:
    guessed = {7: (1, 2, 3), 1 << 40: (0,)}
    frame = wire.encode_guesses("tales", 3, 12, guessed)
    assert wire.decode_guesses(frame, "tales", 3) == (12, guessed)
    assert wire.decode_guesses(frame, "tales", 4) is wire.decode_guesses(frame, "other", 3) is None
    assert wire.decode_guesses(sent(forward(0))[0], "tales", 3) is None
    for place in range(8 * len(frame.header)):
        raw = bytearray(frame.header)
        raw[place // 8] ^= 1 << place % 8
        assert (
            wire.decode_guesses(pb.Frame(header=bytes(raw), crc32c=frame.crc32c), "tales", 3)
            is None
        )
    nothing = wire._seal(pb.FrameHeader(), b"")
    no_header = b"\xff" * 9
    assert (
        wire.decode_guesses(
            pb.Frame(header=no_header, crc32c=wire._checksum(no_header, b"")), "tales", 3
        )
        is None
    )
    assert wire.decode_guesses(nothing, "", 0) is None


TOKEN = SampledToken(7, 8, 5)
SCORES = SpanLogprobs(
    7, PromptLogprobs(1, (0.0,) * PROMPT_LOGPROBS_POSITIONS, ((),) * PROMPT_LOGPROBS_POSITIONS)
)
LONG_RESULTS = {
    "tokens": StepResult((TOKEN,) * (MAX_SPANS + 1)),
    "pending": StepResult(pending=tuple(range(MAX_SPANS + 1))),
    "log-probabilities": StepResult(prompt_logprobs=(SCORES,) * 17),
    "tokens that follow": StepResult(forced={number: tuple(range(100)) for number in range(41)}),
    "timings": StepResult(timings=TIMINGS * 3),
}


@pytest.mark.parametrize("what", LONG_RESULTS)
def test_a_result_with_more_than_any_step_has_is_refused(what: str) -> None:
    reader = FrameReader(replace(RETURN, max_timings=2))
    with pytest.raises(FrameRefusedError) as refused:
        reader.accept(sent(ReturnedStep(0, LONG_RESULTS[what]))[0])
    assert refused.value.field == ("timings" if what == "timings" else "result")
    assert reader.accept(sent(ReturnedStep(0, StepResult(timings=TIMINGS * 2)))[0]).steps


def test_a_step_has_passed_no_more_stages_than_there_are_before() -> None:
    step = replace(forward(0), timings=TIMINGS * 2)
    with pytest.raises(FrameRefusedError) as refused:
        FrameReader(replace(CONTRACT, max_timings=1)).accept(sent(step)[0])
    assert refused.value.field == "timings"
    assert FrameReader(replace(CONTRACT, max_timings=2)).accept(sent(step)[0]) is not None
