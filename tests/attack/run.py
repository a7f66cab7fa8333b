"""Attack a live site, and see what others meet meanwhile: `make attack`.

    python -m tests.attack.run [--seconds 30] [--attack NAME]... [--share 0.5] [-o FILE]

A site over mutual TLS runs on loopback. It has a coordinator with a listener for joiners and an
HTTP gateway, three agents, and two deployments of the demo model. Each attack runs for some
seconds, and before it a loop that does nothing for the same time. Both run in a process of a
control group with a share of a core. Honest clients over the SDK and over HTTP, an operator and
somebody who joins are timed. A line for each attack says what it misses of the limits
(tests/attack/live/verdict.py), or PASS; exit code 1 where one misses any. Two do not count: WALL is
a miss that only a firewall prevents (docs/limits.md), and FAIR is what requests cost the others
that a client may have. `resumption.resume_ended` is held against those, not against the loop.
--attack takes those whose names begin so; -o writes all figures in JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.cgroups import command_inside, part_of_a_core
from edgeshard.domain.errors import EdgeShardError
from edgeshard.domain.identity import JoinToken, Role
from tests.attack.live.attacks import BUSY, NAMES, NEW_REQUESTS, NOT_COUNTED, READY, RESUME_ENDED
from tests.attack.live.honest import measured
from tests.attack.live.site import DEPLOYMENT, HONEST, LiveSite
from tests.attack.live.target import Outcome, Target
from tests.attack.live.verdict import Figures, missed
from tests.attack.raw import ask

ROOT = Path(__file__).resolve().parents[2]
STARTS_S = 150.0
ENDS_S = 90.0
"""Time after its end for an attacker to report its outcome."""
RECOVERS_S = 60.0
QUICK_S = 0.5
TELLING_S = 0.2
"""A pause of the measuring process that the row reports."""


@dataclass(frozen=True, slots=True)
class Row:
    """One attack: the figures of others under it and during the loop, the attacker's report `told`,
    and the missed limits.
    """

    attack: str
    seconds: float
    attacked: Figures
    baseline: Figures
    told: Mapping[str, int]
    missed: Sequence[str]

    @property
    def counts(self) -> bool:
        """Whether the site is to withstand it by itself."""
        return self.attack not in NOT_COUNTED

    def line(self) -> str:
        texts = []
        for name, gaps in self.attacked.clients.items():
            before = self.baseline.clients[name]
            texts.append(
                f"{name} {self.attacked.share_of(self.baseline, name):.2f} of the tokens, "
                f"{1000 * gaps.median_s:.1f} ms (baseline {1000 * before.median_s:.1f}), "
                f"longest {gaps.worst_s:.2f} s ({before.worst_s:.2f})"
            )
        texts.append(
            "operator " + " and ".join(f"{took_s:.2f} s" for took_s in self.attacked.calls.values())
        )
        joined_s = self.attacked.joined_s
        texts.append("no joiner" if joined_s is None else f"joined in {joined_s:.2f} s")
        texts.append(
            ", ".join(
                f"{name} +{grown / 1e6:.0f} MB" for name, grown in self.attacked.grown_bytes.items()
            )
        )
        texts.append(
            ", ".join(
                f"{name} {first}-{last}" for name, (first, last) in self.attacked.epochs.items()
            )
        )
        texts.append(f"log {self.attacked.log_bytes_per_minute / 1e6:.2f} MB/min")
        pause_s = self.attacked.own_pause_s
        texts += (
            [f"of that {pause_s:.2f} s this process stood still"] if pause_s > TELLING_S else []
        )
        told = ", ".join(f"{count} x {what}" for what, count in self.told.items())
        verdict = "PASS" if not self.missed else NOT_COUNTED.get(self.attack, "MISS")
        first = f"{verdict}  {self.attack:28} {'; '.join(texts)}"
        return "\n      ".join([first, f"told: {told or 'nothing'}", *self.missed])


def chosen(names: Sequence[str]) -> list[str]:
    """The attacks whose names begin so, all without a name. Raises ValueError if no name begins
    so."""
    for name in names:
        if not any(attack.startswith(name) for attack in NAMES):
            raise ValueError(f"no attack's name begins with {name!r}: they are {', '.join(NAMES)}")
    return [attack for attack in NAMES if not names or attack.startswith(tuple(names))]


@asynccontextmanager
async def attacker(
    name: str, seconds: float, target: Target, group: Path | None
) -> AsyncIterator[list[str]]:
    """A process that attacks, in the group if there is one; after the `with`, the list has its
    outcome in JSON. Raises RuntimeError if it does not begin, or does not end in time."""
    command = [sys.executable, "-m", "tests.attack.live.attacks", name, str(seconds)]
    with (target.scratch / f"{name}.err").open("w+b") as errors:
        process = await asyncio.create_subprocess_exec(
            *(command if group is None else command_inside(group, command)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
        )
        assert process.stdin is not None and process.stdout is not None
        said: list[str] = []
        try:
            process.stdin.write(target.dumped().encode() + b"\n")
            async with asyncio.timeout(STARTS_S):
                ready = await process.stdout.readline()
            if ready.decode().strip() == READY:
                yield said
                async with asyncio.timeout(ENDS_S):
                    said.append((await process.stdout.read()).decode())
                    await process.wait()
        except TimeoutError:
            raise RuntimeError(f"{name} did not begin or end in time") from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
            await process.wait()
        if process.returncode != 0:
            errors.seek(0)
            why = f"the attacker ended with {process.returncode}: {errors.read()[-2000:].decode()}"
            if not said:
                raise RuntimeError(why)
            said[:] = [Outcome(wrong=[why]).dumped()]


async def attacked(
    site: LiveSite, name: str, seconds: float, group: Path | None, scratch: Path
) -> Row:
    """One attack, after its baseline."""
    directory = scratch / f"{name}-{site.rounds}"
    directory.mkdir(parents=True)
    target, token = await site.next_round(directory)
    beside = NEW_REQUESTS if name == RESUME_ENDED else BUSY
    baseline, _ = await _beside(site, beside, seconds, target, group, None)
    figures, said = await _beside(site, name, seconds, target, group, token)
    outcome = json.loads(said)
    wrong = [*outcome["wrong"], *(f"{process} ended" for process in site.dead())]
    return Row(name, seconds, figures, baseline, outcome["said"], missed(figures, baseline, wrong))


async def _beside(
    site: LiveSite,
    name: str,
    seconds: float,
    target: Target,
    group: Path | None,
    token: JoinToken | None,
) -> tuple[Figures, str]:
    async with attacker(name, seconds, target, group) as said:
        figures = await measured(site, seconds, token)
    return figures, said[-1]


async def recovered(site: LiveSite) -> None:
    """Wait until clients are answered as quickly as before, for a minute at most: the next attack
    begins then."""
    until = time.monotonic() + RECOVERS_S
    async with site.client_of(Role.CLIENT, "honest") as client:
        while time.monotonic() < until:
            began = time.monotonic()
            with suppress(EdgeShardError):
                for name in HONEST:
                    await client.complete(name, "Once", max_new_tokens=5, timeout_s=10.0)
                body = {
                    "model": DEPLOYMENT,
                    "messages": [{"role": "user", "content": "Once"}],
                    "max_tokens": 5,
                }
                await ask(site.gateway, site.honest, "/v1/chat/completions", body, timeout_s=10.0)
                if time.monotonic() - began < QUICK_S:
                    return
            await asyncio.sleep(0.2)


async def run(names: Sequence[str], seconds: float, share: float, scratch: Path) -> list[Row]:
    """A row for each attack. A site that lost a process is replaced by a new one."""
    rows: list[Row] = []
    sites, left = 0, list(names)
    with part_of_a_core("attacker", share) as group:
        if group is None:
            say(
                "no control group can be made here: attacks and loop have whole cores instead of "
                f"{share:g} of one"
            )
        while left:
            sites += 1
            async with LiveSite(scratch / f"site-{sites}") as site:
                began = site.memory_bytes()
                while left and not site.dead():
                    await recovered(site)
                    rows.append(await attacked(site, left.pop(0), seconds, group, scratch))
                    say(rows[-1].line())
                for name, resident in site.memory_bytes().items():
                    say(f"{name} had {began[name] / 1e6:.0f} MB, and has {resident / 1e6:.0f} MB")
    return rows


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="for each attack, and for its baseline"
    )
    parser.add_argument(
        "--attack", action="append", default=[], metavar="NAME", help="may be repeated"
    )
    parser.add_argument("--share", type=float, default=0.5, help="of a core, for the attacker")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    try:
        names = chosen(options.attack)
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(prefix="attack-") as scratch:
        rows = asyncio.run(run(names, options.seconds, options.share, Path(scratch)))
    if options.output is not None:
        options.output.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    misses = sum(bool(row.missed) and row.counts for row in rows)
    say(f"{len(rows)} attacks of {options.seconds:g} s, {misses} with a limit missed")
    return int(misses > 0)


if __name__ == "__main__":
    sys.exit(main())
