"""The dashboard's own files: small, and none from elsewhere."""

from __future__ import annotations

import re

from edgeshard_coordinator.dashboard.app import ASSETS

MAX_BYTES = 350_000


def test_all_files_of_a_page_are_small() -> None:
    files = [path for path in ASSETS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES


def test_no_file_is_from_another_host() -> None:
    """Imports, styles and links of the page are paths."""
    addresses = re.compile(r"""(?:\bfrom|\bimport|src=|href=|url\()\s*\(?["']?(?:https?:)?//""")
    for path in ASSETS.rglob("*"):
        if path.suffix in (".js", ".css", ".html"):
            assert not addresses.search(path.read_text()), path.name
