"""A prompt's group, from scored chunks to its part of the answer; pruned halfway if the plan prunes."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from solrl_core.image_files import lossless_file
from solrl_core.rewards.reward import weighted_sum
from solrl_core.sampling.batches import CHUNK_SIZE
from solrl_core.sampling.sampler import Trajectory
from solrl_engine.sampler import survivors
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.rollouts import RolloutGroup, RolloutRequest

from solrl_rollout.engine.work import Chunk, ScoredChunk

Value = TypeVar("Value")


@dataclass(frozen=True)
class ScoredGroup:
    """All candidates of one prompt.

    Attributes:
        chunks: the chunks of all its candidates, in order.
        finished: the scored `chunks`; after pruning, the scored chunks of the survivors.
        places: after pruning, the survivors' places among all candidates.
    """

    request: RolloutRequest
    chunks: Sequence[Chunk]
    finished: Sequence[ScoredChunk]
    places: Sequence[int] | None = None

    @property
    def seeds(self) -> list[int]:
        """The seeds of all candidates."""
        return [seed for chunk in self.chunks for seed in chunk.seeds]

    def survivors(self, keep: int) -> tuple[list[int], list[Chunk]]:
        """Select the `keep` candidates whose predicted images score best and worst.

        Returns:
            The survivors' places, and the chunks that continue them.

        Raises:
            ProblemError: 422 `score-nonfinite`: the weights take a score out of float32's range.
        """
        seeds, scores = self.seeds, self._scores()
        places = survivors(scores, keep)
        halfway = Trajectory.join([chunk.trajectory for chunk in self.finished if chunk.trajectory is not None])
        parts = [places[start : start + CHUNK_SIZE] for start in range(0, len(places), CHUNK_SIZE)]
        job, prompt = self.chunks[0].job, self.chunks[0].prompt
        return places, [Chunk(job, prompt, [seeds[i] for i in part], start=halfway.rows(part)) for part in parts]

    def answer(self) -> RolloutGroup:
        """Its part of the answer.

        Raises:
            ProblemError: 422 `score-nonfinite`: the weights take a score out of float32's range.
        """
        images = None
        if self.request.images != "none":
            files = [image_file(image) for chunk in self.finished if chunk.images is not None for image in chunk.images]
            images = [base64.b64encode(file).decode() for file in files]
        rewards = {name: values.tolist() for name, values in self._rewards().items()}
        survived = None if self.places is None else set(self.places)
        return RolloutGroup(
            prompt_id=self.chunks[0].prompt.id,
            seeds=tuple(self.seeds),
            scores=self._in_place(self._scores().tolist()),
            rewards={name: self._in_place(values) for name, values in rewards.items()},
            pruned=None if survived is None else tuple(i not in survived for i in range(len(self.seeds))),
            images=None if images is None else self._in_place(images),
            truncated_tokens=self.finished[0].truncated_tokens or None,
        )

    def _rewards(self) -> dict[str, torch.Tensor]:
        return {name: torch.cat([chunk.rewards[name] for chunk in self.finished]) for name in self.finished[0].rewards}

    def _scores(self) -> torch.Tensor:
        try:
            return weighted_sum(self._rewards(), {reward.name: reward.weight for reward in self.request.rewards})
        except OverflowError as error:
            raise ProblemError(
                ProblemKind.SCORE_NONFINITE,
                f"the weighted sum of the rewards overflows for prompt {self.chunks[0].prompt.id!r}",
                where="body.rewards",
                expected="weights whose weighted sum stays within float32",
                action="use smaller weights",
            ) from error

    def _in_place(self, values: Sequence[Value]) -> tuple[Value | None, ...]:
        """The finished candidates' values in their places; None for pruned candidates."""
        if self.places is None:
            return tuple(values)
        by_place = dict(zip(self.places, values, strict=True))
        return tuple(by_place.get(place) for place in range(len(self.seeds)))


def image_file(image: torch.Tensor | bytes) -> bytes:
    """The file of an image or clip, see `lossless_file`; the image itself if a worker has compressed it."""
    return image if isinstance(image, bytes) else lossless_file(image)
