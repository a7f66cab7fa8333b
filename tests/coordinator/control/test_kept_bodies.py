"""State directories of earlier versions are read, and files are written in the same form.

The bodies are as pydantic's adapters wrote them, and `json` with the fields of the classes of that
time.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from edgeshard_coordinator.control.persistence.persistence import StateStore
from edgeshard_coordinator.core.deployments.deployments import restored_record
from edgeshard_coordinator.core.values.measurements import Measurements, Reported, key_of
from edgeshard_coordinator.core.values.state import DeploymentRecord, KnownNode, Timings

from edgeshard.domain.deployments.deployment import DeploymentPhase, parse_spec
from edgeshard.domain.deployments.placement import (
    LengthsFrom,
    PlacedStage,
    Placement,
    Prediction,
    Speculation,
)
from edgeshard.domain.deployments.step_cost import StageCost
from edgeshard.domain.deployments.traffic import Lengths, Traffic
from edgeshard.domain.errors import DataLossError, InvalidArgumentError
from edgeshard.domain.ids import DeploymentName, Digest, Epoch, ModelName, NodeId, NodeName
from edgeshard.domain.models.dtypes import DType, Quantisation
from edgeshard.domain.models.model import LayerRange
from edgeshard.domain.nodes.device import DeviceFacts
from edgeshard.domain.nodes.profile import (
    ComputeProfile,
    DiskProfile,
    Effort,
    EnergyProfile,
    LayerKind,
    LayerProfile,
    LinkProfile,
    MemoryProfile,
    Sample,
    StepOverhead,
)

A, B = NodeId("id-a"), NodeId("id-b")
SPEC = parse_spec(
    {
        "name": "tale",
        "model": "tiny",
        "source": "a",
        "kv_dtype": "float16",
        "reserve": {"b": 7},
        "layers": "a=0:4,b=4:12",
        "max_new_tokens": 1024,
        "max_time_per_token_s": 0.5,
        "quantisation": {"*": "int8", "a": "none"},
        "head_quantisation": "int4",
        "standby": "b,c",
        "micro_batches": 2,
    }
)
COST = StageCost((1, 8), (1e-3, 2e-3), (1e-3, 4e-3), 1e-7, 2e-8, 0.0, 5e-4, 1e-6)
PLACEMENT = Placement(
    (
        PlacedStage(0, A, NodeName("a"), "a:7000", LayerRange(0, 4), 1000, 2000, 300),
        PlacedStage(
            1, B, NodeName("b"), "b:7000", LayerRange(4, 12), 1001, 2001, 301, 400, 500, 1e9, 5e8
        ),
    ),
    kv_block_tokens=16,
    kv_blocks=77,
    micro_batch=1,
    micro_batches=2,
    predicted=Prediction(
        0.5, 0.05, 40.0, "computing on b", 0.25, "latency", 2, 128, 64, LengthsFrom.SEEN, 3.5, None
    ),
    note="planned \u2713",
    costs=(COST, COST),
    sweep=2,
)
FAILURE = DataLossError("tensor x is corrupt", field="x", reason="CORRUPT_TENSOR")
RECORD = DeploymentRecord(
    "u1", SPEC, Digest("d" * 64), PLACEMENT, Epoch(3), DeploymentPhase.FAILED, failure=FAILURE
)
FACTS = DeviceFacts("cpu", "Some CPU", 4, 8 << 30, 6 << 30, False, "edgeshard 1, torch 2", "bits")
NODE = KnownNode(A, NodeName("a"), "a:7000", 1, FACTS, saved=True)
LAYER = LayerProfile(
    LayerKind.MOE_BLOCK, 1000, 4, 0, 4096, (Sample(16, 0, 1e-3, 0.01, 5),), (Sample(1, 64, 2e-3),)
)
PROFILE = ComputeProfile(
    fingerprint="abc",
    model_hash="def",
    dtype=DType.BFLOAT16,
    device="cpu",
    threads=2,
    layers=(LAYER,),
    overhead=StepOverhead(3e-4, 1e-9, 0.1),
    memory=MemoryProfile(8 << 30, 6 << 30, 300 << 20, False),
    effort=Effort.QUICK,
    processor_share=0.9,
    energy=EnergyProfile(3.0, 12.5, "rapl"),
    quantisation=Quantisation.INT4,
    others_share=0.05,
    disk=DiskProfile(1e9, 1 << 40, 5e8),
)
LINK = LinkProfile(1e-3, 1e8, 0.1, 7, 4096)
TRAFFIC = Traffic(3, Lengths(100.0, (0.0, 1.5, 1.0)), Lengths(7.5, (2.5,)), 1.25)

DEPLOYMENT_BODY = (
    r'{"uid":"u1","spec":{"name":"tale","model":"tiny","source":"a","privacy":"open",'
    r'"objective":"auto","dtype":"bfloat16","kv_dtype":"float16","max_context":0,'
    r'"max_new_tokens":1024,"prompt_tokens":null,"new_tokens":null,"concurrency":8,'
    r'"max_time_per_token_s":0.5,"max_inter_token_latency_s":null,"kv_overcommit":false,'
    r'"allow_streaming":false,"kv_swap_bytes":0,"kv_swap_on_disk":false,"prefix_cache":false,'
    r'"mode":"no-bubbles","micro_batches":2,"exclude":[],"standby":["b","c"],"reserve":{"b":7},'
    r'"quantisation":{"*":"int8","a":"none"},"head_quantisation":"int4","layers":[{"node":"a",'
    r'"layers":{"first":0,"end":4}},{"node":"b","layers":{"first":4,"end":12}}]},'
    r'"manifest_digest":"dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd",'
    r'"placement":{"stages":[{"index":0,"node_id":"id-a","node_name":"a","address":"a:7000",'
    r'"layers":{"first":0,"end":4},"parameter_bytes":1000,"kv_bytes":2000,"workspace_bytes":300,'
    r'"weight_budget_bytes":0,"streamed_bytes":0,"disk_read_bytes_per_s":0.0,'
    r'"disk_write_bytes_per_s":0.0},{"index":1,"node_id":"id-b","node_name":"b","address":"b:7000",'
    r'"layers":{"first":4,"end":12},"parameter_bytes":1001,"kv_bytes":2001,"workspace_bytes":301,'
    r'"weight_budget_bytes":400,"streamed_bytes":500,"disk_read_bytes_per_s":1000000000.0,'
    r'"disk_write_bytes_per_s":500000000.0}],"kv_block_tokens":16,"kv_blocks":77,"micro_batch":1,'
    r'"micro_batches":2,"predicted":{"time_to_first_token_s":0.5,"time_per_token_s":0.05,'
    r'"throughput_tps":40.0,"bottleneck":"computing on b","gap":0.25,"objective":"latency",'
    r'"requests":2,"prompt_tokens":128,"new_tokens":64,"lengths":"seen","request_s":3.5,'
    r'"joules_per_token":null},"note":"planned ✓","costs":[{"rows":[1,8],"decode_s":[0.001,0.002],'
    r'"prefill_s":[0.001,0.004],"decode_pair_s":1e-7,"prefill_pair_s":2e-8,"hop_delay_s":0.0,'
    r'"hop_s":0.0005,"hop_token_s":1e-6,"prefill_behind_s":0.0},{"rows":[1,8],"decode_s":[0.001,'
    r'0.002],"prefill_s":[0.001,0.004],"decode_pair_s":1e-7,"prefill_pair_s":2e-8,'
    r'"hop_delay_s":0.0,"hop_s":0.0005,"hop_token_s":1e-6,"prefill_behind_s":0.0}],"sweep":2},'
    r'"epoch":3,"phase":"failed","ever_ready":false,"failure":{"code":15,"reason":"CORRUPT_TENSOR",'
    r'"field":"x","message":"tensor x is corrupt"}}'
)
NODE_BODY = (
    r'{"node_id":"id-a","name":"a","address":"a:7000","wire_version":1,"facts":{"kind":"cpu",'
    r'"model":"Some CPU","cores":4,"memory_total_bytes":8589934592,'
    r'"memory_budget_bytes":6442450944,"unified_memory":false,"software":"edgeshard 1, torch 2",'
    r'"bits_fingerprint":"bits"}}'
)
PROFILE_BODY = """\
{
 "version": 3,
 "fingerprint": "abc",
 "model_hash": "def",
 "dtype": "bfloat16",
 "device": "cpu",
 "threads": 2,
 "layers": [
  {
   "kind": "moe-block",
   "parameters": 1000,
   "layers": 4,
   "window": 0,
   "rotated_bytes": 4096,
   "prefill": [
    {
     "count": 16,
     "context": 0,
     "seconds": 0.001,
     "spread": 0.01,
     "repeats": 5
    }
   ],
   "decode": [
    {
     "count": 1,
     "context": 64,
     "seconds": 0.002,
     "spread": 0.0,
     "repeats": 1
    }
   ]
  }
 ],
 "overhead": {
  "seconds": 0.0003,
  "seconds_per_byte": 1e-09,
  "spread": 0.1
 },
 "memory": {
  "total_bytes": 8589934592,
  "free_bytes": 6442450944,
  "daemon_bytes": 314572800,
  "unified": false
 },
 "effort": "quick",
 "processor_share": 0.9,
 "energy": {
  "idle_w": 3.0,
  "busy_w": 12.5,
  "source": "rapl"
 },
 "quantisation": "int4",
 "others_share": 0.05,
 "disk": {
  "read_bytes_per_s": 1000000000.0,
  "free_bytes": 1099511627776,
  "write_bytes_per_s": 500000000.0
 },
 "beside_stages": false
}"""
LINK_BODY = (
    r'{"version": 3, "latency_s": 0.001, "bandwidth_bps": 100000000.0, "spread": 0.1, "samples": 7,'
    r' "largest_bytes": 4096}'
)
TRAFFIC_BODY = (
    r'{"requests":3,"prompts":{"mean":100.0,"counts":[0.0,1.5,1.0]},"answers":{"mean":7.5,'
    r'"counts":[2.5]},"at_once":1.25}'
)


async def opened(path: Path) -> StateStore:
    """A store of a file with these bodies; its rows are as old as the file of version 4."""
    store = StateStore(path)
    await store.open("one", Timings())
    await store.close()
    with sqlite3.connect(path) as database:
        database.execute("INSERT INTO deployments VALUES (?, ?)", ("tale", DEPLOYMENT_BODY))
        database.executemany(
            "INSERT INTO nodes VALUES (?, ?)", [(A, NODE_BODY), (B, NODE_BODY.replace(A, B))]
        )
        database.execute("INSERT INTO profiles VALUES (?, ?, ?)", (A, 1e9, PROFILE_BODY))
        database.execute("INSERT INTO links VALUES (?, ?, ?, ?)", (A, B, 1e9, LINK_BODY))
        database.execute("INSERT INTO traffic VALUES (?, ?, ?)", ("tale", "tiny", TRAFFIC_BODY))
    database.close()
    return StateStore(path)


async def test_what_was_written_is_read(tmp_path: Path) -> None:
    store = await opened(tmp_path / "state.sqlite")
    state = await store.open("two", Timings())
    traffic = await store.load_traffic()
    await store.close()
    assert state.deployments == {DeploymentName("tale"): restored_record(RECORD)}
    assert state.nodes == {A: NODE, B: replace(NODE, node_id=B)}
    assert [known.value for known in state.measured[A].profiles.values()] == [PROFILE]
    assert {to: known.value for to, known in state.measured[A].links.items()} == {B: LINK}
    assert traffic == {(DeploymentName("tale"), ModelName("tiny")): TRAFFIC}


async def test_what_is_written_has_the_same_form(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    store = StateStore(path)
    await store.open("one", Timings())
    await store.save(replace(RECORD, prepared=(), attachment=4, loaded_bytes=7))
    await store.save_node(replace(NODE, incarnation="i1", connection=3))
    measured = Measurements({key_of(PROFILE): Reported(PROFILE, 0.0)}, {B: Reported(LINK, 0.0)})
    await store.save_measurements(A, measured, 0.0)
    await store.save_traffic({(DeploymentName("tale"), ModelName("tiny")): TRAFFIC})
    await store.close()
    with sqlite3.connect(path) as database:
        bodies = {
            table: database.execute(f"SELECT body FROM {table}").fetchone()[0]
            for table in ("deployments", "nodes", "profiles", "links", "traffic")
        }
    database.close()
    # Keys that this version adds.
    profile = PROFILE_BODY.replace(
        '   ]\n  }\n ],\n "overhead', '   ],\n   "weight_bytes": 0\n  }\n ],\n "overhead'
    )
    assert (bodies["profiles"], bodies["links"]) == (profile, LINK_BODY)
    later = DEPLOYMENT_BODY.replace('"layers":[{', '"rule":[],"layers":[{', 1)
    later = later.replace('"joules_per_token":null', '"joules_per_token":null,"together_tps":null')
    later = later.replace(
        '"sweep":2}',
        '"sweep":2,"saved_states":0,"speculation":"off","guesses":null,"draft":null,'
        '"guess_slots":0}',
    )
    later = later.replace('"mode":', f'"speculation":"{SPEC.speculation}","draft":"off","mode":')
    later = later.replace('},"manifest_digest":', ',"replicas":1,"replica":0},"manifest_digest":')
    facts = ',"takes_guesses":false,"keeps_states_of_guesses":false,"kernels":null}'
    node = NODE_BODY[:-2] + facts + ',"own_labels":{},"set_labels":{}}'
    traffic = TRAFFIC_BODY[:-1] + ',"guesses":{"steps":[]}}'
    for table, body in (("deployments", later), ("nodes", node), ("traffic", traffic)):
        # The same keys in the same order.
        assert json.dumps(json.loads(bodies[table])) == json.dumps(json.loads(body))


@pytest.mark.parametrize("speculation", ["guesses", "middle", "of the future"])
async def test_nothing_is_guessed_where_another_version_placed(
    tmp_path: Path, speculation: str
) -> None:
    """Its nodes may not be able to send guesses to only the sampling node."""
    path = tmp_path / "state.sqlite"
    store = await opened(path)
    body = json.loads(DEPLOYMENT_BODY)
    body["placement"]["speculation"] = speculation
    with sqlite3.connect(path) as database:
        database.execute("UPDATE deployments SET body = ?", (json.dumps(body),))
    database.close()
    state = await store.open("two", Timings())
    await store.close()
    placement = state.deployments[DeploymentName("tale")].placement
    assert placement is not None and placement.speculation is Speculation.OFF


async def test_the_failure_of_a_deployment_may_be_absent_and_so_may_what_came_later(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.sqlite"
    store = await opened(path)
    body = json.loads(DEPLOYMENT_BODY) | {"failure": None, "phase": "ready", "later": 1}
    del (
        body["ever_ready"],
        body["placement"]["costs"],
        body["spec"]["micro_batches"],
        body["spec"]["layers"][0],
    )
    with sqlite3.connect(path) as database:
        database.execute("UPDATE deployments SET body = ?", (json.dumps(body),))
        database.execute(
            "UPDATE nodes SET body = replace(body, ?, '')", (',"bits_fingerprint":"bits"',)
        )
    database.close()
    state = await store.open("two", Timings())
    await store.close()
    spec = replace(SPEC, micro_batches=0, layers=SPEC.layers[1:])
    ready = replace(
        RECORD,
        spec=spec,
        placement=replace(PLACEMENT, costs=()),
        phase=DeploymentPhase.READY,
        failure=None,
    )
    assert state.deployments[DeploymentName("tale")] == restored_record(ready)
    assert state.nodes[A].facts == replace(FACTS, bits_fingerprint="")


@pytest.mark.parametrize(
    ("before", "after", "field"),
    [
        ('"phase":"failed"', '"phase":"lost"', "phase"),
        ('"kv_blocks":77', '"kv_blocks":"many"', "placement.kv_blocks"),
        ('"first":4', '"fist":4', "placement.stages[1].layers.first"),
        ('"dtype":"bfloat16"', '"dtype":"int3"', "spec.dtype"),
        ('"concurrency":8', '"concurrency":0', "spec.concurrency"),
    ],
)
async def test_a_damaged_body_is_named(tmp_path: Path, before: str, after: str, field: str) -> None:
    path = tmp_path / "state.sqlite"
    store = await opened(path)
    damaged = after.join(DEPLOYMENT_BODY.rsplit(before, 1))
    assert damaged != DEPLOYMENT_BODY
    with sqlite3.connect(path) as database:
        database.execute("UPDATE deployments SET body = ?", (damaged,))
    database.close()
    with pytest.raises(InvalidArgumentError) as refused:
        await store.open("two", Timings())
    await store.close()
    assert refused.value.field == field and "state.sqlite" in refused.value.message
