"""Own rewards of README and docs/extending/reward.md, and own prompts: commands in an empty folder, smaller groups."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from solrl_trainer.__main__ import main
from tests.docs.fences import blocks, commands, example
from tests.support.ports import free_port
from tests.support.service_helpers import is_ready
from tests.support.typed import accepted
from tests.trainer.training_helpers import prompts_in

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
def test_the_commands_of_the_page_on_rewards_train_at_a_service_on_own_prompts(tmp_path: Path) -> None:
    reward = example("docs/extending/reward.md")
    (tmp_path / reward.title).write_text(reward.text)
    typed = [shlex.join(words) for block in blocks("docs/extending/reward.md", "sh") for words in commands(block)]
    run = next(line for line in typed if "--run vivid " in line)
    serve = next(line for line in typed if line.startswith("solrl-rollout serve --rewards clipscore my_rewards:"))
    prompts_in(
        tmp_path / "my_prompts",
        train=("a red circle", "a green circle"),
        test=("a red square", "a red triangle", "a green square", "a blue triangle"),
    )
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("wb") as log:
        service = subprocess.Popen(
            ["sh", "-c", f"exec {serve} --port {port}"], cwd=tmp_path, env=ENVIRONMENT, stdout=log, stderr=log
        )
    try:
        while not is_ready(url):
            assert service.poll() is None, (tmp_path / "log").read_text()
        shell(f"{run} --rollout-url {url} --set prompts=my_prompts {SMALLER}", tmp_path)
        service.send_signal(signal.SIGTERM)
        assert service.wait(600) == 0
    finally:
        service.kill()
        service.wait()
    assert_trained(tmp_path / "runs/vivid", "my_rewards:colourfulness")
