"""edgectl get audit: who changed the site, for people and for programs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgeshard.client import SyncClient
from edgeshard.domain.audit import AuditCheck, AuditEntry
from edgeshard.domain.errors import ResourceExhaustedError
from edgeshard.proto.v1 import admin_pb2

ENTRIES = [
    AuditEntry(
        "2026-01-02T03:04:05.678901+00:00",
        "operator/admin",
        "DeleteDeployment",
        "tales",
        "ok",
        "10.0.0.1:5",
    ),
    AuditEntry(
        "2026-01-02T03:04:06.678901+00:00",
        "client/app",
        "Deploy",
        "\x1b[2J",
        "ROLE",
        "10.0.0.2:5",
        7,
    ),
]


@pytest.fixture(autouse=True)
def known(site: Any) -> None:
    site.audit = ENTRIES


def test_a_table_of_who_did_what(edgectl: Any, site: Any) -> None:
    result = edgectl("get", "audit", "--limit", "7")
    header, first, second = result.stdout.splitlines()
    assert header.split() == ["TIME", "WHO", "WHAT", "TARGET", "RESULT", "OMITTED"]
    assert first.split() == [
        "2026-01-02T03:04:05Z",
        "operator/admin",
        "DeleteDeployment",
        "tales",
        "ok",
    ]
    assert second.split()[1:] == ["client/app", "Deploy", r"\x1b[2J", "ROLE", "7"], (
        "nothing steers a terminal"
    )
    assert max(len(line.rstrip()) for line in result.stdout.splitlines()) <= 80
    assert site.sent(admin_pb2.ListAuditRequest)[-1].limit == 7
    assert "10.0.0.2:5" in edgectl("get", "audit", "-o", "wide").stdout


def test_all_of_it_as_json(edgectl: Any) -> None:
    shown = json.loads(edgectl("get", "audit", "-o", "json").stdout)
    assert [AuditEntry(**entry) for entry in shown] == ENTRIES


@pytest.mark.parametrize("limit", ["0", "1001", "many"])
def test_a_limit_out_of_bounds_is_wrong_use(edgectl: Any, limit: str) -> None:
    assert edgectl("get", "audit", "--limit", limit).exit_code == 2


def test_the_synchronous_client_has_it_too(site: Any) -> None:
    with SyncClient(site.address) as client:
        assert list(client.audit(2)) == ENTRIES


def test_a_quota_is_named_with_what_to_do_and_when_to_try_again(edgectl: Any, site: Any) -> None:
    message = (
        "client/app has used more than its quota of 60 tokens_per_minute; try again in 12.5 "
        "s, or have ..."
    )
    site.failures["Generate"] = ResourceExhaustedError(message, reason="QUOTA", retry_after_s=12.5)
    result = edgectl("generate", "tales", "--prompt", "x")
    assert result.exit_code == 1
    assert result.stderr == f"error: {message}\n       a retry may succeed in 12.5 s\n"


def test_seals_are_checked_and_a_broken_one_fails(edgectl: Any, site: Any) -> None:
    site.checks = [AuditCheck("operators.1.jsonl", 300, 300), AuditCheck("operators.jsonl", 12, 12)]
    result = edgectl("get", "audit", "--verify")
    assert result.exit_code == 0
    assert [line.split() for line in result.stdout.splitlines()[1:]] == [
        ["operators.1.jsonl", "300", "300"],
        ["operators.jsonl", "12", "12"],
    ]
    site.checks[0] = AuditCheck(
        "operators.1.jsonl", 299, 101, 102, "lines 102 to 201: they are not what was sealed"
    )
    result = edgectl("get", "audit", "--verify")
    assert result.exit_code == 1 and "operators.1.jsonl:102: lines 102 to 201" in result.stderr
    assert (
        json.loads(edgectl("get", "audit", "--verify", "-o", "json").stdout)[0]["broken_at"] == 102
    )


def test_a_coordinator_without_seals_is_not_taken_for_a_sound_log(edgectl: Any) -> None:
    result = edgectl("get", "audit", "--verify")
    assert result.exit_code == 1 and "does not seal" in result.stderr
