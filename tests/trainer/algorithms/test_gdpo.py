"""GDPO's advantages against its formula, and where they apply."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from solrl_trainer.algorithms.algorithm import advantages_of, aggregated
from solrl_trainer.algorithms.diffusionnft import DiffusionNft, DiffusionNftSettings
from solrl_trainer.algorithms.registry import ALGORITHMS
from solrl_trainer.loop import train
from solrl_trainer.records.reward_shares import shares_text
from solrl_trainer.settings.presets import resolve
from tests.support.small_model import small_model
from tests.trainer.real_runs import Watcher
from tests.trainer.training_helpers import QUICK, events, run_config

SETTINGS = DiffusionNftSettings(aggregation="gdpo")
WEIGHTS = {"small": 1.0, "large": 0.5}
REWARDS = {
    "small": torch.tensor([[0.21, 0.24, 0.22, 0.29], [0.3, 0.3, 0.1, 0.2], [0.2, 0.2, 0.2, 0.2]]),
    "large": torch.tensor([[900.0, 300, 700, 100], [5, 5, 5, 5], [10, 30, 20, 20]]),
}


def found(rewards: dict[str, torch.Tensor], weights: dict[str, float] = WEIGHTS) -> torch.Tensor:
    return advantages_of(DiffusionNft(SETTINGS), aggregated(SETTINGS, rewards, weights))


def of_the_formula() -> np.ndarray[Any, Any]:
    """A_k = (r_k − mean) / std of each group; then their weighted sum, less its mean, over its std."""
    combined = 0
    for name, weight in WEIGHTS.items():
        r = REWARDS[name].double().numpy()
        combined = combined + weight * (r - r.mean(1, keepdims=True)) / (r.std(1, keepdims=True) + 1e-4)
    return np.asarray((combined - np.mean(combined)) / (np.std(combined) + 1e-4))


def test_advantages_are_those_of_the_formula_and_equal_sums_still_teach() -> None:
    np.testing.assert_allclose(found(REWARDS).numpy(), of_the_formula(), rtol=1e-4, atol=1e-6)
    rescaled = REWARDS | {"large": 1e-2 * REWARDS["large"] - 7}
    torch.testing.assert_close(found(rescaled), found(REWARDS), rtol=5e-3, atol=1e-3)
    only = found(REWARDS, {"small": 1.0, "large": 1e-6})
    torch.testing.assert_close(only[0], found(REWARDS | {"large": torch.zeros(3, 4)})[0], rtol=1e-3, atol=1e-4)
    first = aggregated(SETTINGS, {name: values[:1] for name, values in REWARDS.items()}, WEIGHTS)
    assert torch.equal(first, aggregated(SETTINGS, REWARDS, WEIGHTS)[:1])
    apart = {"small": torch.tensor([[0.0, 1, 2, 3]]), "large": torch.tensor([[6.0, 4, 2, 0]])}
    assert not advantages_of(DiffusionNft(DiffusionNftSettings()), apart["small"] + 0.5 * apart["large"]).any()
    assert found(apart, {"small": 1.0, "large": 0.5})[0, 0] < 0


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_every_algorithm_takes_them(name: str) -> None:
    algorithm: Any = ALGORITHMS.find(name)
    made = algorithm(algorithm.Settings(name=name, aggregation="gdpo", global_std=True))
    advantages = advantages_of(made, aggregated(made.settings, REWARDS, WEIGHTS))
    scale = advantages.abs().max() / np.abs(of_the_formula()).max()
    np.testing.assert_allclose((advantages / scale).numpy(), of_the_formula(), rtol=1e-3, atol=1e-4)


def test_one_trained_reward_is_refused() -> None:
    overrides = ["algorithm.aggregation=gdpo", "rewards={clipscore: 1, verifier: 0}"]
    with pytest.raises(ValueError, match=r"and only clipscore is trained; expected algorithm\.aggregation=sum, or"):
        resolve("mini-sana/sol_rl/clipscore", overrides=overrides)


def test_a_run_trains_on_them_logs_trained_rewards_shares_and_says_them_once(tmp_path: Path, notes: list[str]) -> None:
    small = (
        *(*QUICK, f"model={small_model()}", "rewards={clipscore: 1, pickscore: 1, verifier: 0}", "rollout_url=null"),
        *("explore.keep=4", "explore.precision=bf16", "iterations=2"),
    )
    lines = {}
    for how in ("sum", "gdpo"):
        config = run_config("mini-sana/sol_rl/clipscore", tmp_path / how, *small, f"algorithm.aggregation={how}")
        notes.clear()
        train(config, Watcher())
        lines[how], second = events(tmp_path / how, "iteration")
        for line in (lines[how], second):
            assert list(line["shares"]) == ["clipscore", "pickscore"]
            assert sum(line["shares"].values()) == pytest.approx(1)
        said = [note for note in notes if note.startswith("shares of")]
        assert said == [f"shares of the spread of the weighted sum: {shares_text(lines[how]['shares'])}"]
    assert lines["sum"]["rewards"] == lines["gdpo"]["rewards"], "the same samples"
    assert lines["sum"]["digest"] != lines["gdpo"]["digest"]
    assert abs(lines["sum"]["shares"]["pickscore"] - 0.5) > 0.1
    assert abs(lines["gdpo"]["shares"]["pickscore"] - 0.5) < 0.1
