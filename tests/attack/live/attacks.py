"""The attacker: a process that runs one attack against a site for some time, and reports the
outcome.

    python -m tests.attack.live.attacks NAME SECONDS < TARGET

It reads a `Target` in JSON, prints `ready` once its imports are done, and an `Outcome` in JSON at
the end.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from itertools import cycle

import grpc

from edgeshard.client import Client
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.identity import Role
from edgeshard.rpc.channel import open_channel
from edgeshard.rpc.open_calls import MOST_STREAMS
from edgeshard.storage.blobs import BlobDirectory
from edgeshard.storage.forms import TOKENIZER
from edgeshard.wire.store import manifest_from_json
from tests.attack import (
    audit,
    bodies,
    connections,
    guides,
    http_connections,
    joining,
    linked_files,
    resumption,
    revocation,
    smuggling,
    streams,
    terminal,
    tokenize,
    tokenizer_growth,
)
from tests.attack.live import members, revoked, strangers
from tests.attack.live.target import Attack, Outcome, Target, again
from tests.support.chat_models import demo_model_with
from tests.support.tokenizers import write_tokenizer

BUSY = "busy"
"""No attack but a loop, for the baseline."""
READY = "ready"
RESUME_ENDED = "resumption.resume_ended"
NEW_REQUESTS = "resumption.new_requests"
"""No attack either: as many requests as RESUME_ENDED may have, and no resumption. The requests of
RESUME_ENDED must slow others no more than this does."""
NOT_COUNTED = {"connections.churning_joiners": "WALL", NEW_REQUESTS: "FAIR"}
"""Misses that say nothing against a site, by attack. WALL: connections that arrive faster than they
end fill a port, whatever serves it. FAIR: a client's own share of the site."""
MOST_DESCRIPTORS = 8192
LATE_S = 20.0
"""Behind its time an attack is given up that a site holds up."""
ENDS_S = 5.0
"""A node hears with its next heartbeat who was revoked."""


async def _busy(target: Target, seconds: float) -> Outcome:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    return Outcome()


async def _long_texts(target: Target, seconds: float) -> Outcome:
    return Outcome(
        await again(seconds, partial(tokenize.long_texts, target.gateway, target.key, target.model))
    )


async def _fitting_texts(target: Target, seconds: float) -> Outcome:
    """Texts of the context's length."""
    posts = partial(
        tokenize.long_texts, target.gateway, target.key, target.model, count=40, size=1500
    )
    return Outcome(await again(seconds, posts))


async def _long_variables(target: Target, seconds: float) -> Outcome:
    return Outcome(
        await again(
            seconds, partial(tokenize.long_variables, target.gateway, target.key, target.model)
        )
    )


async def _unfinished(target: Target, seconds: float) -> Outcome:
    once = partial(bodies.unfinished, target.gateway, target.key, seconds=min(0.4 * seconds, 10.0))
    return Outcome(await again(seconds, once))


async def _dripping(target: Target, seconds: float) -> Outcome:
    once = partial(bodies.dripping, target.gateway, target.key, seconds=0.9 * seconds)
    return Outcome(await again(seconds, once))


async def _http_silent(target: Target, seconds: float) -> Outcome:
    async with http_connections.silent(target.gateway) as held:
        await asyncio.sleep(seconds)
        return Outcome(
            Counter({"made": len(held), "open at the end": http_connections.still_open(held)})
        )


async def _http_churning(target: Target, seconds: float) -> Outcome:
    return Outcome(
        Counter({"made": await http_connections.churning(target.gateway, seconds=seconds)})
    )


async def _smuggling(target: Target, seconds: float) -> Outcome:
    wrong = set[str]()

    async def once() -> Counter[str]:
        said: Counter[str] = Counter()
        for name, request in smuggling.REQUESTS.items():
            statuses, closed = await smuggling.sent(target.gateway, request)
            before = [200] if name == "a bare LF in the second request" else []
            if statuses != [*before, 400] or not closed:
                wrong.add(f"{name}: answered {statuses}, {'closed' if closed else 'left open'}")
            said[str(statuses)] += 1
        return said

    said = await again(seconds, once)
    return Outcome(said, sorted(wrong))


async def _drown(target: Target, seconds: float) -> Outcome:
    refused = await audit.drown(target.address, target.client, count=1_000_000, seconds=seconds)
    async with Client(target.address, target.operator) as admin:
        entries = await admin.audit(50)
    told = any(
        (entry.what, entry.result, entry.target) == ("Enrol", "ok", target.token_id)
        for entry in entries
    )
    wrong = [] if told else ["the audit log hides that somebody joined"]
    return Outcome(Counter({"refused": refused}), wrong)


async def _linger(target: Target, seconds: float) -> Outcome:
    outcome = Outcome()
    async with Client(target.address, target.operator) as admin:
        for role, address, files, node in (
            (Role.CLIENT, target.address, target.leaving_client, ""),
            (Role.AGENT, target.node_address, target.leaving_node, target.node),
        ):
            revoke = partial(admin.revoke, role, target.leaver)
            ends = await revocation.linger(address, files, revoke, node=node, seconds=ENDS_S)
            for call, end in ends.items():
                outcome.said[end] += 1
                if end != "PERMISSION_DENIED":
                    outcome.wrong.append(f"{call} of a revoked {role}: {end} after {ENDS_S:g} s")
    return outcome


async def _guess(target: Target, seconds: float) -> Outcome:
    authority = target.authority.encode()
    met = await joining.guess(
        target.enrolment, authority, target.site, target.token_id, seconds=seconds
    )
    return Outcome(met)


async def _hold_turns(target: Target, seconds: float) -> Outcome:
    await joining.hold_turns(
        target.enrolment, target.authority.encode(), target.site, seconds=seconds
    )
    return Outcome()


async def _steer(target: Target, seconds: float) -> Outcome:
    """Both ways to say it, in turns, over and over."""
    wrong = set[str]()
    async with (
        open_channel(target.address, target.agent) as node,
        open_channel(target.address, target.client) as client,
    ):

        async def once() -> Counter[str]:
            said: Counter[str] = Counter()
            for text in terminal.STEERING:
                met = await terminal.say_as_a_node(node, "mallory", text)
                met["request_id"] = await terminal.say_as_a_client(client, text)
                wrong.update(
                    f"{field} takes {text!r}" for field, refused in met.items() if refused != field
                )
                said["refused"] += sum(refused == field for field, refused in met.items())
            return said

        said = await again(seconds, once)
    return Outcome(said, sorted(wrong))


async def _resume_ended(target: Target, seconds: float) -> Outcome:
    count, wrong = max(10, min(100, int(3 * seconds))), set[str]()

    async def once() -> Counter[str]:
        found = await resumption.resume_ended(
            target.address, target.client, target.model, count=count, seconds=15.0
        )
        for name in ("others", "never"):
            if found[name][resumption.STARTED]:
                wrong.add(
                    f"{found[name][resumption.STARTED]} of {count} resumed requests ran: {name}"
                )
        return Counter(
            {f"{name} {end}": n for name, ends in found.items() for end, n in ends.items()}
        )

    said = await again(seconds, once)
    return Outcome(said, sorted(wrong))


async def _new_requests(target: Target, seconds: float) -> Outcome:
    async def once() -> Counter[str]:
        return Counter(
            ran=await resumption.let_end(target.address, target.client, target.model, count=10)
        )

    return Outcome(await again(seconds, once))


async def _open_many(target: Target, seconds: float) -> Outcome:
    kinds, wrong = cycle(("Watch", "Listen")), set[str]()

    async def once() -> Counter[str]:
        kind = next(kinds)
        met = await streams.open_many(target.address, target.client, kind, seconds=10.0)
        if met[streams.OPEN] > MOST_STREAMS:
            wrong.add(f"{met[streams.OPEN]} streams of {kind} are open, at most {MOST_STREAMS}")
        return Counter({f"{kind} {end}": n for end, n in met.items()})

    said = await again(seconds, once)
    return Outcome(said, sorted(wrong))


def _churning(kind: connections.Kind, where: Callable[[Target], str]) -> Attack:
    """A new connection for each that the site ends."""

    async def attack(target: Target, seconds: float) -> Outcome:
        made = await connections.churn(
            where(target), seconds=seconds, at_once=_most_connections(), kind=kind
        )
        return Outcome(Counter({"made": made}))

    return attack


async def _joiners(target: Target, seconds: float) -> Outcome:
    held = await connections.hold(target.enrolment, count=_most_connections(), seconds=seconds)
    return Outcome(Counter({"made": held.made, "open at the end": held.still_open}))


def _most_connections() -> int:
    return min(3000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 100)


async def _grow(target: Target, seconds: float) -> Outcome:
    """Each is added by an operator who does not look."""
    outcome = Outcome()
    directory = demo_model_with(target.scratch / "grows")
    async with Client(target.address, target.operator) as admin:
        for name, parts in tokenizer_growth.chains().items():
            write_tokenizer(directory / TOKENIZER, **parts)
            try:
                await admin.add_model(directory, "grows")
                outcome.wrong.append(f"a tokenizer that doubles 40 times was added: {name}")
                await admin.delete_model("grows")
            except EdgeShardError as error:
                outcome.said[error.reason] += 1
    return outcome


async def _edit(target: Target, seconds: float) -> Outcome:
    """Edit the files of a model in place after an operator added it."""
    directory = demo_model_with(target.scratch / "linked")
    name = "linked"
    outcome = Outcome()
    models = target.state / "models"
    async with Client(target.address, target.operator) as admin:
        digest = await admin.add_model(directory, name)
        outcome.said["edited"] += linked_files.edit(
            directory / "chat_template.jinja", b"a tool", b"a joke"
        )
        text = (models / "manifests" / f"{digest}.json").read_text(encoding="utf-8")
        blobs = BlobDirectory(models / "blobs")
        for file in manifest_from_json(text, digest).files:
            if not blobs.is_intact(file.sha256, file.size):
                outcome.wrong.append(f"{file.name} is not what was added")
        await admin.delete_model(name)
    return outcome


async def _guides(target: Target, seconds: float) -> Outcome:
    return Outcome(
        await guides.ambiguous(target.address, target.client, target.model, seconds=seconds)
    )


ATTACKS: dict[str, Attack] = {
    "tokenize.long_texts": _long_texts,
    "tokenize.fitting_texts": _fitting_texts,
    "tokenize.long_variables": _long_variables,
    "bodies.unfinished": _unfinished,
    "bodies.dripping": _dripping,
    "http_connections.silent": _http_silent,
    "http_connections.churning": _http_churning,
    "smuggling.sent": _smuggling,
    "audit.drown": _drown,
    "revocation.linger": _linger,
    "terminal.say": _steer,
    NEW_REQUESTS: _new_requests,
    RESUME_ENDED: _resume_ended,
    "streams.open_many": _open_many,
    "connections.silent": _churning("silent", lambda target: target.address),
    "connections.half": _churning("half", lambda target: target.address),
    "connections.joiners": _joiners,
    "connections.churning_joiners": _churning("silent", lambda target: target.enrolment),
    "tokenizer_growth.chains": _grow,
    "linked_files.edit": _edit,
    "joining.hold_turns": _hold_turns,
    "joining.guess": _guess,
    "guides.ambiguous": _guides,
    "lying_node.lie": members.lies_of_a_node,
    "costly_bodies.send": revoked.costly,
    "late_bodies.of_a_key": revoked.revoked_key,
    "late_bodies.of_an_operator": revoked.revoked_operator,
    "middle.meddle": strangers.meddle,
    "local_user.look": strangers.look,
}
"""By the functions of `tests/attack/` that they call. An attacker that guesses locks its own
address out for a minute, so attacks that enrol are first."""
NAMES = (*ATTACKS, *members.SET_UPS)


def main(name: str, seconds: float) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if most == resource.RLIM_INFINITY else min(MOST_DESCRIPTORS, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    target = Target.loaded(sys.stdin.readline())
    asyncio.run(_attack(name, target, seconds))
    os._exit(0)  # Threads of an agent's engine would not end by themselves.


async def _attack(name: str, target: Target, seconds: float) -> None:
    """Tell when it begins, and its outcome."""
    async with AsyncExitStack() as stack:
        if name in members.SET_UPS:
            attack = await stack.enter_async_context(members.SET_UPS[name](target))
        else:
            attack = {BUSY: _busy, **ATTACKS}[name]
        _say(READY)
        _say((await _told(attack, target, seconds)).dumped())


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _told(attack: Attack, target: Target, seconds: float) -> Outcome:
    """An attack that a site ends, and no promise of whose was broken, is an outcome."""
    try:
        async with asyncio.timeout(seconds + LATE_S):
            return await attack(target, seconds)
    except (OSError, grpc.aio.AioRpcError, EdgeShardError) as error:
        return Outcome(Counter({f"ended by {type(error).__name__}: {error}"[:200]: 1}))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
