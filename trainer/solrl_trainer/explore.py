"""Exploration over HTTP, and selection from what it found."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import (
    AdapterRef,
    Candidates,
    Plan,
    PromptItem,
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


class Explorer:
    """Asks the service for candidates under exact adapter versions."""

    def __init__(self, client: RolloutClient, config: RunConfig) -> None:
        self._client = client
        self._config = config

    def push(self, version: int, adapter: bytes) -> None:
        """Hand the behaviour policy of `version` to the service.

        A store that lost this run (or never had it) takes it as the run's first version.
        """
        run, model = self._config.run, self._config.model_name
        parent = version - 1 if version else None
        try:
            self._client.push(run, version, parent, model, adapter)
        except ProblemError as error:
            if error.problem.kind != "parent-conflict" or error.problem.expected is not None or parent is None:
                raise
            self._client.push(run, version, None, model, adapter)

    def explore(
        self, prompts: Sequence[PromptItem], version: int, seed_root: int, *, whole: bool = False
    ) -> RolloutAnswer:
        """Ask for `explore.candidates` of each prompt under `version`; `whole`: without pruning any."""
        explore = self._config.explore
        return self._client.rollouts(
            RolloutRequest(
                model=self._config.model_name,
                adapter=AdapterRef(run=self._config.run, version=version),
                prompts=tuple(prompts),
                candidates=Candidates(count=explore.candidates, seed_root=seed_root),
                plan=plan(self._config, whole=whole),
                rewards=self._config.trained,
            )
        )


def plan(config: RunConfig, *, whole: bool = False) -> Plan:
    """How the service is to make the candidates; `whole`: without pruning any."""
    return Plan(
        steps=config.explore.steps,
        prune=None if whole else config.explore.prune,
        solver=config.solver,
        guidance=config.guidance,
        precision=config.explore.precision,
    )


def keep(answer: RolloutAnswer, prompts: Sequence[PromptItem], count: int) -> list[Kept]:
    """Select the best and worst of each group.

    Raises:
        ValueError: the answer's groups are not the prompts asked about.
    """
    if [group.prompt_id for group in answer.groups] != [prompt.id for prompt in prompts]:
        raise ValueError("the service answered about other prompts than were asked")
    kept = []
    for prompt, group in zip(prompts, answer.groups, strict=True):
        made = [(seed, score) for seed, score in zip(group.seeds, group.scores, strict=True) if score is not None]
        chosen = [made[i] for i in best_worst([score for _, score in made], count)]
        kept.append(Kept(prompt, [seed for seed, _ in chosen], torch.tensor([score for _, score in chosen])))
    return kept
