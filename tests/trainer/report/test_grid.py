"""The stored gallery of a run, and its grid of images."""

import numpy as np
import pytest
import torch
from PIL import Image
from solrl_trainer.evaluation.gallery import KEPT_PROMPTS, LARGEST_SIDE, load_gallery
from solrl_trainer.records.evaluations import Verdicts
from solrl_trainer.report.grid import COLUMNS, GAP, HEADING, MARGIN, STRIP, corner, shown_size, write_grid
from tests.trainer.run_folders import PAIRS, PROMPTS, sample_images, write_gallery


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(float)


def enlarged(image, size):
    picture = Image.fromarray(image.permute(1, 2, 0).numpy())
    return np.asarray(picture.resize(size, Image.Resampling.BICUBIC)).astype(float)


@pytest.mark.parametrize(("height", "expected"), [(64, (192, 192)), (32, (192, 96))])
def test_every_image_is_in_its_place_and_marks_are_green_for_right_and_red_for_wrong(tmp_path, height, expected):
    assert len(PROMPTS) > 16
    before, after = (sample_images(len(PROMPTS), seed=seed)[:, :, :height] for seed in (1, 2))
    write_gallery(tmp_path, before=before, after=after)
    gallery = load_gallery(tmp_path)
    page = pixels(write_grid(gallery, tmp_path / "grid.png", "run", "about"))
    shown = wide, high = shown_size(64, height)
    assert shown == expected
    assert page.shape[0] < corner(15, shown)[1] + high + STRIP + corner(COLUMNS, shown)[1]
    for index in range(16):
        left, top = corner(index, shown)
        for offset, images in ((0, gallery.before), (wide + GAP, gallery.after)):
            found = page[top : top + high, left + offset : left + offset + wide]
            assert np.abs(found - enlarged(images[index], shown)).max() <= 1
    for index, marks in enumerate(gallery.verdicts.marks[:16]):
        left, top = corner(index, shown)
        for after, good in enumerate(marks):
            x = left + after * (wide + GAP)
            strip = page[top + high + 2 : top + high + STRIP, x : x + wide]
            ink = strip[strip.min(-1) < 120].mean(0)
            assert (ink[1] > ink[0]) == good


def test_the_heading_names_the_run_and_what_it_trained(tmp_path):
    write_gallery(tmp_path)
    gallery = load_gallery(tmp_path)

    def heading(name, about):
        return pixels(write_grid(gallery, tmp_path / "grid.png", name, about))[:HEADING]

    plain, other_name, other_reward = heading("one", "on a"), heading("two", "on a"), heading("one", "on b")
    named, told = (np.where((plain != other).any((1, 2)))[0] for other in (other_name, other_reward))
    assert 20 <= named.min() <= named.max() < 52
    assert 52 <= told.min() <= told.max() < 76
    # A name that is too long ends in an ellipsis within the margin.
    long = heading("n" * 500, "m" * 500)
    assert long[:, -MARGIN:].min() == 255
    assert long[20:76, -4 * MARGIN : -MARGIN].min() < 120


def test_a_saved_gallery_is_loaded_unchanged(tmp_path):
    with pytest.raises(FileNotFoundError, match="contains no gallery"):
        load_gallery(tmp_path)
    write_gallery(tmp_path, PROMPTS[:3])
    gallery = load_gallery(tmp_path)
    assert gallery.prompts == PROMPTS[:3]
    assert gallery.verdicts == Verdicts("verifier", [(True, True), (False, False), (False, True)])
    assert gallery.pairs == PAIRS
    assert gallery.seeds == [4_700_000_001, 4_700_000_002, 4_700_000_003]
    images = (gallery.before, gallery.after, gallery.explored, gallery.regenerated)
    for seed, image in enumerate(images, start=1):
        expected = (sample_images(len(image), seed=seed) * 255).round().to(torch.uint8)
        assert torch.equal(image, expected)


def test_a_large_run_keeps_the_first_prompts_and_shrinks_images(tmp_path):
    prompts = [f"prompt {i}" for i in range(KEPT_PROMPTS + 3)]
    large = torch.zeros(len(prompts), 3, 16, 2 * LARGEST_SIDE)
    write_gallery(tmp_path, prompts, before=large, after=large)
    gallery = load_gallery(tmp_path)
    assert gallery.prompts == prompts[:KEPT_PROMPTS]
    assert gallery.before.shape == (KEPT_PROMPTS, 3, 8, LARGEST_SIDE)
    assert len(gallery.verdicts.marks) == KEPT_PROMPTS
    # More of small images are kept.
    prompts, small = prompts * 4, torch.zeros(4 * len(prompts), 3, 32, 64)
    write_gallery(tmp_path, prompts, before=small, after=small)
    assert load_gallery(tmp_path).prompts == prompts[:128]
