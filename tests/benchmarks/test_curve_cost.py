"""The held-out curve takes at most a twentieth of a run's time, counted in passes of the transformer."""

import pytest
from paper.compute import passes_of_iteration
from solrl_trainer.settings.presets import MODELS, RECIPES, resolve


def share_of_curve(model: str, recipe: str) -> float:
    """Passes of the evaluations along a run, over all passes on the trainer's device.

    The passes of cheap candidates are left out, as a service may explore on another device. A pass of training counts
    as one without a gradient, which takes less time. Both make the share larger than that of the time. Guidance makes
    all passes alike dearer, so it is left out.
    """
    config = resolve(f"{model}/{recipe}/clipscore", overrides=["guidance=1"]).config
    judge, own = config.evaluate, passes_of_iteration(config)
    if config.two_stage:
        del own[f"generate {config.explore.precision}"]
    evaluations = (config.iterations - 1) // judge.every
    assert evaluations >= 3
    images = evaluations * judge.prompts * config.curve_seeds
    return images * judge.steps / (config.iterations * own.total())


GENERATING = [name for name in RECIPES if name not in ("sft", "dpo_pairs")]
"""Recipes on stored images generate nothing, so that their iterations are short beside any evaluation."""


@pytest.mark.parametrize("recipe", GENERATING)
@pytest.mark.parametrize("model", MODELS)
def test_the_curve_of_each_preset_costs_at_most_a_twentieth(model: str, recipe: str) -> None:
    assert 0 < share_of_curve(model, recipe) <= 0.05


def test_a_run_without_evaluations_along_it_compares_all_seeds() -> None:
    for overrides, seeds in ((["iterations=10"], 4), (["evaluate.every=0"], 4), ([], 1), (["evaluate.seeds=1"], 1)):
        assert resolve("mini-sana/sol_rl/clipscore", overrides=overrides).config.curve_seeds == seeds
