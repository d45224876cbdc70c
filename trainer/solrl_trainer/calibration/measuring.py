"""Scores and times of exploration plans, taken in turns: every plan on one prompt, then every plan on the next.

A machine that becomes slower, or faster, changes the times of all plans alike, and the times of one prompt compare.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from solrl_proto.rollouts import Plan, PromptItem

from solrl_trainer.calibration.plans import solver_steps
from solrl_trainer.ranks.communicator import Communicator, gather_rows, shard
from solrl_trainer.rollouts.candidates import GroupSampler

SamplerFactory = Callable[[Plan], GroupSampler]
"""Returns the generation and scoring of candidates by a plan, at its precision."""


@dataclass(frozen=True)
class Observed:
    """Scores and times of a plan.

    Attributes:
        scores: float32 [prompts, N], final scores; NaN for a pruned candidate.
        seconds: float64 [prompts], time of each group, rewards included.
    """

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
        """Scores [prompts, N] of a plan without pruning."""
        rows = []
        for prompt in self._local:
            rows.append(self._factory(plan).scores(*self._group_of(prompt)))
            self._finish(solver_steps(plan, self._candidates))
        return gather_rows(torch.stack(rows) if rows else torch.empty(0, self._candidates), self._world)

    def measure(self, plans: Sequence[Plan]) -> list[Observed]:
        """Measure plans in turns, after a group of each on the first prompt that warms the device up.

        The order of the plans is turned round with every prompt, so that a steady drift favours neither end.
        Plans that prune after the same step share the steps before it, and the time of these counts for each.
        """
        ways = shared_beginnings(plans)
        self._turn(ways, self._prompts[0])
        shape = (len(self._local), len(plans))
        scores = torch.full((*shape, self._candidates), torch.nan)
        seconds = torch.zeros(shape, dtype=torch.float64)
        for row, prompt in enumerate(self._local):
            for at, part in self._turn(ways if row % 2 == 0 else ways[::-1], prompt):
                scores[row, at], seconds[row, at] = part
        scores, seconds = (gather_rows(own, self._world) for own in (scores, seconds))
        return [Observed(plan, scores[:, at], seconds[:, at].numpy()) for at, plan in enumerate(plans)]

    def steps(self, plans: Sequence[Plan], true: Plan) -> int:
        """Solver steps of this rank's candidates for `scores` of the true plan and `measure`."""
        turn = sum(shared_steps([plan for _, plan in way], self._candidates) for way in shared_beginnings(plans))
        return len(self._local) * solver_steps(true, self._candidates) + (1 + len(self._local)) * turn

    def _group_of(self, prompt: PromptItem) -> tuple[list[PromptItem], Sequence[int]]:
        return [prompt] * self._candidates, self._seeds[prompt.id]

    def _turn(
        self, ways: Sequence[Sequence[tuple[int, Plan]]], prompt: PromptItem
    ) -> list[tuple[int, tuple[torch.Tensor, float]]]:
        """Each plan on one prompt: (place of the plan, (scores [N], seconds))."""
        measured = []
        for way in ways:
            plans = [plan for _, plan in way]
            parts = self._group(plans, prompt)
            measured += [(at, part) for (at, _), part in zip(way, parts, strict=True)]
            self._finish(shared_steps(plans, self._candidates))
        return measured

    def _group(self, plans: Sequence[Plan], prompt: PromptItem) -> list[tuple[torch.Tensor, float]]:
        """A group under plans that share their beginning: scores and seconds of each."""
        sampler, (prompts, seeds) = self._factory(plans[0]), self._group_of(prompt)
        began = time.perf_counter()
        if plans[0].prune is None:
            scores = sampler.scores(prompts, seeds)
            return [(scores, time.perf_counter() - began)]
        trajectory, predicted = sampler.halfway(prompts, seeds, plans[0].prune.after)
        shared = time.perf_counter() - began
        measured = []
        for plan in plans:
            assert plan.prune is not None
            began = time.perf_counter()
            scores = sampler.finished(prompts, seeds, trajectory, predicted, plan.prune.keep)
            measured.append((scores, shared + time.perf_counter() - began))
        return measured


def shared_beginnings(plans: Sequence[Plan]) -> list[list[tuple[int, Plan]]]:
    """Plans and their places, those together that prune after the same step of the same solver.

    A plan without pruning is alone, because its candidates are not scored on the way.
    """

    def beginning(numbered: tuple[int, Plan]) -> Plan:
        _, plan = numbered
        return plan if plan.prune is None else plan.model_copy(update={"prune": plan.prune.after})

    return [list(way) for _, way in itertools.groupby(enumerate(plans), beginning)]


def shared_steps(plans: Sequence[Plan], candidates: int) -> int:
    """Solver steps of a group under plans that share their beginning."""
    alone = sum(solver_steps(plan, candidates) for plan in plans)
    shared = plans[0].prune.after if plans[0].prune else 0
    return alone - (len(plans) - 1) * candidates * shared
