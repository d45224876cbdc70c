"""Rules of GenEval: whether detected objects match a prompt's metadata.

Source: Ghosh et al. 2023 (arXiv 2310.11513) and `evaluation/evaluate_images.py` of its code, with that script's default
options. Its rules are kept as they are: colours and positions count for the likeliest objects of a class only, and
objects of classes that the metadata does not name do not count.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from solrl_core.rewards.metadata import MOST_COUNT, objects_of, refuse, require_one_of, require_position

THRESHOLD, COUNTING_THRESHOLD = 0.3, 0.9
"""Scores that an object must exceed, and that of prompts with the tag "counting"; of Mask2Former, by a softmax."""
COUNTING = "counting"
MOST_OBJECTS = MOST_COUNT
"""Most objects of a class."""
POSITION_MARGIN = 0.1
"""Least distance of two objects, as a part of their sizes, for one to be left of, above, … the other."""
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")


class DetectedObject(NamedTuple):
    """An object that a detector found; the box's edges are in pixels."""

    name: str
    score: float
    left: float
    top: float
    right: float
    bottom: float


ColoursOf = Callable[[str, Sequence[DetectedObject]], Sequence[str]]
"""(class, objects of it) → the colour of each, one of `COLOURS`."""


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Require metadata as GenEval's prompts have it.

    Raises:
        PromptError: naming the part at fault.
    """
    include, exclude = objects_of(metadata, "include"), objects_of(metadata, "exclude")
    if not (include or exclude):
        refuse("metadata", dict(metadata), 'GenEval\'s `include` or `exclude`, such as [{"class": "dog", "count": 1}]')
    for at, item in enumerate(include):
        where = f"metadata.include.{at}"
        if "color" in item:
            require_one_of(f"{where}.color", item["color"], COLOURS)
        if "position" in item:
            require_position(f"{where}.position", item["position"], RELATIONS, at)


def kept_objects(
    detections: Sequence[DetectedObject], metadata: Mapping[str, Any], *, threshold: float, counting_threshold: float
) -> dict[str, list[DetectedObject]]:
    """Objects by class, the likeliest first, without objects below the threshold."""
    least = counting_threshold if metadata.get("tag") == COUNTING else threshold
    objects: dict[str, list[DetectedObject]] = {}
    # Of equal scores the later comes first, as in the original.
    for _, detection in sorted(enumerate(detections), key=lambda row: (row[1].score, row[0]), reverse=True):
        if detection.score > least and len(objects.setdefault(detection.name, [])) < MOST_OBJECTS:
            objects[detection.name].append(detection)
    return objects


def is_correct(
    objects: Mapping[str, Sequence[DetectedObject]], metadata: Mapping[str, Any], colours_of: ColoursOf
) -> bool:
    """Whether objects by class, as `kept_objects` gives them, match valid metadata."""
    groups: list[Sequence[DetectedObject] | None] = []
    for requirement in metadata.get("include", []):
        group = objects.get(requirement["class"], [])[: requirement["count"]]
        groups.append(group if _matches(group, requirement, groups, colours_of) else None)
    present = any(len(objects.get(item["class"], [])) >= item["count"] for item in metadata.get("exclude", []))
    return None not in groups and not present


def _matches(
    group: Sequence[DetectedObject],
    requirement: Mapping[str, Any],
    groups: Sequence[Sequence[DetectedObject] | None],
    colours_of: ColoursOf,
) -> bool:
    """Whether the likeliest objects of a class have the required number, colour and place."""
    if len(group) < requirement["count"]:
        return False
    if (
        "color" in requirement
        and list(colours_of(requirement["class"], group)).count(requirement["color"]) < requirement["count"]
    ):
        return False
    if "position" not in requirement:
        return True
    relation, index = requirement["position"]
    targets = groups[index]
    return targets is not None and all(relation in relations(box, target) for box in group for target in targets)


def relations(subject: DetectedObject, target: DetectedObject) -> set[str]:
    """Relations of an object to another, of `RELATIONS`; none if they are too near."""
    across = (subject.left + subject.right - target.left - target.right) / 2
    down = (subject.top + subject.bottom - target.top - target.bottom) / 2
    widths = abs(subject.right - subject.left) + abs(target.right - target.left)
    heights = abs(subject.bottom - subject.top) + abs(target.bottom - target.top)
    x, y = _beyond(across, POSITION_MARGIN * widths), _beyond(down, POSITION_MARGIN * heights)
    if abs(x) < 1e-3 and abs(y) < 1e-3:
        return set()
    distance = math.hypot(across, down)
    x, y = x / distance, y / distance
    holds = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {relation for relation, true in holds.items() if true}


def _beyond(offset: float, margin: float) -> float:
    """The part of an offset beyond a margin on either side of zero."""
    return math.copysign(max(abs(offset) - margin, 0.0), offset)
