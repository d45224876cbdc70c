"""Evaluations on held-out prompts, and the paired comparison of two."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from solrl_core.rewards.reward import weighted_sum

from solrl_trainer.run_folder.figures import OCR, READ_RIGHT, TRAINED_SUM

STRICT = ("verifier", OCR)
"""Rewards that are 1 for a correct image and less for a wrong image."""
_RESAMPLES = 10_000


@dataclass(frozen=True)
class Evaluation:
    """Scores on held-out prompts.

    Attributes:
        scores: reward → float32 [prompts, seeds]; NaN for a prompt that does not have it.
        images: [prompts, 3, H, W], the image of each prompt's first seed, or clips `for_showing`.
    """

    scores: dict[str, torch.Tensor]
    images: torch.Tensor

    def mean(self, reward: str) -> float:
        """Mean over all images that have it."""
        scores = self.scores[reward]
        return float(scores[~scores.isnan()].mean())

    def first(self, prompts: int, seeds: int) -> "Evaluation":
        """The same of the first prompts, and of the first seeds of each."""
        scores = {name: values[:prompts, :seeds] for name, values in self.scores.items()}
        return Evaluation(scores, self.images[:prompts])


def paired_gain(before: torch.Tensor, after: torch.Tensor) -> tuple[float, float, float]:
    """Mean gain of `after` over `before`, scores [prompts, seeds], and its 95 % interval: (mean, low, high).

    The bootstrap is over prompts, because images of a prompt are not independent.
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
    low, high = np.percentile(figures, [2.5, 97.5])
    return float(low), float(high)


def within_prompt_std(scores: torch.Tensor) -> float:
    """Standard deviation of [prompts, seeds] scores among the images of a prompt; 0 for single images."""
    return float(scores.double().var(1).mean().sqrt()) if scores.shape[1] > 1 else 0.0


def compare(
    before: Evaluation, after: Evaluation, weights: Mapping[str, float | torch.Tensor]
) -> dict[str, dict[str, float]]:
    """Reward → means before and after, gain, the gain's 95 % interval, and the base's spread within a prompt.

    The evaluations are of the same prompts and seeds, by the same rewards. Each figure is over the prompts that have
    the reward. `READ_RIGHT` is the share of images whose whole text `ocr` reads. `weights`: the trained
    rewards', from `weights_per_prompt`; a sum of several has the first row, `TRAINED_SUM`, if all were evaluated.
    """
    first, second = (_with_read_right(evaluation.scores) for evaluation in (before, after))
    if len(weights) > 1 and weights.keys() <= first.keys():
        sums = (weighted_sum({key: scores[key].nan_to_num() for key in weights}, weights) for scores in (first, second))
        first, second = ({TRAINED_SUM: total, **scores} for total, scores in zip(sums, (first, second), strict=True))
    rows = {}
    for name, all_scores in first.items():
        having = ~all_scores.isnan().any(1)
        if not having.any():
            continue
        scores, later = all_scores[having], second[name][having]
        gain, low, high = paired_gain(scores, later)
        rows[name] = {
            "before": float(scores.mean()),
            "after": float(later.mean()),
            "gain": gain,
            "low": low,
            "high": high,
            "within": within_prompt_std(scores),
        }
    return rows


def _with_read_right(scores: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The scores, with `READ_RIGHT` after `ocr`."""
    extended = {}
    for name, values in scores.items():
        extended[name] = values
        if name == OCR:
            extended[READ_RIGHT] = torch.where(values.isnan(), values, (values == 1).to(values.dtype))
    return extended


@dataclass(frozen=True)
class Verdicts:
    """Whether each prompt's shown images before and after are right, and the reward that says so."""

    by: str
    marks: Sequence[tuple[bool, bool]]


def verdicts(before: Evaluation, after: Evaluation) -> Verdicts | None:
    """The verdicts of the first of the `STRICT` rewards that was evaluated; None if none was."""
    for name in STRICT:
        if name in before.scores:
            flags = zip(before.scores[name][:, 0].tolist(), after.scores[name][:, 0].tolist(), strict=True)
            return Verdicts(name, [(was == 1, now == 1) for was, now in flags])
    return None
