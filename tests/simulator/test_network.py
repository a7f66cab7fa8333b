"""The simulated network keeps a real one's rules."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

from tests.simulator.loop import Process, VirtualLoop
from tests.simulator.network import Connection, Network, Pipe


def test_nothing_overtakes_what_a_cut_held_up_for_a_process_that_stands_still() -> None:
    loop = VirtualLoop(random.Random(1))
    network = Network(loop, random.Random(1), lambda kind, known: "", lambda line: None)
    client, server = Process(loop, "client"), Process(loop, "server")
    connection = Connection(network, client, cast(Any, SimpleNamespace(process=server)))
    got: list[str] = []
    pipe = Pipe(connection, False, got.append)
    connection.calls[1] = cast(
        Any, SimpleNamespace(up=Pipe(connection, True, got.append), down=pipe)
    )

    def run_for(seconds: float) -> None:
        end = loop.now + seconds
        while loop.step(end):
            pass

    network.part("client", "server", both=True)
    pipe.send("held")
    run_for(0.1)
    client.freeze()
    pipe.send("sent while it stood still")
    run_for(0.1)
    network.heal("client", "server")
    run_for(0.1)
    assert got == []
    client.thaw()
    run_for(0.1)
    assert got == ["held", "sent while it stood still"]
    loop.close()
