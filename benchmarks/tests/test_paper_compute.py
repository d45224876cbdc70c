"""Accounting of compute: passes as they are really made, their times at true shapes, and the share of evaluations."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from paper.compute import SOURCES, STORED, costs_of, passes_of_iteration, store_costs
from paper.experiments import RESULTS, Programme
from solrl_core.families.sana import Sana
from solrl_core.sampling.generator import Generator
from solrl_trainer import loop
from solrl_trainer.loop import train
from solrl_trainer.policy.policy import Policy
from solrl_trainer.settings.presets import MODELS, RECIPES, resolve
from support.paper_runs import TINY

SMALL = {
    "sol_rl": {"explore.candidates": 6, "explore.keep": 4},
    "naive_quant": {"explore.candidates": 6, "explore.keep": 4},
    "awm": {"explore.candidates": 4, "explore.keep": 4},
    "dpo_two_stage": {"explore.candidates": 6, "explore.keep": 5},
    "flowgrpo_fast": {"explore.candidates": 4, "explore.keep": 4},
    "dancegrpo": {"explore.candidates": 4, "explore.keep": 4, "algorithm.recompute": False},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [pytest.param(one, marks=[] if one in ("sol_rl", "awm") else pytest.mark.release) for one in SMALL]
)
def test_passes_are_those_that_a_run_makes(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []  # appended to by several threads
    really_generate, really_velocity = Generator.generate, Sana.velocity

    def generate(self: Generator, prompt: Any, seeds: Any, **options: Any) -> Any:
        made.append((f"generate {self.precision}", len(seeds) * options["steps"]))
        return really_generate(self, prompt, seeds, **options)

    def velocity(self: Sana, transformer: Any, latents: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            made.append(("current" if torch.is_grad_enabled() else "fixed", len(latents)))
        return really_velocity(self, transformer, latents, *rest, **options)

    def uncounted(work: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            before = len(made)
            result = work(*args, **named)
            del made[before:]
            return result

        return call

    monkeypatch.setattr(Generator, "generate", generate)
    monkeypatch.setattr(Sana, "velocity", velocity)
    monkeypatch.setattr(Policy, "is_behaviour", lambda _: False)  # stored runs made every pass
    for name in ("evaluate_base", "evaluate_average", "compare_images"):
        monkeypatch.setattr(loop, name, uncounted(getattr(loop, name)))
    unjudged = {"iterations": 1, "optimizer.batch": 8, "evaluate.every": 0, "evaluate.rewards": []}
    config = Programme(changes=TINY | unjudged | SMALL[recipe]).experiment(recipe, 1).config
    train(config.model_copy(update={"output": tmp_path}), None)
    counted = passes_of_iteration(config)
    fixed = counted["train old"] + counted["train reference"]
    generated = {name: count for name, count in counted.items() if name.startswith("generate")}
    found: Counter[str] = Counter()
    for name, count in made:
        found[name] += count
    assert found == Counter({**generated, "current": counted["train current"], "fixed": fixed})


def test_later_measurements_do_not_change_the_stored_costs(tmp_path: Path) -> None:
    measured, runs = tmp_path / "measured", tmp_path / "runs"
    measured.mkdir()
    for name in SOURCES:
        shutil.copy(RESULTS / name, measured)
    store_costs(runs, measured)
    steps = json.loads((RESULTS / SOURCES[0]).read_text())
    for row in steps["rows"]:
        row |= {"ms": 2 * row["ms"]} if "ms" in row else {}
    (runs / SOURCES[0]).write_text(json.dumps(steps))
    shutil.copy(RESULTS / SOURCES[1], runs)
    assert costs_of("sana", runs) == costs_of("sana", measured)
    (runs / STORED).unlink()
    costs_of.cache_clear()
    assert costs_of("sana", runs)["ms"]["generate fp8"] == 2 * costs_of("sana", measured)["ms"]["generate fp8"]


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
    """Of `fast` a quarter: its iterations are as short, and it ends by its curve."""
    assert 0 < share_of_curve(model, recipe) <= (0.25 if recipe == "fast" else 0.05)


def test_a_run_without_evaluations_along_it_compares_all_seeds() -> None:
    for overrides, seeds in ((["iterations=10"], 4), (["evaluate.every=0"], 4), ([], 1), (["evaluate.seeds=1"], 1)):
        assert resolve("mini-sana/sol_rl/clipscore", overrides=overrides).config.curve_seeds == seeds
