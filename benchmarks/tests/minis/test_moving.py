"""The moving shapes world: its clips, captions and held-out movements."""

import torch
from minis_recipe import moving
from minis_recipe.family import TEXT_TOKENS
from minis_recipe.wan import build, build_autoencoder


def test_clips_change_by_their_motion_alone() -> None:
    source = moving.MovingSource(0)
    clips = source.images(source.draw(12), "cpu")
    assert clips.shape == (12, moving.FRAMES, 3, 64, 64)
    assert clips.dtype == torch.float32
    corner = clips[..., :2, :2]
    assert torch.equal(corner, corner[:, :1].expand_as(corner))
    assert all(float(clip.diff(dim=0).abs().max()) > 0.2 for clip in clips)


def test_held_out_movements_are_never_drawn_for_training() -> None:
    source, other = moving.MovingSource(0), moving.MovingSource(0, held_out=True)
    drawn = source.draw(400)
    assert not any(movement.held_out for movement in [*drawn, *map(source.change, drawn)])
    assert all(movement.held_out for movement in other.draw(50))
    share = sum(movement.held_out for movement in moving.all_movements()) / len(moving.all_movements())
    assert 0.12 < share < 0.18


def test_captions_fit_and_name_their_movement() -> None:
    movements = moving.all_movements()
    texts = {text: movement for movement in movements for text in movement.phrasings()}
    assert len(texts) == sum(len(movement.phrasings()) for movement in movements), "two movements share a caption"
    tokenizer = build(build_autoencoder()).tokenizer
    lengths = [len(ids) for ids in tokenizer(list(texts))["input_ids"]]
    assert 8 < max(lengths) <= TEXT_TOKENS
    first = moving.held_out(3)
    assert first == moving.held_out()[:3]
    assert all(texts[item["prompt"]].metadata["include"] == item["include"] for item in first)
