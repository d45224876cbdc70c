"""Match rate by a Gaussian model: proxy and true rewards of a group are normal, with a given rank correlation.

The correlation of a plan does not depend on the size of the group, so that measured at one size predicts the others.
"""

import math

import numpy as np

_GROUPS = 20_000


def match_rate(spearman: float, candidates: int, side: int) -> float:
    """Expected share of the true best `side` of a group that is among the proxy's best `side`; the worst have the same.

    Args:
        spearman: rank correlation of proxy and true rewards.
        candidates: size of the group.
        side: number of candidates selected on each side.
    """
    # Pearson's correlation of two normal values with this Spearman correlation.
    correlation = 2 * math.sin(math.pi * spearman / 6)
    generator = np.random.default_rng(0)
    true, noise = generator.standard_normal((2, _GROUPS, candidates))
    proxy = correlation * true + math.sqrt(max(0.0, 1 - correlation**2)) * noise
    limits = (np.partition(values, candidates - side, axis=1)[:, candidates - side, None] for values in (true, proxy))
    best, chosen = (values >= limit for values, limit in zip((true, proxy), limits, strict=True))
    return float((best & chosen).sum() / (side * _GROUPS))
