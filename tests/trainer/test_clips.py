"""Runs that train on clips, of a tiny Wan: each algorithm, with and without a service, and what they show."""

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from solrl_core.families import load_backbone
from solrl_core.image_files import from_file
from solrl_core.sampling.generator import Generator
from solrl_trainer.calibration.plans import PlanSet
from solrl_trainer.commands import run
from solrl_trainer.commands.calibrate import calibrate
from solrl_trainer.evaluation.gallery import load_gallery
from solrl_trainer.run_folder import checkpoints
from solrl_trainer.settings.config import RunConfig
from tests.core.families.tiny_pipelines import FRAMES, write_wan
from tests.support.service_helpers import RunningService, running_service
from tests.trainer.training_helpers import QUICK, events, run_config

REWARDS = {"tests.trainer.training_helpers:redness": 1.0, "motion": 0.1}
SMALL = (
    *(*QUICK, "explore.keep=4", "optimizer.updates=1", "optimizer.learning_rate=3e-2", "prompts=shapes"),
    *("guidance=2.5", "evaluate.prompts=2", "evaluate.seeds=2", f"rewards={REWARDS}"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wan(tmp_path_factory.mktemp("models") / "wan")


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[RunningService]:
    with running_service("--rewards", *REWARDS, model=[str(folder)]) as running:
        yield running


def trained(folder: Path, recipe: str, output: Path, url: str | None = None, *more: str) -> RunConfig:
    config = run_config(f"wan/{recipe}/clipscore", output, *SMALL, *more, model=str(folder), rollout_url=url)
    run.run(config)
    found = checkpoints.latest(output / "checkpoints")
    assert any(bool(tensor.any()) for name, tensor in found.averaged.tensors.items() if "lora_B" in name)
    (iteration,) = events(output, "iteration")
    assert iteration["rewards"].keys() == REWARDS.keys()
    return config


def test_policy_gradients_train_on_clips(folder: Path, tmp_path: Path) -> None:
    trained(folder, "flowgrpo", tmp_path / "flowgrpo")
    assert load_gallery(tmp_path / "flowgrpo").after.shape == (2, FRAMES, 3, 64, 96)


@pytest.mark.parametrize("served", [False, True], ids=["here", "served"])
def test_sol_rl_selects_and_shows_clips(folder: Path, service: RunningService, served: bool, tmp_path: Path) -> None:
    name = "served" if served else "here"
    trained(folder, "sol_rl", tmp_path / name, service.url if served else None, "explore.keep=2")
    gallery = load_gallery(tmp_path / name)
    assert gallery.explored.shape == (4, FRAMES, 3, 64, 96)
    page = (tmp_path / name / "report.html").read_text()
    playing = [base64.b64decode(found) for found in re.findall(r'src="data:image/webp;base64,([^"]+)"', page)]
    assert len(playing) == 4 + 8
    for file in playing:
        with Image.open(io.BytesIO(file)) as image:
            assert (image.size, image.n_frames) == ((96, 64), FRAMES)
    assert page.count('class="frames"') == len(playing)
    with Image.open(tmp_path / name / "grid.png") as grid:
        assert grid.width > 800
    card = (tmp_path / name / "README.md").read_text()
    assert "pipeline_tag: text-to-video" in card
    assert f"num_frames={FRAMES}).frames[0]" in card


def test_calibrate_measures_clips(folder: Path, tmp_path: Path) -> None:
    overrides = (*SMALL, "rollout_url=null", "generate.frames=9", "explore.keep=2", "explore.precision=bf16")
    config = run_config("wan/sol_rl/clipscore", tmp_path / "calibration", *overrides, model=str(folder))
    limits = PlanSet(steps=(2,), schedules=())
    summary = calibrate(config, config.output, prompts=2, minimum=-1.0, limits=limits)
    assert [row["name"] for row in summary["plans"]] == ["bf16 2 steps"]
    assert summary["chosen"] is not None
    planned = yaml.safe_load((config.output / "plan.yaml").read_text())
    assert planned["generate"] == {"height": 64, "width": 96, "frames": 9}


def test_a_service_answers_clips_as_this_process_makes_them(folder: Path, service: RunningService) -> None:
    backbone = load_backbone(str(folder))
    made = Generator(backbone, "bf16").generate("a red circle", [3, 4], steps=2, guidance=2.5).images
    request: dict[str, Any] = {
        "model": backbone.name,
        "prompts": [{"id": "p", "text": "a red circle"}],
        "candidates": {"seeds": [[3, 4]]},
        "plan": {"steps": 2, "precision": "bf16", "guidance": 2.5},
        "rewards": [{"name": "motion"}],
        "images": "webp",
    }
    answer = service.client.post("/v1/rollouts", json=request).json()
    files = map(base64.b64decode, answer["groups"][0]["images"])
    clips = torch.stack([from_file(file, *made.shape[-2:], FRAMES) for file in files])
    assert float((clips - made).abs().max()) <= 1.01 / 255
    refusal = service.client.post("/v1/rollouts", json=request | {"images": "png"})
    assert refusal.status_code == 422
    assert refusal.json()["action"] == "ask for webp"
    (hosted,) = service.client.get("/v1/models").json()["models"]
    assert (hosted["frames"], hosted["latent_shape"]) == (FRAMES, [4, 2, 8, 12])
