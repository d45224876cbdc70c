"""Runs that train on stored images with captions, and on stored pairs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from solrl_core.families import load_backbone
from solrl_trainer.commands.calibrate import calibrate
from solrl_trainer.commands.layout import layout
from solrl_trainer.commands.options import Layout
from solrl_trainer.commands.preflight import check_run
from solrl_trainer.commands.run import run
from solrl_trainer.loop import Result, train
from solrl_trainer.prompts.prompt_sets import prompts_of_run
from solrl_trainer.prompts.stored_files import stored_files
from solrl_trainer.rollouts.device_source import StoredImages
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import ConfigError
from tests.support.small_model import small_model
from tests.trainer.real_runs import Watcher
from tests.trainer.training_helpers import TINY, iterations, run_config

SMALL = (
    *TINY,
    f"model={small_model()}",
    *("explore.prompts=2", "evaluate.prompts=2", "evaluate.seeds=1", "evaluate.steps=2", "evaluate.rewards=[]"),
)
COLOURS = {"red": (230, 30, 30), "green": (30, 200, 60), "blue": (40, 60, 220), "white": (250, 250, 250)}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four captioned images as of Hugging Face's imagefolder, one of another shape, and pairs of them."""
    folder = tmp_path_factory.mktemp("stored")
    (folder / "images" / "train").mkdir(parents=True)
    (folder / "pairs").mkdir()
    for name, colour in COLOURS.items():
        Image.new("RGB", (200, 100) if name == "red" else (64, 64), colour).save(folder / f"images/train/{name}.png")
        Image.new("RGB", (64, 64), colour).save(folder / "pairs" / f"{name}.png")
    rows: list[dict[str, Any]] = [{"file_name": f"{name}.png", "text": f"a {name} wall"} for name in COLOURS]
    (folder / "images" / "train" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rows = [
        {"prompt": "a red wall", "chosen": "red.png", "rejected": "blue.png"},
        {"prompt": "a green wall", "jpg_0": "white.png", "jpg_1": "green.png", "label_0": 0},
    ]
    (folder / "pairs" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for kind in ("images", "pairs"):
        (folder / kind / "test.txt").write_text("a red circle\na blue square\n")
    return folder


def config_of(recipe: str, prompts: Path, output: Path, *overrides: str) -> RunConfig:
    return run_config(f"mini-sana/{recipe}/clipscore", output, *SMALL, f"prompts={prompts}", *overrides)


def go(config: RunConfig, *, resume: bool = False) -> Result:
    return train(check_run(config, resume=resume)[0], Watcher(), resume=resume)


@pytest.mark.slow
def test_fine_tuning_lowers_the_loss_on_its_images_resumes_and_reports_them(stored: Path, tmp_path: Path) -> None:
    settings = ("optimizer.learning_rate=3e-3", "regenerate.steps=8", "algorithm.timestep_fraction=1")
    summary = run(config_of("sft", stored / "images", tmp_path / "whole", *settings, "iterations=6"))
    lines = iterations(tmp_path / "whole")
    # Two iterations train on each of the four images once.
    assert lines[4]["loss"] + lines[5]["loss"] < 0.8 * (lines[0]["loss"] + lines[1]["loss"])
    assert lines[0]["rewards"] == {}
    assert summary["trained"] == {}
    go(config_of("sft", stored / "images", tmp_path / "parts", *settings, "iterations=4"))
    go(config_of("sft", stored / "images", tmp_path / "parts", *settings, "iterations=6"), resume=True)
    assert iterations(tmp_path / "parts") == lines
    parts = json.loads((tmp_path / "whole" / "checkpoints" / "000006" / "parts.json").read_text())
    assert "prompts:images" in parts
    report, card = ((tmp_path / "whole" / name).read_text() for name in ("report.html", "README.md"))
    assert "trained on stored images" in report
    assert "Rewards during training" not in report
    assert "2 prompts, stored images" in card
    assert "best − worst" not in report
    assert "trained with solrl on **stored images**" in card
    assert "reinforcement-learning" not in card


def test_what_cannot_be_trained_on_and_commands_about_candidates_are_refused(stored: Path, tmp_path: Path) -> None:
    config = config_of("sft", stored / "images", tmp_path)
    with pytest.raises(ValueError, match=r"calibrate is about candidates, .*source=images generates none"):
        calibrate(config, tmp_path, prompts=1, minimum=0.8)
    with pytest.raises(ValueError, match=r"layout is about candidates"):
        layout(config, Layout())
    for recipe, text in (("sft", "file_name or image"), ("dpo_pairs", "chosen and rejected, or jpg_0")):
        with pytest.raises(ValueError, match=rf"has the fields .*expected {text}"):
            check_run(config_of(recipe, Path("shapes"), tmp_path / "run"), resume=False)
    for row, text in (
        ({"chosen": "red.png", "rejected": "none.png"}, r"names the image 'none.png', which is not in"),
        ({"chosen": "red.png", "rejected": "red.png"}, r"names 'red.png' as the better and as the worse image"),
        ({"jpg_0": "red.png", "jpg_1": "red.png", "label_0": 0.5}, r"label_0 0.5; expected 1 .* leave out ties"),
    ):
        (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "a wall", **row}))
        (tmp_path / "red.png").write_bytes(b"no image")
        with pytest.raises(ValueError, match=text):
            stored_files(config_of("dpo_pairs", tmp_path, tmp_path / "run").prompt_sources, "pairs")
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "a wall", "image": "red.png"}))
    config = config_of("sft", tmp_path, tmp_path / "run", "explore.prompts=1")
    (tmp_path / "test.txt").write_text("a wall")
    with pytest.raises(ValueError, match=r"red.png: expected an image"):
        check_run(config, resume=False)
    for recipe, setting, text in (
        ("dpo_pairs", "algorithm.name=sft", "compares no samples"),
        ("sft", "algorithm.name=dpo", "one image per prompt"),
        ("sol_rl", "algorithm.name=sft", "compares no samples"),
        ("flowgrpo", "explore.source=pairs", "neither the steps"),
        ("dpo_two_stage", "explore.source=pairs", "expected regenerate.at=none"),
    ):
        with pytest.raises(ConfigError, match=text):
            config_of(recipe, stored / "pairs", tmp_path / "run", setting)


@pytest.mark.slow
def test_dpo_learns_which_of_a_stored_pair_was_chosen(stored: Path, tmp_path: Path) -> None:
    settings = ("optimizer.learning_rate=1e-3", "regenerate.steps=8", "algorithm.timestep_fraction=1", "iterations=6")
    result = go(config_of("dpo_pairs", stored / "pairs", tmp_path / "run", *settings))
    lines = iterations(tmp_path / "run")
    assert [line["objective/tied"] for line in lines] == [0] * 6
    assert lines[-1]["objective/margin"] > lines[0]["objective/margin"]
    assert lines[-1]["objective/accuracy"] > 0.9
    for prompt, group in zip(result.samples.prompts, result.samples.groups, strict=True):
        better = group.trained.images[0].mean((1, 2))
        assert int(better.argmax()) == (0 if "red" in prompt.text else 1)


def test_images_are_cropped_to_the_models_size_and_encoded(stored: Path, tmp_path: Path) -> None:
    config, backbone = config_of("sft", stored / "images", tmp_path), load_backbone(small_model())
    source = StoredImages(stored_files(config.prompt_sources, config.explore.source), backbone, ["clipscore"], batch=3)
    prompts = prompts_of_run(config.prompt_sources, "train").all
    for prompt, group in zip(prompts, source.groups(prompts), strict=True):
        samples = group.trained
        colour = torch.tensor(COLOURS[prompt.text.split()[1]]) / 255
        assert samples.images.shape == (1, 3, backbone.height, backbone.width)
        assert torch.allclose(samples.images[0], colour[:, None, None].expand_as(samples.images[0]), atol=1e-6)
        assert torch.allclose(backbone.decode(samples.latents)[0].mean((1, 2)), colour, atol=0.2)
        assert samples.rewards["clipscore"].isnan().all()
        assert samples.latents.is_contiguous(), "as latents of other ranks are, or sums of a loss differ"


def test_a_model_in_bf16_encodes_in_float32() -> None:
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    exact, rounded = (load_backbone(small_model(), dtype=dtype) for dtype in (None, torch.bfloat16))
    assert rounded.dtype == torch.bfloat16
    assert torch.allclose(rounded.encode_images(images), exact.encode_images(images), atol=1e-5)
    rounded.decode(rounded.encode_images(images))  # its own decoder is untouched
