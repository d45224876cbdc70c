"""The moving shapes world, and the recipe of the miniature that makes clips of it, at a handful of steps."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from solrl_core.families import load_backbone

from minis_recipe import measure, moving
from minis_recipe.__main__ import main
from minis_recipe.family import TEXT_TOKENS
from minis_recipe.files import load_pipeline
from minis_recipe.wan import WAN, build, build_autoencoder


def test_clips_change_by_their_motion_alone() -> None:
    source = moving.MovingSource(0)
    clips = source.images(source.draw(12), "cpu")
    assert clips.shape == (12, moving.FRAMES, 3, 64, 64)
    assert clips.dtype == torch.float32
    corner = clips[..., :2, :2]
    assert torch.equal(corner, corner[:, :1].expand_as(corner))
    assert all(float(clip.diff(dim=0).abs().max()) > 0.2 for clip in clips)


def test_held_out_movements_are_never_drawn_for_training() -> None:
    source, other = moving.MovingSource(0), moving.MovingSource(0, held_out=True)
    drawn = source.draw(400)
    assert not any(movement.held_out for movement in [*drawn, *map(source.change, drawn)])
    assert all(movement.held_out for movement in other.draw(50))
    share = sum(movement.held_out for movement in moving.all_movements()) / len(moving.all_movements())
    assert 0.12 < share < 0.18


def test_captions_fit_and_name_their_movement() -> None:
    movements = moving.all_movements()
    texts = {text: movement for movement in movements for text in movement.phrasings()}
    assert len(texts) == sum(len(movement.phrasings()) for movement in movements), "two movements share a caption"
    tokenizer = build(build_autoencoder()).tokenizer
    lengths = [len(ids) for ids in tokenizer(list(texts))["input_ids"]]
    assert 8 < max(lengths) <= TEXT_TOKENS
    first = moving.held_out(3)
    assert first == moving.held_out()[:3]
    assert all(texts[item["prompt"]].metadata["include"] == item["include"] for item in first)


@pytest.mark.release
@pytest.mark.slow
def test_every_stage_runs_and_saves_a_model_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "STEPS", 2)
    words = ["recipe", "--out", str(tmp_path), "--device", "cpu", "--scale", "1e-6", "--only", "mini-wan"]
    monkeypatch.setattr(sys, "argv", words)
    main()
    torch.set_float32_matmul_precision("highest")
    for stage in ("autoencoder", "backbone"):
        (figures,) = json.loads((tmp_path / "training" / "mini-wan" / f"{stage}.json").read_text())["runs"]
        assert len(figures["losses"]) == 12
        assert all(math.isfinite(loss) for loss in figures["losses"])
    backbone, pipeline = load_backbone(str(tmp_path / "mini-wan")), load_pipeline(tmp_path / "mini-wan")
    assert backbone.decode(torch.zeros(1, *backbone.latent_shape)).shape == (1, moving.FRAMES, 3, 64, 64)
    assert backbone.latent_shape == (16, 3, 8, 8)
    assert len(set(pipeline.vae.config.latents_std)) == 16
    texts = ["a red circle moves slowly to the left", ""]
    with torch.no_grad():
        mine = WAN.encode(pipeline, WAN.tokenize(pipeline, texts))["states"]
    assert torch.allclose(mine, backbone.encode(texts)["states"], atol=1e-6)
