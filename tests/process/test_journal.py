"""A daemon's output if systemd's journal reads it: a line for each record, with the level in
front."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timing

SCRIPT = """
import structlog
from edgeshard.domain.errors import InvalidArgumentError
from edgeshard.process.logs import configure_logging, report_failure
configure_logging("debug")
log = structlog.get_logger("edgeshard")
log.debug("d")
log.info("i")
log.warning("w")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("e")
report_failure(InvalidArgumentError("--listen is required"))
"""


def lines_of(journal: str) -> list[str]:
    """The script's output to a pipe; `journal` is JOURNAL_STREAM, with the pipe's own numbers for
    `{here}`."""
    reading, writing = os.pipe()
    status = os.fstat(writing)
    environment = os.environ | {
        "JOURNAL_STREAM": journal.format(here=f"{status.st_dev}:{status.st_ino}")
    }
    subprocess.run(
        [sys.executable, "-c", SCRIPT], stderr=writing, env=environment, timeout=60, check=True
    )
    os.close(writing)
    with os.fdopen(reading) as file:
        return file.read().splitlines()


def test_the_journal_gets_levels_and_one_line_for_a_traceback() -> None:
    lines = lines_of("{here}")
    assert [line[:3] for line in lines] == ["<7>", "<6>", "<4>", "<3>", "<3>"]
    assert [json.loads(line[3:])["event"] for line in lines[:-1]] == ["d", "i", "w", "e"]
    assert "ZeroDivisionError" in lines[3] and lines[-1] == "<3>error: --listen is required"


@pytest.mark.parametrize("journal", ["", "1:2"], ids=["none", "of another stream"])
def test_elsewhere_lines_are_plain(journal: str) -> None:
    lines = lines_of(journal)
    assert [json.loads(line)["event"] for line in lines[:-1]] == ["d", "i", "w", "e"]
    assert lines[-1] == "error: --listen is required"
