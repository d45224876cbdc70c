"""The verifier of motion agrees with clips that were drawn, and with no other description of them."""

from typing import Any

import numpy as np
import pytest
import torch
from minis_recipe.moving import KINDS, MovingSource, differing_in_one
from solrl_core.errors import PromptError
from solrl_core.rewards import RewardSet
from solrl_core.rewards.reward import require_judgeable
from solrl_minis.motion_verifier import motion_verifier_reward, verify_motion, verify_motions


@pytest.fixture(scope="module")
def drawn() -> tuple[list[Any], torch.Tensor]:
    """Movements of every kind, and a clip of each."""
    source = MovingSource(0)
    movements = source.draw(90)
    return movements, source.images(movements, "cpu")


def test_drawn_clips_show_their_movements(drawn: tuple[list[Any], torch.Tensor]) -> None:
    movements, clips = drawn
    assert {movement.kind for movement in movements} == set(KINDS)
    verdicts = verify_motions(clips, [movement.metadata for movement in movements])
    assert np.mean([verdict.strict for verdict in verdicts]) > 0.97
    assert all(verdict.motions == 1 for verdict in verdicts if verdict.objects == 1)


def test_a_description_that_differs_in_one_thing_is_refused(drawn: tuple[list[Any], torch.Tensor]) -> None:
    movements, clips = drawn
    for movement, clip in zip(movements[:30], clips.numpy(), strict=False):
        for other in differing_in_one(movement):
            verdict = verify_motion(clip, other.metadata)
            assert verdict.strict == 0
            assert verdict.motions < 1
            assert verdict.objects == 1 or other.things != movement.things


def test_clips_that_are_still_reversed_stop_or_turn_back_are_refused(drawn: tuple[list[Any], torch.Tensor]) -> None:
    movements, clips = drawn
    metadata = [movement.metadata for movement in movements]
    still = clips[:, :1].expand_as(clips)
    for changed in (still, clips.flip(1)):
        verdicts = verify_motions(changed, metadata)
        assert all(verdict.motions < 1 for verdict in verdicts)
        assert np.mean([verdict.objects for verdict in verdicts]) > 0.97
    at = next(at for at, one in enumerate(movements) if one.kind == "direction")
    for frames, right in (([0, 4, 8], 1), ([0, 4, 4], 0), ([0, 8, 4], 0)):
        assert verify_motion(clips[at].numpy()[frames], metadata[at]).motions == right


def test_the_reward_takes_whole_clips(drawn: tuple[list[Any], torch.Tensor]) -> None:
    movements, clips = drawn
    metadata = [movement.metadata for movement in movements[:9]]
    rewards = RewardSet({"moves": motion_verifier_reward})
    found = rewards.score(["moves"], clips[:9], [""] * 9, metadata)["moves"]
    assert found.tolist() == [verdict.strict for verdict in verify_motions(clips[:9], metadata)]


MOVING = {"class": "circle", "color": "red", "count": 1, "motion": "left"}


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ({"include": [MOVING | {"count": 10**7}]}, "metadata.include.0.count"),
        ({"include": [MOVING] * 17}, "metadata.include"),
        ({"include": [MOVING | {"motion": "away"}]}, "metadata.include.0.motion"),
        ({"include": [MOVING | {"motion": []}]}, "metadata.include.0.motion"),
        ({"include": [MOVING | {"speed": 10**30}]}, "metadata.include.0.speed"),
        ({"include": [MOVING], "tag": "crossing"}, "metadata.include"),
        ({"include": [MOVING | {"position": ["above", 1]}]}, "metadata.include.0.position"),
    ],
)
def test_metadata_of_no_clip_is_refused_with_its_field(metadata: dict[str, Any], field: str) -> None:
    with pytest.raises(PromptError) as refused:
        require_judgeable(motion_verifier_reward, "", metadata)
    assert refused.value.where == field
    with pytest.raises(PromptError):
        verify_motion(np.zeros((5, 3, 64, 64), np.float32), metadata)
