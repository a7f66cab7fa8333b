"""edgectl serve: a site on this machine that answers over HTTP, and grows by the nodes that join
it."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeshard.cli.commands.command_options import argument, option, switch, with_option_groups
from edgeshard.cli.commands.deployments.deploy import (
    MEASURE_S,
    deploy_measured,
    model_source,
    placed_kernel_warnings,
    spec_of,
)
from edgeshard.cli.commands.deployments.model import adding_bars
from edgeshard.cli.commands.site.demo import NAME as DEMO_MODEL
from edgeshard.cli.commands.site.demo import Narrator, model_directory
from edgeshard.cli.commands.site.site_watch import SiteWatch, measure
from edgeshard.cli.commands.spec_options import flag_of, spec_option, spec_options
from edgeshard.cli.connect import run
from edgeshard.cli.render.output import human_bytes, show_text, stderr_console
from edgeshard.domain.errors import (
    INTERRUPTED,
    InvalidArgumentError,
    PlacementError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.ids import check_name
from edgeshard.local.own_site import OwnSite
from edgeshard.process.extras import check_extras

if TYPE_CHECKING:
    from edgeshard.client import Client
    from edgeshard.client.uploads import AddPhase
    from edgeshard.domain.deployments.deployment import Deployment, DeploymentSpec
    from edgeshard.importing.model_sources import Source

DEMO = "demo"
"""Names the model that ships with EdgeShard."""
_LISTEN = "0.0.0.0:7600"
_WIDEST_FIRST = ("none", "int8", "int4")
_FORMATS = ("auto", *_WIDEST_FIRST)
_SHOWN_EVERY_S = 1.0
_ENDS = {INTERRUPTED: "Ctrl-C", 128 + signal.SIGTERM: "SIGTERM"}
"""The ordinary ends of a server, by the exit codes of `run`."""
LIMITS = ("max_context", "max_new_tokens", "concurrency")
"""The keys of a spec about the number and the length of requests, which are options here as in
`edgectl deploy`."""
_CONTEXT_STEP = 16
"""Tokens of a KV block: contexts differ in memory by whole blocks."""
_USEFUL_CONTEXT = 8192
"""Tokens that conversations rarely exceed, if that is less than half of the model's own context:
for a longer one no narrower weights are taken."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The model to serve: `model` by its given name, which is added from `source` unless the site
    has it (None).

    The store calls it `stored`, and programs `name`.
    """

    model: str
    source: Source | None
    stored: str
    name: str
    quantise: str
    limits: Mapping[str, int] = field(default_factory=dict)
    """The limits that were given, by their keys in the spec: `LIMITS`."""
    grow: bool = False

    def spec(self, source: str, quantise: str, max_context: int = 0) -> dict[str, object]:
        """The deployment spec's values, with `max_context` tokens if it was not given."""
        values: dict[str, object] = {"name": self.name, "model": self.stored, "source": source}
        if max_context:
            values["max_context"] = max_context
        if quantise != "none":
            values["quantisation"] = {"*": quantise}
        return {**values, **self.limits}

    def agrees(self, spec: DeploymentSpec) -> bool:
        """Whether the options match a deployment."""
        quantise = spec.quantisation.get("*", "none")
        limits_agree = all(getattr(spec, key) == value for key, value in self.limits.items())
        return limits_agree and self.quantise in ("auto", quantise)


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """The options of the HTTP endpoint, except its port."""

    http_listen: Annotated[
        str | None,
        option(
            "HOST:PORT",
            "Serve the API at this address instead of --port, such as 0.0.0.0:8443. An address "
            "beyond this machine "
            "uses TLS.",
        ),
    ] = None
    http_names: Annotated[
        list[str] | None,
        option(
            "NAME",
            "Add this host name to the API's certificate, such as myhost.local; repeatable.",
            "--http-name",
        ),
    ] = None
    http_origins: Annotated[
        list[str] | None,
        option(
            "ORIGIN",
            "Let web pages of this origin call the API, such as http://localhost:3000; repeatable.",
            "--http-allow-origin",
        ),
    ] = None
    dashboard_url: Annotated[
        str | None,
        option(
            "URL",
            "Set the public URL of the dashboard if clients reach it through a reverse proxy, such "
            "as "
            "https://edge.example.",
        ),
    ] = None
    model_folders: Annotated[
        list[str] | None,
        option(
            "DIR", "Let the dashboard add models from this directory; repeatable.", "--model-folder"
        ),
    ] = None
    allow_hub: Annotated[
        bool, switch("--allow-hub", "Let the dashboard add models from the Hugging Face Hub.")
    ] = False

    def of_coordinator(self) -> list[str]:
        """The same options of the coordinator."""
        words = [] if self.http_listen is None else ["--http-listen", self.http_listen]
        words += [] if self.dashboard_url is None else ["--dashboard-url", self.dashboard_url]
        words += [word for name in self.http_names or () for word in ("--http-name", name)]
        folders = [str(Path(folder).absolute()) for folder in self.model_folders or ()]
        words += [word for folder in folders for word in ("--model-folder", folder)]
        words += ["--allow-hub"] if self.allow_hub else []
        return words + [
            word for origin in self.http_origins or () for word in ("--http-allow-origin", origin)
        ]


ModelArgument = Annotated[
    str,
    argument(
        "MODEL",
        "Serve this model: DIR, FILE.gguf, OWNER/NAME of the Hub, ollama:NAME, a model of the "
        "site, or demo.",
    ),
]
PortOption = Annotated[
    int | None,
    option(
        "N",
        "Serve the API on this port of this machine (default: 8000 or the next free port).",
        min=0,
        max=65535,
    ),
]
QuantiseOption = Annotated[
    str,
    spec_option(
        "quantisation",
        "Quantise the weights to int8 or int4. none: use them as they are stored. auto: use the "
        "widest of these "
        "that fits.",
        "FORMAT",
    ),
]
StateDirOption = Annotated[
    Path | None,
    option(
        "DIR", "Store the site's data in this directory (default: ~/.local/state/edgeshard/serve)."
    ),
]
ListenOption = Annotated[
    str,
    option(
        "HOST:PORT",
        "Accept other nodes at this address, over mutual TLS. They join at the next port (7601 by "
        "default).",
        envvar="EDGESHARD__SERVE__LISTEN",
    ),
]
WheelsOption = Annotated[
    Path | None,
    option(
        "DIR",
        "Let machines without EdgeShard install it from this directory of wheels, at the port of "
        "--listen plus 2.",
    ),
]


@with_option_groups
def serve(  # noqa: PLR0913 - one parameter for each option
    *,
    model: ModelArgument,
    name: Annotated[
        str | None,
        option("NAME", "Set the model name that API clients send (default: the model's own)."),
    ] = None,
    port: PortOption = None,
    http: HttpOptions,
    quantise: QuantiseOption = "auto",
    nodes: Annotated[
        int, option("N", "Start N nodes on this machine.", "--nodes", min=1, max=16)
    ] = 1,
    limits: Annotated[dict[str, int], spec_options(*LIMITS)],
    state_dir: StateDirOption = None,
    listen: ListenOption = _LISTEN,
    wheels: WheelsOption = None,
    grow: Annotated[
        bool, switch("--grow", "Move the model to more nodes when they join and make it faster.")
    ] = False,
) -> None:
    """Serve a model from this machine. Print an OpenAI-compatible URL, an API key and the command
    that joins another node. EdgeShard restarts each process of the site that exits. Stop with
    Ctrl-C. Run the same command again to restart the same site from its --state-dir.
    """
    if quantise not in _FORMATS:
        raise InvalidArgumentError(
            f"--quantise {quantise!r}: use one of {', '.join(_FORMATS)}", field="quantise"
        )
    check_extras("edgectl serve", "agent", "coordinator", "gateway")
    narrator = Narrator(time.monotonic())
    with _found(model) as (source, stored):
        check_name(name or stored, "name")
        # names a limit out of its bounds
        spec_of(None, {"name": name or stored, "model": stored, **limits})
        options = ServeOptions(model, source, stored, name or stored, quantise, limits, grow)
        _run(
            options,
            OwnSite(state_dir, nodes, listen, port, http=http.of_coordinator(), wheels=wheels),
            narrator,
        )


def serve_demo(port: int | None, nodes: int) -> None:
    """`edgectl demo --serve`: its nodes answer over HTTP until Ctrl-C, only on this machine;
    nothing is kept."""
    check_extras("edgectl demo --serve", "agent", "coordinator", "gateway")
    with (
        _found(DEMO) as (source, stored),
        tempfile.TemporaryDirectory(prefix="edgeshard-demo-") as state,
    ):
        site = OwnSite(Path(state), nodes, "127.0.0.1:0", port, lasts=False)
        _run(ServeOptions(DEMO, source, stored, stored, "none"), site, Narrator(time.monotonic()))


def _run(options: ServeOptions, site: OwnSite, narrator: Narrator) -> None:
    """Serve until Ctrl-C, or until SIGTERM, by which a supervisor ends it: it exits 0 after
    either."""
    try:
        run(_serve(options, site, narrator))
    except typer.Exit as end:
        if end.exit_code not in _ENDS:
            raise
        narrator.say(f"ended by {_ENDS[end.exit_code]}, with all processes of the site")


@contextmanager
def _found(model: str) -> Iterator[tuple[Source | None, str]]:
    """The source of a model, None if the site has it; and its name in the store."""
    if model != DEMO:
        source = model_source(model)
        yield source, model if source is None else source.name
        return
    from edgeshard.importing.model_sources import Source

    with model_directory(None) as shipped:
        yield Source(path=shipped), DEMO_MODEL


async def _serve(options: ServeOptions, site: OwnSite, narrator: Narrator) -> None:
    nodes = "1 node" if len(site.nodes) == 1 else f"{len(site.nodes)} nodes"
    narrator.say(
        f"starting a coordinator and {nodes} ({', '.join(site.nodes)}) as processes of this machine"
    )
    async with site:
        narrator.say(f"the coordinator listens on {site.address}, its HTTP endpoint at {site.url}")
        if site.is_elsewhere:
            narrator.say(
                f"{site.wanted} is in use: nodes that joined earlier find the site when that "
                "address is free again"
            )
        await _supervised(site, narrator, _answer(options, site, narrator))


async def _supervised(site: OwnSite, narrator: Narrator, work: Coroutine[Any, Any, None]) -> None:
    """Run the work while the site's processes are restarted. Raises the error of a process that
    cannot start: waiting for it would not end."""
    failed = asyncio.ensure_future(site.supervise(narrator.say))
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait({failed, working}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            raise failed.result()
        await working
    finally:
        failed.cancel()
        working.cancel()
        await asyncio.wait({failed, working})


async def _answer(options: ServeOptions, site: OwnSite, narrator: Narrator) -> None:
    """Load the model, print how to query it, and watch the site until Ctrl-C."""
    deployment, key, link = await _loaded(options, site, narrator)
    site.proven = True
    _show(site, options.name, key, link, deployment, narrator)
    async with site.client() as client:
        await SiteWatch(client, options.name, site.next_name, narrator.say, grow=options.grow).run()


async def _loaded(
    options: ServeOptions, site: OwnSite, narrator: Narrator
) -> tuple[Deployment, str, str]:
    """The deployment, the key for it, and a link to the dashboard. Begins again each time that the
    coordinator ends in the middle."""
    while True:
        starts = site.starts
        try:
            # A client for each try: one that was refused waits before it tries again.
            async with site.client() as client:
                await _add(client, options, narrator)
                await site.joined()
                deployment = await _deploy(client, options, site.nodes[0], narrator)
                for warning in await placed_kernel_warnings(client, [deployment]):
                    narrator.say(warning)
                link = await client.dashboard_link()
                return deployment, await site.api_key(client), link.url
        except UnavailableError:
            if not await site.came_back(starts):
                raise


async def _add(client: Client, options: ServeOptions, narrator: Narrator) -> None:
    """Have the model in the store."""
    name = options.stored
    if options.source is None:
        await client.stored_model(name)  # its error explains how to add a missing model
        return
    shown_s = time.monotonic()

    def show(phase: AddPhase, done: int, total: int) -> None:
        nonlocal shown_s
        if time.monotonic() - shown_s >= _SHOWN_EVERY_S:
            shown_s = time.monotonic()
            narrator.say(f"{phase.value} {name}: {human_bytes(done)} of {human_bytes(total)}")

    from edgeshard.client.uploads import Adding

    console = stderr_console()
    adding = Adding(on_note=lambda text: narrator.say(f"note: {text}"))
    with adding_bars(console) as bars:
        report = bars if console.is_terminal else show
        await client.add_model(options.source.path or options.model, name, report, adding)
    stored = await client.stored_model(name)
    narrator.say(
        f"model {name} is in the store: {stored.architecture}, {stored.layer_count} layers, "
        f"{stored.parameter_count / 1e6:.1f} M parameters, {human_bytes(stored.stored_bytes)}"
    )


async def _deploy(
    client: Client, options: ServeOptions, source: str, narrator: Narrator
) -> Deployment:
    from edgeshard.cli.render.loading import DeployReporter

    with stderr_console().status("") as status:
        reporter = DeployReporter(status)
        deployment = {item.spec.name: item for item in await client.deployments()}.get(options.name)
        if deployment is None:
            # One node has nothing to choose; but the gain by a second one is not known unless it
            # was measured.
            measures = options.grow or len(await client.nodes()) > 1
            spec = await _chosen(client, options, source, narrator)
            return await deploy_measured(client, spec, reporter, MEASURE_S if measures else 0.0)
        if deployment.spec.model != options.stored:
            raise InvalidArgumentError(
                f"--name {options.name}: the site has a deployment of this name, of model "
                f"{deployment.spec.model}; choose "
                f"another --name, or first run edgectl delete deployment {options.name}",
                field="name",
            )
        narrator.say(f"{options.name} was served before: its nodes load it again")
        if not options.agrees(deployment.spec):
            narrator.say(
                "note: it is as it was deployed then; for --quantise, "
                f"{', '.join(map(flag_of, LIMITS))} to count, "
                f"first run edgectl delete deployment {options.name}"
            )
        return await client.wait_ready(options.name, on_change=reporter.show)


async def _chosen(
    client: Client, options: ServeOptions, source: str, narrator: Narrator
) -> DeploymentSpec:
    """The spec with the widest weights that fit. If none do, the widest that fit with fewer
    concurrent requests: the planner knows the loss once the nodes are measured. If none do either,
    with the largest context that fits, unless one was given. Raises the error of `Client.plan` for
    the narrowest."""
    from edgeshard.domain.deployments.deployment import parse_spec

    formats = _WIDEST_FIRST if options.quantise == "auto" else (options.quantise,)
    for measured, quantise in product((False, True), formats):
        spec = parse_spec(options.spec(source, quantise))
        if measured:
            await measure(client, spec, narrator.say)
        try:
            await client.plan(spec)
        except (ResourceExhaustedError, PlacementError):
            if measured and quantise == formats[-1]:
                shorter = await _with_shorter_context(client, options, source, formats, narrator)
                if shorter is None:
                    raise
                return shorter
            if not measured:
                narrator.say(
                    "memory is short for the weights "
                    f"{'as they are' if quantise == 'none' else f'as {quantise}'}"
                )
            continue
        narrator.say(_loading(options.name, quantise))
        return spec
    raise AssertionError("unreachable")


def _loading(name: str, quantise: str) -> str:
    return f"loading {name}" + (f" with {quantise} weights" if quantise != "none" else "")


async def _with_shorter_context(
    client: Client, options: ServeOptions, source: str, formats: Sequence[str], narrator: Narrator
) -> DeploymentSpec | None:
    """With the largest context that fits, and the widest weights that leave a useful one; None if
    no context fits or one was given."""
    from edgeshard.domain.deployments.deployment import parse_spec

    if options.limits.get("max_context"):
        return None
    own = (await client.stored_model(options.stored)).max_context
    narrator.say(
        f"memory is short for the model's own context of {own} tokens: looking for the largest "
        "that fits"
    )
    context, quantise = 0, formats[-1]
    for quantise in formats:

        async def fits(tokens: int, quantise: str = quantise) -> bool:
            try:
                await client.plan(parse_spec(options.spec(source, quantise, tokens)))
            except (ResourceExhaustedError, PlacementError):
                return False
            return True

        context = await largest_context(own, fits)
        if context >= min(_USEFUL_CONTEXT, own // 2):
            break
    if not context:
        return None
    narrator.say(
        f"the context is {context} tokens, the most that fits; a node with more memory takes the "
        "whole"
    )
    narrator.say(_loading(options.name, quantise))
    return parse_spec(options.spec(source, quantise, context))


async def largest_context(most: int, fits: Callable[[int], Awaitable[bool]]) -> int:
    """The largest number of tokens that fits, a multiple of a KV block and less than `most`; 0 if
    no number fits."""
    blocks, too_many = 0, -(-most // _CONTEXT_STEP)
    while blocks + 1 < too_many:
        middle = (blocks + too_many) // 2
        if await fits(middle * _CONTEXT_STEP):
            blocks = middle
        else:
            too_many = middle
    return blocks * _CONTEXT_STEP


def _show(
    site: OwnSite, name: str, key: str, link: str, deployment: Deployment, narrator: Narrator
) -> None:
    stages = " -> ".join(
        f"{stage.node_name} ({stage.layers})" for stage in deployment.placement.stages
    )
    narrator.say(f"ready: {stages}")
    trusted = trusting = ""
    if site.url.startswith("https:"):
        trusted = (
            f"trust    {site.authority}, the site's authority: take it to the machines that "
            "call it\n"
        )
        trusting = f"--cacert {site.authority} "
    show_text(
        f"\nURL      {site.url}/v1\nAPI key  {key}\nmodel    {name}\n{trusted}"
        f"browser  {link} (once, within a minute; then edgectl dashboard)\n\n"
        f"curl {trusting}{site.url}/v1/chat/completions -H 'Authorization: Bearer {key}' \\\n"
        f"  -H 'Content-Type: application/json' \\\n"
        f'  -d \'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}], '
        f'"stream": true}}\'\n'
    )
