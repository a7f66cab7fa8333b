"""A forked child of a process that used the client: its calls fail at once and name the remedy."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

CHILD_CALLS = {
    "its own client": "SyncClient({address!r}, plaintext=True).nodes()",
    "the parent's client": "client.nodes()",
    "a stream of the parent's client": "next(client.generate('tales', 'Once'))",
}
PROGRAM = """
import os, signal, sys
from edgeshard import SyncClient
from edgeshard.domain.errors import FailedPreconditionError

client = SyncClient({address!r}, plaintext=True)
assert len(client.nodes()) == 2
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        {call}
        os._exit(1)
    except FailedPreconditionError as error:
        client.close()
        os._exit(0 if error.reason == "FORKED" and "spawn" in error.message else 2)
    finally:
        os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert len(client.nodes()) == 2, "the parent's own client still works"
client.close()
"""


@pytest.mark.parametrize("call", CHILD_CALLS.values(), ids=CHILD_CALLS.keys())
def test_a_call_after_a_fork_is_an_error(site: Any, call: str) -> None:
    program = PROGRAM.format(address=site.address, call=call.format(address=site.address))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_fork_before_the_first_call_does_no_harm(site: Any) -> None:
    program = f"""
import os, sys
from edgeshard import SyncClient
child = os.fork()
with SyncClient({site.address!r}, plaintext=True) as client:
    assert len(client.nodes()) == 2
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
