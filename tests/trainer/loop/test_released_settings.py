"""A run with the settings of Sol-RL's released code that are not the default, in parts and whole."""

from pathlib import Path

import pytest
from solrl_trainer.loop import Result, train
from tests.trainer.real_runs import SMALL, Watcher
from tests.trainer.training_helpers import iterations, same, state, tiny_config

SETTINGS = (
    *(*SMALL, "rollout_url=null", "explore.prompts=3", "explore.keep=4"),
    *("optimizer.epochs=2", "optimizer.updates=2"),
    *("algorithm.advantage_mode=binary", "policy.counter=updates", "policy.decay_flat=2", "policy.decay_rate=0.1"),
    *("evaluate.prompts=2", "evaluate.fidelity_prompts=0"),
)


def go(folder: Path, iterations: int, *overrides: str, resume: bool = False) -> Result:
    config = tiny_config(*SETTINGS, *overrides, output=folder, run="released", iterations=iterations)
    return train(config, Watcher(), resume=resume)


@pytest.fixture(scope="module")
def whole_result(folder: Path) -> Result:
    return go(folder / "whole", 2)


@pytest.mark.slow
def test_a_resumed_run_of_several_epochs_is_equal_bit_for_bit(whole_result: Result, folder: Path) -> None:
    go(folder / "parts", 1)
    go(folder / "parts", 2, resume=True)
    assert same(state(folder / "parts", 2), state(folder / "whole", 2))
    assert iterations(folder / "parts") == iterations(folder / "whole")


@pytest.mark.release
def test_every_setting_changes_the_run(whole_result: Result, folder: Path) -> None:
    """Otherwise the comparison above would say nothing of it."""
    digests = {iterations(folder / "whole")[0]["digest"]}
    changes = ("optimizer.epochs=1", "policy.decay_flat=0", "policy.counter=iterations", "algorithm.advantage_mode=all")
    for change in changes:
        go(folder / change, 1, change)
        digests.add(iterations(folder / change)[0]["digest"])
    assert len(digests) == 5


def test_each_epoch_takes_its_steps_and_logs_figures(whole_result: Result, folder: Path) -> None:
    # Three prompts, four samples each at two of four timesteps, in two epochs: four steps an iteration.
    assert state(folder / "whole", 2)["optimizer/0/step"] == 8
    first, second = iterations(folder / "whole")
    for line in (first, second):
        assert 0 <= line["groups_without_spread"] <= 1
        assert 0 <= line["objective/clipped"] <= 1
    # At first both distances are to the base.
    assert first["objective/kl"] == pytest.approx(first["objective/old_distance"], rel=1e-4)
    assert second["objective/kl"] > second["objective/old_distance"] > 0
