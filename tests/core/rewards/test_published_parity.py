"""HPSv2, HPSv3, ImageReward and the aesthetic predictor give the same scores as published code, from the same weights.

The reference is written by `scripts/reward-parity` with hpsv2 1.2.0, hpsv3 1.0.0, open_clip 2.32.0 and image-reward
1.5; the aesthetic predictor is open_clip and the published head.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from solrl_core.rewards.aesthetic import Aesthetic
from solrl_core.rewards.hpsv2 import HpsV2, clean_text
from solrl_core.rewards.hpsv3 import REWARD_TOKEN, HpsV3
from solrl_core.rewards.imagereward import ImageReward
from tests.core.rewards.reward_helpers import AESTHETIC, HPSV2, HPSV3, IMAGEREWARD, reference_pairs, rows_through

REFERENCE, IMAGES, PROMPTS = reference_pairs()
COUNT = len(PROMPTS)


@pytest.fixture(scope="module")
def hpsv2() -> HpsV2:
    return HpsV2(**HPSV2)


@pytest.fixture(scope="module")
def imagereward() -> ImageReward:
    return ImageReward(**IMAGEREWARD)


@pytest.fixture(scope="module")
def hpsv3() -> HpsV3:
    return HpsV3(**HPSV3)


def table(reward: Any) -> torch.Tensor:
    """Scores [images, prompts]."""
    return torch.stack([reward(image.expand(COUNT, -1, -1, -1), PROMPTS, [{}] * COUNT) for image in IMAGES])


@pytest.mark.parametrize(
    ("package", "spread", "off"), [("hpsv2", 0.05, 1e-6), ("open_clip", 0.05, 1e-6), ("imagereward", 1, 1e-4)]
)
def test_published_scores(hpsv2: HpsV2, imagereward: ImageReward, package: str, spread: float, off: float) -> None:
    expected = torch.from_numpy(REFERENCE[package])
    assert float(expected.std(0).min()) > spread
    found = table(imagereward if package == "imagereward" else hpsv2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=off)


def test_hpsv3_scores_as_its_package(hpsv3: HpsV3) -> None:
    expected = torch.from_numpy(REFERENCE["hpsv3"])
    assert float(expected.std(0).min()) > 0.2
    found = hpsv3(IMAGES[0].expand(COUNT, -1, -1, -1), PROMPTS, [{}] * COUNT)  # padded together
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-6)
    for image, wanted in zip(IMAGES[1:], expected[1:], strict=True):
        torch.testing.assert_close(hpsv3(image[None], PROMPTS[1:2], [{}]), wanted[1:2], rtol=1e-4, atol=1e-6)
    large = IMAGES[2].repeat_interleave(14, 1).repeat_interleave(14, 2)  # it is reduced, the others are enlarged
    wanted = torch.from_numpy(REFERENCE["hpsv3_large"])[1:2]
    torch.testing.assert_close(hpsv3(large[None], PROMPTS[1:2], [{}]), wanted, rtol=1e-4, atol=1e-6)


def test_hpsv3_computes_its_head_in_float32_and_refuses_prompts_that_spell_its_tokens(hpsv3: HpsV3) -> None:
    half: Any = HpsV3(HPSV3["checkpoint"], HPSV3["processor"])
    assert (half._model.dtype, half._model.rm_head[0].weight.dtype) == (torch.bfloat16, torch.float32)
    assert half.digest == hpsv3.digest, "digests are over bfloat16"
    prompt = PROMPTS[:1]
    torch.testing.assert_close(
        half(IMAGES[1][None], prompt, [{}]), hpsv3(IMAGES[1][None], prompt, [{}]), rtol=0, atol=0.1
    )
    with pytest.raises(ValueError, match=r"it has <.Reward.>, a token of HPSv3"):
        hpsv3(IMAGES[0][None], [f"a {REWARD_TOKEN} fox"], [{}])
    with pytest.raises(ValueError, match="got 1 images and 2 prompts"):
        hpsv3(IMAGES[0][None], PROMPTS[:2], [{}])


def test_the_aesthetic_predictor_scores_as_published() -> None:
    expected = torch.from_numpy(REFERENCE["aesthetic"])
    assert float(expected.std()) > 0.4
    found = torch.cat([Aesthetic(**AESTHETIC)(image[None], ["a"], [{}]) for image in IMAGES])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_tokens_equal_the_packages(hpsv2: HpsV2, imagereward: ImageReward) -> None:
    for prompt, theirs in zip(PROMPTS, REFERENCE["hpsv2_tokens"], strict=True):
        ours = hpsv2._tokenizer(clean_text(prompt), max_length=77, truncation=True).input_ids
        assert ours == theirs[: theirs.argmax() + 1].tolist()
    ours = imagereward._tokenizer(PROMPTS, max_length=35, padding="max_length", truncation=True).input_ids
    assert np.array_equal(ours, REFERENCE["imagereward_tokens"])


def test_imagereward_scores_one_pair_per_image(imagereward: ImageReward) -> None:
    images = IMAGES[0].expand(COUNT, -1, -1, -1)
    with rows_through(imagereward._model.vision) as seen, rows_through(imagereward._model.text) as read:
        imagereward(images, PROMPTS, [{}] * COUNT)
    assert (sum(seen), sum(read)) == (COUNT, COUNT)
    with pytest.raises(ValueError, match=f"got {COUNT} images and 1 prompts"):
        imagereward(images, PROMPTS[:1], [{}])
    assert imagereward(images[:0], [], []).shape == (0,)


@pytest.mark.parametrize("name", ["hpsv2", "imagereward"])
def test_a_bfloat16_folder_scores_the_same(name: str, hpsv2: HpsV2, imagereward: ImageReward, tmp_path: Path) -> None:
    reward: Any = hpsv2 if name == "hpsv2" else imagereward
    kind, options = (HpsV2, HPSV2) if name == "hpsv2" else (ImageReward, IMAGEREWARD)
    kind(**options)._model.bfloat16().save_pretrained(tmp_path)
    reward._tokenizer.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    loaded: Any = kind(str(tmp_path))
    assert loaded._model.dtype == torch.float32
    assert loaded.digest == reward.digest
    rounded: Any = kind(**options)
    for weight in rounded._model.parameters():
        weight.data = weight.bfloat16().float()
    torch.testing.assert_close(table(loaded), table(rounded), rtol=1e-5, atol=1e-6)
