"""docs/five-people.md: its shell runs as written, with a stand-in for Docker that starts the programs themselves."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from proof.compose import load
from solrl_rollout.settings import RolloutSettings
from tests.docs.command_checks import parsed
from tests.docs.fences import ROOT, blocks
from tests.support.service_helpers import running_service

PAGE = (ROOT / "docs/five-people.md").read_text()
PROGRAMS = os.environ | {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "HF_TOKEN": "hf_operator",
}
"""Environment in which a shell finds the programs of these tests' interpreter; with the operator's hub token."""
PEOPLE = ("alice", "bob", "carol", "dave", "erin")
DOCKER = """
docker() {
    while [ $# -gt 0 ] && [ "$1" != token ]; do shift; done
    [ $# -eq 0 ] || solrl-rollout "$@" --file tokens.json
}
sudo() { :; }
nvidia-smi() { printf 'GPU-%s\n' a b c d e f g h; }
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which steps 1 and 2 of the page were typed."""
    folder = tmp_path_factory.mktemp("node")
    shutil.copytree(ROOT / "deploy", folder / "deploy")
    begins = ("grep -vE", "for person in")
    steps = [block.text for block in blocks("docs/five-people.md", "sh") if block.text.startswith(begins)]
    typed = "\n".join(["set -euo pipefail", DOCKER, *steps])
    subprocess.run(["bash", "-c", typed], cwd=folder, check=True, capture_output=True, env=PROGRAMS)
    return folder


def test_each_person_gets_a_token_and_none_of_the_operators_secrets(node: Path) -> None:
    operators = {(node / "secrets" / name).read_text() for name in ("redis_password", "redis_url", "hf_token")}
    tokens = set()
    for person in PEOPLE:
        folder = node / "secrets" / person
        assert operators.isdisjoint(path.read_text() for path in folder.iterdir())
        assert (folder / "hf_token").read_text() == "\n"
        assert folder.stat().st_mode & 0o077 == 0
        tokens.add((folder / "token").read_text())
    assert len(tokens) == len(PEOPLE)


def test_people_see_their_own_runs_and_prometheus_reads_metrics(node: Path) -> None:
    with running_service("--token-file", str(node / "tokens.json")) as service:
        for person in PEOPLE:
            secret = (node / "secrets" / person / "token").read_text().strip()
            headers = {"Authorization": f"Bearer {secret}"}
            assert service.client.get("/v1/status", headers=headers).json()["service"]["tenant"] == person
            assert service.client.get("/metrics", headers=headers).status_code == httpx.codes.FORBIDDEN
        secret = (node / "secrets/metrics_token").read_text().strip()
        headers = {"Authorization": f"Bearer {secret}"}
        assert service.client.get("/metrics", headers=headers).status_code == httpx.codes.OK
        assert service.client.get("/v1/runs/alice-first/adapters", headers=headers).status_code != httpx.codes.OK


def test_the_quotas_reach_the_service_and_fit_redis(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line for line in (node / ".env").read_text().splitlines() if not line.startswith("#")]
    env = dict(line.split("=", 1) for line in lines)
    assert len(env) == len(lines), "each variable once"
    services = load(ROOT / "docker-compose.yml", env)["services"]
    for name, value in services["rollout"]["environment"].items():
        if name.startswith("SOLRL_TENANT_"):
            monkeypatch.setenv(name, value)
    settings = RolloutSettings()
    assert settings.tenant_adapter_bytes is not None
    # Two full runs of FLUX.1 fit, and ring.
    (megabytes,) = re.findall(r"^\| FLUX\.1 \| (\d+) MB", (ROOT / "docs/checkpoints.md").read_text(), re.MULTILINE)
    full = settings.retain * int(megabytes) * 10**6 / settings.tenant_adapter_bytes
    (part,) = re.findall(r"solrl_tenant_adapter_limit_bytes > ([\d.]+)", (ROOT / "deploy/alerts.yml").read_text())
    assert full < float(part) < 2 * full < 1
    redis = int(env["SOLRL_REDIS_MEMORY"].removesuffix("gb"))
    assert len(PEOPLE) * settings.tenant_adapter_bytes < redis * 10**9
    assert int(env["SOLRL_REDIS_LIMIT"].removesuffix("g")) == 1.5 * redis
    assert 2 * 48 * 96 < settings.most_queued < settings.queue_limit / len(PEOPLE)
    assert env["COMPOSE_PROFILES"] in services["proxy"]["profiles"]


def test_the_page_s_hours_and_share_are_those_of_the_layout(node: Path) -> None:
    (command,) = re.findall(r"^solrl-train layout .+", PAGE, re.MULTILINE)
    words = [sys.executable, "-m", "solrl_trainer", *command.split()[1:]]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    for hours in re.findall(r"(?:with|without) a service, ([\d.]+) h per run", printed):
        assert f"{hours} hours" in PAGE
    gpus = re.search(r"CUDA_VISIBLE_DEVICES=(\S+) solrl-rollout serve", printed)
    assert gpus is not None
    uuids = ",".join(f"GPU-{'abcdefgh'[int(gpu)]}" for gpu in gpus[1].split(","))
    assert f"SOLRL_ROLLOUT_GPU={uuids}\n" in (node / ".env").read_text()
    (share,) = set(re.findall(r"explore\.share=([\d.]+)", printed))
    assert PAGE.count(f"--set explore.share={share}") == 2


def test_the_page_s_command_of_a_run_is_the_compose_file_s() -> None:
    (text,) = [
        block.text for block in blocks("docs/five-people.md", "sh") if block.text.startswith("deploy/gpus\nNAME")
    ]
    written = shlex.split(text.replace("\\\n", " ").replace("$NAME", "first").partition("--name first trainer ")[2])
    written = written[: written.index("docker")]
    variables = {"SOLRL_RUN": "first", "SOLRL_EXPLORE_SHARE": "0.833", "SOLRL_PATIENCE": "28800"}
    theirs = load(ROOT / "docker-compose.yml", variables)["services"]["trainer"]["command"]
    commands = [vars(parsed(["solrl-train", *words])) for words in (written, theirs)]
    assert sorted(commands[0].pop("set")) == sorted(commands[1].pop("set"))
    assert commands[0] == commands[1]


def test_the_gpus_without_container_and_program_are_free(tmp_path: Path) -> None:
    programs = {
        "docker": """
            if [ $1 = ps ]; then printf '1\\n2\\n'; exit; fi
            echo "/solrl-rollout-1 [PATH=/bin NVIDIA_VISIBLE_DEVICES=GPU-a,GPU-b SOLRL_PORT=8100]"
            echo "/alice-first [NVIDIA_VISIBLE_DEVICES=GPU-c]"
            echo "/solrl-redis-1 [PATH=/bin]"
            echo "/dcgm-exporter [NVIDIA_VISIBLE_DEVICES=all]" """,
        "nvidia-smi": """
            case $1 in
                --query-gpu=*) for gpu in a b c d e; do echo "GPU-$gpu, 00000000:3$gpu:00.0, 7 MiB"; done;;
                *) printf '17, GPU-c\\n18, GPU-d\\n19, GPU-d\\n';;
            esac """,
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([ROOT / "deploy/gpus"], env=os.environ | path, capture_output=True, text=True, check=True)
    users = ("solrl-rollout-1", "solrl-rollout-1", "alice-first", "process 18 process 19", "free")
    lines = [f"GPU-{gpu} 00000000:3{gpu}:00.0 7 MiB: {user}" for gpu, user in zip("abcde", users, strict=True)]
    assert done.stdout.splitlines() == lines
