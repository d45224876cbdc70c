"""deploy/backup and the restoration of docs/failures.md, with folders in place of volumes and of the node's root."""

import os
import re
import shutil
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from solrl_http.tokens import create_token
from solrl_trainer.__main__ import main
from solrl_trainer.run_folder.metrics_file import read_metrics
from tests.docs.fences import ROOT, blocks
from tests.support.programs import Program, command
from tests.support.redis_server import running_redis
from tests.support.service_helpers import running_service
from tests.trainer.training_helpers import QUICK, sets

PROGRAMS = """
docker() { case $1$2 in
    volumeinspect) [ -d "$HERE/volumes/${5#solrl_}" ] && echo "$HERE/volumes/${5#solrl_}";;
    volumecreate) mkdir -p "$HERE/volumes/${3#solrl_}";;
esac; }
curl() { echo called >> "$HERE/heartbeat"; }
mountpoint() { :; }; sudo() { "$@"; }; sysctl() { :; }; systemctl() { :; }
"""
FILES = (
    *("solrl/.env", "solrl/secrets/alice/token", "solrl/prompts/alice/train.txt"),
    *("volumes/tokens/tokens.json", "volumes/outputs/alice/report.html"),
    *("root/etc/prometheus/alerts.yml", "root/etc/cron.daily/solrl-backup", "root/home/bob/solrl/runs/a/config.json"),
)


@dataclass(frozen=True)
class Node:
    folder: Path

    def run(self, script: str, before: str = "") -> int:
        for path, here in (("/mnt/backup", "backups"), ("/srv/solrl", "solrl")):
            script = script.replace(path, str(self.folder / here))
        script = script.replace("cd /\n", f"cd {self.folder}/root\n").replace("-C / ", f"-C {self.folder}/root ")
        words = ["sh", "-c", PROGRAMS + before + script]
        environment = os.environ | {"HERE": str(self.folder)}
        return subprocess.run(words, cwd=self.folder / "solrl", env=environment, capture_output=True).returncode

    def back_up(self, before: str = "") -> int:
        return self.run((ROOT / "deploy/backup").read_text(), before)

    def restore(self) -> None:
        (text,) = [block.text for block in blocks("docs/failures.md", "sh") if block.text.startswith("from=")]
        self.run(re.sub(r"solrl-\d{4}-\d\d-\d\d", self.days()[-1], text))

    def days(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "backups").glob("solrl-*"))

    def lose(self) -> None:
        for name in ("solrl", "volumes", "root"):
            shutil.rmtree(self.folder / name)
            (self.folder / name).mkdir()

    @property
    def heartbeat(self) -> bool:
        return (self.folder / "heartbeat").exists()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "backups").mkdir()
    return Node(tmp_path)


@pytest.fixture
def old(node: Node) -> str:
    """The name of the third day before, an hour before its time: backups take unequal time."""
    folder = node.folder / "backups/solrl-2026-01-01"
    folder.mkdir()
    os.utime(folder, (time.time() - 71 * 3600,) * 2)
    return folder.name


def test_what_was_backed_up_is_restored(node: Node, old: str) -> None:
    assert node.back_up() == 0
    assert node.heartbeat
    (day,) = node.days()
    assert day != old
    folder = node.folder / "backups" / day
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, *folder.iterdir()))
    node.lose()
    node.restore()
    assert [(node.folder / name).read_text() for name in FILES] == list(FILES)


@pytest.mark.parametrize("lost", ["volumes/outputs", "volumes/tokens", "solrl/secrets", "root/etc/cron.daily"])
def test_without_a_volume_or_the_secrets_no_heartbeat_is_sent_and_no_day_deleted(
    node: Node, old: str, lost: str
) -> None:
    assert node.back_up() == 0
    (node.folder / "heartbeat").unlink()
    before = {path: path.read_bytes() for path in (node.folder / "backups" / node.days()[-1]).iterdir()}
    (node.folder / "backups" / old).mkdir()
    shutil.rmtree(node.folder / lost)
    assert node.back_up() == 1
    assert not node.heartbeat
    assert old in node.days()
    assert before == {path: path.read_bytes() for path in before}


def test_on_a_full_disk_no_heartbeat_is_sent_and_no_day_deleted(node: Node, old: str) -> None:
    (node.folder / "volumes/outputs/alice/weights").write_bytes(os.urandom(10**6))
    assert node.back_up("ulimit -f 100\n") == 1
    assert (node.days(), node.heartbeat) == ([old], False)


def test_a_file_that_changes_meanwhile_is_no_error(node: Node) -> None:
    assert node.back_up('tar() { command tar "$@"; return 1; }\n') == 0
    assert node.heartbeat


@pytest.mark.slow
def test_a_restored_run_goes_on_at_a_restored_service(node: Node) -> None:
    """Redis comes back empty: the resumed trainer pushes its adapters again."""
    secret, tokens, output = (node.folder / name for name in (FILES[1], FILES[3], "volumes/outputs/alice-first"))
    tokens.unlink()
    secret.write_text(create_token(tokens, "alice", ("rollout", "push"), None)[0])
    words = ["solrl-train", "run", "--preset", "mini-sana/sol_rl/clipscore", *sets(*QUICK), "--run", "alice-first"]
    for iterations in (1, 2):
        with ExitStack() as stack:
            redis = stack.enter_context(running_redis())
            service = stack.enter_context(running_service("--redis-url", redis.url, "--token-file", str(tokens)))
            more = ["--resume", str(output), "--rollout-url", service.url, "--iterations", str(iterations)]
            log = node.folder / f"log-{iterations}"
            environment = os.environ | {"SOLRL_TOKEN_PATH": str(secret)}
            trainer = Program(command, (main, [*words, *more], os.getcwd(), environment), log)
            assert trainer.wait() == 0, log.read_text()
            headers = {"Authorization": f"Bearer {secret.read_text()}"}
            answer = httpx.get(f"{service.url}/v1/runs/alice-first/adapters", headers=headers).json()
            assert answer["head"] == iterations
        assert node.back_up() == 0
        node.lose()
        node.restore()
    metrics = read_metrics(output / "metrics.jsonl")
    assert [line["iteration"] for line in metrics if line["event"] == "iteration"] == [0, 1]
