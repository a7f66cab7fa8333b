"""Faults of a site, from facts of it. Pure: facts in, findings out; time is passed in as a
value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from edgeshard.cli.render.kernel_views import kernel_problem
from edgeshard.cli.render.output import human_bytes, human_rate, human_seconds
from edgeshard.domain.control.site import Site
from edgeshard.domain.deployments.deployment import Deployment, DeploymentPhase
from edgeshard.domain.nodes.device import Condition, Node, Support

HERE = "this machine"
COORDINATOR = "coordinator"

CLOCK_S = 2.0
"""Most seconds that two clocks of a site may differ by."""
DISK_SHARE, DISK_BYTES = 0.05, 1 << 30
DISK_WRITE_BPS = 20e6
"""Bytes a second: below, a model of a few gigabytes takes minutes to store or to fetch."""
MEMORY_SHARE, MEMORY_BYTES = 0.05, 256 << 20
SWAP_SHARE, SWAP_BYTES = 0.02, 64 << 20
"""Part of memory, and bytes: both must be in swap. Systems put a little unused memory there."""
HUGE_PAGE_BYTES, HUGE_PAGE_SHARE = 256 << 20, 0.5
LINK_BPS, LINK_S = 100e6, 0.02
"""Bits a second, and seconds: slower links cost more than most nodes beyond them bring."""


class Fault(StrEnum):
    COORDINATOR_UNREACHABLE = "coordinator-unreachable"
    NODE_AWAY = "node-away"
    DEPLOYMENT_NOT_READY = "deployment-not-ready"
    PORT_CLOSED = "port-closed"
    CLOCK_SKEW = "clock-skew"
    CERTIFICATE_EXPIRED = "certificate-expired"
    CERTIFICATE_ENDS = "certificate-ends"
    KEY_READABLE = "key-readable"
    VERSION_SKEW = "version-skew"
    DISK_FULL = "disk-full"
    DISK_SLOW = "disk-slow"
    MEMORY_LOW = "memory-low"
    SWAP_IN_USE = "swap-in-use"
    CUDA_UNUSED = "cuda-unused"
    KERNELS_MISSING = "kernels-missing"
    KERNELS_SLOW = "kernels-slow"
    HUGE_PAGES_OFF = "huge-pages-off"
    CPU_QUOTA = "cpu-quota"
    IDENTITY_COPIED = "identity-copied"
    LINK_SLOW = "link-slow"


@dataclass(frozen=True, slots=True)
class Advice:
    """The meaning of a fault, and the remedy."""

    means: str
    do: str


ADVICE: Mapping[Fault, Advice] = {
    Fault.COORDINATOR_UNREACHABLE: Advice(
        "The coordinator does not answer, or refuses you: the site cannot be checked.",
        "Start it, or name another with --coordinator; its log shows why it ended.",
    ),
    Fault.NODE_AWAY: Advice(
        "The node does not answer. Deployments that need it continue without it, or wait.",
        "Look at the node and its agent's log; edgectl delete node takes one that will not be back "
        "out of the site.",
    ),
    Fault.DEPLOYMENT_NOT_READY: Advice(
        "The deployment answers no requests.", "See edgectl describe deployment NAME for the cause."
    ),
    Fault.PORT_CLOSED: Advice(
        "The port accepts no connections: nodes cannot send activations, or cannot join.",
        "Check that the daemon runs, that the firewall admits the port, and the values of --listen "
        "and --advertise.",
    ),
    Fault.CLOCK_SKEW: Advice(
        "Certificates are refused by clocks that are far off, and logs of nodes cannot be "
        "compared.",
        "Have the clocks set from the network: timedatectl set-ntp true, on the machine that is "
        "named.",
    ),
    Fault.CERTIFICATE_EXPIRED: Advice(
        "The process is refused by everybody else.",
        "Join again with another token (edgectl token create), or make another certificate "
        "(edgectl certificate).",
    ),
    Fault.CERTIFICATE_ENDS: Advice(
        "It should have renewed itself by now, and stops working when it ends.",
        "See the log of the process for why it does not; a site that makes none needs --ca-key at "
        "its coordinator.",
    ),
    Fault.KEY_READABLE: Advice(
        "Others on this machine can take this process's place at the site; daemons refuse such a "
        "key.",
        "chmod 600 FILE; if somebody may have read it, edgectl node revoke NAME and join again.",
    ),
    Fault.VERSION_SKEW: Advice(
        "A site runs one release. Others may be refused, or understand each other in part.",
        "Install the same release everywhere: edgectl get nodes -o wide shows what nodes run.",
    ),
    Fault.DISK_FULL: Advice(
        "Models cannot be added or fetched, and the coordinator cannot write its state.",
        "Free space, or move --state-dir; edgectl delete model and --cache-limit give space back.",
    ),
    Fault.DISK_SLOW: Advice(
        "Adding a model and loading it take long, and so does a recovery.",
        "Move --state-dir to a quicker disk: an SSD instead of a card or a network share.",
    ),
    Fault.MEMORY_LOW: Advice(
        "The system may end a process for memory, most likely the agent.",
        "End what else runs there, or give the agent less with --memory.",
    ),
    Fault.SWAP_IN_USE: Advice(
        "Swap is a thousand times slower than memory; a step may wait for it.",
        "Give the agent less with --memory, end what else runs there, or turn swap off: swapoff "
        "-a.",
    ),
    Fault.CUDA_UNUSED: Advice(
        "There is an NVIDIA driver, and PyTorch here is a build for processors: the card is not "
        "used.",
        "Install PyTorch's CUDA build into the agent's environment and start the agent with "
        "--device cuda.",
    ),
    Fault.KERNELS_MISSING: Advice(
        "Layers on the processor run several times slower than with the native kernels.",
        "Install a C++ compiler (on Debian: g++) and install EdgeShard again.",
    ),
    Fault.KERNELS_SLOW: Advice(
        "Products on the processor stay far below what its memory and its multiply-adds allow.",
        "In the node's checkout run python hatch_build.py (CXX=clang++ tries another compiler), or "
        "install a wheel; "
        "restart the agent. If the node was busy when it started, edgectl profile --again measures "
        "anew.",
    ),
    Fault.HUGE_PAGES_OFF: Advice(
        "Weights lie in small pages, which costs a tenth or more of the speed on most processors.",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, and restart the agent.",
    ),
    Fault.CPU_QUOTA: Advice(
        "A control group takes the processor away in the middle of steps; threads wait for each "
        "other then.",
        "Lift the limit (CPUQuota=, --cpus), or give whole cores instead: CPUAffinity=, "
        "--cpuset-cpus.",
    ),
    Fault.IDENTITY_COPIED: Advice(
        "The state directory of a node was copied, with a memory card perhaps. Its second agent "
        "cannot join.",
        "Stop one of the two. Or remove --state-dir of the second one and join it as a new node.",
    ),
    Fault.LINK_SLOW: Advice(
        "Activations take longer over this link than layers take to compute.",
        "Use a cable, or leave a node out (exclude); edgectl plan --explain shows the cost of the "
        "link.",
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault at one place, with the figures it was seen by."""

    fault: Fault
    where: str
    found: str


@dataclass(frozen=True, slots=True)
class TriedPort:
    """A connection attempt from here: `why` it failed, '' if it was accepted."""

    where: str
    address: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class KeyFile:
    path: str
    mode: int


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of this machine, and of the site if it answers. Times are seconds since 1970.

    `version` is of this edgectl. `here` is None if the coordinator's machine is this one, whose
    report then has it all. `coordinator_ahead_s` is by how much the coordinator's clock is ahead of
    this machine's. `refused` is why the site cannot be checked, '' if it can.
    """

    version: str
    utc_s: float
    here: Condition | None = None
    site: Site | None = None
    deployments: tuple[Deployment, ...] = ()
    refused: str = ""
    coordinator_ahead_s: float = 0.0
    ports: tuple[TriedPort, ...] = ()
    keys: tuple[KeyFile, ...] = ()


def diagnose(facts: Facts) -> tuple[Finding, ...]:
    """All that is wrong, the gravest first, and by place."""
    findings = [*_from_here(facts)]
    if facts.site is not None:
        findings += _site(facts, facts.site)
    order = list(Fault)
    return tuple(sorted(findings, key=lambda finding: (order.index(finding.fault), finding.where)))


def _from_here(facts: Facts) -> Iterator[Finding]:
    if facts.refused:
        yield Finding(Fault.COORDINATOR_UNREACHABLE, COORDINATOR, facts.refused)
    for port in facts.ports:
        if port.why:
            yield Finding(Fault.PORT_CLOSED, port.where, f"{port.address}: {port.why}")
    for key in facts.keys:
        if key.mode & 0o077:
            yield Finding(Fault.KEY_READABLE, HERE, f"{key.path} has mode {key.mode:o}")

    if facts.here is not None:
        yield from _machine(HERE, facts.here, facts.utc_s)
    if abs(facts.coordinator_ahead_s) > CLOCK_S:
        yield _clock(HERE, -facts.coordinator_ahead_s)


def _site(facts: Facts, site: Site) -> Iterator[Finding]:
    if site.coordinator is not None:
        yield from _machine(COORDINATOR, site.coordinator, facts.utc_s + facts.coordinator_ahead_s)
    for node in site.nodes:
        yield from _node(node, facts.utc_s + facts.coordinator_ahead_s)
    yield from _versions(facts, site)
    names = {node.node_id: node.name for node in site.nodes if node.connected}
    for stored in site.links:
        link, profile = stored.link, stored.link.profile
        slow = profile.bandwidth_bps < LINK_BPS or profile.latency_s > LINK_S
        if slow and link.sender in names and link.receiver in names:
            figures = (
                f"{human_rate(profile.bandwidth_bps)}, {human_seconds(profile.latency_s)} one way"
            )
            yield Finding(
                Fault.LINK_SLOW, f"{names[link.sender]} -> {names[link.receiver]}", figures
            )
    for deployment in facts.deployments:
        if deployment.phase in (DeploymentPhase.WAITING, DeploymentPhase.FAILED):
            why = f": {deployment.failure.message}" if deployment.failure is not None else ""
            name = f"deployment {deployment.spec.name}"
            yield Finding(Fault.DEPLOYMENT_NOT_READY, name, f"{deployment.phase}{why}")


def _node(node: Node, utc_s: float) -> Iterator[Finding]:
    if not node.connected:
        yield Finding(Fault.NODE_AWAY, node.name, f"last heard {node.heartbeat_age_s:.0f} s ago")
        return
    if node.twin_address:
        where = (
            f"two agents have its identity: {node.address} is connected, {node.twin_address} "
            "is refused"
        )
        yield Finding(Fault.IDENTITY_COPIED, node.name, where)
    condition = node.condition
    pages = node.huge_pages
    speed = node.facts.kernels
    if speed is not None and speed.name and (problem := kernel_problem(speed)):
        yield Finding(Fault.KERNELS_SLOW, node.name, problem)
    if condition is not None:
        # Figures of a node age: its times are of its own clock, which the coordinator compared.
        yield from _machine(node.name, condition, utc_s)
        if abs(condition.clock_ahead_s) > CLOCK_S:
            yield _clock(node.name, condition.clock_ahead_s)
    if (
        pages is not None
        and (condition is None or condition.huge_pages != "never")
        and pages.wanted_bytes >= HUGE_PAGE_BYTES
        and pages.held_bytes < HUGE_PAGE_SHARE * pages.wanted_bytes
    ):
        figures = (
            f"{human_bytes(pages.held_bytes)} of {human_bytes(pages.wanted_bytes)} lie in "
            "huge pages"
        )
        yield Finding(Fault.HUGE_PAGES_OFF, node.name, figures)


def _machine(where: str, condition: Condition, utc_s: float) -> Iterator[Finding]:
    yield from _certificate(where, condition, utc_s)
    if condition.disk_total_bytes and condition.disk_free_bytes < max(
        DISK_BYTES, DISK_SHARE * condition.disk_total_bytes
    ):
        free = (
            f"{human_bytes(condition.disk_free_bytes)} free of "
            f"{human_bytes(condition.disk_total_bytes)}"
        )
        yield Finding(Fault.DISK_FULL, where, free)
    if 0 < condition.disk_write_bps < DISK_WRITE_BPS:
        yield Finding(
            Fault.DISK_SLOW,
            where,
            f"{human_bytes(int(condition.disk_write_bps))} a second written and flushed",
        )
    total, left = condition.memory_total_bytes, condition.memory_available_bytes
    if total and left < max(MEMORY_BYTES, MEMORY_SHARE * total):
        yield Finding(Fault.MEMORY_LOW, where, f"{human_bytes(left)} left of {human_bytes(total)}")
    if condition.swap_used_bytes > max(SWAP_BYTES, SWAP_SHARE * total):
        yield Finding(Fault.SWAP_IN_USE, where, f"{human_bytes(condition.swap_used_bytes)} in swap")
    if condition.cuda is Support.MISSING:
        yield Finding(Fault.CUDA_UNUSED, where, "a driver, and PyTorch without CUDA")
    if condition.kernels is Support.MISSING:
        yield Finding(Fault.KERNELS_MISSING, where, "the agent has no kernel library")
    if condition.huge_pages == "never":
        yield Finding(Fault.HUGE_PAGES_OFF, where, "the system's mode is never")
    if 0 < condition.cpu_quota < condition.cores:
        yield Finding(Fault.CPU_QUOTA, where, f"{condition.cpu_quota:g} of {condition.cores} cores")


def _certificate(where: str, condition: Condition, utc_s: float) -> Iterator[Finding]:
    """One that is due for half of the time it had left then does not renew itself."""
    ends, due = condition.certificate_ends_s, condition.certificate_due_s
    if ends and ends < utc_s:
        yield Finding(Fault.CERTIFICATE_EXPIRED, where, f"{_span(utc_s - ends)} ago")
    elif ends and utc_s > (due + ends) / 2:
        yield Finding(
            Fault.CERTIFICATE_ENDS, where, f"in {_span(ends - utc_s)}, and was to be renewed before"
        )


def _span(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _clock(where: str, ahead_s: float) -> Finding:
    return Finding(
        Fault.CLOCK_SKEW,
        where,
        f"{_span(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} the coordinator's",
    )


def _versions(facts: Facts, site: Site) -> Iterator[Finding]:
    """Each that is not the coordinator's."""
    theirs = site.coordinator.version if site.coordinator is not None else ""
    if not theirs:
        return
    others = [(HERE, facts.version)]
    others += [
        (node.name, node.condition.version) for node in site.nodes if node.condition is not None
    ]
    for where, version in others:
        if version and version != theirs:
            yield Finding(Fault.VERSION_SKEW, where, f"{version}, and the coordinator has {theirs}")
