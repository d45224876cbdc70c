"""A prompt's group, from scored chunks to its part of the answer."""

import base64
from collections.abc import Mapping, Sequence

import torch
from solrl_core.image_files import lossless_file
from solrl_core.rewards.reward import weighted_sum
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.rollouts import RolloutGroup, RolloutRequest

from solrl_rollout.engine.work import Chunk, ScoredChunk


def group_of(request: RolloutRequest, chunks: Sequence[Chunk], scored: Sequence[ScoredChunk]) -> RolloutGroup:
    """One prompt's part of the answer, from all its chunks and their scores, in order.

    Raises:
        ProblemError: 422 `score-nonfinite`: the weights take a score out of float32's range.
    """
    images = None
    if request.images != "none":
        files = [image_file(image) for chunk in scored if chunk.images is not None for image in chunk.images]
        images = tuple(base64.b64encode(file).decode() for file in files)
    prompt_id = chunks[0].prompt.id
    rewards = {name: torch.cat([chunk.rewards[name] for chunk in scored]) for name in scored[0].rewards}
    return RolloutGroup(
        prompt_id=prompt_id,
        seeds=tuple(seed for chunk in chunks for seed in chunk.seeds),
        scores=tuple(_scores(request, prompt_id, rewards).tolist()),
        rewards={name: tuple(values.tolist()) for name, values in rewards.items()},
        images=images,
    )


def _scores(request: RolloutRequest, prompt_id: str, rewards: Mapping[str, torch.Tensor]) -> torch.Tensor:
    try:
        return weighted_sum(rewards, {reward.name: reward.weight for reward in request.rewards})
    except OverflowError as error:
        raise ProblemError(
            ProblemKind.SCORE_NONFINITE,
            f"the weighted sum of the rewards overflows for prompt {prompt_id!r}",
            where="body.rewards",
            expected="weights whose weighted sum stays within float32",
            action="use smaller weights",
        ) from error


def image_file(image: torch.Tensor | bytes) -> bytes:
    """The file of an image or clip, see `lossless_file`; the image itself if a worker has compressed it."""
    return image if isinstance(image, bytes) else lossless_file(image)
