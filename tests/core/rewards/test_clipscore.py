"""CLIPScore against transformers' CLIP, and the behaviour that all CLIP rewards share."""

import numpy as np
import pytest
import torch
from PIL import Image
from reward_helpers import CLIP, ODD_SIZES, PROMPTS, as_pil, on_bytes, rows_through
from solrl_core.rewards import clip
from solrl_core.rewards.clipscore import ClipScore
from transformers import CLIPModel, CLIPProcessor


@pytest.fixture(scope="module")
def clipscore() -> ClipScore:
    return ClipScore(CLIP)


@pytest.fixture(scope="module")
def reference() -> CLIPModel:
    return CLIPModel.from_pretrained(CLIP, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def processor() -> CLIPProcessor:
    return CLIPProcessor.from_pretrained(CLIP)


def test_clipscore_equals_transformers_logits_of_the_pairs(
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


@pytest.mark.parametrize(("height", "width"), ODD_SIZES)
def test_other_sizes_are_resized_with_antialiasing_and_cut_from_the_centre(
    clipscore: ClipScore, reference: CLIPModel, processor: CLIPProcessor, height: int, width: int
) -> None:
    images = on_bytes(3, height, width)
    short = min(height, width)
    # torchvision: the long side is cut to a whole number, the crop rounded half to even.
    size = (int(64 * width / short), int(64 * height / short))
    left, top = (int(round((side - 64) / 2.0)) for side in size)  # noqa: RUF046
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


def test_images_go_in_batches_and_a_text_is_encoded_once(clipscore: ClipScore) -> None:
    reward = ClipScore(CLIP, batch_size=3)
    images = on_bytes(8, 64, 72)
    prompts = [PROMPTS[at % 3] for at in range(8)]
    with rows_through(reward._model.vision_model) as seen, rows_through(reward._model.text_model) as said:
        scores = reward(images, prompts, [{}] * 8)
        reward(images[:2], prompts[:2], [{}] * 2)
    assert seen == [3, 3, 2, 2]
    assert said == [1, 1, 1]
    assert torch.allclose(scores, clipscore(images, prompts, [{}] * 8), rtol=1e-5)


def test_the_text_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clip, "CACHED_TEXTS", 2)
    reward = ClipScore(CLIP)
    with rows_through(reward._model.text_model) as said:
        for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[2], PROMPTS[0], PROMPTS[1]):
            reward(on_bytes(1, 64, 64), [prompt], [{}])
    assert len(said) == 4


def test_bfloat16_scores_are_close_and_the_digest_is_equal(clipscore: ClipScore) -> None:
    reward = ClipScore(CLIP, dtype="bfloat16")
    images = on_bytes(4, 64, 64)
    assert reward._model.dtype == torch.bfloat16
    scores = reward(images, PROMPTS, [{}] * 4)
    assert scores.dtype == torch.float32
    assert torch.allclose(scores, clipscore(images, PROMPTS, [{}] * 4), atol=5e-3)
    assert reward.digest == clipscore.digest
