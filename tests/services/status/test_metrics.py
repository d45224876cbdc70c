"""Metrics for Prometheus, including all that the dashboard queries."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families
from solrl_http.tokens import Token
from solrl_reward.reward_metrics import RewardMetrics
from solrl_rollout.status.rollout_metrics import SHOWN_RUNS, QueueState, RolloutMetrics
from solrl_rollout.status.throughput import FinishedChunk
from solrl_rollout.store.redis_store import RedisRunStore
from tests.services.iteration_helpers import report
from tests.services.security_helpers import Guarded, push
from tests.services.store_helpers import adapter
from tests.support.service_helpers import MODEL, Layout, adapter_file, rollout_request

ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "docs" / "grafana" / "solrl.json").read_text())
NOW = datetime.now(UTC)
TOKEN = Token(id="3c4d74b3", tenant="a", scopes=("push",), sha256="0" * 64, created=NOW, expires=NOW)
FINISHED = FinishedChunk("a", "demo", "mini", "nvfp4", 24, 6, 0.0, 4.0, True, 0.25, 3.0, 0.5)
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def labelled(samples: Samples, name: str) -> dict[tuple[str, ...], float]:
    return {tuple(v for _, v in labels): value for (found, labels), value in samples.items() if found == name}


async def _no_sizes() -> dict[str, int]:
    return {}


@pytest.fixture
def metrics() -> RolloutMetrics:
    """RolloutMetrics with a value of every kind."""
    made = RolloutMetrics()
    made.watch_queue(lambda: QueueState({"a": 48, "b": 24}, 1.5))
    made._sizes = {"a": 1000}
    made.watch_store(_no_sizes, 4000)
    made.watch_tokens(lambda: [TOKEN, TOKEN.model_copy(update={"id": "11111111", "expires": None})])
    made.adapter_pushed("a", "demo", 7, 1000)
    made.adapter_served("a", "demo", 5, head=7)
    made.chunk_finished("cuda:0", FINISHED)
    made.reward_failed("hpsv2")
    made.out_of_memory("mini", "nvfp4")
    made.worker_up("cuda:0", True)
    made.worker_restarted("cuda:0")
    made.request_answered("/v1/models", "GET", 200, 0.002)
    with made.open.track_inprogress():
        pass
    return made


def test_recorded_numbers_become_metrics(metrics: RolloutMetrics) -> None:
    samples = read(metrics.exposition().decode())
    labels = {"model": "mini", "precision": "nvfp4"}
    assert value(samples, "solrl_candidates_total", tenant="a", **labels) == 24
    assert value(samples, "solrl_chunks_total", **labels) == 1
    assert value(samples, "solrl_step_seconds_sum", **labels) == 0.5
    assert value(samples, "solrl_reward_seconds_sum", model="mini") == 0.5
    assert value(samples, "solrl_switch_seconds_count", **labels) == 1
    for name in ("up", "chunks_total", "restarts_total"):
        assert value(samples, f"solrl_worker_{name}", worker="cuda:0") == 1
    assert value(samples, "solrl_adapter_pushes_total", tenant="a") == 1
    assert value(samples, "solrl_adapter_bytes_total", tenant="a") == 1000
    assert value(samples, "solrl_tenant_adapter_limit_bytes") == 4000
    assert TOKEN.expires is not None
    expiries = labelled(samples, "solrl_token_expiry_timestamp_seconds")
    assert expiries == {("a", TOKEN.id): TOKEN.expires.timestamp()}, "a token without an end has none"
    assert value(samples, "solrl_reward_errors_total", reward="hpsv2") == 1
    assert value(samples, "solrl_out_of_memory_total", model="mini", part="nvfp4") == 1
    assert value(samples, "solrl_queue_candidates", tenant="b") == 24
    assert value(samples, "solrl_queue_oldest_seconds") == 1.5
    assert value(samples, "solrl_http_requests_in_progress") == 0
    assert value(samples, "process_resident_memory_bytes") > 0


def test_only_the_busiest_runs_have_metrics() -> None:
    metrics = RolloutMetrics()
    for i in range(1000):
        metrics.adapter_pushed("a", f"run-{i}", 0, 1)
        finished = FinishedChunk("a", f"run-{i}", "m", "bf16", 1, 1, 0.0, 0.0, False, 0.0, float(i), 0.0)
        metrics.chunk_finished("w", finished)
    samples = read(metrics.exposition().decode())
    shares = labelled(samples, "solrl_run_share")
    assert set(shares) == {(f"run-{i}", "a") for i in range(1000 - SHOWN_RUNS, 1000)}
    # Runs beyond the tracked ones are forgotten and do not count in the total.
    assert sum(shares.values()) == pytest.approx(sum(range(990, 1000)) / sum(range(744, 1000)), rel=1e-3)
    assert len(samples) < 250


def test_the_lag_follows_new_versions_and_rewinds() -> None:
    def lag() -> dict[tuple[str, ...], float]:
        return labelled(read(metrics.exposition().decode()), "solrl_adapter_lag_versions")

    metrics = RolloutMetrics()
    metrics.adapter_served("a", "demo", 3, head=9)
    assert lag() == {("demo", "a"): 6.0}
    metrics.adapter_served("a", "demo", 3, head=4)
    assert lag() == {("demo", "a"): 1.0}
    metrics.run_rewound("a", "demo", 1)
    metrics.adapter_pushed("a", "demo", 2, 1)
    assert lag() == {}
    metrics.adapter_served("a", "demo", 1, head=2)
    assert lag() == {("demo", "a"): 1.0}
    for _ in range(2):  # the second one is unknown, as after the service restarted
        metrics.run_deleted("a", "demo")
        metrics.adapter_served("a", "demo", 1, head=None)
        metrics.chunk_finished("cuda:0", FINISHED)  # accepted before
        assert labelled(read(metrics.exposition().decode()), "solrl_run_idle_seconds") == {}
    metrics.adapter_pushed("a", "demo", 0, 1)
    metrics.adapter_served("a", "demo", 0, head=0)
    assert lag() == {("demo", "a"): 0.0}


def test_a_run_is_idle_until_it_reports_its_end(guarded: Guarded, layout: Layout) -> None:
    def idle() -> set[tuple[str, ...]]:
        samples = read(guarded.service.client.get("/metrics", headers=guarded.headers("admin")).text)
        return {name for name in labelled(samples, "solrl_run_idle_seconds") if name[0] == "ends"}

    def tell(iteration: int, **more: Any) -> None:
        body = report(iteration, **more).model_dump(mode="json")
        headers = guarded.headers("b")
        assert guarded.service.client.post("/v1/runs/ends/iterations", json=body, headers=headers).status_code == 204

    assert push(guarded, "b", "ends", adapter_file(layout, 1)).status_code == 201
    assert idle() == {("ends", "b")}
    for last in ({"ended": "no new best"}, {"planned": 2}):
        tell(1, **last)
        assert idle() == set()
        tell(1)
        assert idle() == {("ends", "b")}
    assert guarded.service.client.delete("/v1/runs/ends", headers=guarded.headers("b")).status_code == 204
    assert idle() == set(), "a deleted run rings nobody"


def test_a_service_counts_its_requests(guarded: Guarded) -> None:
    client = guarded.service.client
    answer = client.get("/metrics", headers=guarded.headers("admin"))
    assert answer.headers["content-type"].startswith("text/plain; version=")
    before = labelled(read(answer.text), "solrl_http_requests_total")
    client.get("/v1/models", headers=guarded.headers("a"))
    for i in range(20):
        client.get(f"/v1/surprise-{i}")
        client.request(f"ODD{i}", "/v1/models", headers=guarded.headers("a"))
        client.get(f"/v1/runs/run-{i}/adapters", headers=guarded.headers("a"))
    after = labelled(read(client.get("/metrics", headers=guarded.headers("admin")).text), "solrl_http_requests_total")
    gained = {name: after[name] - before.get(name, 0) for name in after}
    assert gained["GET", "/v1/models", "200"] == 1
    assert gained["GET", "/v1/runs/{run}/adapters", "404"] == 20
    assert gained["other", "unmatched", "401"] == 20
    assert gained["other", "unmatched", "405"] == 20
    assert len(after) < 100


def test_a_service_counts_its_work(guarded: Guarded, layout: Layout) -> None:
    bodies = [adapter_file(layout, seed) for seed in (1, 2)]
    assert push(guarded, "b", "counted", bodies[0]).status_code == 201
    assert push(guarded, "b", "counted", bodies[1], version=1, parent=0).status_code == 201
    asked = rollout_request(count=3, steps=2, adapter=("counted", 0))
    answer = guarded.service.client.post("/v1/rollouts", json=asked, headers=guarded.headers("b"))
    assert answer.status_code == 200
    labels = {"model": MODEL, "precision": answer.json()["precision"]}
    samples = read(guarded.service.client.get("/metrics", headers=guarded.headers("admin")).text)
    assert value(samples, "solrl_candidates_total", tenant="b", **labels) >= 3
    assert value(samples, "solrl_step_seconds_sum", **labels) > 0
    assert value(samples, "solrl_switch_seconds_count", **labels) >= 1
    assert value(samples, "solrl_adapter_bytes_total", tenant="b") >= sum(map(len, bodies))
    assert value(samples, "solrl_tenant_adapter_bytes", tenant="b") >= sum(map(len, bodies))
    expiries = labelled(samples, "solrl_token_expiry_timestamp_seconds")
    assert "a" in {tenant for tenant, _ in expiries}
    assert value(samples, "solrl_adapter_lag_versions", tenant="b", run="counted") == 1


@pytest.mark.anyio
async def test_a_store_that_does_not_answer_hides_no_other_metric(own_redis) -> None:  # type: ignore[no-untyped-def]
    metrics, store = RolloutMetrics(), RedisRunStore(own_redis.url)
    metrics.watch_store(store.sizes)
    await store.put("a", *adapter(0, None))
    await metrics.update()
    stored = labelled(read(metrics.exposition().decode()), "solrl_tenant_adapter_bytes")
    assert stored == {("a",): adapter(0, None)[0].size}
    own_redis.kill()
    await metrics.update()
    samples = read(metrics.exposition().decode())
    assert labelled(samples, "solrl_tenant_adapter_bytes") == {}
    assert value(samples, "solrl_queue_oldest_seconds") == 0
    await store.close()


def panels(of: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in of["panels"]:
        yield panel
        yield from panels(panel) if "panels" in panel else ()


@pytest.mark.gpu
def test_a_gpu_s_memory_is_reported(metrics: RolloutMetrics) -> None:
    held = torch.ones(64 * 2**20, dtype=torch.uint8, device="cuda")
    device = f"cuda:{held.device.index}"
    samples = read(metrics.exposition().decode())
    total, free, reserved, allocated = (
        value(samples, "solrl_gpu_memory_bytes", device=device, kind=kind)
        for kind in ("total", "free", "reserved", "allocated")
    )
    assert held.nbytes <= allocated <= reserved <= total - free < total


def test_the_dashboard_queries_only_existing_metrics(metrics: RolloutMetrics) -> None:
    names = {name for name, _ in read(metrics.exposition().decode())} | {"solrl_gpu_memory_bytes"}
    asked: set[str] = set()
    for panel in panels(DASHBOARD):
        for target in panel.get("targets", ()):
            asked |= set(re.findall(r"\b(?:solrl|process)_[a-z_]+", target["expr"]))
    assert asked <= names
    ours = {re.sub(r"_(total|sum|count|bucket|created|info)$", "", name) for name in names if name.startswith("solrl_")}
    shown = {re.sub(r"_(total|sum|count|bucket)$", "", name) for name in asked}
    assert ours - shown <= {"solrl_build", "solrl_chunks"}


def test_the_documentation_lists_exactly_the_metrics(metrics: RolloutMetrics) -> None:
    text = (ROOT / "docs" / "monitor.md").read_text()
    told = set(re.findall(r"`(solrl_[a-z_]+)\{|`(solrl_[a-z_]+)`", text))
    told_names = {first or second for first, second in told} - {"solrl_"}
    of_rewards = RewardMetrics()
    of_rewards.watch_costs(dict)
    texts = (metrics.exposition().decode(), of_rewards.exposition().decode())
    families = [family for text in texts for family in text_string_to_metric_families(text)]
    names = {f.name + ("_total" if f.type == "counter" else "") for f in families if f.name.startswith("solrl_")}
    assert told_names == {name for name in names if not name.endswith("_created")}


def test_the_alerts_query_existing_metrics_labels_and_routes_and_the_page_lists_them(metrics: RolloutMetrics) -> None:
    (group,) = yaml.safe_load((ROOT / "deploy/alerts.yml").read_text())["groups"]
    labels = {name: {label for label, _ in pairs} for name, pairs in read(metrics.exposition().decode())}
    labels["up"] = {"job"}
    routes = json.loads((ROOT / "proto/openapi.json").read_text())["paths"]
    for rule in group["rules"]:
        # Those of other exporters are their own.
        asked = re.findall(r"\b(up|(?:solrl|process|redis|node|DCGM)_\w+)(?:\{(.*?)\})?", rule["expr"])
        assert asked or rule["alert"] == "SolrlHeartbeat", rule
        ours = [(name, matchers) for name, matchers in asked if not name.startswith(("redis_", "node_", "DCGM_"))]
        known = {"instance", "UUID"}.union(*(labels[name] for name, _ in ours))
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= known
        for name, matchers in ours:
            assert set(re.findall(r"(\w+)(?:=|!=|=~|!~)\"", matchers)) <= labels[name] | {"job"}
            assert set(re.findall(r'route="(.*?)"', matchers)) <= set(routes)
    page = (ROOT / "docs/monitor.md").read_text()
    rows = re.findall(r"^\| `(Solrl\w+)` \| (.*?) \|", page, re.MULTILINE)
    assert [name for name, _ in rows] == [rule["alert"] for rule in group["rules"]]
    for (name, after), rule in zip(rows, group["rules"], strict=True):
        assert after.endswith(", mail") == (rule.get("labels") == {"severity": "info"}), name
        if name != "SolrlIdle":  # five minutes after a rate of fifteen
            unit = {"m": " min", "h": " h"}.get(rule.get("for", "-")[-1])
            assert after.startswith(rule["for"][:-1] + unit if unit else ("always", "at once", "30 min", "1 h")), name
