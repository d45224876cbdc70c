"""Own rewards of README and docs/train.md, and own prompts: their commands in an empty folder, with smaller groups."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from solrl_trainer.commands.cli import main
from tests.docs.fences import blocks, example
from tests.support.ports import free_port
from tests.support.service_helpers import is_ready
from tests.support.typed import accepted

SMALLER = "--iterations 1 --set explore.prompts=2 --set explore.candidates=24 --set explore.keep=4 "
SMALLER += "--set evaluate.prompts=4 --set evaluate.fidelity_prompts=1"
ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def shell(text: str, folder: Path) -> None:
    """Run a page's commands in a folder, with the programs of this environment."""
    done = subprocess.run(["sh", "-ec", text], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def assert_trained(run: Path, reward: str) -> None:
    assert reward in (run / "report.html").read_text()
    assert (run / "lora.safetensors").is_file()


@pytest.mark.slow
def test_the_commands_of_the_readme_train_on_its_reward(tmp_path: Path) -> None:
    reward = example("README.md")
    (tmp_path / reward.title).write_text(reward.text)
    (block,) = [block for block in blocks("README.md", "sh") if "--run red " in block.text]
    shell(f"{block.text.strip()} {SMALLER}", tmp_path)
    assert_trained(tmp_path / "runs/red", "my_redness:redness")


def test_kohya_s_captions_become_prompts_with_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my_images"
    folder.mkdir()
    for name in ("cat", "dog"):
        Image.new("RGB", (64, 64)).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"a {name}\n")
    (folder / "test.txt").write_text("a fox\n")
    subprocess.run([sys.executable, "-c", example("docs/images-and-pairs.md").text], check=True)
    words = ("--preset", "mini-sana/sft/clipscore", "--set", "prompts=my_images", "--set", "explore.prompts=2")
    accepted(main, "run", *words, "--dry-run")
    assert (folder / "train.jsonl").read_text().splitlines()[0] == '{"file_name": "cat.png", "text": "a cat"}'


@pytest.mark.slow
@pytest.mark.release
def test_the_commands_of_the_guide_train_at_a_service_on_its_prompts(tmp_path: Path) -> None:
    reward = example("docs/extending/reward.md")
    (tmp_path / reward.title).write_text(reward.text)
    texts = [block.text for block in blocks("docs/train.md", "sh")]
    at = next(at for at, text in enumerate(texts) if "mkdir" in text)
    before, run, serve = texts[at : at + 3]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    shell(before, tmp_path)
    with (tmp_path / "log").open("wb") as log:
        service = subprocess.Popen(
            ["sh", "-c", f"exec {serve.strip()} --port {port}"], cwd=tmp_path, env=ENVIRONMENT, stdout=log, stderr=log
        )
    try:
        while not is_ready(url):
            assert service.poll() is None, (tmp_path / "log").read_text()
        shell(f"{run.strip()} --rollout-url {url} {SMALLER}", tmp_path)
        service.send_signal(signal.SIGTERM)
        assert service.wait(600) == 0
    finally:
        service.kill()
        service.wait()
    assert_trained(tmp_path / "runs/vivid", "my_rewards:colourfulness")
