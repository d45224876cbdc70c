"""The verifier of motion agrees with clips that were drawn, and with no other description of them."""

from typing import Any

import numpy as np
import pytest
import torch
from solrl_core.errors import PromptError
from solrl_core.rewards import RewardSet
from solrl_core.rewards.reward import require_judgeable
from solrl_minis.catalog import moving
from solrl_minis.motion_verifier import motion_verifier_reward, verify_motion, verify_motions
from tests.minis.drawn_scenes import changes, drawn_clip, held_out

METADATA = held_out(moving(), 30)


@pytest.fixture(scope="module")
def clips() -> torch.Tensor:
    return torch.stack([drawn_clip(item, seed) for seed, item in enumerate(METADATA)])


def test_drawn_clips_show_their_movements(clips: torch.Tensor) -> None:
    assert {item["tag"] for item in METADATA} == {"direction", "speed", "crossing"}
    verdicts = verify_motions(clips, METADATA)
    assert np.mean([verdict.strict for verdict in verdicts]) > 0.97
    assert all(verdict.motions == 1 for verdict in verdicts if verdict.objects == 1)


def test_a_description_that_differs_in_one_thing_is_refused(clips: torch.Tensor) -> None:
    for item, clip in zip(METADATA[:30], clips.numpy(), strict=False):
        names = [(item["color"], item["class"]) for item in item["include"]]
        for other in changes(item):
            verdict = verify_motion(clip, other)
            assert verdict.strict == 0
            assert verdict.motions < 1
            assert verdict.objects == 1 or names != [(item["color"], item["class"]) for item in other["include"]]


def test_clips_that_are_still_reversed_stop_or_turn_back_are_refused(clips: torch.Tensor) -> None:
    for changed in (clips[:, :1].expand_as(clips), clips.flip(1)):
        verdicts = verify_motions(changed, METADATA)
        assert all(verdict.motions < 1 for verdict in verdicts)
        assert np.mean([verdict.objects for verdict in verdicts]) > 0.97
    at = next(at for at, item in enumerate(METADATA) if item["tag"] == "direction")
    for frames, right in (([0, 4, 8], 1), ([0, 4, 4], 0), ([0, 8, 4], 0)):
        assert verify_motion(clips[at].numpy()[frames], METADATA[at]).motions == right


def test_the_reward_takes_whole_clips(clips: torch.Tensor) -> None:
    rewards = RewardSet({"moves": motion_verifier_reward}).score(["moves"], clips[:9], [""] * 9, METADATA[:9])["moves"]
    assert rewards.tolist() == [verdict.strict for verdict in verify_motions(clips[:9], METADATA[:9])]


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
