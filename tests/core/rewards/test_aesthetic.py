"""The aesthetic predictor's files, batches and digest; `test_published_parity` has its scores."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_helpers import AESTHETIC, CLIP, on_bytes, rows_through
from solrl_core.rewards.aesthetic import CHECKPOINT, REPOSITORY, Aesthetic

Tensors = dict[str, torch.Tensor]


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


def rewritten(folder: Path, change: Callable[[Tensors], Any]) -> dict[str, Any]:
    """Options with a changed copy of the head."""
    tensors = torch.load(AESTHETIC["checkpoint"], weights_only=True)
    change(tensors)
    torch.save(tensors, folder / "head.pth")
    return {**AESTHETIC, "checkpoint": str(folder / "head.pth")}


def test_the_digest_is_of_both_networks(aesthetic: Aesthetic, tmp_path: Path) -> None:
    assert Aesthetic(**AESTHETIC, batch_size=1).digest == aesthetic.digest
    other = Aesthetic(**rewritten(tmp_path, lambda t: t["layers.7.bias"].add_(1)))
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
        Aesthetic(**rewritten(tmp_path, change))


def test_missing_files_and_invalid_options_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="is not a file"):
        Aesthetic(AESTHETIC["model"], str(tmp_path / "none.pth"))
    with pytest.raises(OSError, match=f"cannot get {CHECKPOINT} of {REPOSITORY} .* as `checkpoint`"):
        Aesthetic(AESTHETIC["model"])
    with pytest.raises(ValueError, match="a head for 20 features"):
        Aesthetic(CLIP, AESTHETIC["checkpoint"])
    with pytest.raises(ValueError, match="got batch_size 0"):
        Aesthetic(**AESTHETIC, batch_size=0)
    with pytest.raises(ValueError, match="got dtype 'int8'"):
        Aesthetic(**AESTHETIC, dtype="int8")
