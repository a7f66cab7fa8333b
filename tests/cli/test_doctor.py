"""edgectl doctor: from facts to findings, and how they are shown."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from edgeshard.cli.commands.observing.doctor import _why_closed, beyond
from edgeshard.cli.commands.observing.doctor_checks import (
    ADVICE,
    COORDINATOR,
    HERE,
    Facts,
    Fault,
    KeyFile,
    TriedPort,
    diagnose,
)
from edgeshard.domain.control.site import Site, StoredLink
from edgeshard.domain.deployments.deployment import DeploymentPhase
from edgeshard.domain.errors import UnavailableError
from edgeshard.domain.nodes.device import Condition, HugePages, Support
from edgeshard.domain.nodes.profile import LinkProfile, MeasuredLink

NOW_S = 1_800_000_000.0
SOUND = Condition(
    version="1.0",
    utc_s=NOW_S,
    cores=4,
    memory_total_bytes=8 << 30,
    memory_available_bytes=4 << 30,
    swap_used_bytes=10 << 20,
    disk_total_bytes=100 << 30,
    disk_free_bytes=50 << 30,
    disk_write_bps=200e6,
    huge_pages="madvise",
    kernels=Support.USED,
    certificate_ends_s=NOW_S + 20 * 86_400,
    certificate_due_s=NOW_S + 10 * 86_400,
)
QUICK = LinkProfile(0.0002, 1e9, 0.01, 9, 1 << 20)


@pytest.mark.parametrize("host", ["nowhere.invalid", "a" * 70])
async def test_a_name_that_nobody_knows_is_said_in_words(host: str) -> None:
    why = await _why_closed(f"{host}:1")
    assert HERE in why and "error -" not in why


def facts(
    site: Any, condition: Condition = SOUND, link: LinkProfile = QUICK, **changes: Any
) -> Facts:
    """A site of the scripted nodes, all in `condition`."""
    nodes = tuple(replace(node, connected=True, condition=condition) for node in site.nodes)
    links = (StoredLink(MeasuredLink(nodes[0].node_id, nodes[1].node_id, link), 10.0),)
    known = Site(nodes, links, (), {}, coordinator=SOUND)
    return replace(Facts(version="1.0", utc_s=NOW_S, site=known), **changes)


def test_a_sound_site_has_no_faults(site: Any) -> None:
    assert (
        diagnose(
            facts(site, here=SOUND, ports=(TriedPort("a", "x:1"),), keys=(KeyFile("k", 0o600),))
        )
        == ()
    )


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"clock_ahead_s": -5.0}, Fault.CLOCK_SKEW),
        ({"certificate_ends_s": NOW_S - 60}, Fault.CERTIFICATE_EXPIRED),
        (
            {"certificate_ends_s": NOW_S + 60, "certificate_due_s": NOW_S - 120},
            Fault.CERTIFICATE_ENDS,
        ),
        ({"version": "0.9"}, Fault.VERSION_SKEW),
        ({"disk_free_bytes": 4 << 30}, Fault.DISK_FULL),
        ({"disk_write_bps": 5e6}, Fault.DISK_SLOW),
        ({"memory_available_bytes": 200 << 20}, Fault.MEMORY_LOW),
        ({"swap_used_bytes": 1 << 30}, Fault.SWAP_IN_USE),
        ({"cuda": Support.MISSING}, Fault.CUDA_UNUSED),
        ({"kernels": Support.MISSING}, Fault.KERNELS_MISSING),
        ({"huge_pages": "never"}, Fault.HUGE_PAGES_OFF),
        ({"cpu_quota": 1.5}, Fault.CPU_QUOTA),
    ],
)
def test_a_fault_of_the_nodes_is_found_once_for_each(
    site: Any, changes: dict[str, Any], fault: Fault
) -> None:
    found = diagnose(facts(site, replace(SOUND, **changes)))
    assert [(finding.fault, finding.where) for finding in found] == [
        (fault, node.name) for node in site.nodes
    ]


@pytest.mark.parametrize(
    ("changes", "fault", "where"),
    [
        ({"refused": "nobody answers"}, Fault.COORDINATOR_UNREACHABLE, COORDINATOR),
        ({"ports": (TriedPort("a", "h:1", "connection refused"),)}, Fault.PORT_CLOSED, "a"),
        ({"keys": (KeyFile("key.pem", 0o640),)}, Fault.KEY_READABLE, HERE),
        ({"coordinator_ahead_s": 90.0}, Fault.CLOCK_SKEW, HERE),
        ({"version": "2.0"}, Fault.VERSION_SKEW, HERE),
        ({"here": replace(SOUND, swap_used_bytes=1 << 30)}, Fault.SWAP_IN_USE, HERE),
        ({"link": replace(QUICK, bandwidth_bps=20e6)}, Fault.LINK_SLOW, "a -> b"),
        ({"link": replace(QUICK, latency_s=0.08)}, Fault.LINK_SLOW, "a -> b"),
    ],
)
def test_a_fault_beside_the_nodes_is_found(
    site: Any, changes: dict[str, Any], fault: Fault, where: str
) -> None:
    (found,) = diagnose(facts(site, **changes))
    assert (found.fault, found.where) == (fault, where)


def test_two_agents_with_one_identity_are_named(site: Any) -> None:
    nodes = (replace(site.nodes[0], twin_address="10.0.0.9:4711"), *site.nodes[1:])
    (found,) = diagnose(facts(replace(site, nodes=nodes)))
    assert (found.fault, found.where) == (Fault.IDENTITY_COPIED, site.nodes[0].name)
    assert "10.0.0.9:4711" in found.found and site.nodes[0].address in found.found


def test_a_clock_that_is_off_does_not_make_certificates_end(site: Any) -> None:
    """They are compared with the coordinator's time, not with the caller's."""
    (found,) = diagnose(facts(site, utc_s=NOW_S + 30 * 86_400, coordinator_ahead_s=-30 * 86_400.0))
    assert found.fault is Fault.CLOCK_SKEW and "30 days ahead of" in found.found


def test_nodes_away_deployments_and_pages_are_looked_at(site: Any) -> None:
    known = facts(site)
    assert known.site is not None
    first, second = known.site.nodes
    pages = HugePages(1 << 30, 1 << 20)
    nodes = (
        replace(first, connected=False, heartbeat_age_s=40.0),
        replace(second, huge_pages=pages),
    )
    waiting = site.deployment_in(DeploymentPhase.WAITING, UnavailableError("node a is away"))
    found = diagnose(replace(known, site=replace(known.site, nodes=nodes), deployments=(waiting,)))
    assert [finding.fault for finding in found] == [
        Fault.NODE_AWAY,
        Fault.DEPLOYMENT_NOT_READY,
        Fault.HUGE_PAGES_OFF,
    ]
    assert "node a is away" in found[1].found


@pytest.mark.parametrize(
    ("theirs_s", "ahead_s"), [(11.0, 0.0), (13.0, 0.0), (20.0, 7.0), (5.0, -5.0)]
)
def test_a_slow_answer_does_not_make_a_clock_wrong(theirs_s: float, ahead_s: float) -> None:
    assert beyond(theirs_s, 10.0, 13.0) == ahead_s


def test_each_fault_has_advice() -> None:
    assert set(ADVICE) == set(Fault)


@pytest.fixture
def ailing(site: Any) -> Any:
    """One node is in swap; the test's own machine may have faults too, which its own port has
    not."""
    port = site.address
    nodes = [replace(node, connected=True, address=port, condition=SOUND) for node in site.nodes]
    site.nodes = [replace(nodes[0], condition=replace(SOUND, swap_used_bytes=1 << 30)), *nodes[1:]]
    return site


def ignored(*kept: Fault) -> list[str]:
    return [part for fault in Fault if fault not in kept for part in ("--ignore", fault.value)]


def test_findings_are_a_table_with_what_to_do(edgectl: Any, ailing: Any) -> None:
    result = edgectl("doctor", *ignored(Fault.SWAP_IN_USE))
    assert result.exit_code == 1, result.stderr
    header, row, empty, means, do = result.stdout.splitlines()
    assert header.split() == ["FAULT", "WHERE", "FOUND"]
    assert row.split() == ["swap-in-use", "a", "1", "GiB", "in", "swap"]
    assert (empty, means) == ("", f"swap-in-use: {ADVICE[Fault.SWAP_IN_USE].means}")
    assert do == f"  {ADVICE[Fault.SWAP_IN_USE].do}"


def test_findings_as_json_say_what_they_mean(edgectl: Any, ailing: Any) -> None:
    result = edgectl("doctor", "-o", "json", *ignored(Fault.SWAP_IN_USE))
    (found,) = json.loads(result.stdout)
    assert (found["fault"], found["where"]) == ("swap-in-use", "a")
    assert set(found) == {"fault", "where", "found", "means", "do"}
    assert edgectl("doctor", "-o", "name", *ignored(Fault.SWAP_IN_USE)).stdout == "swap-in-use\n"


def test_nothing_wrong_is_exit_code_0(edgectl: Any, ailing: Any) -> None:
    result = edgectl("doctor", *ignored())
    assert result.exit_code == 0 and result.stdout == "" and "2 nodes" in result.stderr
