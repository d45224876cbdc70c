"""Rank fidelity: agreement of proxy rewards with true rewards, the measure of an exploration plan."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata, spearmanr
from scipy.stats import t as student
from solrl_proto.selection import merge_ties
from torch import Tensor

Group = npt.NDArray[np.float64]
_INTERVAL = 0.95
SATURATED = 0.5
"""If a larger share of a group's candidates has its best reward, the reward has little left to rank."""


@dataclass(frozen=True)
class Fidelity:
    """Rank fidelity, averaged over prompt groups. Ranks count from 1 (best); overlaps are shares of a set, 0 to 1.

    Rewards that are equal up to rounding share the mean of their ranks.

    Attributes:
        spearman: rank correlation within a group, see `correlation`. NaN if the true rewards of every group are
            equal; otherwise such groups do not count.
        top_overlap: size → overlap of the proxy's and the true top of that size.
        bottom_overlap: the same of the bottom.
        top_rank: mean true rank of the best half that the proxy selects.
        bottom_rank: mean true rank of the worst half that the proxy selects.
        perfect_top: mean true rank of the best half by the true rewards, whose ties raise it.
        perfect_bottom: mean true rank of the worst half by the true rewards, whose ties lower it.
        best_share: share of a group's candidates that have its best true reward.
    """

    spearman: float
    top_overlap: dict[int, float]
    bottom_overlap: dict[int, float]
    top_rank: float
    bottom_rank: float
    perfect_top: float
    perfect_bottom: float
    best_share: float

    @property
    def separation(self) -> float:
        """Distance of the selected halves' true ranks, as a share of what true rewards reach; 1 if that is nothing."""
        apart = self.perfect_bottom - self.perfect_top
        return (self.bottom_rank - self.top_rank) / apart if apart else 1.0

    @property
    def saturated(self) -> bool:
        """Whether most candidates of a group have its best reward."""
        return self.best_share > SATURATED


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman correlation within a group of candidates: its mean over prompts, and a 95 % interval.

    Attributes:
        mean: a group whose scores are equal at the precision alone counts as 0, and with equal scores in the reference
            not at all; 0 if that is so in every group.
        low, high: limits of the interval by Student's t over the prompts; −1 and 1 with one prompt.
        groups: number of groups that count.
    """

    mean: float
    low: float
    high: float
    groups: int

    @classmethod
    def over(cls, groups: Sequence[float]) -> "RankCorrelation":
        """The mean over groups, each with its correlation, NaN if its reference ranks nothing."""
        ranked = [rho for rho in groups if not math.isnan(rho)]
        count = len(ranked)
        mean = float(np.mean(ranked)) if ranked else 0.0
        if count < 2:
            return cls(mean, -1.0, 1.0, count)
        spread = np.std(ranked, ddof=1) / count**0.5
        half = float(student.ppf((1 + _INTERVAL) / 2, count - 1) * spread)
        return cls(mean, max(-1.0, mean - half), min(1.0, mean + half), count)


def rank_fidelity(proxy: Tensor, true: Tensor, keep: int = 24) -> Fidelity:
    """Compare proxy with true rewards.

    Args:
        proxy: [groups, candidates] rewards of the cheap images.
        true: [groups, candidates] rewards of the BF16 images of the same seeds.
        keep: number of candidates selected from a group, half from either end.

    Raises:
        ValueError: shapes differ, or a group has fewer candidates than are selected.
    """
    if proxy.shape != true.shape or proxy.ndim != 2 or proxy.shape[1] < keep:
        raise ValueError(
            f"got proxy {tuple(proxy.shape)} and true {tuple(true.shape)}; "
            f"expected equal [groups, candidates] with at least {keep} candidates"
        )
    sizes = [size for size in (4, 8, 12) if 2 * size <= keep]
    rows = np.array([_one_group(p, t, keep // 2, sizes) for p, t in zip(proxy, true, strict=True)])
    measured = rows[~np.isnan(rows[:, 0]), 0]
    top, bottom, perfect_top, perfect_bottom, best_share, *overlaps = rows[:, 1:].mean(0).tolist()
    return Fidelity(
        spearman=float(measured.mean()) if len(measured) else math.nan,
        top_rank=top,
        bottom_rank=bottom,
        perfect_top=perfect_top,
        perfect_bottom=perfect_bottom,
        best_share=best_share,
        top_overlap=dict(zip(sizes, overlaps[: len(sizes)], strict=True)),
        bottom_overlap=dict(zip(sizes, overlaps[len(sizes) :], strict=True)),
    )


def separations(proxy: Tensor, true: Tensor, keep: int = 24) -> npt.NDArray[np.float64]:
    """`Fidelity.separation` of each group: 1 is perfect, 0 is chance.

    `proxy`, `true` [groups, candidates] and `keep` as in `rank_fidelity`.
    """
    groups = zip(proxy, true, strict=True)
    return np.array([rank_fidelity(p[None], t[None], keep).separation for p, t in groups])


def correlation(proxy: Tensor, true: Tensor) -> float:
    """Spearman's rank correlation of the rewards [candidates] of a group.

    0 if only the proxy's rewards are equal; NaN if the true ones are, which rank nothing.
    """
    cheap, exact = _merge_ties(proxy), _merge_ties(true)
    if np.ptp(exact) == 0:
        return math.nan
    if np.ptp(cheap) == 0:
        return 0.0
    return float(spearmanr(cheap, exact).statistic)


def end_ranks(proxy: Tensor, true: Tensor, half: int) -> tuple[float, float]:
    """Mean true ranks of the `half` candidates of a group that the proxy ranks best, and worst."""
    order = rankdata(-_merge_ties(true))[_from_best(_merge_ties(proxy))]
    return float(order[:half].mean()), float(order[-half:].mean())


def _merge_ties(rewards: Tensor) -> Group:
    """The rewards of a group; rewards that are equal up to rounding become equal."""
    return np.array(merge_ties(rewards.double().tolist()))


def _from_best(rewards: Group) -> npt.NDArray[np.int64]:
    return np.argsort(-rewards, kind="stable")


def _one_group(proxy: Tensor, true: Tensor, half: int, sizes: list[int]) -> list[float]:
    exact = _merge_ties(true)
    by_proxy, by_true = _from_best(_merge_ties(proxy)), _from_best(exact)
    return [
        correlation(proxy, true),
        *end_ranks(proxy, true, half),
        *end_ranks(true, true, half),
        float((exact == exact.max()).mean()),
        *(len(set(by_proxy[:s]) & set(by_true[:s])) / s for s in sizes),
        *(len(set(by_proxy[-s:]) & set(by_true[-s:])) / s for s in sizes),
    ]
