"""Clips for rewards of images: some frames are scored like images, and a clip's score is their mean or the worst."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

TAKES_CLIPS = "takes_clips"
"""Attribute of a reward that gets clips [N, F, 3, H, W] whole."""
_JOINS = ("mean", "worst")


class FrameRule(NamedTuple):
    """How a reward of images scores a clip: two options of every such reward.

    Attributes:
        frames: number of frames that are scored, evenly spaced; a shorter clip's are all scored.
        over_frames: "mean" of their scores, or the "worst".
    """

    frames: int = 8
    over_frames: str = "mean"

    def frames_of(
        self, clips: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> tuple[Tensor, list[str], list[Mapping[str, Any]]]:
        """The scored frames [N · n, 3, H, W] of clips [N, F, 3, H, W], with prompt and metadata of each."""
        at = evenly(self.frames, clips.shape[1])
        rows = [row for row in range(len(clips)) for _ in at]
        return clips[:, at].flatten(0, 1), [prompts[row] for row in rows], [metadata[row] for row in rows]

    def joined(self, scores: Tensor, clips: int) -> Tensor:
        """Scores [N] of clips from the scores [N · n] of their frames."""
        by_clip = scores.view(clips, -1)
        return by_clip.mean(1) if self.over_frames == "mean" else by_clip.amin(1)


def frame_rule(options: Mapping[str, Any]) -> tuple[FrameRule, dict[str, Any]]:
    """The rule in the options of a reward of images, and the options that are its own.

    Raises:
        ValueError: the rule is invalid.
    """
    reward_options = {name: value for name, value in options.items() if name not in FrameRule._fields}
    rule = FrameRule(**{name: options[name] for name in FrameRule._fields if name in options})
    if not isinstance(rule.frames, int) or rule.frames < 1:
        raise ValueError(f"got frames {rule.frames!r}; expected the number of a clip's frames that are scored, from 1")
    if rule.over_frames not in _JOINS:
        raise ValueError(f"got over_frames {rule.over_frames!r}; expected one of {_JOINS}")
    return rule, reward_options


def evenly(count: int, frames: int) -> list[int]:
    """Indices of `count` of a clip's frames: the middles of `count` equal parts; all if it has no more."""
    count = min(count, frames)
    return [(2 * part + 1) * frames // (2 * count) for part in range(count)]
