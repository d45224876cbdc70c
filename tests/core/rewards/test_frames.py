"""Clips: what rewards of images and rewards of clips get, and what they may be told."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from solrl_core.errors import RewardError
from solrl_core.rewards import RewardSet
from solrl_core.rewards.frames import evenly
from solrl_core.rewards.motion import Motion
from solrl_core.rewards.reward import PlainDefaults, check_reward

HERE = PlainDefaults(torch.device("cpu"))
TEXTS, METADATA = ["one", "two"], [{"n": 1}, {"n": 2}]
BRIGHT = f"{__name__}:brightness"
seen: list[tuple[torch.Size, list[str], list[int]]] = []


def brightness(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    seen.append((images.shape, list(prompts), [one["n"] for one in metadata]))
    return images.mean((-3, -2, -1))


class OfClips:
    """The brightness of a clip's last frame; its own option has the name of one of a rule."""

    takes_clips = True

    def __init__(self, frames: int = 1, device: str = "cpu") -> None:
        self.frames = frames

    def __call__(self, images: torch.Tensor, prompts: Sequence[str], metadata: Any) -> torch.Tensor:
        return self.frames * images[:, -1].mean((1, 2, 3))


def clips(frames: int) -> torch.Tensor:
    """Two clips whose frames are of one brightness, 0.01 times their number, the second's 0.5 brighter."""
    levels = torch.arange(frames) / 100 + torch.tensor([[0.0], [0.5]])
    return levels[..., None, None, None].expand(2, frames, 3, 4, 6)


@pytest.mark.parametrize(
    ("count", "frames", "at"),
    [(1, 33, [16]), (2, 8, [2, 6]), (8, 33, [2, 6, 10, 14, 18, 22, 26, 30]), (8, 3, [0, 1, 2])],
)
def test_frames_are_evenly_spaced(count: int, frames: int, at: list[int]) -> None:
    assert evenly(count, frames) == at


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 0.16), ({"frames": 2}, 0.16), ({"frames": 2, "over_frames": "worst"}, 0.08), ({"frames": 1}, 0.16)],
)
def test_a_reward_of_images_scores_some_frames(options: dict[str, Any], expected: float) -> None:
    seen.clear()
    rewards = RewardSet.load([BRIGHT], HERE, {BRIGHT: options})
    found = rewards.score([BRIGHT], clips(33), TEXTS, METADATA)[BRIGHT]
    assert found.tolist() == pytest.approx([expected, expected + 0.5])
    each = options.get("frames", 8)
    assert seen == [((2 * each, 3, 4, 6), ["one"] * each + ["two"] * each, [1] * each + [2] * each)]


def test_images_are_scored_as_ever() -> None:
    seen.clear()
    images = clips(33)[:, 7]
    plain, ruled = (RewardSet.load([BRIGHT], HERE, {BRIGHT: options}) for options in ({}, {"over_frames": "worst"}))
    assert torch.equal(*(one.score([BRIGHT], images, TEXTS, METADATA)[BRIGHT] for one in (plain, ruled)))
    assert seen == [((2, 3, 4, 6), TEXTS, [1, 2])] * 2


def test_a_reward_of_clips_gets_them_whole_and_its_own_options() -> None:
    name = f"{__name__}:OfClips"
    rewards = RewardSet.load([name], HERE, {name: {"frames": 3}})
    assert rewards.score([name], clips(5), TEXTS, METADATA)[name].tolist() == pytest.approx([3 * 0.04, 3 * 0.54])


def test_another_rule_is_another_digest_and_goes_with_its_reward() -> None:
    options: list[dict[str, Any]] = [{}, {"frames": 8}, {"frames": 4}, {"over_frames": "worst"}]
    digests = [RewardSet.load([BRIGHT], HERE, {BRIGHT: one}).digests()[f"reward:{BRIGHT}"] for one in options]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    rewards = RewardSet.load([BRIGHT], HERE, {BRIGHT: {"over_frames": "worst", "frames": 33}})
    more = rewards.joined({"other": brightness})
    assert more.score([BRIGHT], clips(33), TEXTS, METADATA)[BRIGHT].tolist() == pytest.approx([0.0, 0.5])
    replaced = rewards.joined({BRIGHT: brightness})
    assert replaced.score([BRIGHT], clips(33), TEXTS, METADATA)[BRIGHT].tolist() == pytest.approx([0.16, 0.66])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frames": 0}, "got frames 0; expected the number of a clip's frames that are scored, from 1"),
        ({"over_frames": "median"}, "got over_frames 'median'; expected one of"),
        ({"over": "mean"}, "got options"),
    ],
)
def test_other_rules_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_reward(BRIGHT, options)


def test_a_frame_that_fails_is_named_with_its_prompt() -> None:
    def fails(images: torch.Tensor, prompts: Sequence[str], metadata: Any) -> torch.Tensor:
        if (images > 0.6).any():
            raise RuntimeError("too bright")
        return images.mean((1, 2, 3))

    with pytest.raises(RewardError, match=r"failed on image 11 of prompt 'two': RuntimeError: too bright"):
        RewardSet({"a": fails}).score(["a"], clips(33), TEXTS, METADATA)


def test_motion_is_the_difference_of_frames_up_to_enough() -> None:
    still = clips(1).expand(2, 5, 3, 4, 6)
    assert Motion()(still, TEXTS, METADATA).tolist() == [0, 0]
    assert Motion()(clips(5), TEXTS, METADATA).tolist() == pytest.approx([0.5, 0.5])  # 0.01 of 0.02
    assert Motion(enough=0.005)(clips(5), TEXTS, METADATA).tolist() == [1, 1]
    one = RewardSet.load(["motion"], HERE)
    assert one.score(["motion"], clips(5), TEXTS, METADATA)["motion"].tolist() == pytest.approx([0.5, 0.5])
    with pytest.raises(RewardError, match=r"got images of shape \(2, 3, 4, 6\); expected clips, of a model that"):
        one.score(["motion"], clips(5)[:, 0], TEXTS, METADATA)
    with pytest.raises(ValueError, match="got enough 0; expected a difference"):
        Motion(enough=0)
