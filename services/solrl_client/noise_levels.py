"""Noise levels of the families' solvers, for clients that take the steps themselves."""

from math import exp


def sigmas(
    family: str, steps: int, *, shift: float = 3.0, tokens: int = 1024, low: float = 0.5, high: float = 1.15
) -> list[float]:
    """`steps` + 1 levels. SD3 and Z-Image use `shift`; FLUX.1 uses `tokens` (1,024 at 512 px), `low` and `high`."""
    even = [1 - n / steps for n in range(steps)]
    if family == "sana":
        return [*even, 0.0]
    if family == "sd3":
        last = shift * 0.001 / (1 + (shift - 1) * 0.001)
        even = [1 - (1 - last) * n / max(1, steps - 1) for n in range(steps)]
    if family in ("sd3", "z-image"):
        return [*(shift * s / (1 + (shift - 1) * s) for s in even), 0.0]
    if family == "flux":
        mu = low + (high - low) * (tokens - 256) / (4096 - 256)
        return [*(exp(mu) / (exp(mu) + 1 / s - 1) for s in even), 0.0]
    raise ValueError(f"got family {family!r}; expected sana, sd3, z-image or flux")
