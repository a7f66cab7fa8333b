"""Habits from other tools: short names, lists that stay, one command from a model to an answer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from edgeshard.cli.commands.requests.run import _chat
from edgeshard.cli.commands.site.logs import command_of
from edgeshard.cli.main import app
from edgeshard.cli.render.output import Column
from edgeshard.cli.render.watch import Changes, Rows
from edgeshard.domain.control.site import SiteEvent, Subject
from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.errors import InvalidArgumentError, NotFoundError
from edgeshard.proto.v1 import admin_pb2, inference_pb2

pytestmark = pytest.mark.timing

EVENTS = [
    SiteEvent(1, "2026-01-02T03:04:05.678+00:00", Subject.NODE, "a", "joined", "127.0.0.1:7001"),
    SiteEvent(
        2,
        "2026-01-02T03:04:06.678+00:00",
        Subject.DEPLOYMENT,
        "tales",
        "waiting",
        "node a is away",
        True,
    ),
]


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (["get", "node"], ["get", "nodes"]),
        (["get", "deploy"], ["get", "deployments"]),
        (["get", "deployment"], ["get", "deployments"]),
        (["get", "event"], ["get", "events"]),
        (["ps"], ["get", "deployments"]),
        (["describe", "nodes", "a"], ["describe", "node", "a"]),
        (["describe", "deploy", "tales"], ["describe", "deployment", "tales"]),
        (["delete", "models", "x"], ["delete", "model", "x"]),
        (["--version"], ["version"]),
    ],
)
def test_short_names(edgectl: Any, site: Any, short: list[str], long: list[str]) -> None:
    site.events = list(EVENTS)
    first, second = edgectl(*short), edgectl(*long)
    assert (
        (first.exit_code, first.stdout) == (second.exit_code, second.stdout) == (0, second.stdout)
    )


def test_generate_takes_the_prompt_behind_the_model(edgectl: Any, site: Any) -> None:
    assert edgectl("generate", "tales", "Once upon").exit_code == 0
    assert edgectl("generate", "tales", "-", stdin="a time").exit_code == 0
    assert [request.generation.prompt for request in site.sent(inference_pb2.GenerateRequest)] == [
        "Once upon",
        "a time",
    ]
    twice = edgectl("generate", "tales", "Once", "--prompt", "upon")
    assert twice.exit_code == 2 and "not both" in twice.stderr


def test_events_are_listed(edgectl: Any, site: Any) -> None:
    assert edgectl("get", "events").stderr == "none\n"
    site.events = list(EVENTS)
    header, first, second = edgectl("get", "events", "--limit", "7").stdout.splitlines()
    assert header.split() == ["TIME", "WHAT", "DETAIL"]
    assert first.split() == ["2026-01-02T03:04:05Z", "node", "a", "joined", "127.0.0.1:7001"]
    assert second.split() == [
        "2026-01-02T03:04:06Z",
        "!",
        "deployment",
        "tales",
        "waiting",
        "node",
        "a",
        "is",
        "away",
    ]
    assert site.sent(admin_pb2.ListEventsRequest)[-1].limit == 7
    assert [
        event["what"] for event in json.loads(edgectl("get", "events", "-o", "json").stdout)
    ] == [
        "joined",
        "waiting",
    ]


@contextmanager
def watching(site: Any, *arguments: str) -> Iterator[Any]:
    command = [
        sys.executable,
        "-m",
        "edgeshard.cli.main",
        "--coordinator",
        site.address,
        *arguments,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def test_events_are_followed(site: Any) -> None:
    site.events = list(EVENTS)
    with watching(site, "get", "events", "-w") as process:
        assert process.stdout.readline().split() == ["TIME", "WHAT", "DETAIL"]
        assert "node a joined" in process.stdout.readline()
        assert "node a is away" in process.stdout.readline()
        assert site.held.wait(60), "the stream stays open"
    assert site.cancelled.wait(60)


def test_a_list_that_stays_prints_what_changes(site: Any) -> None:
    with watching(site, "get", "deployments", "-w", "-o", "json") as process:
        assert json.loads(process.stdout.readline())["phase"] == "ready"
        site.states = [site.deployment_in(DeploymentPhase.WAITING)]
        assert json.loads(process.stdout.readline())["phase"] == "waiting", (
            "one object a line, and no line between"
        )
        site.states = []
        assert process.stderr.readline() == "tales is gone\n"


@pytest.mark.parametrize("noun", ["events", "nodes"])
def test_what_comes_line_by_line_is_no_yaml(edgectl: Any, noun: str) -> None:
    result = edgectl("get", noun, "-w", "-o", "yaml")
    assert result.exit_code == 2 and "give -o json" in result.stderr


def test_only_what_a_table_shows_counts_as_a_change() -> None:
    columns: list[Column[tuple[str, str, float]]] = [
        Column("NAME", lambda item: item[0]),
        Column("PHASE", lambda item: item[1]),
        Column("SEEN", lambda item: str(item[2]), wide=True),
    ]
    changes = Changes(columns, lambda item: item[0])
    assert len(changes.of([("a", "ready", 1.0), ("b", "ready", 1.0)])) == 2
    assert changes.of([("a", "ready", 2.0), ("b", "away", 2.0)]) == [("b", "away", 2.0)]
    assert (changes.of([("b", "away", 3.0)]), changes.gone) == ([], ["a"])
    rows = Rows(columns[:2])
    assert rows.lines(("a", "ready", 1.0)) == ["NAME  PHASE", "a     ready"]
    assert rows.lines(("a-long-name", "away", 1.0)) == ["a-long-name  away"]


def test_run_generates_with_what_is_deployed(edgectl: Any, site: Any) -> None:
    for name in ("tales", "fairy-tales"):
        result = edgectl("run", name, "Once", "--max-tokens", "5")
        assert (result.exit_code, result.stdout) == (0, "Once upon a time é!\n"), result.stderr
    assert not site.sent(admin_pb2.DeployRequest)
    assert site.sent(inference_pb2.GenerateRequest)[-1].generation.max_new_tokens == 5


def test_run_deploys_what_is_in_the_store(edgectl: Any, site: Any) -> None:
    site.models = [*site.models, site.stored_model("fables")]
    site.states = []
    site.on_deploy = [
        site.deployment_in(DeploymentPhase.LOADING),
        site.deployment_in(DeploymentPhase.READY),
    ]
    result = edgectl("run", "fables", stdin="Once")
    assert (result.exit_code, result.stdout) == (0, "Once upon a time é!\n"), result.stderr
    (request,) = site.sent(admin_pb2.DeployRequest)
    assert (request.spec.name, request.spec.model, request.spec.source) == ("fables", "fables", "")
    assert "fables: loading" in result.stderr


def test_run_does_not_say_of_a_deployment_that_failed_that_it_goes_on(
    edgectl: Any, site: Any
) -> None:
    site.models = [*site.models, site.stored_model("fables")]
    site.states = []
    failed = replace(
        site.deployment_in(DeploymentPhase.FAILED), failure=NotFoundError("node a has no memory")
    )
    site.on_deploy = [site.deployment_in(DeploymentPhase.LOADING), failed]
    result = edgectl("run", "fables", "Once")
    assert result.exit_code == 3 and "node a has no memory" in result.stderr
    assert "continues to load" not in result.stderr


def test_run_says_what_to_do_about_a_model_that_is_nowhere(edgectl: Any, site: Any) -> None:
    site.states = []
    result = edgectl("run", "legends", "Once")
    assert result.exit_code == 3 and "edgectl model add" in result.stderr


@pytest.mark.parametrize("talks", [True, False])
def test_run_without_a_prompt_hands_over_to_chat(talks: bool) -> None:
    small = typer.Typer()

    @small.command()
    def begin(context: typer.Context) -> None:
        _chat(context, "tales")

    @small.command(name="chat" if talks else "other")
    def chat(model: str) -> None:
        typer.echo(f"chat with {model}")

    result = CliRunner().invoke(small, ["begin"])
    if talks:
        assert result.stdout == "chat with tales\n"
    else:
        assert (
            isinstance(result.exception, InvalidArgumentError)
            and result.exception.field == "prompt"
        )


def test_logs_are_those_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.log").write_text("one\ntwo\nthree\n")
    assert command_of("a", 2, False, tmp_path)[:3] == ["tail", "-n", "2"]
    (tmp_path / "agent.toml").write_text('[agent]\nname = "b"\n')
    (tmp_path / "coordinator.toml").write_text("[coordinator]\n")
    (tmp_path / "journalctl").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    agent = command_of("b", 7, True, tmp_path, tmp_path)
    assert agent == ["journalctl", "-u", "edgeshard-agent", "-n", "7", "--no-pager", "-f"]
    assert command_of("coordinator", 7, False, tmp_path, tmp_path)[2] == "edgeshard-coordinator"
    with pytest.raises(NotFoundError, match="no log of c on this machine") as caught:
        command_of("c", 7, False, tmp_path, tmp_path)
    assert "journalctl -u edgeshard-agent" in caught.value.message


def test_a_log_is_printed(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("one\ntwo\nthree\n")
    command = [
        sys.executable,
        "-m",
        "edgeshard.cli.main",
        "logs",
        "a",
        "-n",
        "2",
        "--directory",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "two\nthree\n"), done.stderr


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_log_that_is_followed_ends_with_the_command_and_outlives_its_terminal(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.log").write_text("one\n")
    # As `nohup` begins it.
    command = ["env", "--ignore-signal=HUP", sys.executable, "-m", "edgeshard.cli.main"]
    command += ["logs", "a", "-f", "--directory", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "one\n"
            (tail,) = children(process.pid)
            process.send_signal(signal.SIGHUP)
            with (tmp_path / "a.log").open("a") as log:
                log.write("two\n")
            assert process.stdout.readline() == "two\n"
            process.terminate()
            assert process.wait(60) == 128 + signal.SIGTERM
            assert process.stdout.read() == "", "nobody else writes there"
            assert not Path(f"/proc/{tail}").exists()
        finally:
            process.kill()


def completed(site: Any, line: str) -> list[str]:
    """The completions that bash gets for a line whose last word is being typed."""
    words = line.split(" ")
    asked = {
        "_EDGECTL_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    asked["EDGESHARD__CLIENT__COORDINATOR"] = site if isinstance(site, str) else site.address
    result = CliRunner().invoke(app, [], prog_name="edgectl", env=asked)
    assert (result.exit_code, result.stderr) == (0, ""), result.exception
    return result.stdout.split()


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("edgectl describe node ", ["a", "b"]),
        ("edgectl describe deployment t", ["tales"]),
        ("edgectl delete model ", ["fairy-tales"]),
        ("edgectl generate ", ["fairy-tales", "tales"]),
        ("edgectl deploy x --model f", ["fairy-tales"]),
        ("edgectl deploy x --model fairy-tales --source ", ["a", "b"]),
        ("edgectl profile b", ["b"]),
        ("edgectl trace ", ["tales"]),
        ("edgectl run x", []),
    ],
)
def test_the_shell_completes_live_names(site: Any, line: str, names: list[str]) -> None:
    assert completed(site, line) == names


def test_completion_is_silent_without_a_coordinator(site: Any, free_port: int) -> None:
    assert completed(f"127.0.0.1:{free_port}", "edgectl describe node ") == []
    assert completed("nonsense", "edgectl describe node ") == []
    assert completed(
        f"127.0.0.1:{free_port}", f"edgectl --coordinator {site.address} describe node "
    ) == ["a", "b"]


def spec_file(directory: Path, text: str) -> str:
    path = directory / "tales.toml"
    path.write_text(text)
    return str(path)


SAME = 'name = "tales"\nmodel = "fairy-tales"\ndtype = "float32"\n'


def test_apply_leaves_alone_what_is_the_same(edgectl: Any, site: Any, tmp_path: Path) -> None:
    result = edgectl("apply", "-f", spec_file(tmp_path, SAME))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[1].split() == ["tales", "unchanged", "-", "a=0:4,b=4:9"]
    assert not site.sent(admin_pb2.DeployRequest)


def test_apply_creates_what_is_missing(edgectl: Any, site: Any, tmp_path: Path) -> None:
    site.states = []
    site.on_deploy = [site.deployment_in(DeploymentPhase.READY)]
    result = edgectl("apply", "-f", spec_file(tmp_path, SAME), "-o", "json")
    assert result.exit_code == 0, result.stderr
    (change,) = json.loads(result.stdout)
    assert (change["name"], change["action"], change["differences"]) == ("tales", "created", [])
    assert len(site.sent(admin_pb2.DeployRequest)) == 1


def test_apply_names_the_fields_that_cannot_change_and_changes_nothing(
    edgectl: Any, site: Any, tmp_path: Path
) -> None:
    file = spec_file(tmp_path, SAME + 'concurrency = 2\nsource = "b"\n')
    result = edgectl("apply", "-f", file)
    assert result.exit_code == 1
    assert "source is a and would become b; concurrency is 8 and would become 2" in result.stderr
    assert "edgectl delete deployment tales" in result.stderr and "--replace" in result.stderr
    dry = edgectl("apply", "-f", file, "--dry-run")
    assert dry.exit_code == 1 and dry.stdout.splitlines()[1].split() == [
        "tales",
        "refused",
        "source,concurrency",
        "-",
    ]
    assert "tales: concurrency is 8 and would become 2" in dry.stderr
    assert not site.sent(admin_pb2.DeployRequest) and not site.sent(
        admin_pb2.DeleteDeploymentRequest
    )


def test_apply_replaces_where_it_is_told_to(edgectl: Any, site: Any, tmp_path: Path) -> None:
    site.on_deploy = [site.deployment_in(DeploymentPhase.READY)]
    result = edgectl("apply", "-f", spec_file(tmp_path, SAME + "concurrency = 2\n"), "--replace")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[1].split()[:3] == ["tales", "replaced", "concurrency"]
    assert (
        len(site.sent(admin_pb2.DeleteDeploymentRequest))
        == len(site.sent(admin_pb2.DeployRequest))
        == 1
    )


def test_a_dry_run_of_apply_shows_the_plan(edgectl: Any, site: Any, tmp_path: Path) -> None:
    site.states = []
    result = edgectl("apply", "-f", spec_file(tmp_path, SAME), "--dry-run")
    assert result.stdout.splitlines()[1].split() == ["tales", "created", "-", "a=0:4,b=4:9"]
    assert site.sent(admin_pb2.PlanRequest) and not site.sent(admin_pb2.DeployRequest)


def test_apply_brings_back_a_replica_that_is_gone_and_leaves_the_others(
    edgectl: Any, site: Any, tmp_path: Path
) -> None:
    """For a spec with a number and for one that left it to the site, which had settled it."""
    for number in ("3", '"auto"'):
        site.replicate(3, 2)
        site.requests.clear()
        file = spec_file(tmp_path, SAME + f"replicas = {number}\n")
        dry = edgectl("apply", "-f", file, "--dry-run")
        assert dry.stdout.splitlines()[1].split() == ["tales", "restored", "-", "a=0:4,b=4:9"], (
            dry.output
        )
        assert [request.spec.name for request in site.sent(admin_pb2.PlanRequest)] == ["tales.2"]
        result = edgectl("apply", "-f", file)
        assert result.exit_code == 0 and result.stdout.splitlines()[1].split()[:3] == [
            "tales",
            "restored",
            "-",
        ]
        (request,) = site.sent(admin_pb2.DeployRequest)
        spec = request.spec
        assert (spec.name, spec.replica, spec.replicas, spec.source) == ("tales.2", 2, 3, "")
        assert not site.sent(admin_pb2.DeleteDeploymentRequest)
        again = edgectl("apply", "-f", file)
        assert again.stdout.splitlines()[1].split()[:2] == ["tales", "unchanged"]
        assert len(site.sent(admin_pb2.DeployRequest)) == 1


def test_apply_refuses_where_one_replica_has_failed(
    edgectl: Any, site: Any, tmp_path: Path
) -> None:
    site.replicate(2)
    site.replicas[1] = replace(site.replicas[1], phase=DeploymentPhase.FAILED)
    result = edgectl("apply", "-f", spec_file(tmp_path, SAME + "replicas = 2\n"))
    assert result.exit_code == 1 and "deployment tales.2 is failed" in result.stderr
    assert not site.sent(admin_pb2.DeployRequest)


def test_apply_does_not_take_a_dead_deployment_for_a_good_one(
    edgectl: Any, site: Any, tmp_path: Path
) -> None:
    site.states = [
        replace(
            site.deployment_in(DeploymentPhase.FAILED),
            failure=NotFoundError("node a has no memory"),
        )
    ]
    result = edgectl("apply", "-f", spec_file(tmp_path, SAME))
    assert result.exit_code == 1 and "tales is failed: node a has no memory" in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'name = "t"\nmode = "fast"\nconcurrency = 0',
            ("model: is missing", "mode: ", "concurrency: "),
        ),
        ('colour = 1\n[[deployment]]\nname = "t"\nmodel = "m"', ("may contain nothing else",)),
        ('[[deployment]]\nname = "t"\nmodel = "m"\n' * 2, ("there are two deployments t",)),
        ('deployment = ["tales"]', ("may contain nothing else",)),
    ],
)
def test_a_wrong_file_is_named_with_all_that_is_wrong(
    edgectl: Any, site: Any, tmp_path: Path, text: str, message: tuple[str, ...]
) -> None:
    file = spec_file(tmp_path, text)
    result = edgectl("apply", "-f", file)
    assert (result.exit_code, site.requests) == (2, [])
    assert all(words in result.stderr for words in (file, *message)), result.stderr
