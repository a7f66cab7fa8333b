"""edgectl generate: text as it comes, cancelled by Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from edgeshard.cli.main import app
from edgeshard.proto.v1 import common_pb2, inference_pb2

pytestmark = pytest.mark.timing

TEXT = "Once upon a time é!\n"


def test_text_goes_to_stdout_and_nothing_to_stderr(edgectl: Any) -> None:
    result = edgectl("generate", "tales", "--prompt", "Once")
    assert (result.exit_code, result.stdout, result.stderr) == (0, TEXT, "")


def test_options_reach_the_server(edgectl: Any, site: Any) -> None:
    edgectl(
        "generate", "tales", "--prompt", "Once", "--max-tokens", "9",
        "--temperature", "0.5", "--top-k", "4", "--top-p", "0.5", "--repetition-penalty", "1.5",
        "--seed", "7", "--stop", "end", "--stop", "fin", "--ignore-eos", "--priority", "3",
        "--request-id", "mine", "--min-p", "0.25", "--presence-penalty", "-0.5",
        "--frequency-penalty", "2", "--logit-bias", "7=-100", "--logit-bias", "300=1.5",
    )  # fmt: skip
    (request,) = site.sent(inference_pb2.GenerateRequest)
    generation, sampling = request.generation, request.generation.sampling
    assert (request.request_id, generation.prompt, generation.max_new_tokens) == ("mine", "Once", 9)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 4, 0.5)
    assert (sampling.repetition_penalty, sampling.seed) == (1.5, 7)
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (
        0.25,
        -0.5,
        2,
    )
    assert dict(sampling.logit_bias) == {7: -100, 300: 1.5}
    assert (list(generation.stop_strings), generation.ignore_eos) == (["end", "fin"], True)
    assert generation.priority == 3


@pytest.mark.parametrize("wrong", ["7", "7=", "=1", "king=1", "7=nan", "7=101", "-1=1"])
def test_a_bias_that_is_none_is_refused(edgectl: Any, site: Any, wrong: str) -> None:
    result = edgectl("generate", "tales", "--prompt", "Once", "--logit-bias", wrong)
    assert result.exit_code == 2 and "logit_bias" in result.stderr
    assert not site.sent(inference_pb2.GenerateRequest)


@pytest.mark.parametrize(
    ("option", "text", "kind"),
    [
        ("--json", None, "JSON_OBJECT"),
        ("--json-schema", '{"type": "string"}', "JSON_SCHEMA"),
        ("--regex", "yes|no", "REGEX"),
        ("--grammar", 'start: "a"', "GRAMMAR"),
    ],
)
def test_a_guide_reaches_the_server(
    edgectl: Any, site: Any, tmp_path: Path, option: str, text: str | None, kind: str
) -> None:
    value = [] if text is None else [text]
    if text is not None and option != "--regex":
        (tmp_path / "guide").write_text(text)
        value = [str(tmp_path / "guide")]
    result = edgectl("generate", "tales", "--prompt", "Once", option, *value)
    assert result.exit_code == 0
    guide = site.sent(inference_pb2.GenerateRequest)[0].generation.guide
    assert (guide.kind, guide.text) == (getattr(common_pb2, f"GUIDE_KIND_{kind}"), text or "")


def test_two_guides_and_a_file_that_is_not_there_are_refused_by_their_options(
    edgectl: Any, site: Any
) -> None:
    for arguments, named in (
        (("--json", "--regex", "a"), "--regex: an answer has one guide"),
        (("--json-schema", "nowhere.json"), "--json-schema: nowhere.json cannot be read"),
        (("--regex", ""), "guide of kind regex is empty"),
    ):
        result = edgectl("generate", "tales", "--prompt", "Once", *arguments)
        assert result.exit_code == 2 and named in result.stderr
    assert not site.sent(inference_pb2.GenerateRequest)


def test_aliases_of_options_and_no_limit_of_its_own(edgectl: Any, site: Any) -> None:
    edgectl("generate", "tales", "--prompt", "x", "--max-new-tokens", "9", "--stop-strings", "end")
    edgectl("generate", "tales", "--prompt", "x")
    first, second = (request.generation for request in site.sent(inference_pb2.GenerateRequest))
    assert (first.max_new_tokens, first.clip_new_tokens, list(first.stop_strings)) == (
        9,
        True,
        ["end"],
    )
    assert (second.max_new_tokens, second.clip_new_tokens) == (128, True)


def test_a_dash_reads_the_prompt_from_stdin(edgectl: Any, site: Any) -> None:
    edgectl("generate", "tales", "--prompt", "-", stdin="There was\nonce ")
    assert site.sent(inference_pb2.GenerateRequest)[0].generation.prompt == "There was\nonce "


def test_json_holds_the_whole_result(edgectl: Any) -> None:
    value = json.loads(
        edgectl("generate", "tales", "--prompt", "Once", "--logprobs", "-o", "json").stdout
    )
    assert (value["text"], value["token_ids"]) == ("Once upon a time é!", [10, 11, 12, 13, 14])
    assert (value["prompt_token_ids"], value["finish_reason"]) == ([5, 6, 7], "length")
    assert value["placement"][0] == {"node": "a", "layers": "0:4", "bytes": 1 << 20}
    assert value["logprobs"] == [-0.5] * 5
    assert value["ttft_s"] > 0 and value["inter_token_latency_s"] >= 0


def test_logprobs_and_stats_go_to_stderr(edgectl: Any) -> None:
    result = edgectl("generate", "tales", "--prompt", "Once", "--logprobs", "--stats")
    assert result.stdout == TEXT
    assert "LOGPROB" in result.stderr and "tokens/s" in result.stderr


def command(site: Any) -> list[str]:
    return [
        sys.executable,
        "-m",
        "edgeshard.cli.main",
        "--coordinator",
        site.address,
        "generate",
        "tales",
        "-p",
        "Once",
    ]


def test_a_pipe_gets_each_token_as_it_comes_and_ctrl_c_cancels(site: Any) -> None:
    site.hold_after(2)
    # If the tests run in the background, their parent had them ignore SIGINT.
    listening = ["env", "--default-signal=INT", *command(site)]
    with subprocess.Popen(listening, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            assert process.stdout.read(len("Once upon")) == b"Once upon"
            assert not site.cancelled.is_set()
            process.send_signal(signal.SIGINT)
            assert site.cancelled.wait(60)
            assert process.wait(60) == 130
            assert b"Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_sigterm_cancels_too(site: Any) -> None:
    site.hold_after(1)
    with subprocess.Popen(
        command(site), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert site.held.wait(60)
            process.terminate()
            assert site.cancelled.wait(60)
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()


def test_a_reader_that_goes_away_cancels(site: Any) -> None:
    site.hold_after(1)
    site.script.insert(4, site.Hold(for_ever=True))
    with subprocess.Popen(
        command(site), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.read(4) == b"Once"
            process.stdout.close()
            # The second token is the first without a reader.
            site.released.set()
            assert site.cancelled.wait(60)
            assert process.wait(60) == 1
        finally:
            process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a pseudo terminal")
def test_a_terminal_gets_each_token_as_it_comes_but_no_control_characters(site: Any) -> None:
    from dataclasses import replace

    site.script[1] = replace(site.script[1], text="On\x1b[31mce\x07")
    site.hold_after(2)
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command(site), stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL
    ) as process:
        os.close(theirs)
        try:
            assert read_until(ours, b"upon") == b"On[31mce upon"
            site.released.set()
            assert read_until(ours, b"!\r\n") == " a time é!\r\n".encode()
            assert process.wait(60) == 0
        finally:
            process.kill()
            os.close(ours)


def read_until(file: int, end: bytes, seconds: float = 60.0) -> bytes:
    """Bytes of a terminal up to `end`, or all that arrived in time."""
    text, deadline = b"", time.monotonic() + seconds
    while (
        not text.endswith(end)
        and select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]
    ):
        text += os.read(file, 1)
    return text


def test_a_prompt_on_stdin_that_is_not_utf8_is_refused(site: Any) -> None:
    arguments = ["--coordinator", site.address, "generate", "tales", "--prompt", "-"]
    result = CliRunner().invoke(app, arguments, input=b"Once \xff\xfe")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "prompt: stdin is not UTF-8" in result.stderr
    assert site.requests == []


def test_yaml(edgectl: Any) -> None:
    as_json = json.loads(edgectl("generate", "tales", "--prompt", "x", "-o", "json").stdout)
    as_yaml = yaml.safe_load(edgectl("generate", "tales", "--prompt", "x", "-o", "yaml").stdout)
    assert as_yaml["text"] == as_json["text"] != ""
    assert as_yaml["placement"] == as_json["placement"]
