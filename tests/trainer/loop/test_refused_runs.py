"""Runs that a service refuses, or ends."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from solrl_core.errors import MismatchError
from solrl_minis import catalog
from solrl_proto.problems import ProblemKind
from solrl_trainer.__main__ import main
from solrl_trainer.loop import train
from tests.support.programs import Program, command
from tests.trainer.real_runs import SMALL, Service, Watcher
from tests.trainer.training_helpers import TINY, sets, tiny_config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service of the shipped model, by its name."""
    found = Service("mini-sana")
    yield found
    found.stop()


def test_a_service_of_other_weights_is_refused(service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_run_says_whom_it_waits_for_and_then_how_to_go_on(service: Service, folder: Path) -> None:
    output, log = folder / "bereft", folder / "bereft.log"
    words = ["solrl-train", "run", "--preset", "mini-sana/sol_rl/clipscore", *sets(*TINY, *SMALL, "patience=12")]
    words += ["--rollout-url", service.url, "--output", str(output), "--iterations", "1000"]
    variables = {"CUDA_VISIBLE_DEVICES": "", "SOLRL_TOKEN_PATH": str(folder / "my token")}
    (folder / "my token").write_text("secret")
    run = Program(command, (main, words, os.getcwd(), os.environ | variables), log)
    metrics = output / "metrics.jsonl"
    while not (metrics.is_file() and '"iteration"' in metrics.read_text()):
        assert run.alive, log.read_text()
        time.sleep(0.1)
    service.die()
    assert run.wait() == 2
    *lines, last = log.read_text().splitlines()
    said = f"CUDA_VISIBLE_DEVICES='' SOLRL_TOKEN_PATH='{folder}/my token' solrl-train run --resume {output}"
    assert last == f"continue with: {said}"
    assert lines[-1].startswith(f"solrl-train: {ProblemKind.SERVICE_UNREACHABLE.title}")
    assert any(line.startswith(f"waiting for {service.url} until ") for line in lines)
