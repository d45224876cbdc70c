"""Rank fidelity: agreement of proxy rewards with true rewards, the measure of an exploration plan."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import kendalltau, rankdata, spearmanr

Group = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Fidelity:
    """Rank fidelity, averaged over prompt groups. Ranks count from 1 (best); overlaps are shares of a set, 0 to 1.

    Attributes:
        spearman: rank correlation within a group, over the candidates that were not pruned; 0 for a group whose proxy
            rewards are equal while the true ones differ, NaN if the true ones are equal.
        kendall: the same by Kendall's τ.
        top_overlap: size → overlap of the proxy's and the true top of that size.
        bottom_overlap: the same of the bottom.
        top_rank: mean true rank of the best half that the proxy selects.
        bottom_rank: mean true rank of the worst half that the proxy selects.
    """

    spearman: float
    kendall: float
    top_overlap: dict[int, float]
    bottom_overlap: dict[int, float]
    top_rank: float
    bottom_rank: float


def rank_fidelity(proxy: torch.Tensor, true: torch.Tensor, keep: int = 24) -> Fidelity:
    """Compare proxy with true rewards.

    Args:
        proxy: [groups, candidates] rewards of the cheap images; NaN for a pruned candidate.
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
    least = int((~proxy.isnan()).sum(1).min())
    if least < keep:
        raise ValueError(f"got a group with {least} candidates that were not pruned; expected at least {keep}")
    sizes = [size for size in (4, 8, 12) if 2 * size <= keep]
    rows = [_one_group(p, t, keep // 2, sizes) for p, t in zip(proxy.numpy(), true.numpy(), strict=True)]
    means = np.mean(rows, axis=0)
    n = len(sizes)
    return Fidelity(
        spearman=float(means[0]),
        kendall=float(means[1]),
        top_rank=float(means[2]),
        bottom_rank=float(means[3]),
        top_overlap=dict(zip(sizes, means[4 : 4 + n].tolist(), strict=True)),
        bottom_overlap=dict(zip(sizes, means[4 + n :].tolist(), strict=True)),
    )


def separations(proxy: torch.Tensor, true: torch.Tensor, keep: int = 24) -> npt.NDArray[np.float64]:
    """Distance of the true ranks of the proxy's best and worst half, per group: 1 is perfect, 0 is chance.

    Arguments are those of `rank_fidelity`.
    """
    fidelities = [rank_fidelity(p[None], t[None], keep) for p, t in zip(proxy, true, strict=True)]
    # Perfect halves are half of `keep` from either end, so their mean ranks are this far apart.
    apart = proxy.shape[1] - keep // 2
    return np.array([(one.bottom_rank - one.top_rank) / apart for one in fidelities])


def paces(proxy: torch.Tensor, true: torch.Tensor, keep: int = 24) -> npt.NDArray[np.float64]:
    """Pace of learning against a selection by exact ranks, per group: 1 for exact ranks, below 1 for others.

    A gradient weighs a sample by its reward less the mean. So the pace is the ratio of the standard deviations of the
    selected true rewards (`python benchmarks/paper law`); 1 if all true rewards are equal. Arguments are those of
    `rank_fidelity`.
    """
    half = keep // 2
    found = []
    for cheap, exact in zip(proxy.numpy(), true.numpy(), strict=True):
        whole = np.flatnonzero(~np.isnan(cheap))
        chosen = exact[whole[np.argsort(cheap[whole], kind="stable")]]
        spread, most = (np.delete(one, slice(half, len(one) - half)).std() for one in (chosen, np.sort(exact)))
        found.append(spread / most if most else 1.0)
    return np.array(found)


def _one_group(proxy: Group, true: Group, half: int, sizes: list[int]) -> list[float]:
    whole = np.flatnonzero(~np.isnan(proxy))
    by_proxy, by_true = whole[np.argsort(-proxy[whole], kind="stable")], np.argsort(-true, kind="stable")
    ranks = rankdata(-true)
    return [
        *_correlations(proxy[whole], true[whole]),
        float(ranks[by_proxy[:half]].mean()),
        float(ranks[by_proxy[-half:]].mean()),
        *(len(set(by_proxy[:s]) & set(by_true[:s])) / s for s in sizes),
        *(len(set(by_proxy[-s:]) & set(by_true[-s:])) / s for s in sizes),
    ]


def _correlations(proxy: Group, true: Group) -> tuple[float, float]:
    """Spearman's and Kendall's; 0 for a proxy that is constant, and not a number if the true scores are."""
    if np.ptp(true) == 0:
        return math.nan, math.nan
    if np.ptp(proxy) == 0:
        return 0.0, 0.0
    return float(spearmanr(proxy, true).statistic), float(kendalltau(proxy, true).statistic)
