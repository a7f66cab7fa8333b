"""The documents' site has every page, its links hold, and its search finds each page."""

from __future__ import annotations

import http.server
import re
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.support.browser import chromium, needs_chromium
from tools.build_docs import (
    HOME,
    OUTER,
    PARTS,
    build,
    navigation,
    rewrite_links,
    site_names,
    widen_lists,
)
from tools.lock import ROOT

NAMES = site_names()
needs_builder = pytest.mark.skipif(
    not (HOME / "bin" / "zensical").exists(), reason="run `make docs` first"
)
SEARCH_MS = 10_000
FORM = 6


def test_each_page_is_in_one_part_of_the_site() -> None:
    listed = [
        page for part in navigation(NAMES.values()) for pages in part.values() for page in pages
    ]
    assert sorted(listed) == sorted(map(str, NAMES.values()))
    assert [name for part in navigation(NAMES.values()) for name in part] == list(PARTS)


def test_a_part_with_an_unknown_page_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTS, "Use it", ["index", "no-such-page"])
    with pytest.raises(ValueError, match="no-such-page"):
        navigation(NAMES.values())


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("README.md", "[a](docs/http.md#keys)", "[a](http.md#keys)"),
        ("README.md", "![a\nb](docs/ring.svg)", "![a\nb](ring.svg)"),
        ("docs/upgrade.md", "[b](../CHANGELOG.md)", "[b](changelog.md)"),
        ("docs/benchmarks/token.md", "[c](../../ARCHITECTURE.md)", "[c](../architecture.md)"),
        ("docs/benchmarks/token.md", "[c](../http.md)", "[c](../http.md)"),
        (
            "docs/install.md",
            "[`install.sh`](../deploy/install.sh)",
            "`install.sh` (`deploy/install.sh`)",
        ),
        ("docs/install.md", "[deploy/k3s](../deploy/k3s)", "deploy/k3s"),
        (
            "docs/http.md",
            "[d](#keys) [e](https://example.org/x)",
            "[d](#keys) [e](https://example.org/x)",
        ),
        ("docs/http.md", "```text\n[f](../LICENSE)\n```\n", "```text\n[f](../LICENSE)\n```\n"),
    ],
)
def test_links_hold_in_the_site(page: str, text: str, expected: str) -> None:
    assert rewrite_links(text, ROOT / page, NAMES) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a\n  b\n  - c\n    d\n", "- a\n    b\n    - c\n        d\n"),
        (
            "1. a\n\n   ```bash\n   b\n     c\n   ```\n\nd\n",
            "1. a\n\n    ```bash\n    b\n      c\n    ```\n\nd\n",
        ),
        ("a\n- b\n- c\n", "a\n\n- b\n- c\n"),
        ("```text\n- a\n  b\n```\n", "```text\n- a\n  b\n```\n"),
    ],
)
def test_lists_are_indented_as_the_builder_reads_them(text: str, expected: str) -> None:
    assert widen_lists(text) == expected


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("docs") / "site"
    assert build(folder) == 0, "a link of a document leads nowhere"
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def rare_words() -> dict[Path, str]:
    """For each page a word that few other pages have in any form: a form has the same six letters
    at its beginning."""
    prose = {
        path: re.sub(
            r"(?ms)^ *```.*?^ *```$|<!--.*?-->|\]\([^)]*\)", "", path.read_text(encoding="utf-8")
        )
        for path in NAMES
    }
    words = {path: set(re.findall(r"[a-z]{6,}", text.lower())) for path, text in prose.items()}
    pages = Counter(form for own in words.values() for form in {word[:FORM] for word in own})
    return {
        path: min(sorted(own), key=lambda word: (pages[word[:FORM]], -len(word)))
        for path, own in words.items()
    }


@needs_builder
@needs_chromium
@pytest.mark.long
@pytest.mark.timeout(300)
async def test_search_finds_each_page(site: str) -> None:
    others: list[str] = []
    async with chromium() as browser:
        page = await browser.new_page()
        page.on(
            "request",
            lambda request: (
                others.append(request.url) if not request.url.startswith(site) else None
            ),
        )
        await page.goto(f"{site}/index.html")
        await page.get_by_role("button", name="Search").first.click()
        field = (
            page.get_by_role("combobox", name="Search")
            .or_(page.get_by_label("Search", exact=True))
            .last
        )
        for path, word in rare_words().items():
            await field.fill(word)
            target = NAMES[path].with_suffix(".html")
            result = page.locator(f"[id$='-results'] a[href*='{target}']").first
            await expect(result, f"search for {word!r}").to_be_visible(timeout=SEARCH_MS)
    assert not [url for url in others if not url.startswith(("data:", "blob:"))], (
        "the site uses another host"
    )
    assert len(NAMES) > len(OUTER)
