"""Text as it comes: whole characters, no piece of a stop string, and nothing lost."""

from __future__ import annotations

from edgeshard_agent.scheduler.text import TextStream
from hypothesis import given, settings
from hypothesis import strategies as st


def decode(ids: list[int]) -> str:
    """A byte-level tokenizer that, like many, drops a leading space."""
    return bytes(ids).decode("utf-8", errors="replace").removeprefix(" ")


def stream_of(
    text: str, before: str = "", stop: tuple[str, ...] = ()
) -> tuple[list[str], TextStream]:
    stream = TextStream(decode, list(before.encode()), stop)
    pieces = []
    for byte in text.encode():
        pieces.append(stream.push(byte))
        if stream.stopped:
            break
    return pieces, stream


def test_a_character_of_several_tokens_comes_whole() -> None:
    pieces, _ = stream_of("a€b")
    assert pieces == ["a", "", "", "€", "b"]


def test_a_leading_space_survives_after_a_prompt() -> None:
    pieces, stream = stream_of(" cat", before="the")
    assert "".join(pieces) + stream.finish() == " cat"


def test_a_stop_string_ends_the_text_in_front_of_it() -> None:
    pieces, stream = stream_of("one END two", stop=("END",))
    assert "".join(pieces) == "one " and stream.stopped and stream.finish() == ""


def test_a_near_miss_of_a_stop_string_is_released() -> None:
    pieces, stream = stream_of("one ENough", stop=("END",))
    assert pieces[:6] == ["o", "n", "e", " ", "", ""]
    assert "".join(pieces) + stream.finish() == "one ENough"


def test_an_incomplete_end_is_flushed() -> None:
    stream = TextStream(decode, [])
    assert stream.push(0xE2) == ""
    assert stream.finish() == "\ufffd"


@settings(deadline=None)
@given(
    st.text(alphabet="ab €é\n", max_size=30),
    st.text(alphabet="ab €", max_size=8),
    st.lists(st.text("ab €", min_size=1, max_size=4), max_size=3),
)
def test_streamed_text_is_the_text(text: str, before: str, stops: list[str]) -> None:
    pieces, stream = stream_of(text, "x" + before, tuple(stops))
    whole = "".join(pieces) + stream.finish()
    ends = [text.index(stop) for stop in stops if stop in text]
    first_completed = min((text.index(s) + len(s) for s in stops if s in text), default=None)
    if first_completed is None:
        assert whole == text and not stream.stopped
    else:
        assert stream.stopped and text.startswith(whole) and len(whole) in ends
