"""The addresses at which browsers find the dashboard, and the name of an address in front of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from edgeshard_coordinator.daemon import _places
from edgeshard_coordinator.dashboard.places import PageOrigin, PageOrigins, parse_place
from edgeshard_coordinator.settings import CoordinatorSettings

from edgeshard.domain.errors import DeniedError, InvalidArgumentError
from edgeshard.gateway.connections.listen import HttpListen, is_loopback_name

EDGE = PageOrigin("https://edge.example", "/edge")


@pytest.mark.parametrize(
    ("text", "origin", "path"),
    [
        ("https://edge.example", "https://edge.example", ""),
        ("https://edge.example/", "https://edge.example", ""),
        ("https://Edge.Example:443/edge/", "https://edge.example", "/edge"),
        ("https://edge.example:8443/a/b-1", "https://edge.example:8443", "/a/b-1"),
        ("http://127.0.0.1:80/edge", "http://127.0.0.1", "/edge"),
        ("http://[::1]:8080", "http://[::1]:8080", ""),
    ],
)
def test_a_url_is_read_as_browsers_say_it(text: str, origin: str, path: str) -> None:
    assert parse_place(text) == PageOrigin(origin, path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "edge.example",
        "ftp://edge.example",
        "https://",
        "https://edge.example:x",
        "https://user@edge.example",
        "https://edge.example/?a=1",
        "https://edge.example/#a",
        "https://edge.example/a b",
        "https://edge.example/../a",
        "https://edge.example//a",
        'https://edge.example/"><script>',
        "https://bücher.example",
        "https://a;b.example",
        "https://[::1",
    ],
)
def test_what_is_no_address_of_a_page_names_its_option(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        parse_place(text)
    assert refused.value.field == "dashboard-url"


def test_plain_http_is_for_loopback_alone() -> None:
    with pytest.raises(DeniedError, match="TLS"):
        parse_place("http://edge.example")


def test_cookies_of_all_places_have_names_of_their_own() -> None:
    places = (
        PageOrigin("http://127.0.0.1:8000"),
        PageOrigin("http://127.0.0.1:8001"),
        PageOrigin("https://edge.example:8000"),
        PageOrigin("https://edge.example"),
        PageOrigin("https://edge.example", "/a"),
        PageOrigin("https://edge.example", "/a/b"),
    )
    names = [place.cookie for place in places]
    assert len(set(names)) == len(names)
    assert [name.startswith("__Host-") for name in names] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    assert [name.startswith("__Secure-") for name in names] == [
        False,
        False,
        False,
        False,
        True,
        True,
    ]


def test_a_host_stands_for_the_places_where_a_browser_may_be() -> None:
    places = PageOrigins(False, is_loopback_name, EDGE)
    direct = PageOrigin("http://127.0.0.1:8000")
    for host in ("edge.example", "edge.example:443"):
        assert places.of_host(host) == (EDGE,)
    assert places.of_host("127.0.0.1:8000") == (direct, EDGE), "proxies may say the gateway's own"
    assert places.of_origin("127.0.0.1:8000", EDGE.origin) == EDGE
    assert places.of_origin("127.0.0.1:8000", direct.origin) == direct
    assert PageOrigins(False, is_loopback_name).of_host("127.0.0.1:8000") == (direct,)
    for host in ("edge.example:80", "edge.example:8443", "evil.example", "127.0.0.1:x", ""):
        with pytest.raises(DeniedError):
            places.of_host(host)
    for host, origin in (
        ("edge.example", direct.origin),
        ("127.0.0.1:8000", "http://edge.example"),
        ("localhost", None),
    ):
        with pytest.raises(DeniedError):
            places.of_origin(host, origin)


def test_a_url_is_for_a_dashboard_that_there_is(tmp_path: Path) -> None:
    settings = CoordinatorSettings(
        listen="127.0.0.1:0", state_dir=tmp_path, dashboard_url="https://edge.example/edge/"
    )
    listen = HttpListen("127.0.0.1:0")
    found = _places(settings, listen)
    assert found is not None and found.url("http://127.0.0.1:8000") == "https://edge.example/edge"
    for wrong, at in (
        (settings, None),
        (settings.model_copy(update={"no_dashboard": True}), listen),
    ):
        with pytest.raises(InvalidArgumentError) as refused:
            _places(wrong, at)
        assert refused.value.field == "dashboard-url"
    assert (
        _places(settings.model_copy(update={"dashboard_url": None, "no_dashboard": True}), listen)
        is None
    )
