"""Scores and times of exploration plans, taken in turns: every plan on one prompt, then every plan on the next.

A machine that becomes slower, or faster, changes the times of all plans alike, and the times of one prompt compare.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from solrl_proto.rollouts import Plan, PromptItem

from solrl_trainer.ranks.communicator import Communicator, gather_rows, shard
from solrl_trainer.rollouts.candidates import GroupSampler

SamplerFactory = Callable[[Plan], GroupSampler]
"""Returns the generation and scoring of candidates by a plan, at its precision."""


@dataclass(frozen=True)
class Observed:
    """Final scores of a plan, float32 [prompts, N], and seconds of each group, float64 [prompts], rewards included."""

    plan: Plan
    scores: torch.Tensor
    seconds: npt.NDArray[np.float64]


class PlanBenchmark:
    """Measurement of plans on prompts that the ranks share.

    `seeds` are of each prompt's group, by the prompt's id; groups are equally large. `finish` is called with the solver
    steps of each part of the work.
    """

    def __init__(
        self,
        factory: SamplerFactory,
        prompts: Sequence[PromptItem],
        seeds: Mapping[str, Sequence[int]],
        world: Communicator,
        finish: Callable[[float], None],
    ) -> None:
        self._factory, self._seeds, self._world, self._finish = factory, seeds, world, finish
        self._prompts, self._local = prompts, shard(prompts, world)
        self._candidates = len(seeds[prompts[0].id])

    def scores(self, plan: Plan) -> torch.Tensor:
        """Scores [prompts, N] of a plan."""
        rows = []
        for prompt in self._local:
            rows.append(self._group(plan, prompt)[0])
        return gather_rows(torch.stack(rows) if rows else torch.empty(0, self._candidates), self._world)

    def measure(self, plans: Sequence[Plan]) -> list[Observed]:
        """Measure plans in turns, after a group of each on the first prompt that warms the device up.

        The order of the plans is turned round with every prompt, so that a steady drift favours neither end.
        """
        for plan in plans:
            self._group(plan, self._prompts[0])
        shape = (len(self._local), len(plans))
        scores = torch.full((*shape, self._candidates), torch.nan)
        seconds = torch.zeros(shape, dtype=torch.float64)
        for row, prompt in enumerate(self._local):
            for place in range(len(plans)) if row % 2 == 0 else reversed(range(len(plans))):
                scores[row, place], seconds[row, place] = self._group(plans[place], prompt)
        scores, seconds = (gather_rows(rows, self._world) for rows in (scores, seconds))
        return [Observed(plan, scores[:, index], seconds[:, index].numpy()) for index, plan in enumerate(plans)]

    def steps(self, plans: Sequence[Plan], true: Plan) -> int:
        """Solver steps of this rank's candidates for `scores` of the true plan and `measure`."""
        steps = len(self._local) * true.steps + (1 + len(self._local)) * sum(plan.steps for plan in plans)
        return self._candidates * steps

    def _group(self, plan: Plan, prompt: PromptItem) -> tuple[torch.Tensor, float]:
        """A group of a prompt by a plan: scores [N] and seconds."""
        sampler = self._factory(plan)
        began = time.perf_counter()
        scores = sampler.scores([prompt] * self._candidates, self._seeds[prompt.id])
        seconds = time.perf_counter() - began
        self._finish(self._candidates * plan.steps)
        return scores, seconds
