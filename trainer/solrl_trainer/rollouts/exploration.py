"""Exploration of an iteration, whose scores decide which seeds are trained on, and the samples of all ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from solrl_core.sampling.sampler import Recording
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import Plan, PromptItem, RewardTime

from solrl_trainer.ranks.communicator import Communicator, gather_rows, gather_values
from solrl_trainer.rollouts.groups import CandidateGroup
from solrl_trainer.settings.config import RunConfig


@dataclass(frozen=True)
class ExplorationSummary:
    """Outcome of an exploration, with the version and the arithmetic that generated the candidates.

    Attributes:
        seconds: duration, whether or not the trainer waited for it; of a service's part, if it explores a share.
        seconds_here: time that this device explored its share, under the version of this iteration; None if it has
            none beside a service.
        times: time of each reward, by name, as a service measured it; empty for local exploration.
    """

    iteration: int
    version: int
    precision: str
    numerics: str
    score_sum: float
    score_count: int
    seconds: float
    times: Mapping[str, RewardTime] = field(default_factory=dict)
    seconds_here: float | None = None


OnSummary = Callable[[ExplorationSummary], None]


def seed_root(seed: int, iteration: int) -> int:
    """Root of all candidates' seeds of an iteration; iteration −1 is the measurement of rank fidelity."""
    return expand_seeds(seed, f"explore/{iteration}", 1)[0]


def training_plan(config: RunConfig, steps: int) -> Plan:
    """The plan of the samples that are trained on, with this number of steps."""
    return Plan(steps=steps, solver=config.solver, guidance=config.guidance, precision="bf16")


@dataclass(frozen=True)
class IterationSamples:
    """All groups of an iteration in the order of its prompts; `groups` and `exploration` are this rank's alone.

    Attributes:
        proxy_mean: mean score of the candidates.
        latents: clean latents x0 of the samples, float32 [groups, kept, ...].
        scores: of the samples, [groups, kept].
        rewards: reward → [groups, kept] values of the samples; NaN in a group whose prompt does not have it.
        recording: every step of the samples, in the order of the groups, if the algorithm trains on trajectories.
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

        `prompts` are all ranks' prompts: their parts by `communicator.shard`, concatenated. The rest is of this rank;
        its groups may be in any order.
        """
        place = {prompt.id: index for index, prompt in enumerate(prompts)}
        groups = sorted(groups, key=lambda group: place[group.prompt.id])
        local = [group.trained for group in groups]
        sums, counts = zip(*gather_values([exploration.score_sum, exploration.score_count], world), strict=True)
        return cls(
            prompts=prompts,
            groups=groups,
            exploration=exploration,
            proxy_mean=sum(sums) / sum(counts),
            latents=gather_rows(torch.stack([samples.latents for samples in local]), world),
            scores=gather_rows(torch.stack([samples.scores for samples in local]), world),
            rewards={
                name: gather_rows(torch.stack([samples.rewards[name] for samples in local]), world)
                for name in local[0].rewards
            },
            recording=_gathered([samples.recording for samples in local if samples.recording is not None], world),
        )


def _gathered(recordings: Sequence[Recording], world: Communicator) -> Recording | None:
    if not recordings:
        return None
    local = Recording.join(recordings)

    def of_all(rows: torch.Tensor) -> torch.Tensor:
        return gather_rows(rows.transpose(0, 1), world).transpose(0, 1)

    log_probs = None if local.log_probs is None else of_all(local.log_probs)
    return Recording(local.sigmas, of_all(local.states), log_probs)
