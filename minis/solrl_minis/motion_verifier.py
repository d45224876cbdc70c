"""Verifier of the moving shapes world: grades how well a clip shows the objects and motions of its metadata.

It detects objects in the first, the middle and the last frame, as the verifier of images does. An item of the metadata
may have a `motion` (left, right, up, down) and a `speed` (slowly, quickly). Two objects with the tag `crossing` change
sides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from solrl_core.rewards.metadata import refuse, require_one_of
from solrl_core.rewards.reward import checks_prompts

from solrl_minis.verifier import DetectedObject, find_objects, verify
from solrl_minis.world import check_metadata

DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Signs of a motion along x and y, which points down."""
SPEEDS = ("slowly", "quickly")
LEAST_PIXELS = 4.0
"""Shortest way from the first to the last frame that counts as motion."""
QUICK_PIXELS = 17.0
"""Shortest way of a quick object; slow ones go less."""


@dataclass(frozen=True)
class MotionVerdict:
    """Grades of one clip, each 0 to 1: of its objects, in the worst of three frames, and of their motions."""

    objects: float
    motions: float

    @property
    def strict(self) -> float:
        """1.0 if the clip shows exactly the requested objects and motions, otherwise 0.0."""
        return float(self.graded == 1.0)

    @property
    def graded(self) -> float:
        """Mean of both grades."""
        return (self.objects + self.motions) / 2


def check_motions(metadata: Mapping[str, Any]) -> None:
    """Refuse metadata that does not describe a clip of the moving shapes world.

    Raises:
        PromptError: the metadata describes no scene of the shapes world, or its motion, speed or number of crossing
            objects is invalid.
    """
    check_metadata(metadata)
    for index, item in enumerate(metadata["include"]):
        for name, choices in (("motion", tuple(DIRECTIONS)), ("speed", SPEEDS)):
            if name in item:
                require_one_of(f"metadata.include.{index}.{name}", item[name], choices)
    if metadata.get("tag") == "crossing" and len(metadata["include"]) != 2:
        refuse("metadata.include", f"{len(metadata['include'])} objects", "two objects, which cross")


def verify_motion(clip: npt.NDArray[np.float32], metadata: Mapping[str, Any]) -> MotionVerdict:
    """Grade one clip, [F, 3, H, W] in [0, 1].

    Raises:
        PromptError: the metadata does not describe a clip of the moving shapes world.
    """
    check_motions(metadata)
    frames = [clip[0], clip[len(clip) // 2], clip[-1]]
    objects = min(verify(frame, metadata).graded for frame in frames)
    detections = [find_objects(frame) for frame in frames]
    ways = [_way(detections, item) for item in metadata["include"]]
    right = [
        float(way is not None and _moves_as(way, item)) for way, item in zip(ways, metadata["include"], strict=True)
    ]
    if metadata.get("tag") == "crossing":
        right.append(float(_cross(*ways)))
    return MotionVerdict(objects, sum(right) / len(right))


Way = list[tuple[float, float]]
"""Places of an object in the three frames."""


def _way(frames: Sequence[Sequence[DetectedObject]], item: Mapping[str, Any]) -> Way | None:
    """The item's place (x, y) in each frame; None if a frame does not show the item exactly once."""
    places = []
    for objects in frames:
        matches = [match for match in objects if (match.colour, match.shape) == (item["color"], item["class"])]
        if len(matches) != 1:
            return None
        places.append((matches[0].x, matches[0].y))
    return places


def _moves_as(way: Way, item: Mapping[str, Any]) -> bool:
    """Whether an object moves all the time in its direction, and as fast as it should."""
    if "motion" not in item:
        return True
    sign = DIRECTIONS[item["motion"]]
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(way)]
    along = [dx * sign[0] + dy * sign[1] for dx, dy in steps]
    across = max(abs(dx * sign[1]) + abs(dy * sign[0]) for dx, dy in steps)
    if min(along) <= 0 or sum(along) < LEAST_PIXELS or across > min(along):
        return False
    return "speed" not in item or (sum(along) >= QUICK_PIXELS) == (item["speed"] == "quickly")


def _cross(first: Way | None, second: Way | None) -> bool:
    """Whether two objects change sides."""
    if first is None or second is None:
        return False
    return (first[0][0] - second[0][0]) * (first[-1][0] - second[-1][0]) < 0


def verify_motions(clips: torch.Tensor, metadata: Sequence[Mapping[str, Any]]) -> list[MotionVerdict]:
    """Grade clips [N, F, 3, H, W] in [0, 1], each against its own metadata."""
    pixels = clips.detach().float().cpu().numpy()
    return [verify_motion(clip, item) for clip, item in zip(pixels, metadata, strict=True)]


@checks_prompts(lambda text, metadata: check_motions(metadata))
def motion_verifier_reward(
    images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> torch.Tensor:
    """Reward "motion_verifier": 1 if the clip shows exactly the objects and motions of its metadata, otherwise 0."""
    return torch.tensor([verdict.strict for verdict in verify_motions(images, metadata)])


@checks_prompts(lambda text, metadata: check_motions(metadata))
def motion_verifier_graded_reward(
    images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> torch.Tensor:
    """Reward "motion_verifier_graded": mean grade of a clip's objects and motions, 0 to 1."""
    return torch.tensor([verdict.graded for verdict in verify_motions(images, metadata)])


for _reward in (motion_verifier_reward, motion_verifier_graded_reward):
    _reward.takes_clips = True  # type: ignore[attr-defined]
