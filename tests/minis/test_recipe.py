"""The recipe that made the miniatures, for a handful of steps: every stage runs and what it saves can be used."""

import copy
import inspect
import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from solrl_core.families import Backbone, load_backbone
from solrl_core.precision import LayerPolicy, apply_policy
from solrl_core.rewards import load_reward
from solrl_minis.recipe import autoencoder, clip
from solrl_minis.recipe import backbone as recipe
from solrl_minis.recipe.__main__ import main
from solrl_minis.recipe.data import Source, meaning_of_scenes, meaning_of_texts
from solrl_minis.recipe.quantization import quantizable
from solrl_minis.recipe.tokenizers import CLIP_TOKENS, clip_tokenizer, corpus, gemma_tokenizer
from solrl_minis.world import KINDS, Combination, all_combinations

STAGES = ("autoencoder", "backbone", "aware", "clip")


def with_batches_of(size: int, train: Callable[..., Any]) -> Callable[..., Any]:
    """The same training on smaller batches."""
    place = list(inspect.signature(train).parameters).index("batch")

    def small(*arguments: Any) -> Any:
        return train(*arguments[:place], size, *arguments[place + 1 :])

    return small


class FewImages(Source):
    """Draws less than is asked for."""

    def draw(self, count: int) -> list[Combination]:
        return super().draw(min(count, 64))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command leaves after the fewest steps of every stage, on batches that a CPU is done with at once."""
    folder = tmp_path_factory.mktemp("recipe")
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((autoencoder, "train"), (recipe, "train"), (recipe, "train_aware"), (clip, "train")):
            patch.setattr(module, name, with_batches_of(4, getattr(module, name)))
        patch.setattr(autoencoder, "Source", FewImages)
        patch.setattr(clip, "agreement", partial(clip.agreement, pairs=50))
        patch.setattr(sys, "argv", ["recipe", "--out", str(folder), "--device", "cpu", "--scale", "1e-6"])
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # faster on tensors this small
        main()
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    return folder


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_logs_finite_losses(trained: Path, stage: str) -> None:
    figures = json.loads((trained / "training" / f"{stage}.json").read_text())
    assert 20 <= len(figures["losses"]) <= 30
    assert all(math.isfinite(loss) for loss in figures["losses"])
    assert all(math.isfinite(value) for value in figures.values() if isinstance(value, float))


def test_a_loss_goes_down(trained: Path) -> None:
    for stage in ("autoencoder", "backbone"):
        losses = json.loads((trained / "training" / f"{stage}.json").read_text())["losses"]
        assert np.mean(losses[-5:]) < np.mean(losses[:5])


def test_the_saved_folders_load_and_are_shaped_like_the_shipped_ones(trained: Path) -> None:
    backbone, shipped = load_backbone(str(trained / "mini-sana")), load_backbone("mini-sana")
    image = backbone.decode(torch.zeros(1, *backbone.latent_shape))
    assert image.shape == (1, 3, 64, 64)
    score = load_reward("clipscore", backbone)
    assert torch.isfinite(score(image, ["a red circle"], [{}])).all()
    assert getattr(score, "digest", None) != getattr(load_reward("clipscore", shipped), "digest", None)
    for part in ("transformer", "text_encoder", "vae"):
        mine = {name: value.shape for name, value in backbone.parts[part].state_dict().items()}
        assert mine == {name: value.shape for name, value in shipped.parts[part].state_dict().items()}
    assert (backbone.policy, backbone.height, backbone.options.max_sequence_length) == (
        shipped.policy,
        shipped.height,
        shipped.options.max_sequence_length,
    )


def test_what_is_saved_is_bfloat16(trained: Path) -> None:
    files = list(trained.rglob("*.safetensors"))
    assert len(files) == 4
    for file in files:
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}


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
    with quantizable(transformer, LayerPolicy(quantize=tuple(recipe.SETTINGS["quantize"]))) as switch:
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


def test_quantizable_computes_what_the_service_will(shipped: Backbone) -> None:
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
    assert not held & set(corpus())
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


def test_tokenizers_write_every_caption_within_their_length() -> None:
    texts = sorted({text for c in all_combinations() for text in c.phrasings()})
    for tokenizer, limit in ((gemma_tokenizer(), recipe.TEXT_TOKENS), (clip_tokenizer(), CLIP_TOKENS)):
        rows = tokenizer(texts).input_ids
        assert max(len(row) for row in rows) <= limit
        assert len({tuple(row) for row in rows}) == len(texts)
        assert all(tokenizer.unk_token_id not in row[1:-1] for row in rows)


def test_any_printable_text_can_be_written() -> None:
    for tokenizer in (gemma_tokenizer(), clip_tokenizer()):
        ids = tokenizer("Zebra 42, <quickly>!").input_ids
        assert tokenizer.decode(ids, skip_special_tokens=True).lower().replace(" ", "") == "zebra42,<quickly>!"


def test_a_combination_is_shown_as_it_is_asked_for() -> None:
    source = Source(5)
    scenes = source.scenes([Combination("counting", (("red", "circle"),), count=3)])
    assert int(scenes.present.sum()) == 3
