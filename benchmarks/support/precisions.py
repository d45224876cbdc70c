"""Generators and solvers of the benchmarks of fidelity."""

from collections.abc import Sequence

from solrl_core.families.base import Backbone
from solrl_core.precision import apply_policy, probe
from solrl_core.precision.layers import QuantLinear, QuantPointwiseConv
from solrl_core.sampling.generator import Generator
from solrl_proto.rollouts import Solver
from solrl_trainer.settings.presets import resolve

PRECISIONS = ("nvfp4", "fp8")
MODELS = ("mini-sana", "mini-sd3", "mini-flux")
REWARDS = ("clipscore", "pickscore", "hpsv2", "imagereward")
OF_PRESET = "preset"
"""Instead of a solver: the one that the preset of the model's family uses at true size."""
_PRESETS = {"sana": "sana", "sd3": "sd3", "flux": "flux1"}


def generator_at(backbone: Backbone, precision: str) -> Generator:
    """A generator of the base at a precision; FP8 is emulated where the device has no FP8 units."""
    if precision != "fp8" or probe("fp8", backbone.device).numerics is not None:
        return Generator(backbone, precision)
    generator = Generator(backbone, "bf16")
    for name in apply_policy(generator.transformer, backbone.policy_at("fp8"), "fp8 emulated", backbone.device):
        layer, clean = (model.get_submodule(name) for model in (generator.transformer, backbone.transformer))
        assert isinstance(layer, QuantLinear | QuantPointwiseConv)
        layer.refresh_(clean.weight.detach().float())
    generator.precision, generator.numerics = "fp8", "emulated"
    return generator


def solver_of(solver: str, family: str) -> Solver:
    """The solver that is asked for; see `OF_PRESET`."""
    chosen: Solver = resolve(f"{_PRESETS[family]}/sol_rl/clipscore").config.solver if solver == OF_PRESET else solver  # type: ignore[assignment]
    return chosen


def named(numerics: Sequence[tuple[str, str]]) -> str:
    """Such as "NVFP4 (emulated) and FP8 (native)", from pairs of precision and numerics."""
    return " and ".join(f"{precision.upper()} ({how})" for precision, how in dict.fromkeys(numerics))
