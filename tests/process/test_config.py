"""Settings: the order of sources, and that errors are named."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from edgeshard_agent.settings import AgentSettings
from edgeshard_coordinator.settings import CoordinatorSettings

from edgeshard.debugging.private import PRIVATE_KEYS
from edgeshard.domain.errors import DeniedError, InvalidArgumentError
from edgeshard.process.config import load_settings, parse_bytes, parse_duration, write_ready_file
from edgeshard.process.logs import configure_logging, debug_logged, tell_ready


def load(*arguments: str) -> CoordinatorSettings:
    return load_settings(CoordinatorSettings, "edgeshard-coordinator", arguments)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("17", 17),
        ("2GiB", 2 << 30),
        ("500 MB", 500_000_000),
        ("1.5kib", 1536),
        ("3g", 3_000_000_000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 parsec", "1e9", "2GiB!"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as info:
        parse_bytes(text, "memory")
    assert info.value.field == "memory"


def test_command_line_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "site.toml"
    file.write_text(
        '[coordinator]\nlisten = "file:1"\nlog_level = "error"\nstate_dir = "/file"\n[agent]\nname '
        '= "a"\n'
    )
    monkeypatch.setenv("EDGESHARD__COORDINATOR__LOG_LEVEL", "debug")
    monkeypatch.setenv("EDGESHARD__COORDINATOR__STATE_DIR", "/environment")
    settings = load("--config", str(file), "--state-dir", "/line")
    assert (settings.listen, settings.log_level, settings.state_dir) == (
        "file:1",
        "debug",
        Path("/line"),
    )
    assert settings.ready_file is None


def test_a_relative_path_in_a_file_begins_at_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "site.toml"
    file.write_text(
        '[coordinator]\nlisten = "file:1"\nstate_dir = "state"\nca_key = "../ca.key"\ntls_ca = '
        '"/etc/ca.pem"\n'
    )
    settings = load("--config", str(file))
    assert settings.state_dir == tmp_path / "state" and settings.tls_ca == Path("/etc/ca.pem")
    assert settings.ca_key == tmp_path / "../ca.key"
    assert load("--config", str(file), "--state-dir", "mine").state_dir == Path("mine")
    monkeypatch.chdir(tmp_path)
    assert load("--config", "site.toml").state_dir == Path("state")


@pytest.mark.parametrize("given", [("--plaintext",), ("--plaintext", "true")])
def test_plaintext_is_asked_for(given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGESHARD__COORDINATOR__PLAINTEXT")
    required = ("--listen", "127.0.0.1:0", "--state-dir", "/nowhere")
    assert load(*required, *given).tls() is None
    with pytest.raises(DeniedError) as refusal:
        load(*required).tls()
    assert refusal.value.reason == "TLS_REQUIRED" and "--plaintext" in refusal.value.message


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("12h", 43200), ("1.5d", 129600), ("7", 7)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1s", "1 month", "1e9", "nan", "inf"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as info:
        parse_duration(text, "ttl")
    assert info.value.field == "ttl"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('[coordinator]\nlisten = "a:1"\nlisen = "b:1"\n', "lisen"),
        ("[coordinatr]\nx = 1\n", "coordinatr"),
        ("coordinator = 3\n", "coordinator"),
        ("[coordinator\n", "config"),
        ('[coordinator]\nlisten = "a:1"\nstate_dir = "/x"\nlog_level = "loud"\n', "log-level"),
        ("[coordinator]\n", "listen"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, text: str, field: str) -> None:
    file = tmp_path / "site.toml"
    file.write_text(text)
    with pytest.raises(InvalidArgumentError) as info:
        load("--config", str(file))
    assert info.value.field == field and field in str(info.value)


def test_an_unknown_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESHARD__COORDINATOR__LISEN", "a:1")
    with pytest.raises(InvalidArgumentError) as info:
        load("--listen", "a:1", "--state-dir", "/x")
    assert info.value.field == "EDGESHARD__COORDINATOR__LISEN"


def test_the_nearest_name_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site.toml").write_text('[coordinator]\nlisen = "a:1"\n')
    with pytest.raises(InvalidArgumentError, match=r"did you mean listen\?"):
        load("--config", str(tmp_path / "site.toml"))
    with pytest.raises(InvalidArgumentError, match=r"did you mean --state-dir\?") as info:
        load("--listen", "a:1", "--state-dri=/x")
    assert info.value.field == "--state-dri"
    with pytest.raises(InvalidArgumentError) as info:
        load("--quux")
    assert "did you mean" not in info.value.message, "nothing is near"
    monkeypatch.setenv("EDGESHARD__COORDINATOR__LISEN", "a:1")
    with pytest.raises(
        InvalidArgumentError, match=r"did you mean EDGESHARD__COORDINATOR__LISTEN\?"
    ):
        load()


def test_a_missing_file_and_half_of_tls(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError) as info:
        load("--config", str(tmp_path / "none.toml"))
    assert info.value.field == "config"
    settings = load("--listen", "a:1", "--state-dir", "/x", "--tls-ca", "/ca.pem")
    with pytest.raises(InvalidArgumentError) as info:
        settings.tls()
    assert info.value.field == "tls-cert"


def test_the_ready_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "run" / "ready.json"
    write_ready_file(path, "127.0.0.1:41234")
    content = json.loads(path.read_text())
    assert content["address"] == "127.0.0.1:41234" and content["pid"] > 0
    assert list(path.parent.iterdir()) == [path]


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging("info")
    yield stream
    structlog.reset_defaults()
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(level)
    for name in ("edgeshard", "edgeshard_agent", "edgeshard_coordinator"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def test_logs_are_json_without_what_users_wrote(logged: io.StringIO) -> None:
    secrets: dict[str, Any] = dict.fromkeys(PRIVATE_KEYS, "once upon a time")
    structlog.get_logger().info("request_done", deployment="tale", **secrets)
    structlog.get_logger().debug("too fine")
    logging.getLogger("grpc").warning("from %s", "elsewhere")
    lines = [json.loads(line) for line in logged.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["request_done", "from elsewhere"]
    assert (
        lines[0]["deployment"] == "tale" and lines[0]["level"] == "info" and "timestamp" in lines[0]
    )
    assert "once upon a time" not in logged.getvalue()


@pytest.mark.parametrize("level", ["debug", "info", "warning"])
def test_debug_is_of_our_own_packages(
    logged: io.StringIO, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", logged)
    configure_logging(level)
    assert debug_logged() == (level == "debug")
    for name in (
        "edgeshard_agent.hosting.host",
        "edgeshard_coordinator.control.runtime.loop",
        "grpc",
        "some.library",
    ):
        logging.getLogger(name).debug("fine")
        logging.getLogger(name).info("coarse")
    words = [json.loads(line)["event"] for line in logged.getvalue().splitlines()]
    assert (
        words
        == {
            "debug": ["fine", "coarse"] * 2 + ["coarse"] * 2,
            "info": ["coarse"] * 4,
            "warning": [],
        }[level]
    )


def test_a_traceback_shows_no_variables(logged: io.StringIO) -> None:
    def fail(words: str) -> None:
        raise ValueError("broken")

    try:
        fail("once upon a time"[::-1])
    except ValueError:
        structlog.get_logger().exception("failed")
    assert "ValueError: broken" in logged.getvalue()
    assert "once upon a time"[::-1] not in logged.getvalue()


@pytest.mark.parametrize(
    "text", ["9" * 5000, "9" * 400 + ".5", "9" * 400 + "TiB", "1." + "9" * 400]
)
def test_a_size_of_hundreds_of_digits_is_no_size(text: str) -> None:
    """Neither a number that Python refuses to read nor one that is no float."""
    with pytest.raises(InvalidArgumentError, match="is not a size"):
        parse_bytes(text, "memory")


@pytest.mark.parametrize("text", ["1", "4096", "15MiB"])
def test_so_little_memory_is_a_unit_forgotten(text: str) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"--memory: .*at least 16MiB, with its unit"
    ) as info:
        load_settings(
            AgentSettings, "edgeshard-agent", ["--name", "a", "--state-dir", "s", "--memory", text]
        )
    assert info.value.field == "memory"


@pytest.mark.parametrize(("terminal", "said"), [(True, "ready: node a serves\n"), (False, "")])
def test_a_terminal_is_told_that_the_daemon_is_ready(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, said: str
) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", stderr)
    tell_ready("node a serves")
    assert stderr.getvalue() == said


def test_what_may_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--plaintext", "--listen", "127.0.0.1:0", "--state-dir", "x")
    assert load(*given).http_allow_origin == ()
    file = tmp_path / "settings.toml"
    file.write_text('[coordinator]\nhttp_allow_origin = ["http://a", "http://b"]\n')
    assert load(*given, "--config", str(file)).http_allow_origin == ("http://a", "http://b")
    monkeypatch.setenv("EDGESHARD__COORDINATOR__HTTP_ALLOW_ORIGIN", "http://c, http://d")
    assert load(*given, "--config", str(file)).http_allow_origin == ("http://c", "http://d")
    several = ("--http-allow-origin", "http://e", "--http-allow-origin", "http://f")
    assert load(*given, *several).http_allow_origin == ("http://e", "http://f")
