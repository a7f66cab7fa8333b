"""The dashboard's login over TLS, next to a second site, and through a reverse proxy."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest
import pytest_asyncio

from edgeshard import Client
from edgeshard.domain.identity import Role
from edgeshard.identity.authority import Authority, new_key, now, private_pem, request_for
from edgeshard.rpc.tls import TlsFiles
from edgeshard.rpc.tls_files import write_files
from tests.support.chat_models import DEMO_MODEL
from tests.support.http import Http
from tests.support.http_browser import HTML, Browser, Jar, nobody, secret_of
from tests.support.identities import Identities
from tests.support.membership import SecureSite
from tests.support.reverse_proxy import ReverseProxy
from tests.support.site import Site

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timing]

HOST = "edge.example"
ORIGIN, PREFIX = f"https://{HOST}", "/edge"
NUMBERS = count()


def certified(authority: Authority, directory: Path) -> TlsFiles:
    """The files of a server that is called by HOST, and here by loopback's address."""
    key = new_key()
    certificate = authority.issue_for_hosts((HOST, "127.0.0.1"), request_for(key), now())
    return write_files(directory, authority.certificate_pem, certificate, private_pem(key))


def trusting(files: TlsFiles) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(files.ca))


# Over TLS


@dataclass
class Plain:
    """A site, and the way to its gateway."""

    client: Client
    http: Http


@dataclass
class Secured:
    mill: SecureSite
    http: Http

    def client(self, name: str) -> Client:
        return self.mill.client_of(Role.OPERATOR, name)

    async def browser_of(self, name: str) -> Browser:
        async with self.client(name) as client:
            return await Browser.of(Plain(client, self.http), self.http)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    """A coordinator with an authority of its own, and its gateway over TLS."""
    directory = tmp_path_factory.mktemp("secured")
    identities = Identities(directory, "mill")
    files = certified(identities.authority, directory / "gateway")
    options = (
        "--http-listen",
        "127.0.0.1:0",
        "--http-tls-cert",
        str(files.cert),
        "--http-tls-key",
        str(files.key),
    )
    async with SecureSite(directory, *options, identities=identities) as mill:
        yield Secured(mill, Http(mill.gateway, None, trusting(files)))


async def test_over_tls_the_cookie_is_bound_to_its_host(secured: Secured) -> None:
    browser = Browser(secured.http)
    async with secured.client("anna") as anna:
        link = await anna.dashboard_link()
    assert link.url.startswith(f"{secured.http.url}/#open=") and link.url.startswith("https://")
    answer = await browser.enter({"secret": link.url.partition("#open=")[2]})
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"__Host-edgeshard-dashboard-{urlsplit(secured.http.url).port}=")
    parts = {part.strip().lower() for part in cookie.split(";")[1:]}
    assert {"secure", "httponly", "samesite=strict", "path=/"} < parts
    assert not any(part.startswith("domain") for part in parts), "__Host- has none"
    assert (await browser.get("/dashboard/session")).json["who"] == "operator/anna"
    plain = secured.http.url.replace("https:", "http:")
    assert (await browser.post("/dashboard/do/plan", {}, origin=plain)).status == 403, (
        "who may have been changed"
    )


async def test_what_a_revoked_operator_has_open_ends_and_what_another_has_goes_on(
    secured: Secured,
) -> None:
    name = f"carl-{next(NUMBERS)}"
    carl, bert = await secured.browser_of(name), await secured.browser_of("bert")
    async with secured.client(name) as client:
        secret = await secret_of(Plain(client, secured.http))
    async with (
        aclosing(carl.events()) as of_carl,
        aclosing(bert.events()) as of_bert,
        secured.client("admin") as admin,
    ):
        assert (await anext(of_carl))[0] == (await anext(of_bert))[0] == "picture"
        await admin.revoke(Role.OPERATOR, name)
        async with asyncio.timeout(60):
            kinds = [kind async for kind, _ in of_carl]
        assert kinds[-1] == "ended"
        await admin.add_model(DEMO_MODEL, name)
        async with asyncio.timeout(60):
            while name not in (await anext(of_bert))[1].get("models", ()):
                pass
    assert (await carl.get("/dashboard/session")).status == 401
    assert (await carl.post("/dashboard/do/plan", {})).status == 401
    assert (await Browser(secured.http).enter({"secret": secret})).status == 401, (
        "a link that was not used yet"
    )
    assert (await bert.get("/dashboard/session")).json["who"] == "operator/bert"


# Beside a second site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sites(
    tmp_path_factory: pytest.TempPathFactory, forked_daemons: None
) -> AsyncIterator[list[Plain]]:
    """Two sites on two ports of this host."""
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for name in ("one", "other"):
            arguments = ("--http-listen", "127.0.0.1:0")
            site = Site(tmp_path_factory.mktemp(name), (), coordinator_arguments=arguments)
            await stack.enter_async_context(site)
            found.append(Plain(site.client, Http(site.gateway)))
        yield found


async def test_two_sites_of_a_host_keep_their_sessions_apart(sites: list[Plain]) -> None:
    jar = Jar()
    one, other = (Browser(site.http, jar) for site in sites)
    for browser, site in zip((one, other), sites, strict=True):
        assert (await browser.enter({"secret": await secret_of(site)})).status == 200
    assert len(jar.cookies) == 2 and one.cookie == other.cookie, "a browser sends both to both"
    for browser in (one, other):
        told = await browser.get("/dashboard/session")
        assert told.status == 200 and browser.token not in told.body.decode()
    await other.leave()
    assert (await one.get("/dashboard/session")).status == 200
    assert (await other.get("/dashboard/session")).status == 401


async def test_a_page_of_one_site_cannot_act_on_another(sites: list[Plain]) -> None:
    jar = Jar()
    one, other = (Browser(site.http, jar) for site in sites)
    for browser, site in zip((one, other), sites, strict=True):
        await browser.enter({"secret": await secret_of(site)})
    for path in ("do/plan", "do/deploy", "do/delete", "do/replan", "do/join", "chat"):
        for token in (one.token, other.token, None):
            answer = await one.post(
                f"/dashboard/{path}", {}, origin=other.origin, x_edgeshard_token=token
            )
            assert (answer.status, answer.error["code"]) == (403, "foreign_origin")
        foreign = await one.post(f"/dashboard/{path}", {}, x_edgeshard_token=other.token)
        assert (foreign.status, foreign.error["code"]) == (403, "no_token")
    left = await one.send("DELETE", "/dashboard/session", {}, origin=other.origin)
    assert left.status == 403 and (await one.get("/dashboard/session")).status == 200
    # Its answers permit no page of another port to read them.
    assert (
        "access-control-allow-origin"
        not in (await one.get("/dashboard/session", origin=other.origin)).headers
    )
    secret = await secret_of(sites[0])
    assert (await Browser(sites[1].http).enter({"secret": secret})).status == 401, (
        "its links are its own"
    )


# Behind a reverse proxy


@dataclass
class Fronted:
    client: Client
    direct: Http
    proxies: dict[bool, Http]
    """By whether the proxy passes the browser's Host on."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fronted(
    tmp_path_factory: pytest.TempPathFactory, forked_daemons: None
) -> AsyncIterator[Fronted]:
    """A site on loopback without TLS, and proxies before it that have a certificate and take /edge
    off."""
    directory = tmp_path_factory.mktemp("fronted")
    files = certified(Authority.create("proxy", now()), directory / "proxy")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(files.cert, files.key)
    arguments = (
        "--http-listen",
        "127.0.0.1:0",
        "--http-no-key",
        "--dashboard-url",
        f"{ORIGIN}{PREFIX}/",
    )
    async with (
        Site(directory, (), coordinator_arguments=arguments) as site,
        contextlib.AsyncExitStack() as stack,
    ):
        direct, proxies = Http(site.gateway), {}
        for keeps in (True, False):
            proxy = await stack.enter_async_context(
                ReverseProxy(direct.url, PREFIX, keeps, tls).running()
            )
            proxies[keeps] = Http(proxy.origin, None, trusting(files))
        yield Fronted(site.client, direct, proxies)


@pytest.fixture(params=(True, False), ids=("keeps Host", "says its own Host"))
def behind(request: pytest.FixtureRequest, fronted: Fronted) -> Browser:
    """A browser that sees the page at the proxy."""
    return Browser(fronted.proxies[request.param], origin=ORIGIN, prefix=PREFIX)


async def test_behind_a_proxy_a_link_leads_there_and_opens_all_of_the_page(
    fronted: Fronted, behind: Browser
) -> None:
    link = await fronted.client.dashboard_link()
    assert link.url.startswith(f"{ORIGIN}{PREFIX}/#open=")
    answer = await behind.enter({"secret": link.url.partition("#open=")[2]})
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("__Secure-edgeshard-dashboard-0.edge=")
    parts = {part.strip().lower() for part in cookie.split(";")[1:]}
    assert {"secure", "httponly", "samesite=strict", "path=/edge"} < parts
    assert behind.token and (await behind.get("/dashboard/session")).status == 200
    async with aclosing(behind.events()) as events, asyncio.timeout(60):
        assert (await anext(events))[0] == "picture"
    refused = await behind.post("/dashboard/do/plan", {})
    assert (refused.status, refused.error["param"]) == (400, "spec"), (
        "let in, and told what it lacks"
    )
    assert (await behind.leave()).status == 200 and not behind.jar.cookies
    assert (await behind.get("/dashboard/session")).status == 401


@pytest.mark.parametrize(("keeps", "at"), [(True, "/edge/"), (True, "/edge"), (False, "/edge/")])
async def test_the_page_finds_its_files_under_the_path(
    fronted: Fronted, keeps: bool, at: str
) -> None:
    """Also without the slash at its end, if the proxy passes the browser's host name on."""
    http = fronted.proxies[keeps]
    page = await http.get(at, {**HTML, "host": HOST})
    assert page.status == 200
    files = re.findall(r'(?:href|src)="([^"]+)"', page.body.decode())
    found = [
        urlsplit(urljoin(f"{ORIGIN}{at}", name)).path
        for name in files
        if not name.startswith("data:")
    ]
    assert len(found) >= 4
    for path in found:
        assert path.startswith("/edge/dashboard/assets/")
        assert (await http.get(path, {"host": HOST})).status == 200, path
    assert (await http.get("/dashboard/assets/main.js", {"host": HOST})).status == 404, (
        "that is another's"
    )


async def test_other_pages_cannot_act_through_the_proxy(fronted: Fronted, behind: Browser) -> None:
    await behind.enter({"secret": await secret_of(fronted)})
    foreign: tuple[dict[str, str | None], ...] = (
        {"origin": "https://evil.example"},
        {"origin": f"http://{HOST}"},
        {"origin": f"{ORIGIN}:8443"},
        {"origin": "https://edge.example.evil.example"},
        {"origin": "null"},
        {"origin": None},
        {"x_edgeshard_token": None},
        {"x_edgeshard_token": "guess"},
    )
    for path in ("do/plan", "do/deploy", "do/delete", "do/replan", "do/join", "chat"):
        for changes in foreign:
            assert (await behind.post(f"/dashboard/{path}", {}, **changes)).status == 403, changes
        assert (await behind.post(f"/dashboard/{path}", {}, cookie=None)).status == 401
    secret = await secret_of(fronted)
    for changes in foreign[:6]:
        assert (
            await Browser(behind.http, origin=ORIGIN, prefix=PREFIX).enter(
                {"secret": secret}, **changes
            )
        ).status == 403
    assert (await behind.enter({"secret": secret})).status == 200, "it was not used up"


@pytest.mark.parametrize(
    "host", ["evil.example", "edge.example.evil.example", "evil.example:443", "127.0.0.1:x", ""]
)
async def test_names_that_point_here_are_refused_through_a_proxy_that_keeps_them(
    fronted: Fronted, host: str
) -> None:
    behind = Browser(fronted.proxies[True], origin=ORIGIN, prefix=PREFIX)
    await behind.enter({"secret": await secret_of(fronted)})
    for answer in (
        await behind.get("/dashboard/session", host=host),
        await behind.post("/dashboard/chat", {}, host=host),
    ):
        assert (answer.status, answer.error["code"]) == (403, "foreign_host")


async def test_the_gateways_own_address_goes_on_beside_the_proxys(fronted: Fronted) -> None:
    browser = await Browser.of(fronted, fronted.direct)
    assert browser.cookie.startswith(f"edgeshard-dashboard-{urlsplit(fronted.direct.url).port}=")
    assert (await browser.get("/dashboard/session")).status == 200
    assert (await browser.post("/dashboard/do/plan", {})).status == 400
    page = await nobody(fronted.direct).get("/", HTML)
    assert b'"dashboard/assets/main.js"' in page.body
    mixed = await browser.post("/dashboard/do/plan", {}, host=HOST)
    assert (mixed.status, mixed.error["code"]) == (403, "foreign_origin"), (
        "the page is elsewhere than its Host says"
    )
    for path in ("/v1/models", "/health"):
        assert (await nobody(fronted.direct).get(path, {"host": HOST})).status == 403, (
            "it opens the dashboard alone"
        )


async def test_where_programs_need_no_key_a_browser_still_does(fronted: Fronted) -> None:
    assert (await nobody(fronted.direct).get("/v1/models")).status == 200
    for key in ("", "EMPTY", "none"):
        assert (await Browser(fronted.direct).enter({"key": key})).status == 401
