"""Noise levels of the families' solvers, for clients that take the steps themselves."""

from math import exp


def sigmas(
    family: str,
    steps: int,
    *,
    shift: float = 3.0,
    tokens: int = 1024,
    low: float = 0.5,
    high: float = 1.15,
    most: int = 4096,
) -> list[float]:
    """`steps` + 1 levels. SD3, Wan and Z-Image use `shift`, others `tokens` (1,024 at 512 px) and the last three."""
    even = [1 - n / steps for n in range(steps)]
    if family == "sana":
        return [*even, 0.0]
    if family in ("sd3", "wan", "z-image"):
        if family == "wan":
            even = [1 - 0.999 * n / steps for n in range(steps)]
        if family == "sd3":
            last = shift * 0.001 / (1 + (shift - 1) * 0.001)
            even = [1 - (1 - last) * n / max(1, steps - 1) for n in range(steps)]
        return [*(shift * s / (1 + (shift - 1) * s) for s in even), 0.0]
    if family not in ("flux", "qwen-image", "flux2-klein"):
        raise ValueError(f"got family {family!r}; expected sana, sd3, flux, z-image, qwen-image, flux2-klein or wan")
    mu = low + (high - low) * (tokens - 256) / (most - 256)
    if family == "flux2-klein":
        few, many = 8.73809524e-05 * tokens + 1.89833333, 0.00016927 * tokens + 0.45666666
        mu = many if tokens > 4300 else few + (many - few) * (steps - 10) / 190
    levels = [exp(mu) / (exp(mu) + 1 / s - 1) for s in even]
    if family == "qwen-image" and steps > 1:
        levels = [1 - (1 - s) * (1 - 0.02) / (1 - levels[-1]) for s in levels]
    return [*levels, 0.0]
