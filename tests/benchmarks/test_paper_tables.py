"""The paper's tables: the page from the stored runs, and what only invented runs show."""

import re
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from paper import ceiling
from paper.__main__ import main
from paper.experiments import Programme
from paper.intervals import Estimate, over_seeds
from paper.stored import ARCHIVE
from paper.tables import authors, damaged, families, law, margin, plateaus
from paper.tables.gap import verdict
from paper.tables.pace import first_reached, pooled
from paper_runs import RESULTS, context_of, finish, finish_all, finish_trials
from solrl_core.families import load_backbone
from solrl_trainer.settings.prompts import find_prompts, read_prompts

PROGRAMME = Programme(rewards=("clipscore", "hpsv2"), judges=("verifier",))
GAINS = {
    "diffusionnft": 0.4,
    "naive_scaling": 0.8,
    "naive_quant": 0.2,
    "sol_rl": 0.79,
    "awm": 0.5,
    "flowgrpo": 0.1,
    "dancegrpo": 0.3,
}


@pytest.mark.slow
def test_the_stored_runs_give_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has every table; other experiments, costs or statistics would give another."""
    stored = (RESULTS / "paper.md").read_text()
    shutil.copytree(RESULTS / "paper", tmp_path / "out" / "paper")
    (said,) = re.findall(r"^By `python benchmarks/paper (.*?)`", stored, re.MULTILINE)
    words = [*shlex.split(said), "--show", "--stored", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["paper", *words, "--runs", str(tmp_path / "runs"), "--results", str(RESULTS)])
    main()
    # The last digits of paper.json depend on the processor.
    assert (tmp_path / "out" / "paper.md").read_text() == stored


def row(lines: object, start: str) -> list[str]:
    """Cells of the table row that begins with this text."""
    assert isinstance(lines, list)
    (found,) = [line for line in lines if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def families_row(lines: object, family: str) -> list[str]:
    """Cells of a family's row of the first reward, without the reward."""
    return row(lines, f"clipscore | {family}")[1:]


def test_long_runs_reach_shares_of_the_plateau(tmp_path: Path) -> None:
    programme = Programme(rewards=("pickscore", "imagereward"), judges=("verifier",))
    found = plateaus.section(finish_all(programme, tmp_path, GAINS, "plateaus"))
    assert found is not None
    # Straight lines: twice the gain reaches every share in half of the iterations.
    assert {name: round(one["mean"], 1) for name, one in found.data["iterations"]["24-in-96 BF16"].items()} == {
        "50%": 2.0, "70%": 2.0, "90%": 2.0, "95%": 2.0, "99%": 2.0
    }  # fmt: skip
    slower = found.data["compute"]["24-in-96 BF16, FLUX.1, 0.4"]["95%"]
    assert slower["mean"] < 2.0
    assert slower["seeds"] == len(plateaus.SEEDS)


def test_a_plateau_is_the_best_of_a_run_and_not_its_end(tmp_path: Path) -> None:
    programme = Programme(rewards=("pickscore", "imagereward"), judges=("verifier",))
    context = finish_all(programme, tmp_path, GAINS, "plateaus")
    fallen = {name: replace(run, curve=[*run.curve, (300, run.curve[0][1])]) for name, run in context.runs.items()}
    risen, found = plateaus.section(context), plateaus.section(replace(context, runs=fallen))
    assert risen is not None
    assert found is not None
    assert found.data["gains"] == risen.data["gains"]
    assert found.data["iterations"] == risen.data["iterations"]


def test_more_seeds_stand_beside_those_of_the_programme(tmp_path: Path) -> None:
    context = finish_all(PROGRAMME, tmp_path, GAINS, "gap")
    assert margin.section(context) is None
    for recipe in margin.RECIPES:
        for run in replace(context.tuned, seeds=(4, 5)).over_seeds(recipe, reward="hpsv2"):
            finish(run, tmp_path, GAINS[recipe])
    found = margin.section(context_of(PROGRAMME, tmp_path))
    assert found is not None
    assert {name: one["share"]["seeds"] for name, one in found.data["gap"].items()} == {
        "clipscore": 3, "hpsv2": 5, "mean of all": 3
    }  # fmt: skip


def test_grpo_by_its_authors_settings_has_trials_of_its_own(tmp_path: Path) -> None:
    finish_all(PROGRAMME, tmp_path, GAINS, "algorithms")
    found = authors.section(finish_all(PROGRAMME, tmp_path, GAINS, "authors"))
    assert found is not None
    assert found.data["gains"]["FlowGRPO, clipscore"]["sol_rl"]["mean"] == pytest.approx(0.69, abs=0.05)
    assert found.data["gains"]["FlowGRPO, clipscore"]["usual"]["mean"] == pytest.approx(0, abs=0.05)
    assert not any("not run" in line for line in found.lines)


def test_a_speed_up_over_rewards_has_one_value_for_each_seed() -> None:
    logs = [[0.1, 0.3, 0.5], [0.3, 0.5, 0.7]]
    found = pooled(logs).ratio
    alone = over_seeds(np.array([0.2, 0.4, 0.6]))
    assert found is not None
    assert (found.mean, found.low, found.seeds) == (pytest.approx(np.exp(0.4)), pytest.approx(np.exp(alone.low)), 3)
    assert str(pooled([[0.1, 0.2], [0.1, -np.inf]])) == "reached by 3 of 4 runs"
    assert str(pooled([[0.1, 0.2], [0.1]])) == str(pooled([])) == "not run"


def test_runs_on_damaged_samples_are_compared(tmp_path: Path) -> None:
    assert damaged.section(context_of(PROGRAMME, tmp_path)) is None
    found = damaged.section(finish_all(PROGRAMME, tmp_path, GAINS, "damaged"))
    assert found is not None
    own = {family: found.data["families"][f"every layer, {family}"] for family in ("Sol-RL", "naive quant")}
    assert own["Sol-RL"]["gain"]["mean"] == pytest.approx(0.79, abs=0.1)
    assert own["Sol-RL"]["less naive quant"]["mean"] == pytest.approx(0.59, abs=1e-6)
    assert own["naive quant"]["less Sol-RL"]["mean"] == pytest.approx(-0.59, abs=1e-6)
    assert own["naive quant"]["samples"]["mean"] == pytest.approx((0.2 - 0.8) / 0.1)
    assert row(found.lines, "every layer | 24-in-96 BF16")[2:4] == ["", ""]


def test_layers_of_the_damaged_models_are_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    damaged.write_damaged_models()
    models = [load_backbone(name) for name in ("mini-sana", *map(damaged.damaged_model, damaged.KEPT))]
    own, every, most = (set(one.policy_at("nvfp4").select(one.transformer)) for one in models)
    assert own < most < every
    assert {name.rpartition(".")[0] for name in every - most} == {"time_embed.emb.timestep_embedder"}


def test_ranks_are_compared_with_a_gaussian_model(tmp_path: Path) -> None:
    assert law.section(context_of(PROGRAMME, tmp_path)) is None
    found = law.section(finish_all(PROGRAMME, tmp_path, GAINS, "law"))
    assert found is not None
    whole, large = found.data["settings"]["24 12 6"], found.data["settings"]["384 12 6"]
    assert whole["predicted"] == 1
    assert large["predicted"] > found.data["settings"]["96 12 6"]["predicted"] > 1
    # Twice the gain of 24-in-24 on a straight line, in either setting; the larger group costs more.
    assert large["iterations"]["90%"]["mean"] == pytest.approx(whole["iterations"]["90%"]["mean"])
    assert large["compute"]["FLUX.1, 0.4"]["mean"] < whole["compute"]["FLUX.1, 0.4"]["mean"]
    # All runs are alike, so what is measured over the predicted is less where more is predicted.
    assert found.data["fits"][12]["ratio"] < found.data["settings"]["24 12 6"]["iterations"]["70%"]["mean"]


def test_some_missing_runs_are_named(tmp_path: Path) -> None:
    first, second, _ = finish_trials(PROGRAMME, tmp_path).over_seeds("sol_rl")
    finish(first, tmp_path, 0.5)
    lines = families.section(context_of(PROGRAMME, tmp_path)).lines
    assert families_row(lines, "Sol-RL")[2].endswith("(1 of 3 seeds)")
    assert families_row(lines, "Sol-RL")[3:] == ["not run"] * 2
    finish(second, tmp_path, 0.5, stopped="the loss is nan", after={})
    lines = families.section(context_of(PROGRAMME, tmp_path)).lines
    assert families_row(lines, "Sol-RL")[2].endswith("(1 of 3 seeds, 1 stopped)")


@pytest.mark.parametrize(("target", "at"), [(0.0, 0.0), (1.0, 5.0), (1.5, 7.5), (1.9, 9.5), (3.0, 20.0), (3.5, None)])
def test_the_first_time_at_which_a_curve_reaches_a_reward(target: float, at: float | None) -> None:
    assert first_reached([(0, 0.0), (5, 1.0), (10, 2.0), (15, 1.0), (20, 3.0)], target) == at


def test_a_baseline_that_falls_is_no_target(tmp_path: Path) -> None:
    lines = families.section(finish_all(PROGRAMME, tmp_path, GAINS | {"diffusionnft": -0.1}, "families")).lines
    assert families_row(lines, "Sol-RL")[-1] == "the baseline did not rise in 3 of 3 runs"


def test_true_scenes_show_what_their_prompts_say(tmp_path: Path) -> None:
    ceiling.measure_ceiling("mini-sana", ["verifier", "clipscore"], 8, tmp_path)
    prompts = [one.text for one in read_prompts(find_prompts("shapes"), "test")[:8]]
    found = ceiling.ceiling_of("mini-sana", prompts, tmp_path)
    assert found is not None
    assert found["verifier"].mean() > 0.9
    assert found["clipscore"].mean() > 0.48  # images of the base have 0.43
    assert ceiling.ceiling_of("mini-sana", prompts[:7], tmp_path) is None
    assert ceiling.ceiling_of("mini-sd3", prompts, tmp_path) is None


def test_the_gap_is_decided_only_by_its_whole_interval() -> None:
    assert verdict(Estimate(0.01, -0.09, 0.09, 3)) == "yes"
    assert verdict(Estimate(0.01, -0.09, 0.11, 3)) == "not decided"
    assert verdict(Estimate(0.2, 0.11, 0.3, 3)) == "no"


def test_show_writes_the_page_without_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = finish_trials(Programme(), tmp_path / "runs")
    for seed in (1, 2):
        finish(tuned.experiment("sol_rl", seed), tmp_path / "runs", 0.5)
    words = ["paper", "families", "--show", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*words, "--results", str(RESULTS)])
    assert main() == 1
    assert "Finished: 6 of mini-sana; 4 of them are trials of learning rates." in (tmp_path / "paper.md").read_text()
    found = {path.name for path in (tmp_path / "paper").iterdir()}
    assert found == {"finished.tar.gz", "costs.json"}
    assert "46 runs of families are missing" in capsys.readouterr().err


@pytest.mark.release
def test_tables_are_written_again_from_the_stored_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = finish_trials(Programme(), tmp_path / "runs")
    finish(tuned.experiment("sol_rl", 1), tmp_path / "runs", 0.5)
    words = ["paper", "families", "--show", "--out", str(tmp_path), "--results", str(RESULTS), "--runs"]

    def show(*more: str) -> tuple[str, bytes]:
        monkeypatch.setattr(sys, "argv", [*words, *more])
        assert main() == 1
        return (tmp_path / "paper.md").read_text(), (tmp_path / ARCHIVE).read_bytes()

    first = show(str(tmp_path / "runs"))
    assert "Finished: 5 of mini-sana; 4 of them are trials" in first[0]
    assert show(str(tmp_path / "others"), "--stored") == first
    finish(tuned.experiment("sol_rl", 1, {"model": "a/folder"}), tmp_path / "runs", 0.5)
    more = show(str(tmp_path / "runs"), "--unprepared", "a/folder")
    assert "Finished: 5 of mini-sana and 1 of a/folder; 4 of them are trials" in more[0]
    # Tables without that model leave its run in the archive.
    assert show(str(tmp_path / "third"), "--stored") == (first[0], more[1])
    (tmp_path / ARCHIVE).unlink()
    with pytest.raises(SystemExit, match=r"--stored: got no .*finished.tar.gz"):
        show(str(tmp_path / "others"), "--stored")
