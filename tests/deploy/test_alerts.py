"""The rules of deploy/alerts.yml ring when they should, by Prometheus' own test of rules, and each wakes somebody."""

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.docs.fences import ROOT
from tests.support.ports import free_port


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool here: Debian's package prometheus has it")
@pytest.mark.parametrize(
    ("alert", "series", "values", "rings"),
    [
        ("SolrlGone", 'up{job="solrl"}', "1+0x10 0+0x7", False),
        ("SolrlGone", 'up{job="solrl"}', "1+0x10 0+0x8", True),
        ("SolrlGone", 'up{job="gpus"}', "1+0x10 0+0x8", True),
        ("SolrlRestarted", 'process_start_time_seconds{job="solrl"}', "0+0x59", True),
        ("SolrlRestarted", 'process_start_time_seconds{job="solrl"}', "0+0x60", False),
        ("SolrlWorkerDown", 'solrl_worker_up{worker="cuda:0"}', "1+0x3 0+0x59", False),
        ("SolrlWorkerDown", 'solrl_worker_up{worker="cuda:0"}', "1+0x3 0+0x60", True),
        ("SolrlWorkerFlaps", 'solrl_worker_restarts_total{worker="cuda:0"}', "0+0x30 1+0x60 2+0x60", False),
        ("SolrlWorkerFlaps", 'solrl_worker_restarts_total{worker="cuda:0"}', "0+0x300 1+0x60 2+0x60", False),
        ("SolrlWorkerFlaps", 'solrl_worker_restarts_total{worker="cuda:0"}', "0+0x30 1+0x60 2+0x60 3+0x2", True),
        ("SolrlGpuFaulty", 'DCGM_FI_DEV_XID_ERRORS{gpu="3",UUID="GPU-d"}', "0+0x9 31+0x1", False),
        ("SolrlGpuFaulty", 'DCGM_FI_DEV_XID_ERRORS{gpu="3",UUID="GPU-d"}', "0+0x9 79+0x1", True),
        ("SolrlGpuFaulty", 'DCGM_FI_DEV_ROW_REMAP_FAILURE{gpu="3",UUID="GPU-d"}', "0+0x9 1+0x1", True),
        ("SolrlTrainersSilent", 'solrl_run_idle_seconds{tenant="alice",run="first"}', "0+15x240", False),
        ("SolrlTrainersSilent", 'solrl_run_idle_seconds{tenant="alice",run="first"}', "0+15x241", True),
        ("SolrlTrainersSilent", 'solrl_run_idle_seconds{tenant="alice",run="first"}', "0+15x1440", False),
    ],
)
def test_an_alert_rings_in_time(alert: str, series: str, values: str, rings: bool, tmp_path: Path) -> None:
    """`values` in promtool's notation, one every 15 s; the alert's state is that at the last one."""
    last = sum(int(part.partition("x")[2]) + 1 for part in values.split()) - 1
    firing = f'ALERTS{{alertname="{alert}",alertstate="firing"}}'
    wanted = [{"labels": "{}", "value": int(rings)}]
    test = {
        "interval": "15s",
        "input_series": [{"series": series, "values": values}],
        "promql_expr_test": [
            {"expr": f"count({firing}) or vector(0)", "eval_time": f"{15 * last}s", "exp_samples": wanted}
        ],
    }
    file, rules = tmp_path / "test.yml", str(ROOT / "deploy/alerts.yml")
    file.write_text(json.dumps({"rule_files": [rules], "evaluation_interval": "15s", "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(
    not shutil.which("prometheus-alertmanager"),
    reason="no prometheus-alertmanager here: Debian's package of that name has it",
)
def test_while_one_alert_is_acknowledged_another_wakes_too(tmp_path: Path) -> None:
    """Alertmanager keeps one incident for each group."""
    labels = (
        {"alertname": "SolrlHeartbeat", "severity": "heartbeat"},
        {"alertname": "SolrlTokenExpires", "severity": "info"},
        {"alertname": "SolrlGone", "instance": "a"},
        {"alertname": "SolrlErrors", "instance": "a", "route": "/v1/models"},
        {"alertname": "SolrlErrors", "instance": "a", "route": "/v1/rollouts"},
        {"alertname": "SolrlWorkerDown", "instance": "a", "worker": "cuda:0"},
        {"alertname": "SolrlWorkerDown", "instance": "a", "worker": "cuda:1"},
    )
    address = f"127.0.0.1:{free_port()}"
    words = [
        "prometheus-alertmanager",
        f"--config.file={ROOT / 'deploy/alertmanager.yml'}",
        f"--storage.path={tmp_path}",
    ]
    alertmanager = subprocess.Popen([*words, f"--web.listen-address={address}", "--cluster.listen-address="])
    try:
        with httpx.Client(base_url=f"http://{address}/api/v2", transport=httpx.HTTPTransport(retries=9)) as client:
            client.post("/alerts", json=[{"labels": entry} for entry in labels]).raise_for_status()
            deadline = time.monotonic() + 60
            groups: list[Any] = []
            while sum(len(group["alerts"]) for group in groups) < len(labels) and time.monotonic() < deadline:
                groups = client.get("/alerts/groups").raise_for_status().json()
    finally:
        alertmanager.kill()
        alertmanager.wait()
    receivers = sorted((group["receiver"]["name"], len(group["alerts"])) for group in groups)
    assert receivers == [("heartbeat", 1), ("mail", 1), *[("wake", 1)] * 5]
