"""A Gaussian model of selection: proxy and true rewards of a group are normal, with a given rank correlation.

The correlation of a plan does not depend on the size of the group, so that measured at one size predicts the others.
"""

import math

import numpy as np

from paper.intervals import Values

_GROUPS = 20_000


def match_rate(spearman: float, candidates: int, side: int) -> float:
    """Expected share of the true best `side` of a group that is among the proxy's best `side`; the worst have the same.

    Args:
        spearman: rank correlation of proxy and true rewards.
        candidates: size of the group.
        side: number of candidates selected on each side.
    """
    true, proxy = _groups(spearman, candidates)
    limits = (np.partition(values, candidates - side, axis=1)[:, candidates - side, None] for values in (true, proxy))
    best, chosen = (values >= limit for values, limit in zip((true, proxy), limits, strict=True))
    return float((best & chosen).sum() / (side * _GROUPS))


def signal(spearman: float, candidates: int, side: int) -> float:
    """Expected standard deviation of the true rewards of the selected samples of a group, in that of all rewards.

    The gradient weighs each sample by its reward less the mean, so this is the signal of a sample, where noise does not
    depend on selection. The ratio of two signals predicts the ratio of iterations to a reward.
    """
    true, proxy = _groups(spearman, candidates)
    order = np.argsort(proxy, axis=1)
    selected = np.delete(order, slice(side, candidates - side), axis=1)
    return float(np.take_along_axis(true, selected, axis=1).std(1).mean())


def _groups(spearman: float, candidates: int) -> tuple[Values, Values]:
    """True and proxy rewards [groups, candidates]."""
    # Pearson's correlation of two normal values with this Spearman correlation.
    correlation = 2 * math.sin(math.pi * spearman / 6)
    true, noise = np.random.default_rng(0).standard_normal((2, _GROUPS, candidates))
    return true, correlation * true + math.sqrt(max(0.0, 1 - correlation**2)) * noise
