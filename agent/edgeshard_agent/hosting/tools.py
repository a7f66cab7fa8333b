"""The tools that a node computes with. Importing this imports torch, so a node does it when it has joined."""

from __future__ import annotations

import grpc

from edgeshard_agent.engine.background_thread import BackgroundThread
from edgeshard_agent.engine.worker import ComputeThread
from edgeshard_agent.hosting.around import Tools
from edgeshard_agent.hosting.hosted_stage import HostedStage
from edgeshard_agent.hosting.loading import StageLoader
from edgeshard_agent.measuring.facts import read_facts
from edgeshard_agent.measuring.measurer import Measurer
from edgeshard_agent.measuring.node import MeasuredNode, Reports
from edgeshard_agent.store.cache import BlobCache

__all__ = ["make_tools", "read_facts"]


def make_tools(
    node: MeasuredNode,
    reports: Reports,
    cache: BlobCache,
    store: grpc.aio.Channel,
    worker: ComputeThread,
    idle_spin_s: float,
    packs: bool,
) -> Tools:
    """The tools of this node, whose `node.facts` are complete. `store` is a channel to the coordinator's models.

    With `packs`, weights are kept packed once they were loaded.
    """
    loader = StageLoader(cache, store, worker, BackgroundThread(worker), node.device, idle_spin_s, packs)
    return Tools(loader.load, loader.load_standby, Measurer(node, reports, worker).run, HostedStage)
