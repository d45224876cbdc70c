import pytest
import torch
from run_folders import sample_images
from solrl_trainer.evaluation.gallery import KEPT_PROMPTS, LARGEST_SIDE, Gallery, Pair, load_gallery, save_gallery

PAIRS = [Pair("a red circle", 2**53 - 1, "best", 0.31, 0.3), Pair("a red circle", 7, "worst", 0.11, 0.2)]


def save(folder, count=3, **changes):
    values = {
        "prompts": [f"prompt {i}" for i in range(count)],
        "before": sample_images(count, seed=1),
        "after": sample_images(count, seed=2),
        "marks": [(i == 0, True) for i in range(count)],
        "pairs": PAIRS,
        "explored": sample_images(2, seed=3),
        "regenerated": sample_images(2, seed=4),
    }
    save_gallery(folder, Gallery(**(values | changes)))


def test_a_saved_gallery_is_loaded_unchanged(tmp_path):
    save(tmp_path)
    gallery = load_gallery(tmp_path)
    assert gallery.prompts == ["prompt 0", "prompt 1", "prompt 2"]
    assert gallery.marks == [(True, True), (False, True), (False, True)]
    assert gallery.pairs == PAIRS
    images = (gallery.before, gallery.after, gallery.explored, gallery.regenerated)
    for seed, image in enumerate(images, start=1):
        expected = (sample_images(len(image), seed=seed) * 255).round().to(torch.uint8)
        assert torch.equal(image, expected)


def test_a_large_run_keeps_the_first_prompts_and_shrinks_images(tmp_path):
    count = KEPT_PROMPTS + 3
    large = torch.zeros(count, 3, 16, 2 * LARGEST_SIDE)
    save(tmp_path, count, before=large, after=large)
    gallery = load_gallery(tmp_path)
    assert gallery.prompts == [f"prompt {i}" for i in range(KEPT_PROMPTS)]
    assert gallery.before.shape == (KEPT_PROMPTS, 3, 8, LARGEST_SIDE)
    assert len(gallery.marks) == KEPT_PROMPTS


def test_a_folder_without_a_gallery_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="contains no gallery"):
        load_gallery(tmp_path)
