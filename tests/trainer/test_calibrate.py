"""`solrl-train calibrate` measures plans, and writes the cheapest that selects well enough for a run."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from solrl_core.errors import MismatchError
from solrl_core.families import load_backbone
from solrl_core.fingerprint import model_digest, part_digests
from solrl_core.sampling.fitting import SCHEDULES, identity_solver
from solrl_core.sampling.generator import Generator
from solrl_proto.rollouts import Plan
from solrl_trainer.calibration import plans as plans_module
from solrl_trainer.calibration.plans import (
    PlanSet,
    fit_solvers,
    fitting_steps,
    measured_prompts,
    plans,
    recipe_examples,
    reference_plan,
)
from solrl_trainer.commands.calibrate import calibrate, frontier
from solrl_trainer.commands.layout import RATES
from solrl_trainer.prompts.prompt_sets import prompts_of_run
from solrl_trainer.rollouts.candidates import GroupSampler
from solrl_trainer.rollouts.loading import check_bindings
from solrl_trainer.settings.presets import ConfigError, resolve
from tests.support.small_model import small_model
from tests.trainer.training_helpers import prompts_in

ROOT = Path(__file__).parents[2]
PRESET = "mini-sana/sol_rl/clipscore"
SMALL = ("explore.candidates=16", "explore.keep=8", "explore.precision=nvfp4", "regenerate.steps=4", "explore.steps=1")

ONE_PLAN = PlanSet(steps=(), schedules=())


def small(*more: str) -> Any:
    return resolve(PRESET, overrides=[*SMALL, f"model={small_model()}", *more]).config


def test_solvers_are_fitted_to_the_recipes_steps_on_training_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans_module, "FITTED_PROMPTS", 6)
    generator = Generator(load_backbone("mini-sana"), "bf16")
    (solver,) = fit_solvers(generator, recipe_examples(small(), generator), [(1.0, 0.75, 0.5, 0.25)])
    # With the recipe's own four levels there is nothing to gain: the fitted steps end in the same place.
    texts, seeds = ["a red circle"] * 8, list(range(8))
    ends = [generator.generate(texts, seeds, steps=4, solver=by, decode=False).latents for by in (solver, "euler")]
    assert float((ends[0] - ends[1]).square().mean() / ends[1].square().mean()) < 1e-3


def test_the_pages_say_how_long_it_takes() -> None:
    """The number of the default plans at each precision of a GPU with FP8, and their hours by the shipped rates."""

    def hours(model: str, limits: PlanSet) -> tuple[float, int]:
        config, rates = resolve(f"{model}/fast/imagereward").config, RATES[model]
        group = config.explore.candidates
        fitted = list(map(identity_solver, limits.schedules))
        measured = plans(config, ["bf16"], fitted, limits)
        steps, images = group * sum(plan.steps for plan in measured), group * len(measured)
        turns = 17 * (steps * (rates.fp8 + rates.bf16) + 2 * images * rates.image)
        true = 16 * group * (config.regenerate.steps * rates.bf16 + rates.image)
        return (turns + true + fitting_steps(config, limits.schedules) * rates.bf16) / 3600, len(measured)

    page, precision = (" ".join((ROOT / f"docs/{name}.md").read_text().split()) for name in ("many-gpus", "precision"))
    flux, sd3, sana = (hours(model, PlanSet()) for model in ("flux1", "sd3", "sana"))
    assert f"FLUX.1 in {flux[0]:.1f} hours, SD3.5-Large in {sd3[0]:.1f} and SANA in {sana[0]:.1f}." in page
    short = hours("flux1", PlanSet(steps=(4,), schedules=SCHEDULES[:1]))
    assert f"`--steps 4 --schedules 1` measures fewer plans: {short[0]:.1f} hours for FLUX.1." in page
    assert f"{flux[1]} plans at each of two precisions" in precision


@pytest.mark.slow
def test_the_cheapest_good_plan_is_written_for_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans_module, "FITTED_PROMPTS", 4)
    shown: list[tuple[float, float]] = []
    more: Any = {"limits": PlanSet(steps=(4,), schedules=SCHEDULES[:1]), "progress": lambda *done: shown.append(done)}
    summary = calibrate(small(), tmp_path, prompts=2, minimum=0.3, **more)
    # The beginning, the true scores of each prompt and the fit; then, to warm up and for each prompt, 1 step, 4 steps
    # and 4 fitted steps, at 2 precisions.
    assert len(shown) == 1 + 2 + 1 + 3 * 3 * 2
    assert shown == sorted(shown)
    assert (shown[0][0], shown[-1][0]) == (0, shown[-1][1])
    by_name = {row["name"]: row for row in summary["plans"]}
    assert len(by_name) == 6
    assert sum("fitted" in name for name in by_name) == 2
    # The same steps and precision as the true rewards: nothing is lost.
    assert by_name["bf16 4 steps"]["spearman"] == pytest.approx(1.0, abs=1e-3)
    assert by_name["bf16 4 steps"]["separation"] == pytest.approx(1.0, abs=1e-3)
    assert summary["reference"] == "nvfp4 1 steps"
    reference = by_name[summary["reference"]]
    assert (reference["cost"], reference["cost_interval"]) == (1, [1, 1])
    assert (reference["loss"], reference["loss_interval"]) == (0, [0, 0])
    for row in summary["plans"]:
        assert row["loss"] == pytest.approx(reference["separation"] - row["separation"])
        assert row["seconds"] > 0
    good = [row for row in summary["plans"] if row["interval"][0] >= 0.3]
    chosen = min(good, key=lambda row: row["seconds"])
    assert summary["chosen"] == chosen["name"]
    assert summary["verdict"][0].startswith(f"{chosen['name']} has a separation of ")
    assert summary["verdict"][-1] == "the intervals are over 2 prompts and may be too narrow; use at least 8"
    assert json.loads((tmp_path / "calibration.json").read_text())["verdict"] == summary["verdict"]
    written = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    planned = resolve(PRESET, overrides=SMALL[:2], files={"file": written}).config
    assert planned.generate.size == (64, 64, None)
    explore = planned.explore
    assert (explore.steps, explore.precision) == (chosen["plan"]["steps"], chosen["plan"]["precision"])


def test_limited_sets_have_the_reference() -> None:
    config = resolve(PRESET).config
    measured = plans(config, ["nvfp4"], [], PlanSet(steps=(4,)))
    assert [plan.steps for plan in measured] == [4, 6]
    assert reference_plan(config, ["nvfp4", "bf16"]) == measured[1]


def test_a_run_accepts_the_written_fitted_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans_module, "FITTED_PROMPTS", 4)
    limits = PlanSet(steps=(), schedules=SCHEDULES[:1])
    config = small("explore.precision=bf16", "model=mini-sana")
    summary = calibrate(config, tmp_path, prompts=1, minimum=0.7, limits=limits)
    assert summary["chosen"].startswith("bf16 4 fitted steps (1, 0.8")
    written = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    explored = resolve(PRESET, overrides=SMALL[:2], files={"file": written}).config
    asked = explored.exploration_plan(0)
    assert asked.fitted.sigmas == pytest.approx(SCHEDULES[0], abs=0.1)
    chosen = next(row["plan"] for row in summary["plans"] if row["name"] == summary["chosen"])
    assert asked == Plan.model_validate(chosen)
    with pytest.raises(ConfigError, match=r"explore\.steps is 6; expected 4, .*set explore\.fitted=null"):
        resolve(PRESET, overrides=["explore.steps=6"], files={"file": written})


def test_a_plan_is_bound_to_the_model_and_settings_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans_module, "FITTED_PROMPTS", 1)
    config = small("explore.precision=bf16")
    # No plan is chosen if none is good enough.
    summary = calibrate(config, tmp_path, prompts=1, minimum=1, limits=ONE_PLAN)
    assert summary["chosen"] is None
    assert summary["verdict"][0].startswith("every plan surely selects worse than required; the best, bf16 1 steps, ")
    assert not (tmp_path / "plan.yaml").exists()
    calibrate(config, tmp_path, prompts=1, minimum=-1, limits=ONE_PLAN)
    written = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    bindings = resolve(PRESET, overrides=SMALL[:2], files={"file": written}).config.bindings
    check_bindings(bindings, model_digest(part_digests(load_backbone(small_model()).parts)), "mini-sana")
    with pytest.raises(MismatchError, match="different model than mini-sd3"):
        check_bindings(bindings, model_digest(part_digests(load_backbone("mini-sd3").parts)), "mini-sd3")
    for other in ("solver=dpm2", "guidance=2"):
        with pytest.raises(ConfigError, match="calibrated for solver euler at guidance 1"):
            resolve(PRESET, overrides=[*SMALL[:2], other], files={"file": written})


def test_it_measures_on_unfitted_prompts_of_which_few_are_enough_if_none_are_fitted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    monkeypatch.setattr(plans_module, "FITTED_PROMPTS", 2)
    prompts_in(tmp_path, ["a red circle", "a blue square", "a green triangle"])
    config = small("explore.precision=bf16", f"prompts={tmp_path}")
    scored: list[str] = []
    scores = GroupSampler.scores
    monkeypatch.setattr(GroupSampler, "scores", lambda own, p, s: (scored.append(p[0].text), scores(own, p, s))[1])
    calibrate(config, tmp_path, prompts=1, minimum=0, limits=ONE_PLAN)
    assert set(scored) == {prompts_of_run(config.prompt_sources, "train").by_digest[2].text}
    assert "the intervals are over 1 prompt and may be too narrow; use at least 8" in notes
    limits = PlanSet(steps=(), schedules=SCHEDULES[:1])
    with pytest.raises(ValueError, match="has 3 training prompts; expected at least 4: 2 to fit on and 2 other"):
        calibrate(config, tmp_path, prompts=2, minimum=0, limits=limits)
    summary = calibrate(config, tmp_path, prompts=3, minimum=-1, limits=ONE_PLAN)
    assert summary["prompts"] == 3


def test_prompts_for_fitting_are_needed_only_if_something_is_fitted() -> None:
    config = small()
    train = prompts_of_run(config.prompt_sources, "train").by_digest
    count = len(train) - 10
    assert measured_prompts(config, count, fits=False) == train[10:]
    with pytest.raises(ValueError, match=r"has 1024 training prompts; expected at least 1038: 24 to fit on"):
        measured_prompts(config, count, fits=True)
    for fits in (True, False):
        assert measured_prompts(config, 16, fits=fits) == train[24:40]
    with pytest.raises(ValueError, match=r"expected at least 1025 to measure on \(--prompts\)"):
        measured_prompts(config, 1025, fits=False)


def test_the_frontier_contains_the_plans_that_no_other_dominates() -> None:
    figures = [("a", 1.0, 0.2), ("b", 2.0, 0.1), ("c", 2.0, 0.5), ("d", 3.0, 0.5), ("e", 4.0, 0.9)]
    rows = [dict(zip(("name", "seconds", "separation"), row, strict=True)) for row in figures]
    assert [row["name"] for row in frontier(rows)] == ["a", "c", "e"]


def test_stochastic_steps_are_not_calibrated(tmp_path: Path) -> None:
    config = resolve("mini-sana/flowgrpo_two_stage/clipscore").config
    with pytest.raises(ValueError, match=r"whose steps are the algorithm's; expected explore\.sampler=ode"):
        calibrate(config, tmp_path, prompts=1, minimum=0.3)
