"""The pictures of README.md and docs/dashboard.md are made of a real run."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.support.browser import needs_chromium
from tests.support.forms import DAYS, is_turn
from tools.pictures import MOST_BYTES, PICTURES, main


def test_each_picture_is_in_a_document() -> None:
    pages = (PICTURES.parent / "dashboard.md").read_text() + (
        PICTURES.parent.parent / "README.md"
    ).read_text()
    for path in PICTURES.iterdir():
        assert f"pictures/{path.name}" in pages, path.name


@needs_chromium
@pytest.mark.long
@pytest.mark.skipif(not is_turn(DAYS, 0), reason=f"runs one day in {DAYS}")
@pytest.mark.timing
async def test_screenshots_and_a_recording_are_made_and_small(tmp_path: Path) -> None:
    assert await main(tmp_path) == 0
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in PICTURES.iterdir()}
    assert all(path.stat().st_size <= MOST_BYTES for path in tmp_path.iterdir())
    with Image.open(tmp_path / "kill.webp") as recording:
        assert getattr(recording, "n_frames", 1) > 5
