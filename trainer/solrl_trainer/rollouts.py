"""Where an iteration's samples come from: seeds that the service named, made again here, or candidates made here.

Both end in the same: the kept samples of each prompt, with their latents and true rewards.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from solrl_core.adapter import decode_adapter
from solrl_core.generator import Generator
from solrl_core.rewards import RewardSet
from solrl_core.rewards.base import weighted_sum
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import PromptItem

from solrl_trainer.config import RunConfig
from solrl_trainer.exploration import Exploration
from solrl_trainer.explore import Explorer, Kept, keep
from solrl_trainer.selection import best_worst

Phase = Callable[[str], AbstractContextManager[None]]
"""Shows and times a phase."""

PromptsOf = Callable[[int], Sequence[PromptItem]]
"""The prompts of an iteration."""


@dataclass(frozen=True)
class Made:
    """Kept candidates: latents x0 [groups, kept, ...], images, score and each reward [groups, kept]."""

    latents: torch.Tensor
    images: torch.Tensor
    scores: torch.Tensor
    rewards: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Gathered:
    """An iteration's samples, and what ranked the candidates they were chosen from.

    Attributes:
        kept: the chosen seeds of each prompt.
        made: the samples of those seeds, which are trained on.
        proxy_mean: mean score of all candidates.
        precision, numerics: what made the candidates.
        version: of the behaviour policy that made the candidates.
        seconds: how long making them took, whether or not anybody waited for them.
    """

    kept: list[Kept]
    made: Made
    proxy_mean: float
    precision: str
    numerics: str
    version: int
    seconds: float


class Rollouts(Protocol):
    """One way to get samples."""

    def start(self, adapters: Mapping[int, bytes], own: Collection[str]) -> None:
        """Begin at the last of these versions of the behaviour policy; those before it are what may lag.

        `own`: digests of what the run pushed before it broke off.
        """

    def push(self, version: int, adapter: bytes) -> None:
        """From now on roll out under this version."""

    def gather(self, iteration: int, phase: Phase) -> Gathered:
        """An iteration's samples; `iteration` is the version that was pushed last."""


class ServiceRollouts:
    """Explore at the service, then make exactly the kept seeds again in BF16 (the Sol-RL recipe).

    Iteration i is explored under version max(0, i − lag) as soon as that is pushed, so while the iterations before i
    are trained. What is trained on is made under version i, whatever the lag.
    """

    def __init__(
        self, explorer: Explorer, generator: Generator, rewards: RewardSet, prompts_of: PromptsOf, config: RunConfig
    ) -> None:
        self._explorer = explorer
        self._generator = generator
        self._rewards = rewards
        self._prompts_of = prompts_of
        self._config = config
        self._ahead: dict[int, Exploration] = {}

    def start(self, adapters: Mapping[int, bytes], own: Collection[str]) -> None:
        """Make the service hold the versions, and merge the last one here."""
        version = max(adapters)
        self._explorer.start(adapters, own)
        merge(self._generator, adapters[version])
        self._look_ahead(version)

    def push(self, version: int, adapter: bytes) -> None:
        """Hand the version to the service and merge the same bytes here."""
        self._explorer.push(version, adapter)
        merge(self._generator, adapter)
        self._look_ahead(version)

    def gather(self, iteration: int, phase: Phase) -> Gathered:
        """Select and regenerate each group as it comes."""
        config, prompts = self._config, self._prompts_of(iteration)
        exploration = self._ahead.pop(iteration)
        groups, kept, made = exploration.groups(), {}, {}
        while True:
            with phase("explore"):
                group = next(groups, None)
            if group is None:
                break
            prompt = next(prompt for prompt in prompts if prompt.id == group.prompt_id)
            kept[prompt.id] = keep(group, prompt, config.explore.keep)
            with phase("regenerate"):
                made[prompt.id] = regenerate([kept[prompt.id]], self._generator, self._rewards, config)
        answer = exploration.answer
        assert answer.adapter is not None  # it is what was asked for
        scores = [score for group in answer.groups for score in group.scores if score is not None]
        return Gathered(
            [kept[prompt.id] for prompt in prompts],
            _join([made[prompt.id] for prompt in prompts]),
            sum(scores) / len(scores),
            answer.precision,
            answer.numerics,
            answer.adapter.version,
            exploration.seconds,
        )

    def _look_ahead(self, version: int) -> None:
        """Explore what `version` lets be explored and is not yet."""
        config = self._config
        for iteration in range(version, min(version + config.explore.lag + 1, config.iterations)):
            if iteration not in self._ahead:
                self._ahead[iteration] = Exploration(
                    partial(
                        self._explorer.explore,
                        self._prompts_of(iteration),
                        explored_version(iteration, config),
                        seed_root(config, iteration),
                    )
                )


class LocalRollouts:
    """Make all candidates here and train on the kept ones themselves, at whatever precision they were made."""

    def __init__(self, generator: Generator, rewards: RewardSet, prompts_of: PromptsOf, config: RunConfig) -> None:
        self._generator = generator
        self._rewards = rewards
        self._prompts_of = prompts_of
        self._config = config

    def start(self, adapters: Mapping[int, bytes], own: Collection[str]) -> None:
        """Merge the last one here; nobody else is told."""
        self.push(max(adapters), adapters[max(adapters)])

    def push(self, version: int, adapter: bytes) -> None:
        """Merge the adapter here; nobody else is told."""
        merge(self._generator, adapter)

    def gather(self, iteration: int, phase: Phase) -> Gathered:
        """Roll out and select."""
        explore, root, prompts = self._config.explore, seed_root(self._config, iteration), self._prompts_of(iteration)
        kept, parts, total, started = [], [], 0.0, time.perf_counter()
        with phase("explore"):
            for prompt in prompts:
                seeds = expand_seeds(root, prompt.id, explore.candidates)
                whole = Kept(prompt, seeds, torch.empty(0))
                made = _make([whole], explore.steps, self._generator, self._rewards, self._config)
                index = best_worst(made.scores[0], explore.keep)
                kept.append(Kept(prompt, [seeds[i] for i in index], made.scores[0, index]))
                parts.append(_rows(made, index))
                total += float(made.scores.sum())
        seconds = time.perf_counter() - started
        mean, generator = total / (len(prompts) * explore.candidates), self._generator
        return Gathered(kept, _join(parts), mean, generator.precision, generator.numerics, iteration, seconds)


def explored_version(iteration: int, config: RunConfig) -> int:
    """The version of the behaviour policy that an iteration's candidates are explored under."""
    return max(0, iteration - config.explore.lag)


def seed_root(config: RunConfig, iteration: int) -> int:
    """The seed root of an iteration."""
    return expand_seeds(config.seed, f"explore/{iteration}", 1)[0]


def merge(generator: Generator, adapter: bytes) -> None:
    """Serve an adapter, from the bytes that everyone else gets, in a local generator."""
    generator.set_adapter(decode_adapter(adapter, generator.layout))


def regenerate(kept: Sequence[Kept], generator: Generator, rewards: RewardSet, config: RunConfig) -> Made:
    """Make exactly the kept seeds at full length and score the true images."""
    return _make(kept, config.regenerate.steps, generator, rewards, config)


def _make(kept: Sequence[Kept], steps: int, generator: Generator, rewards: RewardSet, config: RunConfig) -> Made:
    parts = []
    for group in kept:
        count, text = len(group.seeds), group.prompt.text
        made = generator.generate(text, group.seeds, steps=steps, solver=config.solver, guidance=config.guidance)
        each = rewards.score(tuple(config.rewards), made.images, [text] * count, [group.prompt.metadata] * count)
        score = weighted_sum(each, {spec.name: spec.weight for spec in config.trained})
        each = {name: values[None] for name, values in each.items()}
        parts.append(Made(made.latents[None], made.images.cpu()[None], score[None], each))
    return _join(parts)


def _rows(made: Made, index: list[int]) -> Made:
    rewards = {name: values[:, index] for name, values in made.rewards.items()}
    return Made(made.latents[:, index], made.images[:, index], made.scores[:, index], rewards)


def _join(parts: Sequence[Made]) -> Made:
    return Made(
        torch.cat([part.latents for part in parts]),
        torch.cat([part.images for part in parts]),
        torch.cat([part.scores for part in parts]),
        {name: torch.cat([part.rewards[name] for part in parts]) for name in parts[0].rewards},
    )
