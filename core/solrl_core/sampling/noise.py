"""Noise by seed: row i depends on seed i alone, so a seed names a candidate wherever it is generated."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from solrl_proto.models import NoiseContract
from solrl_proto.noise import (
    NOISE_CONTRACT_VERSION,
    PROBE_LENGTH,
    PROBE_SEED,
    PROBE_TOLERANCE,
    SEED_LIMIT,
    expand_seeds,
)

from solrl_core.errors import MismatchError

_THREADS = 8
"""A batch has at most 24 rows: 8 threads draw them in three turns and leave most cores free."""
_WORTH_THREADS = 2**20
"""Least number of values for threads to draw the rows: SD3.5-Large's 24 rows are 6 million, and would delay a GPU."""


def initial_noise(seeds: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Draw one standard normal row per seed, as diffusers does from a CPU `torch.Generator` of that seed.

    torch's CPU generator reads the lower 32 bits of a seed: two seeds that agree in these bits draw the same row.

    Args:
        seeds: candidates' seeds, each 0 ≤ seed < 2**53.
        shape: shape of one row, e.g. the latent shape (C, H, W).

    Returns:
        float32 CPU tensor [len(seeds), *shape]; bit-equal on one processor type, equal to about 1e-6 across.

    Raises:
        ValueError: a seed is out of range.
    """
    for seed in seeds:
        if not 0 <= seed < SEED_LIMIT:
            raise ValueError(f"got seed {seed}; expected 0 ≤ seed < 2**53 ({SEED_LIMIT})")
    noise = torch.empty(len(seeds), *shape, dtype=torch.float32, device="cpu")

    @torch.inference_mode()  # threads do not inherit the mode, and only within it can its tensors be written
    def draw(row: torch.Tensor, seed: int) -> None:
        row.normal_(generator=torch.Generator("cpu").manual_seed(seed))

    if noise.numel() < _WORTH_THREADS:
        for row, seed in zip(noise, seeds, strict=True):
            draw(row, seed)
    else:
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(draw, noise, seeds))
    return noise


def step_noise(seeds: Sequence[int], step: int, shape: Sequence[int]) -> torch.Tensor:
    """Draw the noise of one stochastic solver step: row i depends on seed i and the step alone, not on the batch.

    Row i is the initial noise of the seed `expand_seeds(seeds[i], f"step/{step}", 1)[0]`, so it shares nothing with the
    candidate's own initial noise.

    Returns:
        float32 CPU tensor [len(seeds), *shape].
    """
    return initial_noise([expand_seeds(seed, f"step/{step}", 1)[0] for seed in seeds], shape)


def noise_contract() -> NoiseContract:
    """The contract of this process: its version and the probe row that it draws."""
    probe = initial_noise([PROBE_SEED], (PROBE_LENGTH,))[0]
    return NoiseContract(version=NOISE_CONTRACT_VERSION, probe=tuple(probe.tolist()))


def check_noise_contract(theirs: NoiseContract) -> None:
    """Refuse a service whose noise differs from this process's.

    Raises:
        MismatchError: another contract version, or a probe row that differs by more than 1e-5.
    """
    ours = noise_contract()
    if theirs.version != ours.version:
        raise MismatchError(
            "noise",
            "the service and the trainer follow different versions of the noise contract",
            where="noise.version",
            got=theirs.version,
            expected=ours.version,
            action="run the same solrl version on both sides",
        )
    offs = [abs(a - b) for a, b in zip(theirs.probe, ours.probe, strict=False)]
    off = max(offs, default=float("inf"))
    # Not max(): NaN compares false with everything.
    if len(theirs.probe) != len(ours.probe) or not all(difference <= PROBE_TOLERANCE for difference in offs):
        raise MismatchError(
            "noise",
            "the service draws different noise from the same seed, so its seeds give different images here",
            where="noise.probe",
            got=f"a row that differs by {off:.3g}",
            expected=f"at most {PROBE_TOLERANCE}",
            action="use the same torch release on both sides",
        )
