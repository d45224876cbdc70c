"""Generators and solvers of the benchmarks of fidelity."""

from collections.abc import Sequence

from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.precision.layer_policy import LayerPolicy
from solrl_proto.rollouts import Solver
from solrl_trainer.settings.presets import resolve

PRECISIONS = ("nvfp4", "fp8")
MODELS = ("mini-sana", "mini-sd3", "mini-flux")
REWARDS = ("clipscore", "pickscore", "hpsv2", "imagereward")
PRESET = "preset"
"""Instead of a solver: the one that the preset of the model's family uses at true size."""
QUANTISED = {
    "family": "At NVFP4, the layers of each family's list are quantised, as of a large model. Those that are not in "
    "the miniature's own list were not prepared.",
    "own": "At NVFP4, the layers of a list that was chosen for each miniature are quantised.",
}
"""Layers to quantise at NVFP4 → what pages say of them."""
LISTS = tuple(QUANTISED)
"""By the list of the model's family, or by the model's own in its solrl.json."""
_PRESETS = {"sana": "sana", "sd3": "sd3", "flux": "flux1"}


def solver_of(solver: str, family: str) -> Solver:
    """The solver that is asked for; see `PRESET`."""
    chosen: Solver = resolve(f"{_PRESETS[family]}/sol_rl/clipscore").config.solver if solver == PRESET else solver  # type: ignore[assignment]
    return chosen


def use_layers(backbone: PipelineBackbone, layers: str) -> None:
    """Quantise by one of `LISTS`. SD3.5's keeps layers up to its width; a miniature is narrower."""
    if layers == "own":
        return
    config, family = backbone.transformer.config, type(backbone)
    width = config.num_attention_heads * config.attention_head_dim
    backbone.policy = LayerPolicy(family.quantize, family.keep, min(family.keep_max_dim, width))


def named(numerics: Sequence[tuple[str, str]]) -> str:
    """Such as "NVFP4 (emulated) and FP8 (native)", from pairs of precision and numerics."""
    return " and ".join(f"{precision.upper()} ({how})" for precision, how in dict.fromkeys(numerics))
