from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from run_folders import PROMPTS, write_gallery
from solrl_trainer.evaluation.gallery import load_gallery
from solrl_trainer.report.grid import COLUMNS, GAP, HEADING, MARGIN, STRIP, corner, shown_side, write_grid


@pytest.fixture
def gallery(tmp_path):
    write_gallery(tmp_path)
    return load_gallery(tmp_path)


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(float)


def enlarged(image, side):
    picture = Image.fromarray(image.permute(1, 2, 0).numpy())
    return np.asarray(picture.resize((side, side), Image.Resampling.BICUBIC)).astype(float)


def test_every_image_is_in_its_place(tmp_path, gallery):
    page = pixels(write_grid(gallery, tmp_path / "grid.png", "run", "about"))
    shown = shown_side(64)
    assert shown == 192
    for index in range(16):
        left, top = corner(index, 64)
        for offset, images in ((0, gallery.before), (shown + GAP, gallery.after)):
            found = page[top : top + shown, left + offset : left + offset + shown]
            assert np.abs(found - enlarged(images[index], shown)).max() <= 1


def test_the_grid_shows_the_first_prompts_in_order(tmp_path, gallery):
    assert len(PROMPTS) > 16
    sixteen = pixels(write_grid(gallery, tmp_path / "grid.png", "run", "about"))
    last_row = corner(16 - 1, 64)[1]
    assert sixteen.shape[0] < last_row + shown_side(64) + STRIP + corner(COLUMNS, 64)[1]
    shuffled = replace(gallery, before=gallery.before.flip(0), prompts=gallery.prompts[::-1])
    left, top = corner(0, 64)
    page = pixels(write_grid(shuffled, tmp_path / "other.png", "run", "about"))
    assert np.abs(page[top : top + 192, left : left + 192] - enlarged(gallery.before[-1], 192)).max() <= 1


def test_marks_are_green_for_right_and_red_for_wrong(tmp_path, gallery):
    page = pixels(write_grid(gallery, tmp_path / "grid.png", "run", "about"))
    shown = shown_side(64)
    for index, marks in enumerate(gallery.marks[:16]):
        left, top = corner(index, 64)
        for after, good in enumerate(marks):
            x = left + after * (shown + GAP)
            strip = page[top + shown + 2 : top + shown + STRIP, x : x + shown]
            ink = strip[strip.min(-1) < 120].mean(0)
            assert (ink[1] > ink[0]) == good


def test_the_heading_names_the_run_and_what_it_trained(tmp_path, gallery):
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
