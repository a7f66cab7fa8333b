"""Examples and exit codes of each command of edgectl, which end its help.

A command without an entry in `USAGES` cannot be loaded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from edgeshard.domain.errors import EXIT_CODES, INTERRUPTED


class CommandUsage(NamedTuple):
    """Two or more command lines without `edgectl`, and the exit codes that differ from
    `EXIT_CODES`."""

    examples: tuple[str, ...]
    failed: str = EXIT_CODES[1]
    """The meaning of exit code 1."""
    endless: str = ""
    """When the command runs until Ctrl-C and then exits with 0: a phrase for the help, or
    `ALWAYS`."""


ALWAYS = "always"

USAGES = {
    "serve": CommandUsage(
        ("serve demo", "serve ./my-model --port 8080 --quantise int8"), endless=ALWAYS
    ),
    "run": CommandUsage(("run fairy-tales", 'run fairy-tales "Once upon a time"')),
    "chat": CommandUsage(("chat", "chat tales --system 'Answer in one sentence.'")),
    "generate": CommandUsage(
        (
            'generate tales "Once upon a time"',
            "generate tales --prompt Once --max-tokens 64 --seed 7 --stats",
        )
    ),
    "ps": CommandUsage(("ps", "ps --watch"), endless="with --watch"),
    "get nodes": CommandUsage(("get nodes", "get nodes -o json"), endless="with --watch"),
    "get models": CommandUsage(("get models", "get models --watch"), endless="with --watch"),
    "get deployments": CommandUsage(
        ("get deployments", "get deployments --watch"), endless="with --watch"
    ),
    "get events": CommandUsage(
        ("get events --limit 20", "get events --watch"), endless="with --watch"
    ),
    "get audit": CommandUsage(
        ("get audit --limit 20", "get audit --verify"), "failed or a seal is broken"
    ),
    "describe node": CommandUsage(("describe node attic", "describe node attic -o json")),
    "describe model": CommandUsage(
        ("describe model fairy-tales", "describe model fairy-tales -o json")
    ),
    "describe deployment": CommandUsage(
        ("describe deployment tales", "describe deployment tales -o json")
    ),
    "deploy": CommandUsage(
        (
            "deploy tales --model fairy-tales",
            "deploy tales --model ./my-model --layers a=0:6,b=6:12",
        )
    ),
    "apply": CommandUsage(
        ("apply -f tales.toml --dry-run", "apply -f tales.toml --replace"),
        "failed or a deployment was refused",
    ),
    "replan": CommandUsage(("replan tales --dry-run", "replan tales")),
    "delete deployment": CommandUsage(
        ("delete deployment tales", "delete deployment tales --force --timeout 30")
    ),
    "delete model": CommandUsage(
        ("delete model fairy-tales", "delete model fairy-tales --coordinator mill:7600")
    ),
    "delete node": CommandUsage(("delete node attic", "delete node attic --coordinator mill:7600")),
    "delete packed": CommandUsage(
        ("delete packed attic --unused", "delete packed attic 0123456789abcdef"),
        "failed or a unit is in use",
    ),
    "plan": CommandUsage(
        ("plan --model fairy-tales", "plan --cluster nodes.toml --model llama2-7b --compare"),
        "failed, no plan fits or --verify found a better plan",
    ),
    "profile": CommandUsage(
        ("profile", "profile attic garage --model fairy-tales --quick"),
        "failed or a node or link was not measured",
    ),
    "model add": CommandUsage(
        ("model add ./my-model --name mine", "model add OWNER/NAME --dry-run"),
        "failed or it does not fit",
    ),
    "model list": CommandUsage(("model list", "model list --found")),
    "dashboard": CommandUsage(("dashboard", "dashboard --coordinator mill:7600")),
    "key create": CommandUsage(
        ("key create website --model tales", "key create prometheus --metrics")
    ),
    "key list": CommandUsage(("key list", "key list -o json")),
    "key revoke": CommandUsage(
        ("key revoke website", "key revoke website --coordinator mill:7600")
    ),
    "top": CommandUsage(("top", "top --once"), endless="in the live view"),
    "trace": CommandUsage(
        ("trace tales --seconds 10", "trace tales -o trace.json"),
        "failed or no step ran during the recording",
    ),
    "bench": CommandUsage(
        ("bench tales --concurrency 4", "bench tales --rate 2 --requests 100 --slo-ttft 1"),
        "failed",
    ),
    "doctor": CommandUsage(("doctor", "doctor -o json"), "failed or a fault was found"),
    "logs": CommandUsage(
        ("logs coordinator", "logs attic -n 20 --follow"), endless="with --follow"
    ),
    "debug dump": CommandUsage(("debug dump", "debug dump -o site.json --force")),
    "debug replay": CommandUsage(
        ("debug replay site.json", "debug replay - < site.json"), "failed or a state differs"
    ),
    "init": CommandUsage(("init mill", "init mill --http-listen 0.0.0.0:8443")),
    "backup": CommandUsage(("backup site.backup", "backup site.backup --state-dir ~/site")),
    "restore": CommandUsage(
        ("restore site.backup", "restore site.backup -d pki-restored --state-dir state-restored")
    ),
    "set-coordinator": CommandUsage(
        ("set-coordinator mill:7600", "set-coordinator mill:7600 --config agent.toml")
    ),
    "certificate": CommandUsage(("certificate agent attic", "certificate client website -d pki")),
    "token create": CommandUsage(
        ("token create --node attic", "token create --name website --role client --ttl 1h")
    ),
    "token list": CommandUsage(("token list", "token list -o json")),
    "token revoke": CommandUsage(
        ("token revoke 0123456789abcdef", "token revoke 0123456789abcdef --coordinator mill:7600")
    ),
    "join": CommandUsage(
        ("join edgeshard2-...", "join - --memory 8GiB < token.txt"),
        endless="if it runs the agent itself",
    ),
    "node revoke": CommandUsage(("node revoke attic", "node revoke website --role client")),
    "label node": CommandUsage(("label node attic zone=hall1", "label node attic zone-")),
    "config check": CommandUsage(("config check", "config check agent.toml"), "failed"),
    "config show": CommandUsage(
        ("config show agent", "config show coordinator --config site.toml --resolved")
    ),
    "config docs": CommandUsage(("config docs agent", "config docs coordinator -o json")),
    "install agent": CommandUsage(
        (
            "install agent --coordinator mill:7600 --name attic",
            "install agent --credentials attic --dry-run",
        )
    ),
    "install coordinator": CommandUsage(
        ("install coordinator --site pki", "install coordinator --site pki --dry-run")
    ),
    "uninstall": CommandUsage(("uninstall --dry-run", "uninstall --purge --yes")),
    "uninstall agent": CommandUsage(("uninstall agent --dry-run", "uninstall agent --purge")),
    "uninstall coordinator": CommandUsage(
        ("uninstall coordinator --dry-run", "uninstall coordinator --purge")
    ),
    "upgrade": CommandUsage(("upgrade", "upgrade --back")),
    "lab run": CommandUsage(("lab run lab.toml", "lab run lab.toml -o json")),
    "lab up": CommandUsage(("lab up lab.toml", "lab up lab.toml --directory lab")),
    "lab down": CommandUsage(("lab down lab.toml", "lab down lab.toml --directory lab")),
    "demo": CommandUsage(
        ('demo --prompt "Once upon a time"', "demo --serve --port 8080"), endless="with --serve"
    ),
    "version": CommandUsage(("version", "--version")),
}
"""By the command's words."""
FIRST = CommandUsage(("serve demo", "run ./my-model", "deploy --help"))
"""The examples of edgectl itself: from nothing to an answer, and where more is."""


def complete(command: Any, path: tuple[str, ...]) -> Any:
    """The command, with the examples and exit codes of it and of the commands in it at the end of
    their help.

    Raises KeyError if one has no entry.
    """
    inner = getattr(command, "commands", {})
    for name, part in inner.items():
        complete(part, (*path, name))
    key = " ".join(path)
    if not inner or key in USAGES:
        command.epilog = epilog(USAGES[key])
    return command


def epilog(usage: CommandUsage) -> str:
    """The end of a help: examples and exit codes."""
    lines = "\n".join(f"  edgectl {line}" for line in usage.examples)
    return f"\b\nExamples:\n{lines}\n\n{_exit_codes(usage.failed, usage.endless)}"


def _exit_codes(failed: str = EXIT_CODES[1], endless: str = "") -> str:
    """The exit codes in a sentence."""
    codes = EXIT_CODES | {1: failed}
    if endless == ALWAYS:
        codes[0] = f"{codes.pop(INTERRUPTED)} or SIGTERM"
    elif endless:
        codes[INTERRUPTED] += f" (0 {endless})"
    return (
        "Exit codes: "
        + "; ".join(f"{code} {meaning}" for code, meaning in sorted(codes.items()))
        + "."
    )
