"""Debian's Prometheus on a real site: it reads the daemons, takes the alert rules, and answers each
of the dashboard's queries."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from edgeshard.domain.errors import NotFoundError
from tests.house.test_documents import free_port
from tests.support.site import MakeSpec, Site

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "edgeshard.json"
JOBS = {"edgeshard-coordinator": ["coordinator"], "edgeshard-agent": ["a", "b", "c"]}

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        shutil.which("promtool") is None, reason="needs Debian's package prometheus"
    ),
]


def promtool(*arguments: str, stdin: bytes = b"") -> str:
    done = subprocess.run(["promtool", *arguments], input=stdin, capture_output=True, timeout=60)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scraped(
    tmp_path_factory: pytest.TempPathFactory, make_spec: MakeSpec
) -> AsyncIterator[dict[str, str]]:
    """A site that has served requests, whose daemons are read at these addresses."""
    ports: dict[str, int] = {}
    for name in ("coordinator", "a", "b", "c"):
        ports[name] = free_port(ports.values())
    listen = {name: ["--metrics-listen", f"127.0.0.1:{port}"] for name, port in ports.items()}
    site = Site(
        tmp_path_factory.mktemp("scraped"),
        models={"fairy-tales": ROOT / "edgeshard" / "demo_model"},
        coordinator_arguments=listen.pop("coordinator"),
        arguments_by_agent=listen,
    )
    async with site:
        client = site.client
        async for _ in client.profile():  # links only
            pass
        await client.deploy(make_spec())
        await asyncio.gather(
            *(client.complete("tales", "Once upon a time", max_new_tokens=8) for _ in range(2))
        )
        with pytest.raises(NotFoundError):
            await client.complete("nothing", "Once")

        async def told() -> bool:
            return all(stage.steps_done for stage in (await client.deployment("tales")).stages)

        await site.until(told)
        yield {name: f"127.0.0.1:{port}" for name, port in ports.items()}


def read(address: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        return bytes(answer.read())


async def test_promtool_finds_nothing_to_say_of_the_metrics(scraped: dict[str, str]) -> None:
    """But of the colon in vLLM's names, which are not ours to choose."""
    for address in scraped.values():
        text = await asyncio.to_thread(read, address)
        ours = [line for line in text.splitlines(keepends=True) if b"vllm:" not in line]
        assert not promtool("check", "metrics", stdin=b"".join(ours))


async def test_promtool_takes_rules_and_configuration(scraped: dict[str, str]) -> None:
    promtool("check", "rules", str(RULES))
    promtool("check", "config", str(RULES.parent / "prometheus.yml"))


class Prometheus:
    """The server, at its own address; ended with the test."""

    def __init__(self, directory: Path, targets: dict[str, str]) -> None:
        config = yaml.safe_load((RULES.parent / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(RULES)]
        for job in config["scrape_configs"]:
            job["static_configs"] = [
                {"targets": [targets[name] for name in JOBS.pop(job["job_name"])]}
            ]
        assert not JOBS, "the example names each job"
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.address = f"127.0.0.1:{free_port(())}"
        self._log = (directory / "prometheus.log").open("wb")
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={self.address}",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def api(self, path: str, **query: str) -> Any:
        """None while it does not listen yet, or reads its own files."""
        try:
            with urllib.request.urlopen(
                f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=30
            ) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
                return None
            raise AssertionError(f"{query}: {error.read().decode()}") from None
        except (urllib.error.URLError, ConnectionError):
            return None

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._log.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prometheus(
    scraped: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Prometheus]:
    """It has read each daemon at least three times."""
    server = Prometheus(tmp_path_factory.mktemp("prometheus"), scraped)
    try:
        async with asyncio.timeout(90):
            while True:
                found = await asyncio.to_thread(
                    server.api, "query", query="count_over_time(up[1m]) >= 3 and up == 1"
                )
                if found is not None and len(found["result"]) == len(scraped):
                    break
                assert server.process.poll() is None, "it has ended; its log says why"
                await asyncio.sleep(0.2)
        yield server
    finally:
        server.stop()


def queries() -> Iterator[tuple[str, str]]:
    """Each query of the dashboard with its panel's title, as Grafana sends it."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            expr = target["expr"].replace("$__rate_interval", "1m").replace("$deployment", ".*")
            assert "$" not in expr, f"{panel['title']}: {expr}"
            yield panel["title"], expr


async def test_each_query_of_the_dashboard_has_an_answer(prometheus: Prometheus) -> None:
    unanswered = []
    for title, query in queries():
        found = await asyncio.to_thread(prometheus.api, "query", query=query)
        if not found["result"]:
            unanswered.append(f"{title}: {query}")
    assert not unanswered, "\n".join(unanswered)


async def test_the_alert_rules_are_evaluated_and_a_sound_site_raises_none(
    prometheus: Prometheus,
) -> None:
    async with asyncio.timeout(60):
        while True:
            groups = (await asyncio.to_thread(prometheus.api, "rules"))["groups"]
            health = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
            if "unknown" not in health.values():
                break
            await asyncio.sleep(0.2)
    assert health and set(health.values()) == {"ok"}
    assert not [
        rule["name"] for group in groups for rule in group["rules"] if rule["state"] != "inactive"
    ]


async def test_alerts_and_dashboard_name_metrics_that_there_are(scraped: dict[str, str]) -> None:
    texts = [(await asyncio.to_thread(read, address)).decode() for address in scraped.values()]
    families = {name for text in texts for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)}
    # Only with certificates, which this site has not.
    ends = "certificate_expiry_timestamp_seconds"
    families |= {f"edgeshard_{ends}", f"edgeshard_node_{ends}"}
    for file in (RULES, DASHBOARD):
        named = set(re.findall(r"\b(?:edgeshard_|vllm:)\w+", file.read_text()))
        unknown = {name for name in named if name not in families and not _is_part(name, families)}
        assert not unknown, f"{file.name} names {sorted(unknown)}"


async def test_each_metric_is_in_the_documents(scraped: dict[str, str]) -> None:
    documented = set(
        re.findall(r"`((?:edgeshard_|vllm:)\w+)`", (ROOT / "docs" / "metrics.md").read_text())
    )
    texts = [(await asyncio.to_thread(read, address)).decode() for address in scraped.values()]
    families = {name for text in texts for name in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)}
    ours = {name for name in families if not name.startswith("process_")}
    assert ours - documented == set()
    assert {name for name in documented - ours if "certificate_expiry" not in name} == set()


def _is_part(name: str, families: set[str]) -> bool:
    return any(
        name.endswith(end) and name.removesuffix(end) in families
        for end in ("_bucket", "_sum", "_count")
    )


# The cause of each alert: the series that make it fire, and when.
FIRING = {
    "EdgeShardCoordinatorGone": (['up{job="edgeshard-coordinator"} 0+0x20'], "2m"),
    "EdgeShardNodeLost": (['edgeshard_nodes{status="away"} 1+0x20'], "3m"),
    "EdgeShardNodeSilent": (
        [
            'edgeshard_nodes{status="away"} 1+0x20',
            'edgeshard_node_heartbeat_age_seconds{node="a"} 20+60x20',
        ],
        "3m",
    ),
    "EdgeShardDeploymentNotReady": (['edgeshard_deployment_ready{deployment="d"} 0+0x20'], "6m"),
    "EdgeShardRecoveryLoop": (
        ['edgeshard_recoveries_total{deployment="d",kind="epoch"} 0+1x30'],
        "20m",
    ),
    "EdgeShardLinkSuspect": (['edgeshard_links_suspect{deployment="d"} 1+0x20'], "2m"),
    "EdgeShardQueueFull": (
        [
            'edgeshard_requests_running{deployment="d"} 2+0x20',
            'edgeshard_requests_waiting{deployment="d"} 8+0x20',
            'edgeshard_requests_limit{deployment="d"} 10+0x20',
        ],
        "3m",
    ),
    "EdgeShardKvFull": (
        [
            'edgeshard_stage_kv_used_bytes{deployment="d",stage="0",node="a"} 99+0x20',
            'edgeshard_stage_kv_capacity_bytes{deployment="d",stage="0",node="a"} 100+0x20',
            'edgeshard_requests_waiting{deployment="d"} 8+0x20',
        ],
        "6m",
    ),
    "EdgeShardFirstTokenSlow": (
        [
            'edgeshard_time_to_first_token_seconds_bucket{deployment="d",le="10.0"} 0+0x30',
            'edgeshard_time_to_first_token_seconds_bucket{deployment="d",le="20.0"} 0+5x30',
            'edgeshard_time_to_first_token_seconds_bucket{deployment="d",le="+Inf"} 0+5x30',
        ],
        "15m",
    ),
    "EdgeShardRequestsFail": (
        [
            'edgeshard_requests_failed_total{deployment="d",code="unavailable"} 0+1x30',
            'edgeshard_requests_total{deployment="d",role="client"} 0+10x30',
        ],
        "15m",
    ),
    "EdgeShardCertificateEnds": (
        ['edgeshard_node_certificate_expiry_timestamp_seconds{node="a"} 172800+0x20'],
        "1m",
    ),
    "EdgeShardClockSkew": (['edgeshard_node_clock_ahead_seconds{node="a"} -5+0x20'], "3m"),
    "EdgeShardDiskLow": (
        [
            'edgeshard_node_disk_free_bytes{node="a"} 1+0x20',
            'edgeshard_node_disk_size_bytes{node="a"} 100+0x20',
        ],
        "6m",
    ),
    "EdgeShardSwapInUse": (['edgeshard_node_swap_used_bytes{node="a"} 1000000000+0x20'], "11m"),
}


async def test_each_alert_fires_for_what_it_is_for(tmp_path: Path) -> None:
    rules = {
        rule["alert"]: rule
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
    }
    assert set(rules) == set(FIRING)
    tests = []
    for name, (series, when) in FIRING.items():
        given = [dict(zip(("series", "values"), one.rsplit(" ", 1), strict=True)) for one in series]
        # promtool compares all labels and annotations of firing alerts: ALERTS shows only that
        # something fires.
        expr = f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'
        fires = {"expr": expr, "eval_time": when, "exp_samples": [{"labels": "{}", "value": 1}]}
        tests.append({"interval": "1m", "input_series": given, "promql_expr_test": [fires]})
    file = tmp_path / "alerts_test.yml"
    file.write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests})
    )
    promtool("test", "rules", str(file))
