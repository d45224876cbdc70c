"""Short runs of the recipes of AWM and Diffusion-DPO: two ranks, then a resumed process, against one process."""

from pathlib import Path

import pytest
from rank_runs import arguments, run, same_weights
from training_helpers import iterations

pytestmark = pytest.mark.slow
FIGURES = {
    "awm": {"ratio", "clipped", "error", "old_distance", "kl"},
    "dpo": {"accuracy", "margin", "tied", "error", "reference_error"},
}


@pytest.mark.parametrize("recipe", ["awm_two_stage", "dpo"])
def test_two_ranks_and_a_resumed_run_give_the_weights_of_one_bit_for_bit(recipe: str, tmp_path: Path) -> None:
    settings = ["optimizer.batch=3"]
    settings += ["rollout_url=null", "explore.precision=nvfp4"] if "two_stage" in recipe else ["explore.steps=4"]
    extra = ["--preset", f"mini-sana/{recipe}/clipscore", *(word for one in settings for word in ("--set", one))]
    whole, shared, log = tmp_path / "whole", tmp_path / "shared", tmp_path / "log"
    assert run(1, [*arguments(whole, 2), *extra], log) == 0, log.read_text()
    assert run(2, [*arguments(shared, 1), *extra], log) == 0, log.read_text()
    assert run(1, [*arguments(shared, 2), *extra], log) == 0, log.read_text()
    assert same_weights(shared, whole, 1)
    assert same_weights(shared, whole, 2)
    found = iterations(whole)
    assert found == iterations(shared)
    algorithm = recipe.removesuffix("_two_stage")
    figures = {key.removeprefix("objective/") for line in found for key in line if key.startswith("objective/")}
    assert figures == FIGURES[algorithm]
    first, second = found
    assert first["loss"] != second["loss"]
    if algorithm == "awm":
        assert first["objective/ratio"] != 1
        assert 0 < first["objective/old_distance"] < 1
    else:
        assert first["objective/margin"] != 0
        assert 0 <= first["objective/accuracy"] <= 1
