"""Noise of seeds by numpy, for clients without torch; it is `torch.randn` of a CPU generator, to about 1e-6."""

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray
from solrl_proto.noise import SEED_LIMIT


def initial_noise(seeds: Sequence[int], shape: Sequence[int]) -> NDArray[np.float32]:
    """Standard normal noise of candidates: float32 [len(seeds), *shape]; row i depends on seed i alone.

    Args:
        seeds: candidates' seeds, each 0 ≤ seed < 2**53.
        shape: shape of one candidate's latents, the model's `latent_shape`, such as (16, 64, 64).

    Raises:
        ValueError: a seed is out of range, or a row has fewer than 16 values.
    """
    for seed in seeds:
        if not 0 <= seed < SEED_LIMIT:
            raise ValueError(f"got seed {seed}; expected 0 ≤ seed < 2**53 ({SEED_LIMIT})")
    count = prod(shape)
    if count < 16:
        raise ValueError(f"got shape {tuple(shape)} with {count} values; expected at least 16")
    return np.reshape([noise(seed, count) for seed in seeds], (len(seeds), *shape)).astype(np.float32)


def noise(seed: int, count: int) -> NDArray[np.float32]:
    """Standard normal float32 [count], count ≥ 16."""
    draws = np.random.RandomState(seed % 2**32)  # MT19937, of the lower 32 bits of the seed

    def uniform(n: int) -> NDArray[np.float32]:
        return (draws.randint(0, 2**32, n, np.uint32) % 2**24).astype(np.float32) / np.float32(2**24)

    def normal(u: NDArray[np.float32]) -> NDArray[np.float32]:
        """Box–Muller transform, 16 values at a time: eight radii, then eight angles."""
        radius, angle = np.sqrt(-2 * np.log(1 - u[:8])), 2 * np.pi * u[8:]
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)]).astype(np.float32)

    u = uniform(count)
    blocks = [normal(u[i : i + 16]) for i in range(0, count - 15, 16)]
    if count % 16:  # the last 16 are drawn again
        blocks = [np.concatenate(blocks)[: count - 16], normal(uniform(16))]
    return np.concatenate(blocks)
