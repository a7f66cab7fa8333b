"""An agent on a machine with all that `edgectl doctor` looks for:
`python -m tests.support.ailing_agent OPTIONS...`

The machine's own reports are replaced at the point where the process reads them.
`EDGESHARD_TEST_CGROUP` names a control group, with a quota, that the process goes into; without it
the quota is replaced, too.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import edgeshard
from edgeshard.domain.nodes.device import Support
from edgeshard.process import machine_facts

GROUP = "EDGESHARD_TEST_CGROUP"


def main() -> None:
    group = os.environ.get(GROUP)
    if group:
        (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    else:
        vars(machine_facts).update(cpu_quota=lambda root=None: 0.5)
    edgeshard.__version__ = "0.0.1"
    memory = {
        "MemTotal": 8 << 30,
        "MemAvailable": 1 << 20,
        "SwapTotal": 4 << 30,
        "SwapFree": 1 << 30,
    }
    vars(machine_facts).update(
        utc_s=lambda: time.time() + 120.0,
        disk_bytes=lambda directory: (100 << 30, 1 << 20),
        disk_write_bps=lambda directory: 1e6,
        _memory=lambda root: memory,
        _huge_pages=lambda root: "never",
        _kernels=lambda: Support.MISSING,
        _cuda=lambda root: Support.MISSING,
        _certificate=lambda tls: (time.time() + 3600.0, time.time() - 86_400.0),
    )

    from edgeshard_agent.entry import main as agent
    from edgeshard_agent.net import control

    control.CONDITION_INTERVAL_S = 0.5
    agent()


if __name__ == "__main__":
    main()
