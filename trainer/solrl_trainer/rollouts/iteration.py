"""The samples of an iteration on all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from solrl_core.sampling.sampler import Recording
from solrl_proto.rollouts import PromptItem

from solrl_trainer.ranks.communicator import Communicator, gather_rows, gather_values
from solrl_trainer.rollouts.exploration import ExplorationSummary
from solrl_trainer.rollouts.groups import CandidateGroup


@dataclass(frozen=True)
class IterationSamples:
    """All groups of an iteration in the order of its prompts.

    Attributes:
        prompts: prompts of all ranks.
        groups: groups of this rank.
        exploration: summary of this rank's exploration.
        proxy_mean: mean score of all ranks' candidates.
        latents: clean latents x0 of all ranks' samples, float32 [groups, kept, ...].
        scores: [groups, kept] scores of all ranks' samples.
        rewards: reward → [groups, kept] values of all ranks' samples; NaN in a group whose prompt does not have it.
        recording: every step of these samples, in the order of the groups, if the algorithm trains on trajectories.
    """

    prompts: Sequence[PromptItem]
    groups: Sequence[CandidateGroup]
    exploration: ExplorationSummary
    proxy_mean: float
    latents: torch.Tensor
    scores: torch.Tensor
    rewards: dict[str, torch.Tensor]
    recording: Recording | None

    @classmethod
    def gather(
        cls,
        prompts: Sequence[PromptItem],
        groups: Sequence[CandidateGroup],
        exploration: ExplorationSummary,
        world: Communicator,
    ) -> "IterationSamples":
        """Gather the samples of all ranks.

        Args:
            prompts: prompts of all ranks: the parts of all ranks by `communicator.share`, concatenated.
            groups: groups of this rank, in any order.
            exploration: summary of this rank's exploration.
            world: the ranks.
        """
        place = {prompt.id: index for index, prompt in enumerate(prompts)}
        groups = sorted(groups, key=lambda group: place[group.prompt.id])
        own = [group.trained for group in groups]
        sums, counts = zip(*gather_values([exploration.score_sum, exploration.score_count], world), strict=True)
        return cls(
            prompts=prompts,
            groups=groups,
            exploration=exploration,
            proxy_mean=sum(sums) / sum(counts),
            latents=gather_rows(torch.stack([samples.latents for samples in own]), world),
            scores=gather_rows(torch.stack([samples.scores for samples in own]), world),
            rewards={
                name: gather_rows(torch.stack([samples.rewards[name] for samples in own]), world)
                for name in own[0].rewards
            },
            recording=_gathered([samples.recording for samples in own if samples.recording is not None], world),
        )


def explored_prompts(groups: Sequence[CandidateGroup], world: Communicator) -> list[PromptItem]:
    """Prompts of all ranks' groups, given this rank's in the order of its places."""
    own = [group.prompt.model_dump(mode="json") for group in groups]
    return [PromptItem.model_validate(prompt) for part in gather_values(own, world) for prompt in part]


def _gathered(recordings: Sequence[Recording], world: Communicator) -> Recording | None:
    if not recordings:
        return None
    own = Recording.join(recordings)

    def of_all(rows: torch.Tensor) -> torch.Tensor:
        return gather_rows(rows.transpose(0, 1), world).transpose(0, 1)

    log_probs = None if own.log_probs is None else of_all(own.log_probs)
    return Recording(own.sigmas, of_all(own.states), log_probs)
