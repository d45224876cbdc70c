"""`solrl-train calibrate` measures plans, and writes the cheapest that selects well enough for a run."""

from pathlib import Path

import pytest
import yaml
from PIL import Image
from solrl_core.errors import MismatchError
from solrl_core.families import load_backbone
from solrl_core.fingerprint import model_digest, part_digests
from solrl_core.fitting import SCHEDULES, identity_solver
from solrl_core.generator import Generator
from solrl_proto.rollouts import EarlyDecoder, Plan, Prune
from solrl_trainer import calibrate as module
from solrl_trainer.calibrate import Fits, calibrate, fit_solvers, name, plans, recipe_examples, solver_steps
from solrl_trainer.presets import ConfigError, resolve
from solrl_trainer.report.frontier import frontier
from solrl_trainer.rollouts.agreement import check_bindings, check_early_decoder
from solrl_trainer.rollouts.candidates import PlannedCandidates
from solrl_trainer.rollouts.source import exploration_plan

PRESET = "mini-sana/sol_rl/clipscore"
TRAINED_ON_THEMSELVES = ("explore.source=local", "regenerate.at=none", "explore.prune=null")
SMALL = ("explore.candidates=24", "explore.keep=8", "explore.precision=nvfp4", "regenerate.steps=4")


def test_every_precision_is_tried_with_all_step_counts_with_and_without_pruning() -> None:
    config = resolve("mini-sana/sol_rl/clipscore", overrides=["solver=dpm2"]).config
    solver = identity_solver(SCHEDULES[0])
    found = plans(config, ("nvfp4", "bf16"), Fits(solvers=(solver,)))
    assert len(found) == 2 * (5 + 3 + 2)
    assert {plan.prune.keep for plan in found if plan.prune} == {48}
    assert all(plan.prune.after < plan.steps for plan in found if plan.prune)
    assert all(plan.solver == "dpm2" for plan in found)
    assert [plan.prune for plan in found if plan.fitted == solver] == 2 * [None, Prune(after=3, keep=48)]
    few = resolve("mini-sana/sol_rl/clipscore", overrides=["explore.candidates=24"]).config
    assert not any(plan.prune for plan in plans(few, ("bf16",), Fits(solvers=(solver,))))


def test_pruned_candidates_take_no_more_steps() -> None:
    assert solver_steps(Plan(steps=6), 96) == 6 * 96
    assert solver_steps(Plan(steps=6, prune=Prune(after=2, keep=48)), 96) == 2 * 96 + 4 * 48


def test_solvers_are_fitted_to_the_recipes_steps_on_training_prompts() -> None:
    config = resolve(PRESET, overrides=SMALL).config
    generator = Generator(load_backbone("mini-sana"), "bf16")
    (solver,) = fit_solvers(generator, recipe_examples(config, generator), [(1.0, 0.75, 0.5, 0.25)])
    # With the recipe's own four levels there is nothing to gain: the fitted steps end in the same place.
    texts, seeds = ["a red circle"] * 8, list(range(8))
    ends = [generator.generate(texts, seeds, steps=4, solver=by, decode=False).latents for by in (solver, "euler")]
    assert float((ends[0] - ends[1]).square().mean() / ends[1].square().mean()) < 1e-3


@pytest.mark.slow
def test_the_cheapest_good_plan_is_written_for_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", (1, 4))
    monkeypatch.setattr(module, "SCHEDULES", SCHEDULES[:1])
    monkeypatch.setattr(module, "FITTED_PROMPTS", 4)
    notes: list[str] = []
    config = resolve(PRESET, overrides=SMALL).config
    shown: list[tuple[float, float]] = []
    told = {"progress": lambda done, total: shown.append((done, total))}
    summary = calibrate(config, tmp_path, notes.append, prompts=1, wanted=0.3, **told)
    # The beginning, the true scores, the fit, and each plan once to warm up and once for its prompt.
    assert len(shown) == 3 + 2 * len(summary["plans"])
    assert shown == sorted(shown)
    assert (shown[0][0], shown[-1][0]) == (0, shown[-1][1])
    by_name = {row["name"]: row for row in summary["plans"]}
    assert len(by_name) == 10
    assert sum("fitted" in name for name in by_name) == 4
    # The same steps and precision as the true rewards: nothing is lost.
    assert by_name["bf16 4 steps"]["spearman"] == pytest.approx(1.0, abs=1e-3)
    assert by_name["bf16 4 steps"]["separation"] == pytest.approx(1.0, abs=1e-3)
    good = [row for row in summary["plans"] if row["interval"][0] >= 0.3]
    chosen = min(good, key=lambda row: row["seconds"])
    assert summary["chosen"] == chosen["name"]
    written = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    explore = resolve(PRESET, overrides=SMALL[:2], files={"file": written}).config.explore
    assert (explore.steps, explore.precision) == (chosen["plan"]["steps"], chosen["plan"]["precision"])
    with Image.open(tmp_path / "frontier.png") as picture:
        assert picture.width > 800


def test_a_run_accepts_the_written_fitted_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", ())
    monkeypatch.setattr(module, "SCHEDULES", SCHEDULES[:1])
    monkeypatch.setattr(module, "FITTED_PROMPTS", 4)
    config = resolve(PRESET, overrides=[*SMALL, "explore.precision=bf16"]).config
    summary = calibrate(config, tmp_path, lambda text: None, prompts=1, wanted=0.0)
    assert summary["chosen"].startswith("bf16 4 fitted steps (1, 0.85, 0.65, 0.3)")
    written = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    explored = resolve(PRESET, overrides=SMALL[:2], files={"file": written}).config
    asked = exploration_plan(explored, 0)
    assert asked.fitted is not None
    assert asked.fitted.sigmas == SCHEDULES[0]
    chosen = next(row["plan"] for row in summary["plans"] if row["name"] == summary["chosen"])
    assert asked == Plan.model_validate(chosen)
    with pytest.raises(ConfigError, match="steps is 6, but the solver was fitted for 4"):
        resolve(PRESET, overrides=["explore.steps=6"], files={"file": written})
    with pytest.raises(ConfigError, match=r"explore\.fitted generates cheap candidates"):
        resolve(PRESET, overrides=TRAINED_ON_THEMSELVES, files={"file": written})


def test_a_run_accepts_the_written_early_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", (4,))
    monkeypatch.setattr(module, "SCHEDULES", ())
    monkeypatch.setattr(module, "FITTED_PROMPTS", 4)
    monkeypatch.setattr(module, "REWARD_PIXELS", 32)
    config = resolve(PRESET, overrides=[*SMALL, "explore.precision=bf16"]).config
    monkeypatch.setattr(module, "plans", lambda *given: [plan for plan in plans(*given) if plan.early_decoder])
    summary = calibrate(config, tmp_path, lambda text: None, prompts=1, wanted=-1.0)
    row = next(row for row in summary["plans"] if row["name"] == "bf16 4 steps, decoded early")
    assert 0.2 < row["separation"] < 0.999
    written = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    explored = resolve(PRESET, overrides=SMALL[:2], files={"file": written}).config
    decoder = exploration_plan(explored, 0).early_decoder
    assert decoder is not None
    vaes = [part_digests(load_backbone(model).parts)["vae"] for model in ("mini-sana", "mini-sd3")]
    check_early_decoder(decoder, vaes[0], "mini-sana")
    with pytest.raises(MismatchError, match="fitted to a different autoencoder than that of mini-sd3"):
        check_early_decoder(decoder, vaes[1], "mini-sd3")
    with pytest.raises(ConfigError, match=r"explore\.early_decoder generates cheap candidates"):
        resolve(PRESET, overrides=[*TRAINED_ON_THEMSELVES, *SMALL[:2]], files={"file": written})


def test_small_images_are_decoded_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", (1,))
    monkeypatch.setattr(module, "SCHEDULES", ())
    monkeypatch.setattr(module, "FITTED_PROMPTS", 1)
    notes: list[str] = []
    config = resolve(PRESET, overrides=[*SMALL, "explore.precision=bf16"]).config
    summary = calibrate(config, tmp_path, notes.append, prompts=1, wanted=-1.0)
    assert [row["name"] for row in summary["plans"]] == ["bf16 1 steps"]
    assert any("all plans decode whole images: got a decoder of images of 64×64 px" in note for note in notes)


def test_early_decoding_is_measured_for_all_scores_and_for_pruning() -> None:
    config = resolve(PRESET).config
    found = plans(config, ("bf16",), Fits(early_decoder=EarlyDecoder.model_construct(scores="all")))
    uses = [(plan.steps, plan.prune is not None, plan.early_decoder and plan.early_decoder.scores) for plan in found]
    assert uses[:2] == [(2, False, None), (2, False, "all")]
    assert uses[-5:] == [(8, False, None), (8, False, "all"), *((8, True, use) for use in (None, "pruning", "all"))]
    assert len({name(plan) for plan in found}) == len(found)


def test_a_plan_is_bound_to_the_model_and_settings_of_its_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STEPS", (1,))
    monkeypatch.setattr(module, "SCHEDULES", ())
    monkeypatch.setattr(module, "FITTED_PROMPTS", 1)
    config = resolve(PRESET, overrides=[*SMALL, "explore.precision=bf16"]).config
    calibrate(config, tmp_path, lambda text: None, prompts=1, wanted=-1.0)
    written = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    bindings = resolve(PRESET, overrides=SMALL[:2], files={"file": written}).config.bindings
    check_bindings(bindings, model_digest(part_digests(load_backbone("mini-sana").parts)), "mini-sana")
    with pytest.raises(MismatchError, match="different model than mini-sd3"):
        check_bindings(bindings, model_digest(part_digests(load_backbone("mini-sd3").parts)), "mini-sd3")
    for other in ("solver=dpm2", "guidance=2"):
        with pytest.raises(ConfigError, match="calibrated for solver euler at guidance 1"):
            resolve(PRESET, overrides=[*SMALL[:2], other], files={"file": written})


def test_it_measures_on_training_prompts_that_are_not_used_for_fitting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STEPS", (1,))
    monkeypatch.setattr(module, "SCHEDULES", ())
    monkeypatch.setattr(module, "FITTED_PROMPTS", 2)
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    (prompts / "train.txt").write_text("a red circle\na blue square\na green triangle\n")
    (prompts / "test.txt").write_text("a white star\n")
    config = resolve(PRESET, overrides=[*SMALL, "explore.precision=bf16", f"prompts={prompts}"]).config
    scored: list[str] = []
    scores = PlannedCandidates.scores
    monkeypatch.setattr(PlannedCandidates, "scores", lambda own, p, s: (scored.append(p.text), scores(own, p, s))[1])
    notes: list[str] = []
    calibrate(config, tmp_path, notes.append, prompts=1, wanted=0.0)
    assert set(scored) == {"a green triangle"}
    assert "the intervals are over 1 prompt and may be too narrow; use at least 8" in notes
    with pytest.raises(ValueError, match="has 3 training prompts; expected at least 4"):
        calibrate(config, tmp_path, notes.append, prompts=2, wanted=0.0)


def test_no_plan_is_chosen_if_none_is_good_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", (1,))
    monkeypatch.setattr(module, "SCHEDULES", ())
    monkeypatch.setattr(module, "FITTED_PROMPTS", 1)
    config = resolve(PRESET, overrides=[*SMALL, "explore.precision=bf16"]).config
    summary = calibrate(config, tmp_path, lambda text: None, prompts=1, wanted=1.0)
    assert summary["chosen"] is None
    assert not (tmp_path / "plan.yaml").exists()


def test_the_frontier_contains_the_plans_that_no_other_dominates() -> None:
    points = [("a", 1.0, 0.2), ("b", 2.0, 0.1), ("c", 2.0, 0.5), ("d", 3.0, 0.5), ("e", 4.0, 0.9)]
    assert [name for name, _, _ in frontier(points)] == ["a", "c", "e"]


def test_stochastic_steps_are_not_calibrated(tmp_path: Path) -> None:
    config = resolve("mini-sana/flowgrpo_two_stage/clipscore").config
    with pytest.raises(ValueError, match=r"whose steps are the algorithm's; expected explore\.sampler=ode"):
        calibrate(config, tmp_path, lambda text: None, prompts=1, wanted=0.3)
