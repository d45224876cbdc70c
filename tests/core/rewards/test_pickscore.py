"""PickScore against the plain forward of transformers with its own processor."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from reward_helpers import CLIP, ODD_SIZES, PROMPTS, as_pil, on_bytes
from solrl_core.rewards.pickscore import PickScore
from transformers import CLIPModel, CLIPProcessor


@pytest.fixture(scope="module")
def pickscore() -> PickScore:
    return PickScore(CLIP)


@pytest.mark.parametrize(("height", "width"), [(64, 64), *ODD_SIZES])
def test_pickscore_equals_transformers_logits_over_26(pickscore: PickScore, height: int, width: int) -> None:
    images = on_bytes(4, height, width)
    inputs = CLIPProcessor.from_pretrained(CLIP)(
        text=PROMPTS,
        images=[as_pil(image) for image in images],
        return_tensors="pt",
        padding=True,
        max_length=24,
        truncation=True,
    )
    model = CLIPModel.from_pretrained(CLIP, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(**inputs).logits_per_image.diagonal() / 26
    scores = pickscore(images, PROMPTS, [{}] * 4)
    assert scores.dtype == torch.float32
    assert torch.allclose(scores, expected, rtol=1e-4, atol=1e-6)


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
