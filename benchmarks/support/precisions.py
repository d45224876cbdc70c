"""Generators and solvers of the benchmarks of fidelity."""

from collections.abc import Sequence

from solrl_proto.rollouts import Solver
from solrl_trainer.settings.presets import resolve

PRECISIONS = ("nvfp4", "fp8")
MODELS = ("mini-sana", "mini-sd3", "mini-flux")
REWARDS = ("clipscore", "pickscore", "hpsv2", "imagereward")
OF_PRESET = "preset"
"""Instead of a solver: the one that the preset of the model's family uses at true size."""
_PRESETS = {"sana": "sana", "sd3": "sd3", "flux": "flux1"}


def solver_of(solver: str, family: str) -> Solver:
    """The solver that is asked for; see `OF_PRESET`."""
    chosen: Solver = resolve(f"{_PRESETS[family]}/sol_rl/clipscore").config.solver if solver == OF_PRESET else solver  # type: ignore[assignment]
    return chosen


def named(numerics: Sequence[tuple[str, str]]) -> str:
    """Such as "NVFP4 (emulated) and FP8 (native)", from pairs of precision and numerics."""
    return " and ".join(f"{precision.upper()} ({how})" for precision, how in dict.fromkeys(numerics))
