"""The output of every command of edgectl on a live site, as a table and as JSON, kept in `golden`.

`EDGESHARD_GOLDEN=write` writes the files again. A command of edgectl is a line of `CASES`, or of
`ELSEWHERE` with the test that checks its output.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from edgeshard.cli.main import Lazy, app
from edgeshard.domain.deployments.deployment import parse_spec
from edgeshard.local.cluster import LocalCluster
from tests.support.golden import json_text, masked_text

pytestmark = [pytest.mark.timing, pytest.mark.in_order]

GOLDEN = Path(__file__).parent / "golden"
WRITES = os.environ.get("EDGESHARD_GOLDEN") == "write"
SPEC = {
    "name": "tales",
    "model": "fairy-tales",
    "dtype": "float32",
    "concurrency": 2,
    "layers": "a=0:6,b=6:12",
}
TESTBED = Path(__file__).parents[2] / "deploy" / "examples" / "paper-testbed.toml"


@dataclass(frozen=True)
class Case:
    """A command line; `{dir}` is a directory of the test's own. `json` is whether it has `-o json`,
    too."""

    line: str
    json: bool = True
    exit_code: int = 0
    twice: bool = True
    """Whether it can be run once more, for its JSON."""

    @property
    def words(self) -> list[str]:
        return self.line.split()

    @property
    def command(self) -> str:
        return " ".join(command_of(self.words))


TEXT_ONLY = False
# In this order, on one site: what deletes comes last.
CASES = [
    Case("version", TEXT_ONLY),
    Case("init mill --directory {dir}/pki", TEXT_ONLY),
    Case("certificate agent cellar --directory {dir}/pki", TEXT_ONLY),
    Case("get nodes"),
    Case("get models"),
    Case("get deployments"),
    Case("ps"),
    Case("get events --limit 4"),
    Case("get audit --limit 3"),
    Case("describe node a"),
    Case("describe model fairy-tales"),
    Case("describe deployment tales"),
    Case("profile"),
    Case("plan --model fairy-tales --source a", TEXT_ONLY, exit_code=1),
    Case("plan --cluster {testbed} --model llama2-7b"),
    Case("model add {model} --name cellar"),
    Case("model list"),
    Case("generate tales Once --max-tokens 4"),
    Case("run tales Once --max-tokens 4", TEXT_ONLY),
    Case("trace tales --seconds 0.1", TEXT_ONLY, exit_code=1),
    Case("apply -f {dir}/tales.toml"),
    Case("deploy cellar --model cellar --source b --dry-run"),
    Case(
        "deploy cellar --model cellar --layers b=0:12 --max-context 64 --concurrency 1 --measure "
        "200",
        twice=False,
    ),
    Case("logs coordinator --lines 0 --directory {dir}", TEXT_ONLY),
    Case("debug dump -o {dir}/site.json --force", TEXT_ONLY),
    Case("debug replay {dir}/site.json", TEXT_ONLY),
    Case("token create --node cellar", TEXT_ONLY, exit_code=1),
    Case("token list"),
    Case("token revoke 0123456789abcdef", TEXT_ONLY, exit_code=3),
    Case("delete deployment cellar", TEXT_ONLY),
    Case("delete deployment tales", TEXT_ONLY),
    Case("delete packed a --unused"),
    Case("delete model cellar", TEXT_ONLY),
    Case("config check {dir}/site.toml", TEXT_ONLY),
    Case("config show coordinator --config {dir}/site.toml"),
    Case("config docs agent", TEXT_ONLY),
    Case("label node a zone=hall1 rack-", TEXT_ONLY),
    Case("node revoke app --role client", TEXT_ONLY),
    Case("delete node b", TEXT_ONLY),
]
ELSEWHERE = {
    "bench": "its figures are of the machine: test_bench.py",
    "chat": "it is a conversation: test_chat.py",
    "doctor": "what it finds is of the machine: test_doctor.py",
    "dashboard": "it prints a secret: tests/gateway",
    "key create": "it prints a secret: tests/gateway",
    "key list": "it lists what key create made: tests/gateway",
    "key revoke": "it prints nothing: tests/gateway",
    "replan": "it moves a deployment: test_replan.py",
    "serve": "it starts a site of its own: test_serve.py",
    "top": "it is a live view: test_top.py",
    "join": "it becomes the agent: test_joining.py",
    "demo": "it starts a site of its own: test_documents.py runs it from docs/demo-model.md",
    "lab run": "it starts a site of its own: test_documents.py runs it from docs/lab.md",
    "lab up": "it starts a site of its own: test_documents.py runs it from docs/lab.md",
    "lab down": "it starts a site of its own: test_documents.py runs it from docs/lab.md",
    "install agent": "it changes the machine: test_install.py",
    "install coordinator": "it changes the machine: test_install.py",
    "backup": "it copies a site that lasts: test_backup.py",
    "restore": "it needs a backup: test_backup.py",
    "set-coordinator": "it changes this user's settings: test_backup.py",
    "upgrade": "it changes the machine: tests/installing/test_upgrade.py",
    "uninstall agent": "it changes the machine: test_install.py",
    "uninstall coordinator": "it changes the machine: test_install.py",
}


def commands(group: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command that can be typed, without aliases."""
    for name, listed in group.commands.items():
        command = listed.load() if isinstance(listed, Lazy) else listed
        if hasattr(command, "commands"):
            yield from commands(command, (*prefix, name))
        else:
            yield (*prefix, name)


def command_of(words: list[str]) -> tuple[str, ...]:
    (found,) = (command for command in ALL if words[: len(command)] == list(command))
    return found


ALL = sorted(commands(typer.main.get_command(app)))


class Site:
    """A coordinator and two nodes with the demo model deployed, run by an event loop in a thread of
    its own, so that commands can have theirs in the test's."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cluster = LocalCluster(
            directory, ("a", "b"), agent_arguments=("--memory", "1GiB"), secure=True
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.model = Path(str(resources.files("edgeshard") / "demo_model"))

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(180)

    async def start(self) -> None:
        await self.cluster.start()
        async with self.cluster.client() as client:
            await client.add_model(self.model, "fairy-tales")
            async for (
                _
            ) in client.profile():  # links: a site measures unmeasured links at some time by itself
                pass
            await client.deploy(parse_spec(SPEC), timeout_s=120)
            await client.complete("tales", "Once upon a time", max_new_tokens=4)

    def close(self) -> None:
        self.run(self.cluster.stop(1.0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def edgectl(self, line: str, *more: str) -> Any:
        words = [
            word.format(dir=self.directory, model=self.model, testbed=TESTBED)
            for word in line.split()
        ]
        pki = self.directory / "pki" / "operator-admin"
        options = [f"--tls-{name}={pki / name}.pem" for name in ("ca", "cert", "key")]
        return CliRunner().invoke(
            app, ["--coordinator", self.cluster.address, *options, *words, *more]
        )


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, forked_daemons: None) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as environment:
        directory = tmp_path_factory.mktemp("golden")
        environment.setenv("XDG_CONFIG_HOME", str(directory / "config"))
        environment.setenv("XDG_STATE_HOME", str(directory / "state"))
        (directory / "site.toml").write_text('[coordinator]\nlog_level = "debug"\n')
        (directory / "tales.toml").write_text(
            "".join(f"{key} = {value!r}\n" for key, value in SPEC.items())
        )
        site = Site(directory)
        try:
            site.run(site.start())
            yield site
        finally:
            site.close()


@pytest.fixture(autouse=True)
def with_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGESHARD__CLIENT__PLAINTEXT", raising=False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.line)
def test_what_a_command_prints(live: Site, case: Case) -> None:
    result = live.edgectl(case.line)
    assert result.exit_code == case.exit_code, result.stderr
    said = result.stdout if result.exit_code == 0 else result.stderr
    printed = f"$ edgectl {case.line}\n{masked_text(said)}"
    if case.json and case.twice:
        shown = live.edgectl(case.line, "-o", "json")
        assert shown.exit_code == 0, shown.stderr
        printed += f"\n$ edgectl {case.line} -o json\n{json_text(shown.stdout)}"
    printed = printed.replace(str(live.directory), "DIR")
    printed = printed.replace(str(Path(__file__).resolve().parents[2]), "CHECKOUT")
    file = GOLDEN / f"{file_name(case)}.txt"
    if WRITES:
        file.write_text(printed)
    assert printed == file.read_text(), (
        f"{file}: EDGESHARD_GOLDEN=write renews it; unmasked:\n{said}"
    )


def file_name(case: Case) -> str:
    """The command's name, with a number if a command has several cases."""
    same = [other for other in CASES if other.command == case.command]
    number = f"-{same.index(case) + 1}" if len(same) > 1 else ""
    return case.command.replace(" ", "-") + number


def test_every_command_has_its_output_looked_at() -> None:
    there = {" ".join(command) for command in ALL}
    looked_at = {case.command for case in CASES}
    assert there == looked_at | ELSEWHERE.keys(), (
        "a new command is a line of CASES, or of ELSEWHERE"
    )
    assert not looked_at & ELSEWHERE.keys()


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {file_name(case) for case in CASES}
