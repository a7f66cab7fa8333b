"""A client cannot hide an entry by causing many refusals, and a change of a file is detected."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from edgeshard.domain.audit import SUPPRESSED
from edgeshard.domain.identity import Role
from tests.attack import audit
from tests.support.identities import tls_options
from tests.support.membership import SecureSite, edgectl, joined

pytestmark = pytest.mark.timing


async def test_refusals_hide_no_enrolment_and_an_edited_log_is_told_of(tmp_path: Path) -> None:
    async with SecureSite(tmp_path) as mill, mill.client_of() as admin:
        eve = mill.identities.of(Role.CLIENT, "eve")
        refused = 0
        for number in range(5):
            refused += await audit.drown(mill.coordinator.address, eve, count=100)
            await joined(mill, Role.AGENT, f"node-{number}")
        refused += await audit.drown(mill.coordinator.address, eve, count=100)
        entries = await admin.audit(50)
        assert Counter(entry.what for entry in entries if entry.result == "ok")["Enrol"] == 5
        told = [entry for entry in entries if "DeleteModel" in (entry.what, entry.target)]
        assert refused == 600
        assert sum(entry.suppressed + (entry.result != SUPPRESSED) for entry in told) == refused

        reach = [
            "--coordinator",
            mill.coordinator.address,
            *tls_options(mill.identities.of(Role.OPERATOR, "admin")),
        ]
        environment = {**os.environ, "NO_COLOR": "1"}
        code, out, _ = await edgectl(*reach, "get", "audit", "--verify", environment=environment)
        assert code == 0 and "others.jsonl" in out

        path = tmp_path / "coordinator" / "audit" / "others.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        del lines[2]
        path.write_bytes(b"".join(lines))
        code, _, err = await edgectl(*reach, "get", "audit", "--verify", environment=environment)
        assert code == 1 and "others.jsonl:1" in err
