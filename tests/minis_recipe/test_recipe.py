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
import torch.nn.functional as F
from safetensors.torch import load_file
from solrl_core.families import Backbone, load_backbone
from solrl_core.precision import apply_policy, quantize_dequantize
from solrl_core.rewards import load_reward
from solrl_minis.scenes import render
from solrl_minis.verifier import DetectedObject, find_objects
from solrl_minis.world import KINDS, Combination, all_combinations

from minis_recipe import clip, loop, measure, preference
from minis_recipe.__main__ import main
from minis_recipe.data import Source
from minis_recipe.family import TEXT_TOKENS, Family
from minis_recipe.files import load_pipeline
from minis_recipe.flux import FLUX
from minis_recipe.loop import Budget, Rates, fit
from minis_recipe.meaning import meaning_of_detections, meaning_of_scenes, meaning_of_texts
from minis_recipe.miniatures import MINIATURES
from minis_recipe.quantization import quantizable
from minis_recipe.rounding import rounded
from minis_recipe.sana import SANA
from minis_recipe.sd3 import SD3
from minis_recipe.tokenizers import CLIP_TOKENS, bert_tokenizer, clip_tokenizer, gemma_tokenizer, t5_tokenizer
from minis_recipe.tokenizers import corpus as all_texts

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
def test_each_stage_logs_finite_losses(trained: Path, name: str, stage: str) -> None:
    (figures,) = log(trained, name, stage)
    assert len(figures["losses"]) in (0, 12)
    assert bool(figures["losses"]) == (stage != "rounding" and "from" not in figures)
    assert all(math.isfinite(loss) for loss in figures["losses"])
    # Agreement is NaN if no image is better than another, as with untrained backbones.
    floats = {key: value for key, value in figures.items() if isinstance(value, float) and stage != "preference"}
    assert all(math.isfinite(value) for value in floats.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_loss_goes_down(trained: Path, name: str) -> None:
    losses = log(trained, name, "backbone")[0]["losses"]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


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
@pytest.mark.parametrize("name", FAMILIES)
def test_training_encodes_prompts_as_the_service_does(trained: Path, name: str) -> None:
    family: Family = FAMILIES[name]
    backbone, pipeline = load_backbone(str(trained / name)), load_pipeline(trained / name)
    texts = ["a red circle", "a purple triangle to the left of a blue cross", ""]
    with torch.no_grad():
        mine = family.encode(pipeline, family.tokenize(pipeline, texts))
    theirs = backbone.encode(texts)
    assert set(mine) == set(theirs)
    for key, value in theirs.items():
        assert torch.allclose(mine[key].float(), value.float(), atol=1e-6), key


@pytest.mark.slow
def test_saved_weights_are_bfloat16_and_contain_no_paths(trained: Path) -> None:
    files = list(trained.rglob("*.safetensors"))
    assert len(files) == 3 + 5 + 4 + 3 + 1
    for file in files:
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}
    assert not any(str(trained) in file.read_text() for file in trained.rglob("*.json"))


@pytest.mark.slow
def test_flux_shares_its_text_encoders_with_sd3(trained: Path) -> None:
    t5 = [
        trained / f"mini-{name}" / part / "model.safetensors"
        for name, part in (("sd3", "text_encoder_3"), ("flux", "text_encoder_2"))
    ]
    one, other = (load_file(file) for file in t5)
    assert set(one) == set(other)
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_training_stops_where_the_loss_is_not_finite() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))

    def loss() -> tuple[torch.Tensor, torch.Tensor]:
        value = (parameter * math.nan).sum()
        return value, value

    with pytest.raises(FloatingPointError, match="trial"):
        fit("trial", [parameter], loss, Budget(50, 1, 1), Rates(1e-3))


def test_training_reaches_a_minimum_by_steps_or_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(budget: Budget) -> tuple[int, float]:
        parameter = torch.nn.Parameter(torch.ones(1))

        def loss() -> tuple[torch.Tensor, torch.Tensor]:
            value = (parameter - 3).square().sum()
            return value, value

        return len(fit("trial", [parameter], loss, budget, Rates(0.1, weight_decay=0.0))), float(parameter.detach())

    steps, found = train(Budget(300, 1, 1))
    assert steps == 300
    assert abs(found - 3) < 0.05
    ticks = iter(range(10_000))
    monkeypatch.setattr(loop.time, "monotonic", lambda: next(ticks))
    steps, _ = train(Budget(300, 1, 1, seconds=40))
    assert 30 < steps <= 45


def test_rounded_weights_are_on_the_grid_with_smaller_errors_on_real_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    seen = torch.randn(512, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    found = rounded(weight, (seen.T @ seen).double())
    again = quantize_dequantize(found)
    assert float((again - found).norm()) < 0.02 * float((quantize_dequantize(weight) - weight).norm())
    error, nearest = ((seen @ (w - weight).T).norm() for w in (found, quantize_dequantize(weight)))
    assert error < 0.8 * nearest


def test_preference_groups_have_the_documented_content() -> None:
    groups = preference.rendered(Source(4), 30)
    assert groups.images.shape == (30, preference.SIZE, 3, 64, 64)
    assert (groups.grades[:, 0] == 1).float().mean() > 0.9
    assert (groups.grades[:, 1] < groups.grades[:, 0]).float().mean() > 0.9
    assert groups.degraded.sum(1).tolist() == [1] * 30
    held = {text for c in all_combinations() if c.held_out for text in c.phrasings()}
    assert not held & set(groups.prompts)


def test_agreement_counts_ordered_pairs_alone() -> None:
    groups = preference.rendered(Source(4), 20)
    grades = groups.grades.flatten()
    assert preference.agreement(lambda images, prompts, metadata: grades, groups) == 1
    assert preference.agreement(lambda images, prompts, metadata: -grades, groups) == 0


@pytest.fixture(scope="module")
def shipped() -> Backbone:
    return load_backbone("mini-sana")


def velocity(backbone: Backbone, transformer: torch.nn.Module) -> torch.Tensor:
    x = torch.randn(2, *backbone.latent_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return backbone.velocity(transformer, x, torch.tensor([0.9, 0.4]), backbone.encode(["a red circle", "a cross"]))


def test_quantizable_leaves_no_trace(shipped: Backbone) -> None:
    transformer = copy.deepcopy(shipped.transformer)
    before, parameters = copy.deepcopy(transformer.state_dict()), dict(transformer.named_parameters())
    classes = {name: type(module) for name, module in transformer.named_modules()}
    plain = velocity(shipped, transformer)
    with quantizable(transformer, shipped.policy) as switch:
        assert torch.equal(velocity(shipped, transformer), plain)
        switch.on = True
        assert not torch.equal(velocity(shipped, transformer), plain)
    after = transformer.state_dict()
    assert set(after) == set(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert {name: type(module) for name, module in transformer.named_modules()} == classes
    assert set(dict(transformer.named_parameters())) == set(parameters)
    assert torch.equal(velocity(shipped, transformer), plain)


def test_quantizable_restores_after_an_error(shipped: Backbone) -> None:
    transformer = copy.deepcopy(shipped.transformer)
    names = set(transformer.state_dict())
    plain = velocity(shipped, transformer)

    def fail() -> None:
        with quantizable(transformer, shipped.policy) as switch:
            switch.on = True
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert set(transformer.state_dict()) == names
    assert torch.equal(velocity(shipped, transformer), plain)


def test_quantizable_computes_the_same_as_the_service(shipped: Backbone) -> None:
    transformer, served = copy.deepcopy(shipped.transformer), copy.deepcopy(shipped.transformer)
    apply_policy(served, shipped.policy)
    expected, plain = velocity(shipped, served), velocity(shipped, transformer)
    with quantizable(transformer, shipped.policy) as switch:
        switch.on = True
        found = velocity(shipped, transformer)
    # Codes on a boundary may flip; what is left is far below the rounding itself.
    assert float((found - expected).norm()) < 0.1 * float((plain - expected).norm())


def test_gradients_pass_straight_through_the_rounding(shipped: Backbone) -> None:
    transformer = copy.deepcopy(shipped.transformer).requires_grad_(True)
    x = torch.randn(2, *shipped.latent_shape, generator=torch.Generator().manual_seed(0))
    with quantizable(transformer, shipped.policy) as switch:
        switch.on = True
        out = shipped.velocity(transformer, x, torch.tensor([0.9, 0.4]), shipped.encode(["a red circle", "a cross"]))
        out.square().mean().backward()
        gradients = {name: parameter.grad for name, parameter in transformer.named_parameters()}
    assert all(g is not None and torch.isfinite(g).all() for g in gradients.values())
    assert sum(float(g.abs().sum()) > 0 for g in gradients.values() if g is not None) > 0.9 * len(gradients)


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


def test_a_source_depends_on_its_seed_alone() -> None:
    assert Source(1).draw(50) == Source(1).draw(50) != Source(2).draw(50)


def test_a_caption_is_true_of_its_own_scene_and_not_of_a_changed_one() -> None:
    source = Source(3)
    drawn = source.draw(400)
    own = meaning_of_texts(drawn).true_of(meaning_of_scenes(source.scenes(drawn))).diagonal()
    assert own.all()
    other = (
        meaning_of_texts(drawn).true_of(meaning_of_scenes(source.scenes([source.change(c) for c in drawn]))).diagonal()
    )
    assert not other.any()


def test_detections_in_a_scene_have_the_meaning_of_the_scene() -> None:
    source = Source(7)
    scenes = source.scenes(source.draw(200))
    shown = meaning_of_scenes(scenes)
    found = meaning_of_detections([find_objects(image.numpy()) for image in render(scenes, 0, "cpu")])
    for mine, theirs in ((found.objects, shown.objects), (found.relation, shown.relation), (found.size, shown.size)):
        assert float((mine == theirs).float().mean()) > 0.97


def test_no_caption_is_true_of_a_shape_without_a_name() -> None:
    red = Combination("colours", (("red", "circle"),))
    whole, broken = (DetectedObject("red", shape, 20.0, 20.0, 20.0) for shape in ("circle", None))
    true = meaning_of_texts([red]).true_of(meaning_of_detections([[whole], [broken], [whole, broken]]))
    assert true.flatten().tolist() == [True, False, False]


def test_contrast_is_the_cross_entropy_where_each_image_has_one_text() -> None:
    logits = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    one = torch.arange(5)
    expected = (F.cross_entropy(logits, one) + F.cross_entropy(logits.T, one)) / 2
    assert float(clip.contrast(logits, torch.eye(5, dtype=torch.bool))) == pytest.approx(float(expected), rel=1e-6)


def test_contrast_uses_unmatched_images_as_negatives_and_no_true_pair() -> None:
    logits = torch.zeros(3, 2, requires_grad=True)
    true = torch.tensor([[True, False], [True, False], [False, False]])
    clip.contrast(logits, true).backward()
    assert logits.grad is not None
    assert (logits.grad[true] < 0).all()
    assert logits.grad[2, 0] > 0  # the nameless image
    assert logits.grad[2, 1] == 0  # of no image is the second text true, so nothing is contrasted with it there
    with torch.no_grad():
        raised = clip.contrast(torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 0.0]]), true)
        assert raised < clip.contrast(torch.zeros(3, 2), true)


def test_every_caption_fits_in_the_tokenizers_length() -> None:
    texts = sorted({text for c in all_combinations() for text in c.phrasings()})
    for tokenizer, limit in (
        (gemma_tokenizer(), TEXT_TOKENS),
        (clip_tokenizer(TEXT_TOKENS), TEXT_TOKENS),
        (t5_tokenizer(TEXT_TOKENS), TEXT_TOKENS),
        (bert_tokenizer(CLIP_TOKENS), CLIP_TOKENS),
    ):
        rows = tokenizer(texts).input_ids
        assert max(len(row) for row in rows) <= limit
        assert len({tuple(row) for row in rows}) == len(texts)
        assert all(tokenizer.unk_token_id not in row[1:-1] for row in rows)


def test_any_printable_text_can_be_tokenised() -> None:
    for tokenizer in (gemma_tokenizer(), clip_tokenizer(), t5_tokenizer(64), bert_tokenizer(64)):
        ids = tokenizer("Zebra 42, <quickly>!").input_ids
        assert tokenizer.decode(ids, skip_special_tokens=True).lower().replace(" ", "") == "zebra42,<quickly>!"
