"""edgectl serve: a site on this machine that answers over HTTP, and grows by the boxes that join it."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgeshard.cli.connect import run
from edgeshard.cli.demo import NAME as DEMO_MODEL
from edgeshard.cli.demo import Narrator, model_directory
from edgeshard.cli.deploy import model_source
from edgeshard.cli.output import human_bytes, stderr_console
from edgeshard.cli.own_site import OwnSite
from edgeshard.cli.replan import sentence_of_gain
from edgeshard.cli.views import layers_text
from edgeshard.domain.errors import (
    EdgeShardError,
    InvalidArgumentError,
    PlacementError,
    ResourceExhaustedError,
    UnavailableError,
)
from edgeshard.domain.identity import Role
from edgeshard.domain.ids import check_name
from edgeshard.domain.replan import ReplanReason

if TYPE_CHECKING:
    from edgeshard.cli.deploy import DeployReporter
    from edgeshard.client import Client
    from edgeshard.client.models import AddPhase
    from edgeshard.domain.deployment import Deployment
    from edgeshard.domain.device import Node
    from edgeshard.importing.sources import Source

PORT = 8000
_LISTEN = "0.0.0.0:7600"
_WIDEST_FIRST = ("none", "int8", "int4")
_FORMATS = ("auto", *_WIDEST_FIRST)
_WATCH_S = 2.0
_REST_S = 60.0
_SHOWN_EVERY_S = 1.0
_TOKEN_TTL_S = 24 * 3600.0
_WORTH = 1.05
"""A plan that gains less is not worth a pause."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What is to be served: `model` as it was named, which is added from `source` unless the site has it (None)."""

    model: str
    source: Source | None
    name: str
    quantise: str
    concurrency: int | None
    max_context: int | None
    grow: bool

    def spec(self, model: str, source: str, quantise: str) -> dict[str, object]:
        """The deployment spec's values."""
        values: dict[str, object] = {"name": self.name, "model": model, "source": source}
        if self.concurrency is not None:
            values["concurrency"] = self.concurrency
        if self.max_context is not None:
            values["max_context"] = self.max_context
        if quantise != "none":
            values["quantisation"] = {"*": quantise}
        return values


def serve(  # noqa: PLR0913 - one parameter for each option
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model directory, the name of a model of the site, or demo.")
    ],
    name: Annotated[str | None, typer.Option(metavar="NAME", help="What programs call it; by default the model's.")] = (
        None
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="Of the URL, on this machine.")] = PORT,
    quantise: Annotated[
        str,
        typer.Option(
            "--quantise",
            "--quantize",
            metavar="FORMAT",
            help="Weights as none, int8 or int4; auto takes the widest that fit.",
        ),
    ] = "auto",
    boxes: Annotated[int, typer.Option(min=1, max=16, metavar="N", help="Split this machine into so many.")] = 1,
    concurrency: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Requests that memory is kept for.")
    ] = None,
    max_context: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of prompt and answer; by default the model's.")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the site is kept, and found again after a restart.")
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            envvar="EDGESHARD__SERVE__LISTEN",
            help="Where other boxes reach the site, over mutual TLS; they join at the next port.",
        ),
    ] = _LISTEN,
    grow: Annotated[
        bool, typer.Option("--grow", help="Move the model to more boxes by itself when they join and it gains by it.")
    ] = False,
) -> None:
    """Serve a model from this machine: an OpenAI-compatible URL, an API key, and the line that joins another box.

    Everything is kept in --state-dir: the same command finds it again. Ctrl-C ends it.
    """
    if quantise not in _FORMATS:
        raise InvalidArgumentError(f"--quantise {quantise!r}: use one of {', '.join(_FORMATS)}", field="quantise")
    narrator = Narrator(time.monotonic())
    if model == "demo":
        with model_directory(None) as shipped:
            options = _demo(shipped, name or DEMO_MODEL, quantise, concurrency, max_context, grow)
            run(_serve(options, OwnSite.at(state_dir, boxes, listen, port), narrator))
        return
    source = model_source(model)
    own_name = name or (model if source is None else source.name)
    check_name(own_name, "name")
    options = ServeOptions(model, source, own_name, quantise, concurrency, max_context, grow)
    run(_serve(options, OwnSite.at(state_dir, boxes, listen, port), narrator))


def serve_demo(port: int, boxes: int) -> None:
    """`edgectl demo --serve`: its boxes answer over HTTP until Ctrl-C, on this machine alone; nothing is kept."""
    with model_directory(None) as shipped, tempfile.TemporaryDirectory(prefix="edgeshard-demo-") as state:
        site = OwnSite.at(Path(state), boxes, "127.0.0.1:0", port)
        run(_serve(_demo(shipped, DEMO_MODEL), site, Narrator(time.monotonic())))


def _demo(
    directory: Path,
    name: str,
    quantise: str = "none",
    concurrency: int | None = None,
    max_context: int | None = None,
    grow: bool = False,
) -> ServeOptions:
    from edgeshard.importing.sources import Source

    return ServeOptions(DEMO_MODEL, Source(path=directory), name, quantise, concurrency, max_context, grow)


async def _serve(options: ServeOptions, site: OwnSite, narrator: Narrator) -> None:
    boxes = "1 box" if len(site.nodes) == 1 else f"{len(site.nodes)} boxes"
    narrator.say(f"starting a coordinator and {boxes} ({', '.join(site.nodes)}) as processes of this machine")
    async with site:
        narrator.say(f"the coordinator listens on {site.address}, its HTTP endpoint at {site.url}")
        async with site.client() as client:
            model = await _add(client, options, narrator)
            await site.joined()
            deployment = await _deploy(client, options, model, site.nodes[0], narrator)
            key = await site.api_key(client)
            _show(site, options.name, key, deployment, narrator)
            await _watch(client, options, site, narrator)


async def _add(client: Client, options: ServeOptions, narrator: Narrator) -> str:
    """The model's name in the store."""
    if options.source is None:
        await client.stored_model(options.model)  # says how to add it where it is not there
        return options.model
    name = DEMO_MODEL if options.model == DEMO_MODEL else options.source.name
    shown_s = time.monotonic()

    def show(phase: AddPhase, done: int, total: int) -> None:
        nonlocal shown_s
        if time.monotonic() - shown_s >= _SHOWN_EVERY_S:
            shown_s = time.monotonic()
            narrator.say(f"{phase.value} {name}: {human_bytes(done)} of {human_bytes(total)}")

    from edgeshard.client.models import Adding

    await client.add_model(
        options.source.path or options.model, name, show, Adding(on_note=lambda text: narrator.say(f"note: {text}"))
    )
    stored = await client.stored_model(name)
    narrator.say(
        f"model {name} is in the store: {stored.architecture}, {stored.layer_count} layers, "
        f"{stored.parameter_count / 1e6:.1f} M parameters, {human_bytes(stored.stored_bytes)}"
    )
    return name


async def _deploy(client: Client, options: ServeOptions, model: str, source: str, narrator: Narrator) -> Deployment:
    from edgeshard.cli.deploy import DeployReporter

    with stderr_console().status("") as status:
        reporter = DeployReporter(status)
        kept = {item.spec.name: item for item in await client.deployments()}.get(options.name)
        if kept is None:
            if len(await client.nodes()) > 1:
                narrator.say("measuring the boxes and their links")
                async for _ in client.profile(model):
                    pass
            return await _deploy_new(client, options, model, source, narrator, reporter)
        if kept.spec.model != model:
            raise InvalidArgumentError(
                f"--name {options.name}: the site has a deployment of this name, of model {kept.spec.model}; choose "
                f"another --name, or first run edgectl delete deployment {options.name}",
                field="name",
            )
        narrator.say(f"{options.name} was served before: its boxes load it again")
        return await client.wait_ready(options.name, on_change=reporter.show)


async def _deploy_new(
    client: Client, options: ServeOptions, model: str, source: str, narrator: Narrator, reporter: DeployReporter
) -> Deployment:
    """With the widest weights that fit, when they are to be chosen."""
    from edgeshard.domain.deployment import parse_spec

    formats = _WIDEST_FIRST if options.quantise == "auto" else (options.quantise,)
    for quantise in formats:
        spec = parse_spec(options.spec(model, source, quantise))
        try:
            await client.plan(spec)
        except (ResourceExhaustedError, PlacementError):
            if quantise == formats[-1]:
                raise
            narrator.say(f"the weights do not fit as {'they are' if quantise == 'none' else quantise}")
            continue
        narrator.say(f"loading {options.name}" + (f" with {quantise} weights" if quantise != "none" else ""))
        return await client.deploy(spec, on_change=reporter.show)
    raise AssertionError("unreachable")


def _show(site: OwnSite, name: str, key: str, deployment: Deployment, narrator: Narrator) -> None:
    stages = " -> ".join(f"{stage.node_name} ({stage.layers})" for stage in deployment.placement.stages)
    narrator.say(f"ready: {stages}")
    typer.echo(
        f"\nURL      {site.url}/v1\nAPI key  {key}\nmodel    {name}\n\n"
        f"curl {site.url}/v1/chat/completions -H 'Authorization: Bearer {key}' \\\n"
        f"  -H 'Content-Type: application/json' \\\n"
        f'  -d \'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}], "stream": true}}\'\n'
    )


async def _watch(client: Client, options: ServeOptions, site: OwnSite, narrator: Narrator) -> None:
    """Until Ctrl-C: who joins, and what the site would gain by it. Raises the error of a process that ends."""
    known = set(site.nodes) | {node.name for node in await client.nodes()}
    await _offer(client, site, narrator)
    ended, growth = asyncio.ensure_future(site.first_end()), _Growth(client, options, narrator)
    try:
        while not ended.done():
            await asyncio.wait({ended}, timeout=_WATCH_S)
            try:
                nodes = await client.nodes()
            except UnavailableError:
                continue
            for node in nodes:
                if node.connected and node.name not in known:
                    known.add(node.name)
                    narrator.say(f"box {node.name} has joined; it is measured when the site is quiet")
                    await _offer(client, site, narrator)
            await growth.consider(nodes)
        raise ended.result()
    finally:
        ended.cancel()


class _Growth:
    """Says what the site would gain with the boxes that it has now, or moves the model there."""

    def __init__(self, client: Client, options: ServeOptions, narrator: Narrator) -> None:
        self._client = client
        self._options = options
        self._narrator = narrator
        self._said = ""
        self._rests_until_s = 0.0

    async def consider(self, nodes: Sequence[Node]) -> None:
        """Nothing while a box that is here is not measured: a plan would stand on data sheets."""
        here = [node for node in nodes if node.connected]
        if time.monotonic() < self._rests_until_s or len(here) < 2:
            return
        if any(not node.placeable or node.unknown_profiles or node.unknown_links for node in here):
            return
        name = self._options.name
        try:
            found = await self._client.replan(name, dry_run=True)
            if found.reason is not ReplanReason.WOULD_MOVE:
                return
            gain = f"{layers_text(found.found)}: {sentence_of_gain(found)}"
            if self._options.grow:
                self._narrator.say(f"moving {name} to {gain}")
                await self._client.replan(name)
                self._narrator.say(f"{name} has moved; what ran went on")
            else:
                self._say_once(f"{name} would gain by {gain}; `edgectl replan {name}` moves it, --grow does so itself")
        except EdgeShardError as error:
            # It went back, or could not be asked: not again and again, since a move pauses what runs.
            self._rests_until_s = time.monotonic() + _REST_S
            self._say_once(f"{name} stays where it is: {error.message}")

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._narrator.say(text)


async def _offer(client: Client, site: OwnSite, narrator: Narrator) -> None:
    """The line that joins one more box."""
    from edgeshard.client.joining import token_to_text

    name = site.next_name({node.name for node in await client.nodes()})
    token = await client.create_token(Role.AGENT, name, _TOKEN_TTL_S)
    narrator.say(f"another box joins with this line, once, within a day:\n  edgectl join {token_to_text(token)}")
