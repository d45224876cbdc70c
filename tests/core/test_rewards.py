"""Rewards: CLIPScore against transformers' own CLIP, the registry, and what RewardSet refuses."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from solrl_core.families import Backbone
from solrl_core.families.load import locate
from solrl_core.rewards import Reward, RewardSet, load_reward
from solrl_core.rewards.base import known_rewards, weighted_sum
from solrl_core.rewards.clipscore import ClipScore
from solrl_minis.verifier import verifier_graded_reward, verifier_reward
from transformers import CLIPModel, CLIPProcessor

CLIP = Path(locate("mini-sana")).parent / "mini-clip"
PROMPTS = [
    "a red circle",
    "two blue squares",
    "a green cross above a yellow triangle",
    "a picture of a very long winded and winding prompt that says far more than twenty four tokens can ever hold " * 2,
]


@pytest.fixture(scope="module")
def clipscore() -> ClipScore:
    return ClipScore(str(CLIP))


@pytest.fixture(scope="module")
def reference() -> CLIPModel:
    return CLIPModel.from_pretrained(CLIP, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def processor() -> CLIPProcessor:
    return CLIPProcessor.from_pretrained(CLIP)


def on_bytes(count: int, height: int, width: int) -> torch.Tensor:
    """Random images whose values are whole numbers of 255."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, height // 8, width // 8, generator=generator)
    images = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")
    return (images * 255).round() / 255


def as_pil(image: torch.Tensor) -> Image.Image:
    return Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())


def test_clipscore_is_transformers_logits_of_the_pairs(
    clipscore: ClipScore, reference: CLIPModel, processor: CLIPProcessor
) -> None:
    images = on_bytes(4, 64, 64)
    inputs = processor(
        text=PROMPTS,
        images=[as_pil(image) for image in images],
        return_tensors="pt",
        padding="max_length",
        max_length=reference.config.text_config.max_position_embeddings,
        truncation=True,
    )
    with torch.no_grad():
        expected = reference(**inputs).logits_per_image.diagonal() / 100
    scores = clipscore(images, PROMPTS, [{}] * 4)
    assert scores.shape == (4,)
    assert scores.dtype == torch.float32
    assert torch.allclose(scores, expected, rtol=1e-4, atol=1e-6)
    assert float(scores.std()) > 1e-3
    again = clipscore(images.flip(0), PROMPTS[::-1], [{}] * 4).flip(0)
    assert torch.allclose(scores, again, rtol=1e-5)


@pytest.mark.parametrize(("height", "width"), [(64, 96), (104, 64), (160, 96), (48, 80), (32, 32), (256, 256)])
def test_other_sizes_are_resized_with_antialiasing_and_cut_from_the_centre(
    clipscore: ClipScore, reference: CLIPModel, processor: CLIPProcessor, height: int, width: int
) -> None:
    images = on_bytes(3, height, width)
    short = min(height, width)
    size = (width * 64 // short, height * 64 // short)
    left, top = (size[0] - 64) // 2, (size[1] - 64) // 2
    resized = []
    for channels in images.numpy():
        planes = [np.asarray(Image.fromarray(plane).resize(size, Image.Resampling.BILINEAR)) for plane in channels]
        resized.append(np.stack(planes)[:, top : top + 64, left : left + 64])
    scaler = processor.image_processor
    pixels = torch.from_numpy(np.stack(resized)) - torch.tensor(scaler.image_mean)[:, None, None]
    pixels = pixels / torch.tensor(scaler.image_std)[:, None, None]
    tokens = processor.tokenizer(PROMPTS[:3], padding="max_length", max_length=24, truncation=True, return_tensors="pt")
    with torch.no_grad():
        expected = reference(pixel_values=pixels, **tokens).logits_per_image.diagonal() / 100
    assert torch.allclose(clipscore(images, PROMPTS[:3], [{}] * 3), expected, rtol=1e-4, atol=1e-5)


def test_clipscore_does_not_change_its_images_nor_pass_gradients(clipscore: ClipScore) -> None:
    images = on_bytes(2, 64, 64)
    kept = images.clone()
    assert not clipscore(images, PROMPTS[:2], [{}] * 2).requires_grad
    assert torch.equal(images, kept)


def test_clipscore_is_loaded_from_where_the_model_says(backbone: Backbone, clipscore: ClipScore) -> None:
    loaded = load_reward("clipscore", backbone)
    assert isinstance(loaded, ClipScore)
    assert loaded.digest == clipscore.digest


def test_a_reward_of_an_entry_point_is_found_by_name(backbone: Backbone) -> None:
    assert load_reward("verifier", backbone) is verifier_reward
    assert load_reward("verifier_graded", backbone) is verifier_graded_reward
    assert {"clipscore", "verifier", "verifier_graded"} <= set(known_rewards())


def test_a_reward_is_found_by_module_and_attribute(backbone: Backbone) -> None:
    assert load_reward("solrl_minis.verifier:verifier_reward", backbone) is verifier_reward


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("clipscores", "expected one of .*clipscore.*verifier"),
        ("", "expected one of"),
        ("no_such_package:reward", "no_such_package"),
        ("solrl_minis.verifier:no_such_reward", "no_such_reward"),
        (".relative:reward", "relative"),
        (":reward", "cannot load"),
    ],
)
def test_an_unknown_reward_is_refused_by_name(backbone: Backbone, name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_reward(name, backbone)


def giving(values: Any) -> Reward:
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        found: torch.Tensor = values(images) if callable(values) else values
        return found

    return reward


IMAGES = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
TEXTS = ["one", "two", "three"]


def scored(**rewards: Reward) -> dict[str, torch.Tensor]:
    return RewardSet(rewards).score(list(rewards), IMAGES, TEXTS, [{}] * 3)


def test_scores_come_by_name_as_float32() -> None:
    found = scored(a=giving(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)), b=giving(lambda x: x.mean((1, 2, 3))))
    assert list(found) == ["a", "b"]
    assert all(values.dtype == torch.float32 for values in found.values())
    assert found["a"].tolist() == [1, 2, 3]
    assert torch.allclose(found["b"], IMAGES.mean((1, 2, 3)))


def test_only_what_is_asked_for_is_computed() -> None:
    rewards = RewardSet({"a": giving(torch.zeros(3)), "b": giving(torch.zeros(7))})
    assert rewards.names == ("a", "b")
    assert list(rewards.score(["a"], IMAGES, TEXTS, [{}] * 3)) == ["a"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_score_that_is_not_finite_names_reward_and_image(bad: float) -> None:
    with pytest.raises(RuntimeError, match=r"'b' gave (nan|inf|-inf) for image 1 of prompt 'two'"):
        scored(a=giving(torch.zeros(3)), b=giving(torch.tensor([0.0, bad, bad])))


@pytest.mark.parametrize("shape", [(2,), (3, 1), ()])
def test_a_wrong_shape_names_the_reward(shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match=r"'b' gave shape .*; expected \(3,\)"):
        scored(b=giving(torch.zeros(shape)))


def test_a_failing_reward_is_named_with_its_error() -> None:
    def fails(images: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("no such luck")

    with pytest.raises(RuntimeError, match="'b' failed on 3 images: no such luck"):
        scored(a=giving(torch.zeros(3)), b=giving(fails))
    with pytest.raises(RuntimeError, match="'b' failed"):
        scored(b=giving([0.0, 0.0, 0.0]))


def test_a_reward_that_was_not_loaded_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="never"):
        RewardSet({"a": giving(torch.zeros(3))}).score(["never"], IMAGES, TEXTS, [{}] * 3)


def test_each_reward_is_loaded_once_and_digested(backbone: Backbone, clipscore: ClipScore) -> None:
    rewards = RewardSet.load(["verifier", "clipscore", "verifier"], backbone)
    assert rewards.names == ("verifier", "clipscore")
    digests = rewards.digests()
    assert digests.keys() == {"reward:verifier", "reward:clipscore"}
    assert digests["reward:clipscore"] == clipscore.digest
    assert digests["reward:verifier"].startswith("sha256:")


def test_the_weighted_sum_is_of_the_named_scores_alone() -> None:
    scores = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([10.0, 20.0]), "c": torch.full((2,), 99.0)}
    assert weighted_sum(scores, {"a": 2.0, "b": -0.5}).tolist() == [-3.0, -6.0]
