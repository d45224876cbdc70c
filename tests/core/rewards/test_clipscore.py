"""CLIPScore against transformers' CLIP, and the behaviour that all CLIP rewards share."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from solrl_core.rewards import clip
from solrl_core.rewards.aesthetic import CHECKPOINT, REPOSITORY, Aesthetic
from solrl_core.rewards.clipscore import ClipScore, PickScore
from solrl_core.rewards.images import as_pil
from tests.core.rewards.reward_helpers import (
    AESTHETIC,
    CLIP,
    ODD_SIZES,
    PROMPTS,
    Tensors,
    on_bytes,
    rewritten,
    rows_through,
)
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


@torch.no_grad()
def logits(reference: CLIPModel, processor: CLIPProcessor, images: torch.Tensor) -> torch.Tensor:
    """Those of transformers of four images with PROMPTS."""
    tokens = {"padding": "max_length", "max_length": reference.config.text_config.max_position_embeddings}
    inputs = processor(text=PROMPTS, images=as_pil(images), return_tensors="pt", truncation=True, **tokens)
    found: torch.Tensor = reference(**inputs).logits_per_image.diagonal()
    return found


def test_clipscore_equals_transformers(clipscore: ClipScore, reference: CLIPModel, processor: CLIPProcessor) -> None:
    images = on_bytes(4, 64, 64)
    kept = images.clone()
    expected = logits(reference, processor, images) / 100
    scores = clipscore(images, PROMPTS, [{}] * 4)
    assert (scores.shape, scores.dtype, scores.requires_grad) == ((4,), torch.float32, False)
    assert torch.equal(images, kept)
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


def test_images_go_in_batches_and_texts_are_cached(clipscore: ClipScore, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = ClipScore(CLIP, batch_size=3)
    images = on_bytes(8, 64, 72)
    prompts = [PROMPTS[at % 3] for at in range(8)]
    with rows_through(reward._model.vision_model) as seen, rows_through(reward._model.text_model) as said:
        scores = reward(images, prompts, [{}] * 8)
        reward(images[:2], prompts[:2], [{}] * 2)
    assert seen == [3, 3, 2, 2]
    assert said == [1, 1, 1]
    assert torch.allclose(scores, clipscore(images, prompts, [{}] * 8), rtol=1e-5)
    # The text cache is bounded.
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


@pytest.fixture(scope="module")
def pickscore() -> PickScore:
    return PickScore(CLIP)


@pytest.mark.parametrize(("height", "width"), [(64, 64), *ODD_SIZES])
def test_pickscore_equals_transformers_logits_over_26(
    pickscore: PickScore, reference: CLIPModel, processor: CLIPProcessor, height: int, width: int
) -> None:
    images = on_bytes(4, height, width)
    scores = pickscore(images, PROMPTS, [{}] * 4)
    assert scores.dtype == torch.float32
    assert torch.allclose(scores, logits(reference, processor, images) / 26, rtol=1e-4, atol=1e-6)


def test_images_are_rounded_to_bytes_and_batches_do_not_matter(pickscore: PickScore) -> None:
    images = on_bytes(4, 80, 64)
    scores = pickscore(images, PROMPTS, [{}] * 4)
    assert torch.allclose(scores, pickscore(images + 0.4 / 255, PROMPTS, [{}] * 4), rtol=1e-5)
    assert torch.allclose(scores, PickScore(CLIP, batch_size=1)(images, PROMPTS, [{}] * 4), rtol=1e-5)


def test_another_processor_is_used_and_changes_the_digest(pickscore: PickScore, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "processor_config.json"):
        shutil.copy(Path(CLIP) / name, tmp_path)
    assert PickScore(CLIP, str(tmp_path)).digest == pickscore.digest
    settings = json.loads((tmp_path / "processor_config.json").read_text())
    settings["image_processor"]["image_mean"] = [0.5, 0.5, 0.5]
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    other = PickScore(CLIP, str(tmp_path))
    assert other.digest != pickscore.digest
    images = on_bytes(4, 64, 64)
    assert not torch.allclose(other(images, PROMPTS, [{}] * 4), pickscore(images, PROMPTS, [{}] * 4), rtol=1e-4)


@pytest.fixture(scope="module")
def aesthetic() -> Aesthetic:
    return Aesthetic(**AESTHETIC)


def score(reward: Aesthetic, images: torch.Tensor, prompt: str = "a") -> torch.Tensor:
    return reward(images, [prompt] * len(images), [{}] * len(images))


def test_scores_are_of_images_alone_and_in_batches(aesthetic: Aesthetic) -> None:
    images = on_bytes(5, 64, 96)
    found = score(aesthetic, images)
    assert (found.shape, found.dtype) == ((5,), torch.float32)
    assert len(set(found.tolist())) == 5
    assert torch.equal(score(aesthetic, images, "another prompt"), found)
    small = Aesthetic(**AESTHETIC, batch_size=2)
    with rows_through(small._model) as rows:
        torch.testing.assert_close(score(small, images), found, rtol=1e-5, atol=1e-6)
    assert rows == [2, 2, 1]
    assert score(aesthetic, images[:0]).shape == (0,)


def test_the_digest_is_of_both_networks(aesthetic: Aesthetic, tmp_path: Path) -> None:
    assert Aesthetic(**AESTHETIC, batch_size=1).digest == aesthetic.digest
    other = Aesthetic(**rewritten(tmp_path, AESTHETIC, lambda t: t["layers.7.bias"].add_(1)))
    assert other.digest != aesthetic.digest
    images = on_bytes(2, 48, 48)
    torch.testing.assert_close(score(other, images), score(aesthetic, images) + 1, rtol=0, atol=1e-3)
    other._model.visual_projection.weight.data.add_(1)
    other._model.save_pretrained(tmp_path / "clip")
    assert Aesthetic(str(tmp_path / "clip"), AESTHETIC["checkpoint"]).digest not in (aesthetic.digest, other.digest)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.clear(), "has the wrong tensors"),
        (lambda t: t.pop("layers.4.bias"), r"wrong tensors \(layers.4.bias\); expected the head of LAION's"),
        (lambda t: t.update(strange=torch.zeros(1)), r"wrong tensors \(strange\)"),
        (lambda t: t.update({"layers.2.weight": torch.zeros(16, 31)}), r"of shapes .*\(16, 31\).* no MLP"),
        (lambda t: t.update({"layers.7.weight": torch.zeros(2, 8)}), "no MLP with one output"),
        (lambda t: t.update({"layers.0.weight": torch.zeros(32, 19)}), "a head for 19 features and .*, which has 20"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(tmp_path: Path, change: Callable[[Tensors], Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s){said}"):
        Aesthetic(**rewritten(tmp_path, AESTHETIC, change))


def test_missing_files_and_another_clip_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="is not a file"):
        Aesthetic(AESTHETIC["model"], str(tmp_path / "none.pth"))
    with pytest.raises(OSError, match=f"cannot get {CHECKPOINT} of {REPOSITORY} .* as `checkpoint`"):
        Aesthetic(AESTHETIC["model"])
    with pytest.raises(ValueError, match="a head for 20 features"):
        Aesthetic(CLIP, AESTHETIC["checkpoint"])


@pytest.mark.parametrize(
    ("text", "unread", "same_as"),
    [
        ("a red circle", 0, "a red circle"),
        ("a red circle " * 9, 5, "a red circle " * 7 + "a"),
        ("a red <|endoftext|> circle left of a cross", 5, "a red"),
        ("a red circle " * 7 + "a <|endoftext|> red", 1, "a red circle " * 7 + "a"),
    ],
)
def test_the_unread_end_of_a_prompt_is_counted(clipscore: ClipScore, text: str, unread: int, same_as: str) -> None:
    assert clipscore.unread_tokens(text) == unread
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    scores = [clipscore(images, [one] * 2, [{}] * 2) for one in (text, same_as)]
    assert torch.equal(*scores)
