"""Runs that are refused: by their folder, or by the service."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from real_runs import SMALL, Service, Watcher
from safetensors.torch import load_file, save_file
from solrl_core.errors import MismatchError
from solrl_minis import catalog
from solrl_proto.problems import ProblemKind
from solrl_trainer.loop import train
from support.ports import free_port
from training_helpers import TINY, tiny_config

PROGRAM = str(Path(sys.executable).parent / "solrl-train")


@pytest.fixture(scope="module")
def unreachable(folder: Path) -> subprocess.Popen[str]:
    """A run without a service, started early because it waits between its attempts."""
    command = [PROGRAM, "run", "--rollout-url", f"http://127.0.0.1:{free_port()}", "--output", str(folder / "alone")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def taken(folder: Path) -> subprocess.Popen[str]:
    """A run whose folder has another run's checkpoints, also started early."""
    (folder / "taken" / "checkpoints" / "000001").mkdir(parents=True)
    (folder / "taken" / "config.json").write_text("{}")
    command = [PROGRAM, "run", "--output", str(folder / "taken")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("unreachable", "taken")
def test_a_service_with_different_weights_is_refused_and_the_part_named(
    service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = shutil.copytree(catalog.WEIGHTS, folder / "changed")
    path = weights / "mini-sana" / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors[sorted(tensors)[-1]].view(-1)[0] += 0.5
    save_file(tensors, path, metadata={"format": "pt"})
    # The name refers to the changed folder here, and to the shipped one at the service.
    monkeypatch.setattr(catalog, "mini_sana", lambda: weights / "mini-sana")
    output, watcher = folder / "refused", Watcher()
    with pytest.raises(MismatchError) as raised:
        train(tiny_config(*SMALL, output=output, run="refused", rollout_url=service.url), watcher)
    error = raised.value
    assert (error.fault, error.where) == ("digests", "transformer")
    assert "transformer" in (error.action or "")
    assert watcher.phases == []
    assert not (output / "checkpoints").exists()
    assert service.running.client.get("/v1/runs/refused/adapters").status_code == 404


def test_the_command_refuses_a_folder_with_another_run(taken: subprocess.Popen[str], folder: Path) -> None:
    _, said = taken.communicate(timeout=600)
    assert taken.returncode == 2
    assert said.startswith("solrl-train: ")
    assert "already contains a run" in said
    assert "--resume" in said
    assert "Traceback" not in said
    files = [path.relative_to(folder / "taken") for path in (folder / "taken").rglob("*") if path.is_file()]
    assert set(files) == {Path("config.json"), Path(".lock")}
    assert (folder / "taken" / "config.json").read_text() == "{}"


def test_a_run_says_whom_it_waits_for_and_then_how_to_go_on(folder: Path) -> None:
    service, output = Service(), folder / "bereft"
    settings = [word for setting in (*TINY, *SMALL, "patience=12") for word in ("--set", setting)]
    words = ["--rollout-url", service.url, "--output", str(output), "--iterations", "1000", *settings]
    command = [PROGRAM, "run", "--preset", "mini-sana/sol_rl/clipscore", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        metrics = output / "metrics.jsonl"
        while not (metrics.is_file() and '"iteration"' in metrics.read_text()):
            assert run.poll() is None, run.communicate()
            time.sleep(0.1)
        service.die()
        _, said = run.communicate(timeout=600)
    assert run.returncode == 2
    *lines, last = said.splitlines()
    assert last == f"continue with: solrl-train run --resume {output}"
    assert lines[-1].startswith(f"solrl-train: {ProblemKind.SERVICE_UNREACHABLE.title}")
    assert any(line.startswith(f"waiting for {service.url} until ") for line in lines)


def test_an_unreachable_service_is_one_clear_message(unreachable: subprocess.Popen[str], folder: Path) -> None:
    _, said = unreachable.communicate(timeout=600)
    assert unreachable.returncode == 2
    message = next(line for line in said.splitlines() if line.startswith("solrl-train: "))
    assert "no answer from http://127.0.0.1:" in message
    assert "solrl-rollout serve" in message
    assert "Traceback" not in said
    assert not (folder / "alone" / "checkpoints").exists()
