"""The input of an attack on a live site, and its outcome."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import grpc

from edgeshard.client import Client
from edgeshard.domain.errors import EdgeShardError
from edgeshard.rpc.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class Target:
    """The data that an attacker has about a site: addresses, its own `key` and `client`, and its
    own node's certificate for attacks by nodes. `operator` is for an operator's actions meanwhile,
    `leaver` for the principal that is revoked. It knows the id of the token by which an honest
    joiner, with whom it has nothing to do, joins; `scratch` is a directory for it."""

    address: str
    enrolment: str
    gateway: str
    node: str
    node_address: str
    model: str
    site: str
    authority: str
    key: str = field(repr=False)
    client: TlsFiles
    agent: TlsFiles
    operator: TlsFiles
    leaver: str
    leaving_client: TlsFiles
    leaving_node: TlsFiles
    leaving_operator: TlsFiles
    token_id: str
    state: Path
    scratch: Path

    def dumped(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def loaded(cls, text: str) -> Target:
        values: dict[str, Any] = json.loads(text)
        for each in fields(cls):
            if each.type == "TlsFiles":
                values[each.name] = TlsFiles(
                    **{name: Path(path) for name, path in values[each.name].items()}
                )
            elif each.type == "Path":
                values[each.name] = Path(values[each.name])
        return cls(**values)


@dataclass(slots=True)
class Outcome:
    """Counts of the answers that the attacker got, and the promises that they break."""

    said: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def dumped(self) -> str:
        return json.dumps({"said": dict(self.said), "wrong": self.wrong})


@dataclass(slots=True)
class Entered:
    """The parts of a site that `Browser.of` reads: the client of the operator whose link it
    opens."""

    client: Client


Attack = Callable[[Target, float], Awaitable[Outcome]]


async def again(seconds: float, once: Callable[[], Awaitable[Mapping[Any, int]]]) -> Counter[str]:
    """Repeat it until the time is over; return the sum of its results. Work that the end interrupts
    is not counted."""
    said: Counter[str] = Counter()
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                try:
                    said.update({str(name): count for name, count in (await once()).items()})
                except (OSError, grpc.aio.AioRpcError, EdgeShardError) as error:
                    said[type(error).__name__] += 1
                    await asyncio.sleep(0.1)
    return said
