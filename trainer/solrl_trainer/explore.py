"""Exploration over HTTP, and regeneration of what it found."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from solrl_core.generator import Generator
from solrl_core.rewards import RewardSet
from solrl_proto.noise import expand_seeds
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import (
    AdapterRef,
    Candidates,
    Plan,
    PromptItem,
    RewardSpec,
    RolloutAnswer,
    RolloutRequest,
)

from solrl_trainer.client import RolloutClient
from solrl_trainer.config import RunConfig
from solrl_trainer.selection import best_worst


@dataclass(frozen=True)
class Kept:
    """A prompt's kept seeds, best half first, with the proxy rewards that chose them."""

    prompt: PromptItem
    seeds: list[int]
    proxy: torch.Tensor


@dataclass(frozen=True)
class Regenerated:
    """The kept seeds in BF16: latents x0 [groups, kept, ...], images, and their true rewards [groups, kept]."""

    latents: torch.Tensor
    images: torch.Tensor
    rewards: torch.Tensor


class Explorer:
    """Asks the service for candidates under exact adapter versions."""

    def __init__(self, client: RolloutClient, config: RunConfig) -> None:
        self._client = client
        self._config = config

    def push(self, version: int, adapter: bytes) -> None:
        """Hand the behaviour policy of `version` to the service.

        A store that lost this run (or never had it) takes it as the run's first version.
        """
        run, model = self._config.run, self._config.model
        parent = version - 1 if version else None
        try:
            self._client.push(run, version, parent, model, adapter)
        except ProblemError as error:
            if error.problem.kind != "parent-conflict" or error.problem.expected is not None or parent is None:
                raise
            self._client.push(run, version, None, model, adapter)

    def explore(self, prompts: Sequence[PromptItem], version: int, seed_root: int) -> RolloutAnswer:
        """Ask for `explore.candidates` of each prompt under `version`."""
        explore = self._config.explore
        return self._client.rollouts(
            RolloutRequest(
                model=self._config.model,
                adapter=AdapterRef(run=self._config.run, version=version),
                prompts=tuple(prompts),
                candidates=Candidates(count=explore.candidates, seed_root=seed_root),
                plan=Plan(steps=explore.steps, precision=explore.precision, guidance=self._config.guidance),
                rewards=(RewardSpec(name=self._config.reward),),
            )
        )

    def seed_root(self, iteration: int) -> int:
        """The seed root of an iteration."""
        return expand_seeds(self._config.seed, f"explore/{iteration}", 1)[0]


def keep(answer: RolloutAnswer, prompts: Sequence[PromptItem], count: int) -> list[Kept]:
    """Select the best and worst of each group.

    Raises:
        ValueError: the answer's groups are not the prompts asked about.
    """
    if [group.prompt_id for group in answer.groups] != [prompt.id for prompt in prompts]:
        raise ValueError("the service answered about other prompts than were asked")
    kept = []
    for prompt, group in zip(prompts, answer.groups, strict=True):
        index = best_worst(group.scores, count)
        kept.append(Kept(prompt, [group.seeds[i] for i in index], torch.tensor([group.scores[i] for i in index])))
    return kept


def regenerate(kept: Sequence[Kept], generator: Generator, rewards: RewardSet, config: RunConfig) -> Regenerated:
    """Make exactly the kept seeds again in BF16 under the behaviour policy, and score them with the true images."""
    latents, images, scores = [], [], []
    for group in kept:
        texts, metadata = [group.prompt.text] * len(group.seeds), [group.prompt.metadata] * len(group.seeds)
        made = generator.generate(
            group.prompt.text, group.seeds, steps=config.regenerate.steps, guidance=config.guidance
        )
        latents.append(made.latents)
        images.append(made.images.cpu())
        scores.append(rewards.score([config.reward], made.images, texts, metadata)[config.reward])
    return Regenerated(torch.stack(latents), torch.stack(images), torch.stack(scores))
