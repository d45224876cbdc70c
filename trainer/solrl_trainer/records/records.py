"""Records of a run's iterations, and their forms in metrics.jsonl and in reports to the service."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from solrl_proto.status import Estimate, HeldOut, IterationReport, RunSettings, Samples, ScoringTime, Spread

from solrl_trainer.algorithms.algorithm import AT_LEVEL, without_spread
from solrl_trainer.policy.update import UpdateFigures
from solrl_trainer.records.evaluations import Evaluation, compare
from solrl_trainer.run_folder.figures import TRAINED_SUM


def spread_of(rewards: torch.Tensor) -> Spread:
    """Spread of rewards [groups, kept], with each group's best half first; a single sample is both halves."""
    kept = rewards.shape[1]
    half = kept // 2 or 1
    best, worst = rewards[:, :half], rewards[:, min(half, kept - 1) :]
    # Not validated: what a report may not have must not end a run.
    return Spread.model_construct(mean=float(rewards.mean()), best=float(best.mean()), worst=float(worst.mean()))


def _objective(figures: Mapping[str, float]) -> dict[str, Any]:
    """The algorithm's figures by key; figures by noise level are one mapping, of the levels that were trained."""
    objective: dict[str, Any] = {}
    for key, value in figures.items():
        name, at, level = key.partition(AT_LEVEL)
        if not at:
            objective[f"objective/{name}"] = value
        elif name and (share := figures[at + level]):
            objective.setdefault(f"objective/{name}", {})[level] = value / share
    return objective


def share_without_spread(scores: torch.Tensor) -> float:
    """Share of the prompts whose samples all score equally up to rounding, and so have no advantage; [groups, kept]."""
    return float(without_spread(scores).float().mean())


@dataclass(frozen=True)
class HeldOutRecord:
    """A point of the held-out curve: the same prompts and seeds at every version.

    Attributes:
        version: of the averaged weights; 0 is the base.
        rewards: of the trained sum, if there are several trained rewards, and of each reward.
        by_prompt: whether prompts differ in their weights, so that means of rewards do not give the sum's.
    """

    version: int
    images: int
    rewards: dict[str, Estimate]
    by_prompt: bool = False

    @classmethod
    def of(
        cls,
        version: int,
        base: Evaluation,
        evaluation: Evaluation,
        weights: Mapping[str, float | torch.Tensor],
        prompts: int,
        seeds: int,
    ) -> "HeldOutRecord":
        """The record of an evaluation: trained rewards first, over the first prompts and the first seeds of each.

        Weights that are tensors are of these prompts.
        """
        base, evaluation = base.first(prompts, seeds), evaluation.first(prompts, seeds)
        rows = compare(base, evaluation, weights)
        first = [name for name in (TRAINED_SUM, *weights) if name in rows]
        images = next(iter(evaluation.scores.values())).numel()
        rewards = {}
        for name in dict.fromkeys((*first, *rows)):
            row = rows[name]
            low, high = row["before"] + row["low"], row["before"] + row["high"]
            rewards[name] = Estimate.model_construct(mean=row["after"], low=low, high=high)
        return cls(version, images, rewards, any(map(torch.is_tensor, weights.values())))

    def line(self) -> dict[str, Any]:
        """The evaluation's line of metrics.jsonl."""
        means = {name: reward.mean for name, reward in self.rewards.items() if name != TRAINED_SUM or self.by_prompt}
        line = {"version": self.version, "images": self.images, "rewards": means}
        if not self.version:
            return line
        ends = {end: {name: getattr(reward, end) for name, reward in self.rewards.items()} for end in ("low", "high")}
        return line | ends

    def message(self) -> HeldOut:
        return HeldOut(version=self.version, images=self.images, rewards=self.rewards)


@dataclass(frozen=True)
class IterationRecord:
    """An iteration's outcome.

    Attributes:
        iteration: index from 0; it produces version iteration + 1 of the behaviour policy.
        explored_version: version that explored the candidates.
        proxy_mean: mean score of all candidates.
        spearman: rank fidelity before the iteration, if it was measured then; a line of its own in metrics.jsonl.
        score: spread of the training samples' scores.
        without_spread: share of the prompts whose samples all score equally up to rounding.
        weights: mean weight of each reward over the prompts, if prompts have other weights than the run's.
        shares: share of each trained reward in the spread of the score.
        digest: digest of the new behaviour policy's adapter file.
        seconds: by phase, as metrics.jsonl names them: "explore"; "explore_here", if the trainer explores a share;
            "wait" of the trainer for a service; "regenerate", scoring included; "train"; and "push", after it.
        scoring: time of each reward of candidates and of training samples, and where it ran; of rank 0's share.
    """

    iteration: int
    explored_version: int
    precision: str
    numerics: str
    proxy_mean: float
    spearman: float | None
    score: Spread
    without_spread: float
    rewards: dict[str, Spread]
    shares: dict[str, float]
    digest: str
    update: UpdateFigures
    seconds: Mapping[str, float]
    weights: Mapping[str, float] = field(default_factory=dict)
    scoring: tuple[ScoringTime, ...] = ()

    @property
    def version(self) -> int:
        """Version of the behaviour policy that the iteration produced."""
        return self.iteration + 1

    def line(self) -> dict[str, Any]:
        """The iteration's line of metrics.jsonl."""
        return {
            "iteration": self.iteration,
            "version": self.version,
            "proxy_mean": self.proxy_mean,
            "reward_mean": self.score.mean,
            "reward_best": self.score.best,
            "reward_worst": self.score.worst,
            "groups_without_spread": self.without_spread,
            "rewards": {name: spread.mean for name, spread in self.rewards.items()},
            **({"shares": self.shares} if len(self.shares) > 1 else {}),
            **({"weights": self.weights} if self.weights else {}),
            "explored_version": self.explored_version,
            "precision": self.precision,
            "numerics": self.numerics,
            "digest": self.digest,
            "loss": self.update.loss,
            "grad_norm": self.update.grad_norm,
            "grad_norm_max": self.update.grad_norm_max,
            **_objective(self.update.figures),
            "seconds": dict(self.seconds),
            "scoring": [timing.model_dump() for timing in self.scoring],
        }

    def report(
        self,
        planned: int,
        samples: Samples | None,
        held_out: Sequence[HeldOut] = (),
        settings: RunSettings | None = None,
        ended: str | None = None,
    ) -> IterationReport:
        """Report of the iteration for the service, with evaluations since the report before and images for the page.

        `planned` is the number of iterations of the whole run, and `ended` why the run ended before.
        """
        return IterationReport(
            iteration=self.iteration,
            version=self.version,
            explored_version=self.explored_version,
            score=self.score,
            proxy_mean=self.proxy_mean,
            spearman=self.spearman,
            loss=self.update.loss,
            rewards=self.rewards,
            seconds={name: round(seconds, 4) for name, seconds in self.seconds.items()},
            scoring=self.scoring,
            planned=planned,
            ended=ended,
            held_out=tuple(held_out),
            settings=settings,
            samples=samples,
        )
