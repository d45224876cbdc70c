"""The program solrl-reward: it serves until a signal, or says why it does not start."""

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest
import torch
from packaging.requirements import Requirement
from solrl_core.rewards.images import as_floats
from solrl_reward.__main__ import main
from tests.services.reward_servers import body, pictures, scores
from tests.support.ports import free_port
from tests.support.service_helpers import is_ready
from tests.support.typed import refused, typed

ROOT = Path(__file__).parents[3]
BRIGHT = "tests.services.served_rewards:brightness"


def not_required() -> set[str]:
    """Modules of the project's dependencies that a reward service does without, unless its rewards import them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    required = (ROOT / "deploy" / "rewards" / "service.in").read_text().splitlines()
    names = {Requirement(line).name for line in set(project) - set(required)}
    return {"yaml" if name == "pyyaml" else name for name in names} | {"huggingface_hub"}


@pytest.mark.slow
def test_the_program_serves_until_a_signal(tmp_path: Path) -> None:
    """In an environment with the packages of deploy/rewards/service.in alone."""
    absent = not_required()
    assert {"diffusers", "transformers"} <= absent
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({sorted(absent)}))\n")
    program, port = Path(sys.executable).parent / "solrl-reward", free_port()
    command = [str(program), "serve", "--rewards", BRIGHT, "--device", "cpu", "--port", str(port)]
    folders = f"{tmp_path}{os.pathsep}{ROOT}"
    environment = os.environ | {"PYTHONPATH": folders, "COLUMNS": "200"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as there:
            while not is_ready(str(there.base_url).rstrip("/")):
                assert process.poll() is None, (tmp_path / "log").read_text()
            found = scores(there, body(pictures(2), BRIGHT))
        assert torch.equal(torch.tensor(found.scores[BRIGHT]), as_floats(pictures(2)).mean((1, 2, 3)))
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 0
    finally:
        process.kill()
        process.wait()
    said = (tmp_path / "log").read_text()
    assert found.digests[BRIGHT] in said
    assert "Traceback" not in said


def test_the_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # one line for each row, however long the paths
    named = (BRIGHT, "mine=tests.services.faulty_rewards:gone", "clipscore")
    done = typed(main, "doctor", "--rewards", *named, "--options-from", "mini-sana", "--device", "cpu", "--port", "0")
    rows = {line.split("  ")[0]: " ".join(line.split()) for line in done.stdout.splitlines() if "  " in line}
    assert done.returncode == 1
    assert rows[f"reward {BRIGHT}"].endswith("ok in tests.services.served_rewards")
    assert "missing cannot load reward 'tests.services.faulty_rewards:gone'" in rows["reward mine"]
    assert "mini-clip" in rows["reward clipscore"]
    assert {"python", "device", "access", "port"} < rows.keys()
    assert "Traceback" not in done.stdout + done.stderr
    assert typed(main, "doctor", "--rewards", BRIGHT, "--device", "cpu", "--port", "0").returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve", "--rewards", "clipscor"], "did you mean 'clipscore'"),
        (["serve", "--host", "0.0.0.0"], "--scopes score"),
        (["serve", "--queue-limit", "1"], "got --queue-limit 1; expected a number greater than or equal to 256"),
        (["serve", "--options-from", "mini-sanna"], "mini-sana"),
        (["serve", "--rewards", "clipscore", "clipscore=a:b"], "expected name=source for one of them"),
        (["serve", "--rewards", "clipscore="], "or name=source"),
        (["serve", "--rewards", "mine=clipscor"], "did you mean 'clipscore'"),
    ],
)
def test_the_program_says_in_one_line_why_it_does_not_start(words: list[str], said: str) -> None:
    message = refused(main, *words, "--port", "0")
    assert said in message.splitlines()[-1]
    assert "solrl-reward" in message
