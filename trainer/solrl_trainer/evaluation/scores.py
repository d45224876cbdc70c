"""Evaluation on held-out prompts with fixed seeds, and paired comparison of two evaluations."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from solrl_core.rewards.base import weighted_sum
from solrl_engine.sampler import Sampler
from solrl_engine.scorer import Scorer
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import PromptItem

from solrl_trainer.ranks.communicator import Communicator, gather_rows, share
from solrl_trainer.records.time_left import OnProgress
from solrl_trainer.report.figures import TRAINED_SUM
from solrl_trainer.rollouts.scoring import score_policy_images

SEED_ROOT = 0
STRICT = "verifier"
"""The reward that is 1 for a correct image and 0 otherwise."""
JUDGE = "judge"
"""The same by a judge that no reward has seen."""
_RESAMPLES = 10_000
_AHEAD = 4
"""Batches whose prompts are encoded together; the cache of prompts has room for them."""


@dataclass(frozen=True)
class Evaluation:
    """Scores on held-out prompts.

    Attributes:
        scores: reward → float32 [prompts, seeds].
        images: [prompts, 3, H, W], the image of each prompt's first seed.
    """

    scores: dict[str, torch.Tensor]
    images: torch.Tensor

    def mean(self, reward: str) -> float:
        """Mean over all images."""
        return float(self.scores[reward].mean())

    def first(self, seeds: int) -> "Evaluation":
        """The same of the first seeds of each prompt."""
        return Evaluation({name: scores[:, :seeds] for name, scores in self.scores.items()}, self.images)


def evaluate(
    sampler: Sampler,
    scorer: Scorer,
    prompts: Sequence[PromptItem],
    *,
    seeds: int,
    encode: Callable[[Sequence[str], float], None] = lambda texts, guidance: None,
    progress: OnProgress = lambda done, total: None,
) -> Evaluation:
    """Generate `seeds` images per prompt, always from the same seeds, and score them with every loaded reward.

    `encode` is called with the texts of the next few batches, and the guidance; `progress` with the numbers of images
    made and wanted.
    """
    names = scorer.rewards.names
    if not prompts:
        backbone = sampler.generator.backbone
        none = {name: torch.empty(0, seeds) for name in names}
        return Evaluation(scores=none, images=torch.empty(0, 3, backbone.height, backbone.width))
    pairs = [(prompt, seed) for prompt in prompts for seed in expand_seeds(SEED_ROOT, prompt.id, seeds)]
    scores: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    images = []
    progress(0, len(pairs))
    size = sampler.batch.size
    for start in range(0, len(pairs), size):
        if start % (_AHEAD * size) == 0:
            encode([prompt.text for prompt, _ in pairs[start : start + _AHEAD * size]], sampler.plan().guidance)
        own, own_seeds = zip(*pairs[start : start + size], strict=True)
        made = sampler.sample(own, own_seeds).images
        for name, values in score_policy_images(scorer, names, made, own).rewards.items():
            scores[name].append(values)
        images.append(made.cpu())
        progress(start + len(own), len(pairs))
    return Evaluation(
        scores={name: torch.cat(parts).view(len(prompts), seeds) for name, parts in scores.items()},
        images=torch.cat(images)[::seeds],
    )


def evaluate_together(
    sampler: Sampler,
    scorer: Scorer,
    prompts: Sequence[PromptItem],
    world: Communicator,
    *,
    seeds: int,
    encode: Callable[[Sequence[str], float], None] = lambda texts, guidance: None,
    progress: OnProgress = lambda done, total: None,
) -> Evaluation:
    """Evaluate on all ranks: each generates its share of the prompts, and all get the whole result.

    `encode` and `progress` are called as by `evaluate`, for this rank.
    """
    own = evaluate(sampler, scorer, share(prompts, world), seeds=seeds, encode=encode, progress=progress)
    scores = {name: gather_rows(values, world) for name, values in own.scores.items()}
    return Evaluation(scores, gather_rows(own.images, world))


def paired_gain(before: torch.Tensor, after: torch.Tensor) -> tuple[float, float, float]:
    """Mean gain and its 95 % interval, by a bootstrap over prompts (images of a prompt are not independent).

    Args:
        before: [prompts, seeds] scores of the same prompts and seeds as `after`.
        after: [prompts, seeds].

    Returns:
        (mean, low, high).
    """
    return mean_interval((after.double() - before.double()).mean(1).numpy())


def mean_interval(values: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """Mean of one value per prompt and its 95 % bootstrap interval: (mean, low, high)."""
    return float(values.mean()), *_interval(_resampled(values).mean(1))


def mean_intervals_together(values: npt.NDArray[np.float64]) -> list[tuple[float, float, float]]:
    """Mean of each row of [rows, prompts] and an interval: (mean, low, high). All intervals hold at once with 95 %.

    Bootstrap of the largest standardised deviation over all rows: Romano and Wolf, Econometrica 73 (2005).
    """
    means, prompts = values.mean(1), values.shape[1]
    shares = np.random.default_rng(0).multinomial(prompts, np.full(prompts, 1 / prompts), size=_RESAMPLES) / prompts
    off = values @ shares.T - means[:, None]
    errors = off.std(1, keepdims=True)
    furthest = np.abs(np.divide(off, errors, out=np.zeros_like(off), where=errors > 0)).max(0)
    reach = np.percentile(furthest, 95) * errors[:, 0]
    return [tuple(row) for row in np.stack([means, means - reach, means + reach], 1).tolist()]


def median_interval(values: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """Median of one value per prompt and its 95 % bootstrap interval: (median, low, high)."""
    return float(np.median(values)), *_interval(np.median(_resampled(values), 1))


def _resampled(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The values of each bootstrap sample, [samples, values]."""
    return values[np.random.default_rng(0).integers(len(values), size=(_RESAMPLES, len(values)))]


def _interval(figures: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The middle 95 % of a figure of all bootstrap samples."""
    low, high = np.percentile(figures, [2.5, 97.5])
    return float(low), float(high)


def within_prompt_std(scores: torch.Tensor) -> float:
    """Standard deviation of [prompts, seeds] scores among the images of a prompt; 0 for single images."""
    return float(scores.double().var(1).mean().sqrt()) if scores.shape[1] > 1 else 0.0


def compare(before: Evaluation, after: Evaluation, weights: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Reward → means before and after, gain, the gain's 95 % interval, and the base's spread within a prompt.

    Args:
        before, after: of the same prompts and seeds, by the same rewards.
        weights: of the trained rewards. A sum of several has the first row, `TRAINED_SUM`, if all were evaluated.
    """
    first, second = dict(before.scores), dict(after.scores)
    if len(weights) > 1 and weights.keys() <= first.keys():
        first = {TRAINED_SUM: weighted_sum(first, weights), **first}
        second[TRAINED_SUM] = weighted_sum(second, weights)
    rows = {}
    for name, scores in first.items():
        gain, low, high = paired_gain(scores, second[name])
        rows[name] = {
            "before": float(scores.mean()),
            "after": float(second[name].mean()),
            "gain": gain,
            "low": low,
            "high": high,
            "within": within_prompt_std(scores),
        }
    return rows


def verdicts(before: Evaluation, after: Evaluation) -> list[tuple[bool, bool]] | None:
    """The strict verifier's verdicts on the shown images, before and after; None if it was not evaluated."""
    if STRICT not in before.scores:
        return None
    flags = zip(before.scores[STRICT][:, 0].tolist(), after.scores[STRICT][:, 0].tolist(), strict=True)
    return [(was == 1, now == 1) for was, now in flags]
