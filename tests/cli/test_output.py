"""Numbers and text as people read them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from edgeshard.cli.render.output import (
    Column,
    gap_text,
    human_age,
    human_bytes,
    human_count,
    human_rate,
    human_seconds,
    plain,
    print_table,
    printable,
    table,
)
from edgeshard.domain.deployments.deployment import parse_spec


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.50 KiB"),
        (20 * 1024 + 512, "20.5 KiB"),
        (300 << 20, "300 MiB"),
        (4 << 30, "4 GiB"),
        (5 << 40, "5 TiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(7, "7"), (6_520_000, "6.52M"), (8_030_000_000, "8.03B"), (12_000, "12K")]
)
def test_counts(count: int, text: str) -> None:
    assert human_count(count) == text


def test_seconds() -> None:
    assert (human_seconds(0.01234), human_seconds(1.234)) == ("12.3 ms", "1.23 s")


@pytest.mark.parametrize(
    ("rate", "text"),
    [(800, "800 b/s"), (64_000, "64 Kb/s"), (93.6e6, "93.6 Mb/s"), (9.41e9, "9.41 Gb/s")],
)
def test_rates(rate: float, text: str) -> None:
    assert human_rate(rate) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s ago"),
        (59.9, "59 s ago"),
        (60, "1 min ago"),
        (7199, "1 h ago"),
        (200_000, "2 d ago"),
    ],
)
def test_ages(seconds: float, text: str) -> None:
    assert human_age(seconds) == text


def test_gaps() -> None:
    assert (gap_text(0.0), gap_text(0.0213)) == ("0 (exact)", "at most 2.13 %")


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert printable("é\tb\n\x1b[2Jc\x9b\x7f") == "é\tb\n[2Jc"


def test_a_spec_becomes_json_types() -> None:
    spec = parse_spec(
        {"name": "t", "model": "m", "source": "a", "layers": "a=0:4", "reserve": {"a": 5}}
    )
    value = plain(spec)
    assert value["layers"] == [{"node": "a", "layers": "0:4"}]
    assert (value["dtype"], value["reserve"], value["kv_dtype"]) == ("bfloat16", {"a": 5}, None)


def test_a_table_wider_than_the_terminal_keeps_one_line_a_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "edgeshard.cli.render.output.stdout_console", lambda: Console(width=40, force_terminal=True)
    )
    columns: list[Column[str]] = [Column(f"COLUMN {i}", lambda item: item * 3) for i in range(6)]
    print_table(table(["a long cell ", "b"], columns))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].count("a long cell a long cell a long cell") == 6


def test_a_narrow_terminal_gets_folded_cells_and_a_pipe_whole_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    columns: list[Column[str]] = [
        Column("NAME", lambda text: text),
        Column("DETAIL", lambda text: "word " * 30),
    ]
    for terminal, wide, longest in ((True, False, 80), (True, True, 200), (False, False, 200)):
        screen = io.StringIO()
        console = Console(
            file=screen, force_terminal=terminal, width=80 if terminal else 1000, color_system=None
        )
        monkeypatch.setattr(
            "edgeshard.cli.render.output.stdout_console", lambda console=console: console
        )
        print_table(table(["a"], columns), wide)
        lines = [line.rstrip() for line in screen.getvalue().splitlines()]
        assert max(map(len, lines)) <= longest
        assert (len(lines) > 2) is (longest == 80), (
            "a row of several lines where there is no room, and only there"
        )
