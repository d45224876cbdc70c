"""The recipe of the miniatures, at a handful of steps: every stage runs and saves usable files."""

import copy
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from minis_recipe import measure
from minis_recipe.__main__ import main
from minis_recipe.data import Source
from minis_recipe.family import Family
from minis_recipe.files import load_pipeline
from minis_recipe.flux import FLUX
from minis_recipe.meaning import meaning_of_detections, meaning_of_scenes, meaning_of_texts
from minis_recipe.miniatures import MINIATURES
from minis_recipe.quantization import quantizable
from minis_recipe.rounding import rounded
from minis_recipe.sana import SANA
from minis_recipe.scenes import render
from minis_recipe.sd3 import SD3
from minis_recipe.tokenizers import corpus as all_texts
from minis_recipe.wan import WAN
from minis_recipe.world import KINDS, all_combinations
from safetensors.torch import load_file
from solrl_core.families import Backbone, load_backbone
from solrl_core.precision.layer_policy import apply_policy
from solrl_core.precision.nvfp4 import quantize_dequantize
from solrl_core.rewards import load_reward
from solrl_minis.verifier import find_objects

pytestmark = pytest.mark.release
"""They train every stage, of a recipe that ran once."""

FAMILIES = {"mini-sana": SANA, "mini-sd3": SD3, "mini-flux": FLUX}
STAGES = [(name, stage) for name, miniature in MINIATURES.items() for stage in miniature.stages]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of the recipe after the minimum number of steps of every stage."""
    folder = tmp_path_factory.mktemp("recipe")
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "CANDIDATES", 24)
        patch.setattr(measure, "STEPS", 2)
        patch.setattr(sys, "argv", ["recipe", "--out", str(folder), "--device", "cpu", "--scale", "1e-6"])
        torch.set_num_threads(1)  # faster on tensors this small
        main()
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    return folder


def log(folder: Path, name: str, stage: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads((folder / "training" / name / f"{stage}.json").read_text())["runs"]
    return runs


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), STAGES)
def test_each_stage_logs_finite_losses_and_those_of_backbones_go_down(trained: Path, name: str, stage: str) -> None:
    (figures,) = log(trained, name, stage)
    losses = figures["losses"]
    assert len(losses) in (0, 12)
    assert bool(losses) == (stage != "rounding" and "from" not in figures)
    assert all(math.isfinite(loss) for loss in losses)
    # Agreement is NaN if no image is better than another, as with untrained backbones.
    floats = {key: value for key, value in figures.items() if isinstance(value, float) and stage != "preference"}
    assert all(math.isfinite(value) for value in floats.values())
    assert (name not in FAMILIES or stage != "backbone") or np.mean(losses[-5:]) < np.mean(losses[:5])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_saved_folders_load_and_are_shaped_like_the_shipped_ones(trained: Path, name: str) -> None:
    backbone, shipped = load_backbone(str(trained / name)), load_backbone(name)
    image = backbone.decode(torch.zeros(1, *backbone.latent_shape))
    assert image.shape == (1, 3, 64, 64)
    for reward in ("clipscore", "pickscore", "hpsv2", "imagereward"):
        score = load_reward(reward, backbone)
        assert torch.isfinite(score(image, ["a red circle"], [{}])).all()
        assert getattr(score, "digest", None) != getattr(load_reward(reward, shipped), "digest", None)
    parts = [part for part, module in backbone.parts.items() if isinstance(module, torch.nn.Module)]
    assert len(parts) >= 3
    for part in parts:
        mine = {key: value.shape for key, value in backbone.parts[part].state_dict().items()}
        assert mine == {key: value.shape for key, value in shipped.parts[part].state_dict().items()}
    assert (backbone.policy, backbone.height, backbone.options.max_sequence_length) == (
        shipped.policy,
        shipped.height,
        shipped.options.max_sequence_length,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), [*FAMILIES.items(), ("mini-wan", WAN)])
def test_training_encodes_prompts_as_the_service_does(trained: Path, name: str, family: Family) -> None:
    backbone, pipeline = load_backbone(str(trained / name)), load_pipeline(trained / name)
    texts = ["a red circle", "a purple triangle to the left of a blue cross", ""]
    with torch.no_grad():
        mine = family.encode(pipeline, family.tokenize(pipeline, texts))
    theirs = backbone.encode(texts)
    assert set(mine) == set(theirs)
    for key, value in theirs.items():
        assert torch.allclose(mine[key].float(), value.float(), atol=1e-6), key
    assert family is not WAN or len(set(pipeline.vae.config.latents_std)) == 16


@pytest.mark.slow
def test_saved_weights_are_bfloat16_and_contain_no_paths(trained: Path) -> None:
    files = list(trained.rglob("*.safetensors"))
    assert len(files) == 3 + 5 + 4 + 5 + 3 + 3 + 1  # five pipelines, rewards, the judge
    for file in files:
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}
    assert not any(str(trained) in file.read_text() for file in trained.rglob("*.json"))
    # FLUX shares its text encoder with SD3.
    of_sd3, of_flux = trained / "mini-sd3" / "text_encoder_3", trained / "mini-flux" / "text_encoder_2"
    one, other = (load_file(part / "model.safetensors") for part in (of_sd3, of_flux))
    assert set(one) == set(other)
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_rounded_weights_are_on_the_grid_with_smaller_errors_on_real_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    seen = torch.randn(512, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    found = rounded(weight, (seen.T @ seen).double())
    again = quantize_dequantize(found)
    assert float((again - found).norm()) < 0.02 * float((quantize_dequantize(weight) - weight).norm())
    error, nearest = ((seen @ (w - weight).T).norm() for w in (found, quantize_dequantize(weight)))
    assert error < 0.8 * nearest


@pytest.fixture(scope="module")
def shipped() -> Backbone:
    return load_backbone("mini-sana")


def velocity(backbone: Backbone, transformer: torch.nn.Module) -> torch.Tensor:
    x = torch.randn(2, *backbone.latent_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return backbone.velocity(transformer, x, torch.tensor([0.9, 0.4]), backbone.encode(["a red circle", "a cross"]))


def test_quantizable_computes_the_same_as_the_service(shipped: Backbone) -> None:
    transformer, served = copy.deepcopy(shipped.transformer), copy.deepcopy(shipped.transformer)
    apply_policy(served, shipped.policy)
    expected, plain = velocity(shipped, served), velocity(shipped, transformer)
    with quantizable(transformer, shipped.policy) as switch:
        switch.on = True
        found = velocity(shipped, transformer)
    # Codes on a boundary may flip; what is left is far below the rounding itself.
    assert float((found - expected).norm()) < 0.1 * float((plain - expected).norm())


def test_training_data_holds_nothing_held_out() -> None:
    source = Source(0)
    drawn = source.draw(2000)
    changed = [source.change(c) for c in drawn]
    assert not any(c.held_out for c in [*drawn, *changed])
    assert {c.kind for c in drawn} == set(KINDS)
    assert all(one != other for one, other in zip(drawn, changed, strict=True))
    assert all(c.held_out for c in Source(0, held_out=True).draw(200))
    held = {text for c in all_combinations() if c.held_out for text in c.phrasings()}
    assert not held & set(all_texts())
    assert {source.caption(drawn[0]) for _ in range(50)} == set(drawn[0].phrasings())


def test_a_caption_is_true_of_its_own_scene_and_not_of_a_changed_one() -> None:
    source = Source(3)
    drawn = source.draw(400)
    own = meaning_of_texts(drawn).true_of(meaning_of_scenes(source.scenes(drawn))).diagonal()
    assert own.all()
    changed = meaning_of_scenes(source.scenes([source.change(c) for c in drawn]))
    assert not meaning_of_texts(drawn).true_of(changed).diagonal().any()


def test_detections_in_a_scene_have_the_meaning_of_the_scene() -> None:
    source = Source(7)
    scenes = source.scenes(source.draw(200))
    shown = meaning_of_scenes(scenes)
    found = meaning_of_detections([find_objects(image.numpy()) for image in render(scenes, 0, "cpu")])
    for mine, theirs in ((found.objects, shown.objects), (found.relation, shown.relation), (found.size, shown.size)):
        assert float((mine == theirs).float().mean()) > 0.97
