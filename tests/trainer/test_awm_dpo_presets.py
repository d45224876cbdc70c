"""The recipes of AWM and Diffusion-DPO have their papers' settings, and Sol-RL's elsewhere."""

from typing import Any

import pytest
from solrl_trainer.settings.presets import MODELS, RECIPES, resolve

ONE_STAGE = {
    "explore.source": "local",
    "explore.precision": "bf16",
    "explore.candidates": 24,
    "regenerate.at": "none",
}
TWO_STAGES = {
    "explore.source": "local",
    "explore.precision": "auto",
    "explore.candidates": 96,
    "explore.steps": 6,
    "regenerate.at": "trainer",
}
# The authors' configuration for PickScore: 6 of the 12 highest of 14 noise levels.
AWM = {
    "algorithm.name": "awm",
    "algorithm.weighting": "ghuber",
    "algorithm.power": 0.25,
    "algorithm.ratio_clip": 1.0,
    "algorithm.global_std": True,
    "algorithm.adv_clip": 5.0,
    "algorithm.adv_max": 1.0,
    "algorithm.kl_weight": 1e-4,
    "algorithm.old_kl_weight": 1.0,
    "algorithm.kl_weighting": "uniform",
    "algorithm.noise_range": 0.9,
    "algorithm.initial_noise": True,
    "algorithm.timestep_fraction": 0.5,
    "regenerate.steps": 14,
    "optimizer.learning_rate": 3e-4,
    "optimizer.weight_decay": 1e-4,
    "optimizer.max_grad_norm": 1.0,
    "policy.decay_rate": 0.001,
    "policy.decay_max": 0.3,
    "policy.ema": 0.99,
}
# The paper's beta for SD1.5; the learning rate is of LoRA weights, since the paper trains all weights.
DPO = {
    "algorithm.name": "dpo",
    "algorithm.beta": 2000.0,
    "regenerate.steps": 10,
    "optimizer.learning_rate": 1e-5,
    "optimizer.weight_decay": 1e-2,
    "optimizer.max_grad_norm": 1.0,
}
PRESETS: dict[str, dict[str, Any]] = {
    "awm": ONE_STAGE | AWM | {"explore.steps": 14},
    "awm_two_stage": TWO_STAGES | AWM,
    "dpo": ONE_STAGE | DPO | {"explore.steps": 10},
    "dpo_two_stage": TWO_STAGES | DPO,
}
COMMON = {"explore.prompts": 48, "explore.keep": 24, "optimizer.updates": 1, "lora.rank": 32, "lora.alpha": 64.0}
MINIATURE = {"explore.prompts": 12, "optimizer.updates": 6, "iterations": 40}
RATES = {"awm": 1e-3, "awm_two_stage": 1e-3, "dpo": 3e-5, "dpo_two_stage": 3e-5}


def found(preset: str, keys: dict[str, Any]) -> dict[str, Any]:
    values = {}
    for key in keys:
        value: Any = resolve(preset).config
        for part in key.split("."):
            value = getattr(value, part)
        values[key] = value
    return values


@pytest.mark.parametrize("recipe", PRESETS)
@pytest.mark.parametrize("model", ["sana", "sd3", "flux1"])
def test_a_large_models_preset_has_the_papers_settings(model: str, recipe: str) -> None:
    wanted = COMMON | PRESETS[recipe]
    assert found(f"{model}/{recipe}/hpsv2", wanted) == wanted


@pytest.mark.parametrize("recipe", PRESETS)
@pytest.mark.parametrize("model", [name for name in MODELS if name.startswith("mini-")])
def test_a_miniatures_preset_is_scaled(model: str, recipe: str) -> None:
    wanted = PRESETS[recipe] | MINIATURE | {"optimizer.learning_rate": RATES[recipe]}
    assert found(f"{model}/{recipe}/clipscore", wanted) == wanted
    assert resolve(f"{model}/{recipe}/clipscore").sources["optimizer.learning_rate"] == (
        f"model {model}" if recipe.startswith("awm") else f"recipe {recipe} for {model}"
    )


def test_every_recipe_exists() -> None:
    assert PRESETS.keys() <= RECIPES.keys()
