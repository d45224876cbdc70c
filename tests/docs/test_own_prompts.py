"""README's own prompts and own reward: its commands in an empty folder, with fewer iterations and candidates."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from fences import Block, blocks
from support.ports import free_port

SMALLER = "--iterations 1 --set explore.candidates=24 --set explore.keep=4"


def section() -> tuple[Block, Block]:
    """The reward and the commands."""
    reward, commands = (
        next(block for block in blocks("README.md", language) if "redness" in block.text)
        for language in ("python", "sh")
    )
    return reward, commands


@pytest.mark.slow
@pytest.mark.release
def test_the_commands_train_on_them(tmp_path: Path) -> None:
    reward, block = section()
    (tmp_path / "my_rewards.py").write_text(reward.text)
    before, serve, run = re.split(r"^(?=solrl-)", block.text, flags=re.MULTILINE)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def shell(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-ec", text], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    done = shell(before)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "log").open("wb") as log:
        service = subprocess.Popen(
            ["sh", "-c", f"exec {serve.strip()} --port {port}"], cwd=tmp_path, env=environment, stdout=log, stderr=log
        )
    try:
        while not ready(url):
            assert service.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        done = shell(f"{run.strip()} --rollout-url {url} {SMALLER}")
        assert done.returncode == 0, done.stdout + done.stderr
        service.send_signal(signal.SIGTERM)
        assert service.wait(600) == 0
    finally:
        service.kill()
        service.wait()
    assert "my_rewards:redness" in (tmp_path / "runs/mine/report.html").read_text()
    assert (tmp_path / "runs/mine/lora.safetensors").is_file()


def ready(url: str) -> bool:
    """Whether the service answers that it is."""
    try:
        return httpx.get(f"{url}/health/ready").status_code == 200
    except httpx.TransportError:
        return False
