"""A site is backed up under load and serves on; its disk is lost, and it is restored at another address."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from edgeshard import Client
from edgeshard.domain.deployments.deployment import Deployment, DeploymentPhase
from edgeshard.domain.errors import DeniedError, EdgeShardError
from edgeshard.local.cluster import LocalCluster
from edgeshard.rpc.addresses import free_port
from edgeshard.rpc.tls import TlsFiles
from edgeshard.rpc.tls_files import tls_files
from tests.support.membership import edgectl
from tests.support.site import MakeSpec

pytestmark = [pytest.mark.timing, pytest.mark.long]

DEMO_MODEL = Path(__file__).resolve().parents[2] / "edgeshard" / "demo_model"
READY_S = 90.0
PROMPT = "Once upon a time"
