"""The paper's tables, from invented runs."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from paper import ceiling
from paper.__main__ import main
from paper.experiments import Programme
from paper.intervals import Estimate, over_seeds
from paper.page import write_page
from paper.stored import ARCHIVE
from paper.tables import algorithms, families, gap, hacking, quantised, sweeps
from paper.tables.common import Context, ceiling_text, gain_text
from paper.tables.gap import verdict
from paper.tables.pace import first_reached, pooled
from paper_runs import RESULTS, context_of, finish, finish_all, finish_trials
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


def row(lines: object, start: str) -> list[str]:
    """Cells of the table row that begins with this text."""
    assert isinstance(lines, list)
    (found,) = [line for line in lines if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def families_row(lines: object, family: str) -> list[str]:
    """Cells of a family's row of the first reward, without the reward."""
    return row(lines, f"clipscore | {family}")[1:]


def test_without_runs_every_figure_is_not_run(tmp_path: Path) -> None:
    text = write_page(Context(PROGRAMME, {}, RESULTS), tmp_path, tmp_path, "python benchmarks/paper")
    for line in text.splitlines():
        ours = [cell for cell in line.split("|") if re.search(r"[+-]\d\.\d", cell)]
        assert not ours, line
    assert text.count("not run") > 50
    assert list(tmp_path.glob("paper/*")) == []
    assert json.loads((tmp_path / "paper.json").read_text())["runs"] == 0


def test_families_gain_and_reach_the_baseline(tmp_path: Path) -> None:
    lines = families.section(finish_all(PROGRAMME, tmp_path, GAINS, "families")).lines
    base = families_row(lines, "24-in-24 BF16")
    assert float(base[2].split()[0]) == pytest.approx(0.4, abs=0.05)
    assert [line.split("|")[1].strip() for line in lines if " | Sol-RL |" in line] == list(PROGRAMME.rewards)
    assert base[3:] == ["", ""]
    naive = families_row(lines, "24-in-96 BF16")
    assert [float(cell.split()[0]) for cell in naive[2:4]] == pytest.approx([0.8, 0.4], abs=0.05)
    # A straight line to twice the reward reaches it after half of the iterations.
    assert naive[-1].startswith("2.00 [2.00, ")
    assert families_row(lines, "24-in-96 naive quant")[-1] == "reached in 0 of 3 runs"


def test_a_speed_up_in_compute_is_that_in_iterations_over_the_cost_of_one(tmp_path: Path) -> None:
    context = finish_all(PROGRAMME, tmp_path, GAINS, "families")
    section = families.section(context)
    figures = section.data
    assert figures["iterations"]["24-in-96 BF16"]["90%"]["mean"] == pytest.approx(2.0)
    assert figures["iterations of BF16"]["90%"]["mean"] == pytest.approx(0.79 / 0.8)
    for name in ("24-in-96 BF16", "Sol-RL"):
        for clock, one in figures["compute"][f"{name}, 90%"].items():
            expected = figures["iterations"][name]["90%"]["mean"] / figures["cost of an iteration"][name][clock]
            assert one["mean"] == pytest.approx(expected)
    costs = figures["cost of an iteration"]["24-in-96 BF16"]
    # It denoises four times as much, and training costs the same: fewer trained noise levels make it dearer.
    assert 1 < costs["FLUX.1, 0.6"] < costs["FLUX.1, 0.4"] < 4
    assert figures["compute"]["24-in-96 naive quant, 100%"]["FLUX.1, 0.4"] is None
    assert figures["iterations"]["24-in-96 naive quant"]["30%"]["mean"] == pytest.approx(0.5)


def test_a_speed_up_over_rewards_has_one_value_for_each_seed() -> None:
    logs = [[0.1, 0.3, 0.5], [0.3, 0.5, 0.7]]
    found = pooled(logs).ratio
    alone = over_seeds(np.array([0.2, 0.4, 0.6]))
    assert found is not None
    assert (found.mean, found.low, found.seeds) == (pytest.approx(np.exp(0.4)), pytest.approx(np.exp(alone.low)), 3)
    assert str(pooled([[0.1, 0.2], [0.1, -np.inf]])) == "not reached by every run"
    assert str(pooled([[0.1, 0.2], [0.1]])) == str(pooled([])) == "not run"


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


def test_algorithms_are_compared_at_their_own_learning_rates(tmp_path: Path) -> None:
    context = finish_all(PROGRAMME, tmp_path, GAINS, "algorithms")
    lines = algorithms.section(context).lines
    (ours,) = [line for line in lines if line.startswith("| Sol-RL | 0.5")]
    assert ours.count("+0.7") + ours.count("+0.8") >= 2
    apart = lines[lines.index(next(line for line in lines if line.startswith("Sol-RL's gain less"))) :]
    for name, recipe in algorithms.ALGORITHMS.items():
        if name != "Sol-RL":
            ahead = next(line for line in apart if line.startswith(f"| {name} |")).split("|")[2]
            assert float(ahead.split()[0]) == pytest.approx(GAINS["sol_rl"] - GAINS[recipe], abs=0.05)
    counts = {name: algorithms.runs_of(context, name, "hpsv2")[0].config.iterations for name in algorithms.ALGORITHMS}
    assert counts["Sol-RL"] == 40 < counts["DiffusionNFT"] < counts["DanceGRPO"]


def test_an_algorithm_without_trials_is_not_tuned(tmp_path: Path) -> None:
    lines = algorithms.section(context_of(PROGRAMME, tmp_path)).lines
    assert "not run: not tuned" in next(line for line in lines if line.startswith("| AWM | "))
    assert len(algorithms.experiments(context_of(PROGRAMME, tmp_path))) == 20
    assert len(algorithms.experiments(context_of(PROGRAMME, tmp_path), whole=True)) == 20 + 5 * 2 * 3


def test_sol_rl_is_compared_over_all_rewards(tmp_path: Path) -> None:
    context = finish_all(PROGRAMME, tmp_path, GAINS, "algorithms")
    section = algorithms.section(context)
    awm = section.data["compared"]["AWM"]
    assert awm["less"]["mean"] == pytest.approx(0.29, abs=0.05)
    assert (awm["ahead"], awm["pairs"]) == (6, 6)
    assert awm["more"]["mean"] == pytest.approx(0.79 / 0.5 - 1, abs=0.1)
    # Means over the rewards of the programme, of gains over the base in the paper's table.
    assert awm["more, paper"] == pytest.approx(((0.3089 - 0.2630) / 0.0409 + (0.3688 - 0.2566) / 0.1098) / 2 - 1)
    spent = section.data["spent"]
    assert [spent[name]["recomputed"] > 0.1 for name in spent] == [True, True, False, False, False]
    assert spent["Sol-RL"]["steps"] == 240


def test_the_ceiling_stands_beside_gains_of_the_prompts_that_it_was_measured_on(tmp_path: Path) -> None:
    context = finish_all(PROGRAMME, tmp_path, GAINS, "gap")
    runs = context.tuned.over_seeds("sol_rl")
    assert context.ceiling("clipscore") is None
    assert "%" not in gain_text(context, runs, "clipscore")
    prompts = context.finished(runs)[0].prompts
    scores = {"clipscore": [0.7] * len(prompts)}
    (tmp_path / "paper").mkdir()
    (tmp_path / ceiling.STORED).write_text(json.dumps({"mini-sana": {"prompts": prompts, "scores": scores}}))
    measured = replace(context, results=tmp_path)
    # The base has 0.5, with a deviation of 0.1.
    assert measured.ceiling("clipscore") == pytest.approx(2.0)
    assert re.fullmatch(r"\+0\.[78]\d+ \[.*\], (39|40)%", gain_text(measured, runs, "clipscore"))
    assert ceiling_text(measured, ["clipscore", "hpsv2"])[1].endswith("mini-sana: +2.00 with clipscore.")


def test_true_scenes_show_what_their_prompts_say(tmp_path: Path) -> None:
    ceiling.measure_ceiling("mini-sana", ["verifier", "clipscore"], 8, tmp_path)
    prompts = [one.text for one in read_prompts(find_prompts("shapes"), "test")[:8]]
    found = ceiling.ceiling_of("mini-sana", prompts, tmp_path)
    assert found is not None
    assert found["verifier"].mean() > 0.9
    assert found["clipscore"].mean() > 0.48  # images of the base have 0.43
    assert ceiling.ceiling_of("mini-sana", prompts[:7], tmp_path) is None
    assert ceiling.ceiling_of("mini-sd3", prompts, tmp_path) is None


def test_the_gap_is_decided_only_by_its_whole_interval(tmp_path: Path) -> None:
    lines = gap.section(finish_all(PROGRAMME, tmp_path, GAINS, "gap")).lines
    cells = row([next(line for line in lines if line.startswith("| 40 |"))], "40")
    assert re.match(r"[+-][\d.]+% \[[+-][\d.]+%, [+-][\d.]+%\]", cells[4])
    assert abs(float(cells[4].split("%")[0])) < 10
    assert verdict(Estimate(0.01, -0.09, 0.09, 3)) == "yes"
    assert verdict(Estimate(0.01, -0.09, 0.11, 3)) == "not decided"
    assert verdict(Estimate(0.2, 0.11, 0.3, 3)) == "no"


def test_a_fall_is_measured_from_the_best_evaluation(tmp_path: Path) -> None:
    one = finish_trials(PROGRAMME, tmp_path).experiment("naive_quant", 1)
    finish(one, tmp_path, 0.3, curve=[(0, {"clipscore": 0.5}), (5, {"clipscore": 0.58}), (40, {"clipscore": 0.53})])
    context = context_of(PROGRAMME, tmp_path)
    assert quantised.fall(context.runs[one.name], "clipscore") == pytest.approx(0.5)
    assert any("--unprepared MODEL" in line for line in quantised.section(context).lines)


def test_damage_is_measured_on_the_samples_of_the_base(tmp_path: Path) -> None:
    context = finish_all(PROGRAMME, tmp_path, GAINS, "families")
    for seed, lost in ((1, 0.01), (2, 0.02), (3, 0.03)):
        one = context.tuned.experiment("naive_quant", seed)
        exact = context.runs[context.tuned.experiment("naive_scaling", seed).name].iterations[0]
        finish(one, tmp_path, 0.2, iterations=[exact | {"proxy_mean": exact["proxy_mean"] - lost}])
    _, found = quantised.damage(context_of(PROGRAMME, tmp_path))
    # A deviation is 0.1.
    assert found["clipscore"]["samples"]["mean"] == pytest.approx(-0.2)
    assert found["clipscore"]["ahead"]["mean"] == pytest.approx(0.2 - 0.79, abs=0.05)
    assert found["clipscore"]["iterations"] is None
    assert found["mean of all, mini-sana"]["ahead"]["high"] < 0


def test_ranks_are_given_along_the_run(tmp_path: Path) -> None:
    programme = finish_trials(PROGRAMME, tmp_path)
    for seed, last in ((1, 0.6), (2, 0.7)):
        lines = [{"version": 0, "spearman": 0.8}, {"version": 10, "spearman": last}]
        finish(programme.experiment("sol_rl", seed), tmp_path, 0.3, fidelity=lines)
    found = quantised.ranks_along(context_of(PROGRAMME, tmp_path), {})
    assert {version: (one.mean, one.seeds) for version, one in found.items()} == {
        0: (pytest.approx(0.8), 2),
        10: (pytest.approx(0.65), 2),
    }
    lines = quantised.section(context_of(PROGRAMME, tmp_path)).lines
    assert row(
        lines[lines.index(next(line for line in lines if line.startswith("Ranks along"))) :], "mini-sana, 40 iterations"
    )[1:] == ["0.80 [0.80, 0.80]", "0.65 [0.01, 1.29]"]


def test_other_weights_have_rows_of_their_own(tmp_path: Path) -> None:
    programme = Programme(unprepared="a/folder")
    context = context_of(programme, tmp_path)
    assert [line for line in quantised.section(context).lines if line.startswith("| a/folder, 40 iterations |")]
    assert [line for line in families.section(context).lines if line.startswith("| clipscore, a/folder | Sol-RL |")]
    for one in (families, quantised):
        models = {experiment.config.model for experiment in one.experiments(context, whole=True)}
        assert models == {"mini-sana", "a/folder"}


def test_sweeps_show_measured_and_predicted_matches(tmp_path: Path) -> None:
    section = sweeps.section(finish_all(PROGRAMME, tmp_path, GAINS, "sweeps"))
    lines = section.lines
    grids = [line for line in lines if line.startswith("| 96 |")]
    gains, apart, matches = ([cell.strip() for cell in line.strip("|").split("|")] for line in grids)
    assert gains[1].startswith("+0.7") or gains[1].startswith("+0.8")
    assert gains[-1] == "0.3686"
    assert apart[-1] == ""  # the usual setting, to which the others are compared
    assert all(re.match(r"(\*\*)?[+-]0\.\d+ \[", cell) for cell in apart[1:-1])
    assert [cell.split(",")[0] for cell in matches[1:]] == ["70.0%", "75.0%", "80.0%"]
    predicted = [float(cell.split(", ")[1].rstrip("%")) for cell in matches[1:]]
    assert predicted == sorted(predicted)
    assert section.data["per doubling"]["mean of all"]["mean"] == pytest.approx(0, abs=1e-9)
    assert row(lines, "4 fitted steps, after 3 keep 48")[1].startswith("+0.")
    assert row(lines, "8")[3] == "0.3659"
    assert [row(lines, setting)[2] for setting in ("6", "6 steps", "0")] == [""] * 3
    assert all(
        re.match(r"(\*\*)?[+-]0\.[01]\d+ \[", row(lines, setting)[2]) for setting in ("8", "4 fitted steps", "1")
    )


def test_a_model_without_fitted_steps_says_so(tmp_path: Path) -> None:
    (tmp_path / "plan_fidelity.json").write_text('{"solvers": {}}')
    for name in ("step_time.json", "training_phase.json"):
        (tmp_path / name).symlink_to(RESULTS / name)
    lines = sweeps.section(Context(PROGRAMME, {}, tmp_path)).lines
    assert "Fitted steps: not run; plan_fidelity.json has none for mini-sana." in lines


def test_hacking_names_the_judges_that_fell(tmp_path: Path) -> None:
    context = finish_all(PROGRAMME, tmp_path, GAINS, "hacking")
    (run, *_) = algorithms.runs_of(context, "AWM", "clipscore") or []
    for one in algorithms.runs_of(context, "AWM", "clipscore") or []:
        found = context.runs[one.name]
        finish(one, tmp_path, 0.5, after={**found.after, "verifier": found.before["verifier"] - 0.05})
    lines = hacking.section(context_of(PROGRAMME, tmp_path)).lines
    awm = [line for line in lines if line.startswith("| clipscore | AWM |")]
    cells = [cell.strip() for cell in awm[0].strip("|").split("|")]
    assert cells[2].startswith("**+0.")
    assert cells[-2:] == ["verifier", f"[grid](paper/{run.name}.png)"]
    other = next(line for line in lines if line.startswith("| hpsv2 | AWM |"))
    assert "| none |" in other


def test_show_writes_page_and_plots_without_running(
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
    assert found == {"curves.png", "finished.tar.gz", "costs.json"}
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
