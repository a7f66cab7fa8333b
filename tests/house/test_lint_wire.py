"""The lint finds a conversion outside edgeshard/wire in each of its forms, and accepts wrapping and
unwrapping."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LINT = Path(__file__).resolve().parents[2] / "tools" / "lint_wire.py"
IMPORT = "from edgeshard.proto.v1 import admin_pb2 as pb\n"

BAD = {
    "def f(node):\n    return pb.Node(name=node.name)": "names Node",
    "def f(message: pb.Node): ...": "names Node",
    "PHASE = pb.DEPLOYMENT_PHASE_READY": "names DEPLOYMENT_PHASE_READY",
    "def f(a):\n    return pb.GetSiteResponse(nodes=a, links=a, profiles=a)": "more than 2",
    "def f(a):\n    return pb.GetNodeRequest(**a)": "more than 2",
    "def f(request: pb.DeployRequest):\n    return request.spec.name": "reads name",
    "def f(request: pb.DeployRequest | None):\n    spec = request.spec\n    return "
    "spec.name": "reads name",
    "def f(request: pb.DeployRequest):\n    request.spec.layers.extend([])": "reads layers",
    "def f(answer: pb.ListNodesResponse):\n    return [node.name for node in "
    "answer.nodes]": "reads name",
    "def f(answer: pb.ListNodesResponse):\n    return answer.nodes[0].name": "reads name",
    "async def f(ms: AsyncIterator[pb.TraceResponse]):\n    async for m in ms: "
    "m.stage.node": "reads node",
    "def f(x):\n    if isinstance(x, pb.TraceResponse):\n        return x.stage.node": "reads node",
    "def f(x):\n    while isinstance(y := x(), pb.TraceResponse):\n        "
    "y.stage.node": "reads node",
    "async def f(s):\n    a = await s.GetNode(pb.GetNodeRequest(node='a'))\n    return "
    "a.node.name": "reads name",
    "async def f(c):\n    r = pb.GetNodeRequest(node='a')\n    return (await c.call('x', "
    "r)).node.name": "reads name",
    "async def f(c):\n  async with g(c(pb.TraceRequest())) as s:\n    [m.stage.node async for m in "
    "s]": "reads node",
    "def f(raw):\n    return pb.DeployResponse.FromString(raw).deployment.epoch": "reads epoch",
    "import edgeshard.proto.v1.admin_pb2": "by its path",
    "from edgeshard.proto.v1.common_pb2 import Node": "names out of",
}  # fmt: skip

GOOD = [
    "def f(request: pb.DeployRequest):\n    return spec_from_wire(request.spec)",
    "def f(request: pb.GetNodeRequest, state):\n    return state.find(request.node[:80]).name",
    "def f(node):\n    return pb.GetNodeResponse(node=node_to_wire(node))",
    "def f(answer: pb.ListNodesResponse):\n    return [node_from_wire(node) for node in "
    "answer.nodes]",
    "def f(request: pb.DeployRequest):\n    return request.HasField('spec') and "
    "request.SerializeToString()",
    "async def f(stub):\n    answer = await stub.Heartbeat(heartbeat_to_wire(x))\n    return "
    "answer.known",
    "async def f(c, request: pb.DeployRequest):\n    spec = spec_from_wire(request.spec)\n    "
    "return spec.name",
    "def f(raw):\n    return pb.DeployResponse.FromString(raw)",
]


def lint(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(LINT), str(path)], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("source", BAD, ids=lambda source: source.replace("\n", "; "))
def test_finds(source: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(IMPORT + source + "\n")
    result = lint(path)
    assert result.returncode == 1 and BAD[source] in result.stderr


@pytest.mark.parametrize("source", GOOD, ids=lambda source: source.replace("\n", "; "))
def test_leaves_wrapping_and_unwrapping_alone(source: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(IMPORT + source + "\n")
    result = lint(path)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.long
def test_the_tree_converts_in_wire_only() -> None:
    result = subprocess.run([sys.executable, str(LINT)], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
