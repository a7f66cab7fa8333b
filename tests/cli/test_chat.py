"""edgectl chat: a conversation on a terminal, and one message from a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from edgeshard.cli.commands.requests.chat import Talk
from edgeshard.domain.errors import ResourceExhaustedError
from edgeshard.domain.requests.conversation import ReasoningDelta
from edgeshard.proto.v1 import inference_pb2

pytestmark = pytest.mark.timing

ANSWER = "Once upon a time é!"
ROOT = Path(__file__).parents[2]


def messages(site: Any) -> list[list[tuple[str, str]]]:
    """Role and content of the messages in each prompt."""
    asked = site.sent(inference_pb2.RenderChatRequest)
    return [
        [(m["role"], m["content"]) for m in json.loads(request.conversation.messages)]
        for request in asked
    ]


def test_what_is_piped_in_is_one_message(edgectl: Any, site: Any) -> None:
    result = edgectl("chat", "tales", "--system", "Be brief.", stdin="Two\nlines\n")
    assert (result.exit_code, result.stdout, result.stderr) == (0, ANSWER + "\n", "")
    assert messages(site) == [[("system", "Be brief."), ("user", "Two\nlines\n")]]


def test_only_options_that_are_given_replace_what_the_model_recommends(
    edgectl: Any, site: Any
) -> None:
    edgectl("chat", stdin="Hello")
    edgectl("chat", "--temperature", "0", "--max-tokens", "9", "--stop", "end", stdin="Hello")
    first, second = (request.generation for request in site.sent(inference_pb2.GenerateRequest))
    assert (first.sampling.temperature, first.max_new_tokens) == (0.5, 100)
    assert (second.sampling.temperature, second.max_new_tokens, list(second.stop_strings)) == (
        0.0,
        9,
        ["end"],
    )


def test_an_error_ends_a_run_without_a_terminal(edgectl: Any, site: Any) -> None:
    site.failures["Generate"] = ResourceExhaustedError("there is no room")
    result = edgectl("chat", "tales", stdin="Hello")
    assert (result.exit_code, result.stdout) == (1, "") and "there is no room" in result.stderr


class Thinking:
    """A client whose answer breaks off in the middle of its reasoning."""

    def __init__(self, why: BaseException) -> None:
        self._why = why

    def chat(self, *_: object, **__: object) -> Iterator[Any]:
        yield ReasoningDelta("hm")
        raise self._why


@pytest.mark.parametrize("why", [ResourceExhaustedError("there is no room"), KeyboardInterrupt()])
def test_a_terminal_is_not_left_dim(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], why: BaseException
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with pytest.raises(type(why)):
        Talk(cast("Any", Thinking(why)), "tales", {}).answer("Hello")
    assert capsys.readouterr().out.rstrip("\n") == "\x1b[2mhm\x1b[0m"


class Terminal:
    """edgectl at a terminal of its own."""

    def __init__(self, address: str) -> None:
        self._main, other = pty.openpty()
        self.read = ""
        environment = {
            **os.environ,
            "TERM": "dumb",
            "EDGESHARD__CLIENT__PLAINTEXT": "true",
            "PYTHONPATH": str(ROOT),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "edgeshard.cli.main", "--coordinator", address, "chat", "tales"],
            stdin=other, stdout=other, stderr=other, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(other)

    def until(self, text: str) -> str:
        """The output since the last call, up to this text."""
        try:
            assert self.has(text, time.monotonic() + 60), f"no {text!r} in {self.read!r}"
        except OSError:
            raise AssertionError(f"it ended without {text!r}: {self.read!r}") from None
        before, _, self.read = self.read.partition(text)
        return before

    def type(self, *lines: str) -> None:
        for line in lines:
            os.write(self._main, f"{line}\n".encode())

    def press(self, key: bytes) -> None:
        os.write(self._main, key)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def interrupt_until(self, done: Callable[[float], bool]) -> None:
        """Repeated as often as needed: Python notices a Ctrl-C between prompt and waiting only with
        the next key."""
        for _ in range(6):
            self.interrupt()
            if done(time.monotonic() + 10):
                return
        raise AssertionError(f"it does not hear Ctrl-C: {self.read!r}")

    def has(self, text: str, deadline: float) -> bool:
        while text not in self.read:
            if not select.select([self._main], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
            self.read += os.read(self._main, 4096).decode(errors="replace")
        return True

    def has_ended(self, deadline: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(deadline - time.monotonic())
        return self.process.returncode is not None

    def end(self) -> int:
        return self.process.wait(60)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)


@pytest.fixture
def terminal(site: Any) -> Iterator[Terminal]:
    made = Terminal(site.address)
    made.until(">>> ")
    yield made
    made.close()


def test_a_conversation_remembers_what_was_said(terminal: Terminal, site: Any) -> None:
    terminal.type("Hello")
    assert ANSWER in terminal.until(">>> ")
    terminal.type(
        "/system Be brief.",
        "One \\",
        "two",
        '"""three',
        "four",
        '"""',
        "/clear",
        "Bye",
        "/nonsense",
        "/help",
    )
    assert "/nonsense is not a command" in terminal.until("Ctrl-C stops an answer")
    terminal.type("/quit")
    assert terminal.end() == 0
    talk = [("user", "Hello"), ("assistant", ANSWER)]
    system, second = ("system", "Be brief."), [("user", "One \ntwo"), ("assistant", ANSWER)]
    assert messages(site) == [
        [("user", "Hello")],
        [system, *talk, ("user", "One \ntwo")],
        [system, *talk, *second, ("user", "three\nfour")],
        [system, ("user", "Bye")],
    ]


def test_ctrl_c_stops_the_answer_alone_and_at_the_prompt_leaves(
    terminal: Terminal, site: Any
) -> None:
    site.hold_after(2)
    terminal.type("Hello")
    terminal.until("Once upon")
    terminal.interrupt()
    terminal.until(">>> ")
    assert site.cancelled.wait(60)
    site.script = site.script[:2] + site.script[-1:]
    terminal.type("Go on")
    terminal.until("!")
    terminal.until(">>> ")
    assert messages(site)[1] == [("user", "Hello"), ("assistant", "Once upon"), ("user", "Go on")]
    terminal.interrupt_until(lambda deadline: terminal.has("once more", deadline))
    terminal.until("leaves)")
    terminal.until(">>> ")
    terminal.interrupt_until(terminal.has_ended)
    assert terminal.end() == 0


def test_an_error_does_not_end_a_conversation(terminal: Terminal, site: Any) -> None:
    site.failures["Generate"] = ResourceExhaustedError("there is no room")
    terminal.type("Hello")
    assert "there is no room" in terminal.until(">>> ")
    del site.failures["Generate"]
    terminal.type("Hello again")
    assert ANSWER in terminal.until(">>> ")
    assert messages(site)[1] == [("user", "Hello again")]
    terminal.press(b"\x04")
    assert terminal.end() == 0
