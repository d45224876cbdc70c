"""The presets of the large models equal the settings of the paper's table and released configurations."""

from typing import Any

import pytest
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import RECIPES, REWARDS, resolve

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
    "diffusionnft": {"source": "local", "precision": "bf16", "steps": 10, "candidates": 24},
    "naive_scaling": {"source": "local", "precision": "bf16", "steps": 10, "candidates": 96},
    "naive_quant": {"source": "local", "precision": "nvfp4", "steps": 10, "candidates": 96},
    # NVFP4 in the paper; `auto` selects it on GPUs like the paper's.
    "sol_rl": {"source": "local", "precision": "auto", "steps": 6, "candidates": 96},
}

# Settings of the papers' code for large models: yifan123/flow_grpo (SD3.5, and FLUX.1 where it differs; the first form
# of Fast), and XueZeyue/DanceGRPO (FLUX.1 with LoRA).
_GRPO = {
    "optimizer.learning_rate": 3e-4,
    "optimizer.max_grad_norm": 1.0,
    "optimizer.updates": 2,
    "optimizer.weight_decay": 1e-4,
    "policy.decay_max": 0.0,
    "algorithm.adv_clip": 5.0,
}
_FLOWGRPO = {
    "explore.prompts": 48,
    "explore.keep": 24,
    "algorithm.timestep_fraction": 1.0,
    "algorithm.global_std": True,
}
TRAJECTORIES: dict[str, dict[str, Any]] = {
    "flowgrpo": _FLOWGRPO | {"eta": 0.7, "clip_range": 1e-4, "kl_weight": 0.01, "window": None, "lora.rank": 32},
    "flowgrpo_fast": _FLOWGRPO
    | {"eta": 0.8, "clip_range": 1e-5, "kl_weight": 0.0, "window": 2, "window_within": 0.5, "lora.rank": 32},
    "dancegrpo": {
        "eta": 0.3,
        "clip_range": 1e-4,
        "timestep_fraction": 0.6,
        "window": None,
        "algorithm.global_std": False,
    }
    | {"explore.prompts": 16, "explore.keep": 12, "lora.rank": 128, "lora.alpha": 256.0},
}
FLUX = {"flowgrpo": {"eta": 0.9, "kl_weight": 0.0}}
STEPS = {"flowgrpo": 10, "flowgrpo_fast": 10, "dancegrpo": 12}
FLUX_STEPS = {"flowgrpo": 6, "flowgrpo_fast": 6, "dancegrpo": 12}
CANDIDATES = {"flowgrpo": (24, 96), "flowgrpo_fast": (24, 96), "dancegrpo": (12, 48)}


@pytest.mark.parametrize("stages", ["", "_two_stage"])
@pytest.mark.parametrize("recipe", TRAJECTORIES)
@pytest.mark.parametrize("model", MODELS)
def test_a_recipe_on_trajectories_has_its_papers_settings(model: str, recipe: str, stages: str) -> None:
    config = resolve(f"{model}/{recipe}{stages}/hpsv2").config
    flux, two = model == "flux1", bool(stages)
    wanted = _GRPO | TRAJECTORIES[recipe] | (FLUX.get(recipe, {}) if flux else {})
    wanted |= {"algorithm.name": recipe.removesuffix("_fast"), "explore.candidates": CANDIDATES[recipe][two]}
    steps = (FLUX_STEPS if flux else STEPS)[recipe]
    wanted |= {"regenerate.at": "trainer", "explore.source": "local", "regenerate.steps": steps} if two else {}
    wanted |= {} if two else {"regenerate.at": "none", "explore.precision": "bf16", "explore.steps": steps}
    found = {}
    for key in wanted:
        value: Any = config
        for part in (key if "." in key else f"algorithm.{key}").split("."):
            value = getattr(value, part)
        found[key] = value
    assert found == wanted
    assert config.explore.sampler == ("training" if two else "ode")
    assert config.explore.steps == steps


@pytest.mark.parametrize("stages", ["", "_two_stage"])
def test_sd35_medium_has_the_guidance_and_prompts_of_its_baselines(stages: str) -> None:
    def of(recipe: str) -> RunConfig:
        return resolve(f"sd3-medium/{recipe}{stages}/pickscore").config

    assert [of(recipe).guidance for recipe in ("flowgrpo", "flowgrpo_fast", "awm", "dpo")] == [4.5, 4.5, 1.0, 1.0]
    assert [of(recipe).explore.prompts for recipe in ("flowgrpo", "awm")] == [48, 24]


# Tencent-Hunyuan/UniRL, yifan123/flow_grpo and X-GenGroup/Flow-Factory; the files are named in presets.py.
HALF = {"window": 3, "window_within": 0.5, "timestep_fraction": 1.0}
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen-image/sol_rl": {"guidance": 1.0, "lora": (64, 128.0), "timestep_fraction": 0.99, "learning_rate": 3e-4},
    "qwen-image/flowgrpo_fast": {"guidance": 4.0, "eta": 1.2, "clip_range": 1e-4, "window": 2, "kl_weight": 0.0},
    "qwen-image/flowgrpo_fast_two_stage": {"guidance": 4.0, "prompts": 32, "keep": 16, "candidates": 64},
    "qwen-image/dancegrpo": {"guidance": 1.0, "eta": 0.7, "keep": 16, "lora": (64, 128.0), "global_std": True, **HALF},
    "flux2-klein/sol_rl": {"guidance": 1.0, "beta": 0.1, "kl_weight": 0.0, "learning_rate": 1e-4, "global_std": False},
    "flux2-klein/awm": {"guidance": 4.0, "learning_rate": 3e-4, "lora": (64, 128.0), "global_std": False},
    "flux2-klein/flowgrpo_fast": {"guidance": 4.0, "eta": 0.7, "clip_range": 1e-4, "window": 1, "steps": 8},
    "flux2-klein/dancegrpo": {"guidance": 1.0, "eta": 0.7, "clip_range": 5e-3, "lora": (16, 32.0), **HALF},
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_models_that_are_not_in_the_paper_have_their_baselines_settings(preset: str) -> None:
    config = resolve(f"{preset}/pickscore").config
    values = {"guidance": config.guidance, "learning_rate": config.optimizer.learning_rate}
    values |= {"lora": (config.lora.rank, config.lora.alpha)}
    values |= config.explore.model_dump() | config.algorithm.model_dump()
    assert {key: values[key] for key in PUBLISHED[preset]} == PUBLISHED[preset]


@pytest.mark.parametrize(("stages", "candidates"), [("", 16), ("_two_stage", 64)])
def test_z_image_has_the_settings_of_unirl(stages: str, candidates: int) -> None:
    """Tencent-Hunyuan/UniRL, examples/diffusion/z_image/z_image_trainside.yaml."""
    config = resolve(f"z-image/flowgrpo_fast{stages}/pickscore").config
    assert (config.model, config.guidance, config.solver) == ("Tongyi-MAI/Z-Image", 1.0, "euler")
    assert (config.lora.rank, config.lora.alpha, config.optimizer.batch) == (64, 128.0, 8)
    assert (config.optimizer.learning_rate, config.optimizer.weight_decay, config.optimizer.updates) == (3e-4, 0.0, 2)
    explore, settings = config.explore, config.algorithm.model_dump()
    assert (explore.prompts, explore.keep, explore.candidates, explore.steps) == (64, 16, candidates, 12)
    wanted = {"eta": 0.7, "clip_range": 1e-4, "window": 3, "window_within": 0.5, "kl_weight": 0.0}
    assert {name: settings[name] for name in wanted} == wanted


@pytest.mark.parametrize("recipe", TRAJECTORIES)
def test_a_miniatures_clip_range_is_wider(recipe: str) -> None:
    small, large = (resolve(f"{model}/{recipe}/hpsv2").config.algorithm for model in ("mini-sd3", "sd3"))
    assert small.model_dump()["clip_range"] == pytest.approx(10 * large.model_dump()["clip_range"])


def test_the_table_is_complete() -> None:
    assert set(EXPLORED) | {f"{name}{stages}" for name in TRAJECTORIES for stages in ("", "_two_stage")} <= set(RECIPES)
    assert set(REWARDS) == {"clipscore", "pickscore", "hpsv2", "imagereward"}


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
