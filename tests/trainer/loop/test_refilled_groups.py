"""`explore.refill`: further prompts of the run's order take the places of those whose candidates all score equally."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import run, same_weights
from real_runs import Watcher
from small_model import small_model
from solrl_minis import catalog
from solrl_proto.rollouts import PromptItem
from solrl_trainer.loop import Result, train
from solrl_trainer.ranks.communicator import Communicator
from solrl_trainer.session import check_ranks
from solrl_trainer.settings.preflight import check_run
from solrl_trainer.settings.presets import resolve
from solrl_trainer.settings.prompts import PromptSet, prompts_of_iteration, read_prompts
from training_helpers import QUICK, Ranks, iterations, prompts_in, run_config, sets

SETTINGS = (
    *(*QUICK, f"model={small_model()}", f"rewards={{'{__name__}:redness_of_red': 1}}", "explore.prompts=4"),
    *("explore.candidates=6", "explore.keep=4", "explore.precision=bf16", "rollout_url=null"),
    "optimizer.shard_base=false",
)


def redness_of_red(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """The red of an image if the prompt asks for it; otherwise equal for all images, up to rounding."""
    asked = torch.tensor([float("red" in prompt) for prompt in prompts])
    return asked * images[:, 0].mean((1, 2)) + 5 + 1e-6 * torch.arange(len(prompts))


def go(output: Path, refill: int, recipe: str) -> Result:
    overrides = (*SETTINGS, f"explore.refill={refill}", "iterations=2")
    return train(run_config(f"mini-sana/{recipe}/clipscore", output, *overrides), Watcher())


def ids(prompts: Sequence[PromptItem]) -> list[str]:
    return [prompt.id for prompt in prompts]


@pytest.mark.parametrize("recipe", ["sol_rl", "flowgrpo"])
def test_prompts_with_spread_take_the_places_of_those_without(recipe: str, tmp_path: Path) -> None:
    plain, refilled = go(tmp_path / "plain", 0, recipe), go(tmp_path / "refilled", 3, recipe)
    train_set = read_prompts(catalog.prompts(), "train")
    own = prompts_of_iteration(train_set, 4, 42, 1)
    expected, replaced = [], 0
    for prompt, others in zip(own, PromptSet((train_set,)).further(4, 42, 1, 3), strict=True):
        found = next((one for one in [prompt, *others] if "red" in one.text), prompt)
        expected.append(found.id)
        replaced += found is not prompt
    assert replaced > 0
    assert ids(plain.samples.prompts) == ids(own)
    assert ids(refilled.samples.prompts) == expected
    assert [group.prompt.id for group in refilled.samples.groups] == expected
    without = ["red" not in prompt.text for prompt in own]
    (_, before), (_, after) = iterations(tmp_path / "plain"), iterations(tmp_path / "refilled")
    assert before["groups_without_spread"] == sum(without) / 4
    assert "groups_refilled" not in before
    assert after["groups_refilled"] == replaced / 4
    assert after["groups_without_spread"] == (sum(without) - replaced) / 4


@pytest.mark.slow
def test_ranks_and_a_resumed_run_refill_alike(tmp_path: Path) -> None:
    whole, shared, log = tmp_path / "whole", tmp_path / "shared", tmp_path / "log"
    words = ["run", "--preset", "mini-sana/sol_rl/clipscore", *sets(*SETTINGS, "explore.refill=3")]
    assert run(1, [*words, "--resume", str(whole), "--iterations", "2"], log) == 0, log.read_text()
    assert run(2, [*words, "--resume", str(shared), "--iterations", "1"], log) == 0, log.read_text()
    assert run(1, [*words, "--resume", str(shared), "--iterations", "2"], log) == 0, log.read_text()
    assert same_weights(shared, whole, 2)
    assert iterations(shared) == iterations(whole)
    assert any(line["groups_refilled"] for line in iterations(whole))


def test_no_prompt_comes_twice_in_an_iteration() -> None:
    few = [PromptItem(id=str(i), text=str(i)) for i in range(10)]
    for iteration in range(6):
        own = prompts_of_iteration(few, 3, 7, iteration)
        places = PromptSet((few,)).further(3, 7, iteration, 4)
        taken = ids(own) + [prompt.id for place in places for prompt in place]
        assert len(taken) == len(set(taken))
        assert ids(places[0])[:1] == [prompts_of_iteration(few, 3, 7, iteration + 1)[0].id] or iteration % 3 == 2


def test_what_cannot_refill_is_refused_before_loading(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"refill is 2, but a service explores .*; expected explore\.refill=0, or"):
        resolve("mini-sana/sol_rl/clipscore", overrides=["explore.refill=2", "rollout_url=http://127.0.0.1:8100"])
    config = resolve("mini-sana/sol_rl/clipscore", overrides=["explore.refill=2", "rollout_url=null"]).config
    with pytest.raises(ValueError, match=r"refill is 2, and 2 ranks .* out of step; .*shard_base=false"):
        check_ranks(config, Ranks(0, 2))
    check_ranks(config, Communicator())
    settings = ("rollout_url=null", "explore.refill=3", f"prompts={prompts_in(tmp_path)}")
    two, one = (
        run_config("mini-sana/sol_rl/clipscore", tmp_path / "run", *settings, f"explore.prompts={prompts}")
        for prompts in (2, 1)
    )
    with pytest.raises(ValueError, match=r"refill is 3, but .* has 2 train prompts and explore\.prompts is 2; "):
        check_run(two, resume=False)
    check_run(one, resume=False)
