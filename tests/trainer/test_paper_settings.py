"""The presets of the large models equal the settings of the paper's table and released configurations."""

from typing import Any

import pytest
from solrl_trainer.settings.presets import resolve

# Text tokens, sigmas, LoRA targets and layers belong to the families and are tested there.
MODELS: dict[str, dict[str, Any]] = {
    "sana": {
        "model": "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers",
        "solver": "euler",
        "evaluate.steps": 40,
        "algorithm.timestep_fraction": 0.6,
        "optimizer.max_grad_norm": 1.0,
        "optimizer.batch": 16,
    },
    "sd3": {
        "model": "stabilityai/stable-diffusion-3.5-large",
        "solver": "dpm2",
        "evaluate.steps": 40,
        "algorithm.timestep_fraction": 0.6,
        "optimizer.max_grad_norm": 0.002,
        "optimizer.batch": 4,
    },
    # NVlabs/DiffusionNFT, config/nft.py; the other settings are Sol-RL's, too.
    "sd3-medium": {
        "model": "stabilityai/stable-diffusion-3.5-medium",
        "solver": "dpm2",
        "evaluate.steps": 40,
        "algorithm.timestep_fraction": 0.99,
        "optimizer.max_grad_norm": 1.0,
        "optimizer.batch": 9,
    },
    "flux1": {
        "model": "black-forest-labs/FLUX.1-dev",
        "solver": "dpm2",
        "evaluate.steps": 28,
        "algorithm.timestep_fraction": 0.4,
        "optimizer.max_grad_norm": 1.0,
        "optimizer.batch": 12,
    },
}
COMMON: dict[str, Any] = {
    "guidance": 1.0,
    "seed": 42,
    "explore.prompts": 48,
    "explore.keep": 24,
    "explore.lag": 0,
    "explore.prune": None,
    "regenerate.steps": 10,
    "lora.rank": 32,
    "lora.alpha": 64.0,
    "optimizer.learning_rate": 3e-4,
    "optimizer.betas": (0.9, 0.999),
    "optimizer.weight_decay": 1e-4,
    "optimizer.eps": 1e-8,
    "optimizer.updates": 1,
    "algorithm.name": "diffusionnft",
    "algorithm.global_std": True,
    "algorithm.beta": 1.0,
    "algorithm.adv_clip": 5.0,
    "algorithm.kl_weight": 1e-4,
    "policy.ema": 0.9,
    "policy.decay_rate": 0.001,
    "policy.decay_max": 0.5,
}
EXPLORED: dict[str, dict[str, Any]] = {
    "diffusionnft": {"precision": "bf16", "steps": 10, "candidates": 24},
    "naive_scaling": {"precision": "bf16", "steps": 10, "candidates": 96},
    "naive_quant": {"precision": "nvfp4", "steps": 10, "candidates": 96},
    # NVFP4 in the paper; `auto` selects it on GPUs like the paper's.
    "sol_rl": {"precision": "auto", "steps": 6, "candidates": 96},
}


@pytest.mark.parametrize("reward", ["clipscore", "pickscore", "hpsv2", "imagereward"])
@pytest.mark.parametrize("recipe", EXPLORED)
@pytest.mark.parametrize("model", MODELS)
def test_a_published_preset_has_the_papers_settings(model: str, recipe: str, reward: str) -> None:
    config = resolve(f"{model}/{recipe}/{reward}").config
    wanted = MODELS[model] | COMMON | {f"explore.{key}": value for key, value in EXPLORED[recipe].items()}
    wanted |= {"rewards": {reward: 1.0}}
    found = {}
    for key in wanted:
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        found[key] = value
    assert found == wanted
