"""A prompt's candidates, from finished chunks to their part of the answer; pruned halfway if the plan says so."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from PIL import Image
from solrl_core.generator import CHUNK
from solrl_core.rewards.base import weighted_sum
from solrl_core.sampler import Trajectory
from solrl_core.selection import best_worst
from solrl_proto.rollouts import RolloutGroup, RolloutRequest

from solrl_rollout.engine.admission import score_not_finite
from solrl_rollout.engine.work import Chunk, Scored

Value = TypeVar("Value")


@dataclass(frozen=True)
class Group:
    """A group whose chunks are finished.

    Attributes:
        chunks: all that ran for it, in order; `scored`: what came of each.
        ends: those of `scored` that reached the last step.
        places: where in the group the candidates of `ends` stand; None if all of it reached the end.
    """

    request: RolloutRequest
    chunks: Sequence[Chunk]
    scored: Sequence[Scored]
    ends: Sequence[Scored]
    places: list[int] | None = None

    @property
    def seeds(self) -> list[int]:
        """Of all its candidates."""
        return [seed for chunk in self.chunks for seed in chunk.seeds]

    def survivors(self, keep: int) -> tuple[list[int], list[Chunk]]:
        """The places of the `keep` candidates that are most extreme by their predicted images, and their next chunks.

        Raises:
            ProblemError: 422 `score-not-finite`.
        """
        seeds, scores = self.seeds, self._scores()
        places = sorted(best_worst(scores, min(keep, len(scores))))
        halfway = Trajectory.join([one.trajectory for one in self.scored if one.trajectory is not None])
        parts = [places[start : start + CHUNK] for start in range(0, len(places), CHUNK)]
        job, prompt = self.chunks[0].job, self.chunks[0].prompt
        return places, [Chunk(job, prompt, [seeds[i] for i in part], begin=halfway.rows(part)) for part in parts]

    def pruned(self, places: list[int], ends: Sequence[Scored]) -> "Group":
        """This group once its survivors have ended."""
        return replace(self, scored=[*self.scored, *ends], ends=ends, places=places)

    def answer(self) -> RolloutGroup:
        """What the client gets.

        Raises:
            ProblemError: 422 `score-not-finite`.
        """
        images = None
        if self.request.images == "png":
            images = [_png(pixels) for one in self.ends if one.images is not None for pixels in one.images]
        rewards = {name: values.tolist() for name, values in self._rewards().items()}
        return RolloutGroup(
            prompt_id=self.chunks[0].prompt.id,
            seeds=tuple(self.seeds),
            scores=self._in_place(self._scores().tolist()),
            rewards={name: self._in_place(values) for name, values in rewards.items()},
            pruned=None if self.places is None else tuple(i not in set(self.places) for i in range(len(self.seeds))),
            images=None if images is None else self._in_place(images),
        )

    def _rewards(self) -> dict[str, torch.Tensor]:
        return {name: torch.cat([one.rewards[name] for one in self.ends]) for name in self.ends[0].rewards}

    def _scores(self) -> torch.Tensor:
        scores = weighted_sum(self._rewards(), {reward.name: reward.weight for reward in self.request.rewards})
        if not torch.isfinite(scores).all():
            raise score_not_finite(self.chunks[0].prompt.id)
        return scores

    def _in_place(self, values: Sequence[Value]) -> tuple[Value | None, ...]:
        if self.places is None:
            return tuple(values)
        found = dict(zip(self.places, values, strict=True))
        return tuple(found.get(place) for place in range(len(self.seeds)))


def _png(pixels: torch.Tensor) -> str:
    """Base64 PNG of uint8 [H, W, 3]."""
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
