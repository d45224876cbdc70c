"""The paper's tables: the page from the stored runs, and what only invented runs show."""

import math
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from paper import arms, ceiling
from paper.__main__ import main
from paper.arms import Context
from paper.experiments import RESULTS, Programme
from paper.figures import Figure
from paper.finished import ARCHIVE
from paper.intervals import Estimate, over_seeds
from paper.pace import first_reached, pace
from paper.tables import TABLES, algorithms, families, quantised
from paper.tables.gap import verdict
from paper.tuning import USUAL, trials
from solrl_core.families import load_backbone
from solrl_trainer.prompts.prompt_sets import find_prompts, read_prompts
from support.paper_runs import PROMPTS, context_of, finish, finish_all, finish_trials

PROGRAMME = Programme(rewards=("clipscore", "hpsv2"), judges=("verifier",))


@pytest.mark.slow
def test_the_stored_runs_give_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has every table; other experiments, costs or statistics would give another."""
    stored = (RESULTS / "paper.md").read_text()
    shutil.copytree(RESULTS / "paper", tmp_path / "out" / "paper")
    (said,) = re.findall(r"^By `python benchmarks/paper (.*?)`", stored, re.MULTILINE)
    words = [*shlex.split(said), "--show", "--stored", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["paper", *words, "--runs", str(tmp_path / "runs")])
    main()
    # The last digits of paper.json depend on the processor.
    assert (tmp_path / "out" / "paper.md").read_text() == stored


def cells(context: Context, family: str) -> list[str]:
    """A family's row of the first reward in table 2."""
    return [str(cell) for cell in families.figures(context)["gains"].rows["clipscore", family].values()]


def test_a_table_on_request_stands_once_all_of_its_runs_are_finished(tmp_path: Path) -> None:
    assert not TABLES["margin"].stands(finish_all(PROGRAMME, tmp_path, "gap"))
    assert TABLES["margin"].stands(finish_all(PROGRAMME, tmp_path, "margin"))


def test_layers_of_the_damaged_models_are_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quantised.write_damaged_models()
    models = [load_backbone(name) for name in ("mini-sana", *map(quantised.damaged_model, quantised.KEPT))]
    own, every, most = (set(one.policy_at("nvfp4").select(one.transformer)) for one in models)
    assert own < most < every
    assert {name.rpartition(".")[0] for name in every - most} == {"time_embed.emb.timestep_embedder"}


def test_some_missing_runs_are_named(tmp_path: Path) -> None:
    first, second, _ = finish_trials(PROGRAMME, tmp_path).arm("sol_rl").experiments
    finish(first, tmp_path, 0.5)
    _, gain, less, times = cells(context_of(PROGRAMME, tmp_path), "Sol-RL")
    assert gain.endswith(", 1 of 3 seeds")
    assert (less, times) == ("not run", "not run")
    finish(second, tmp_path, 0.5, stopped="the loss is nan", after={})
    assert cells(context_of(PROGRAMME, tmp_path), "Sol-RL")[1].endswith(", 1 of 3 seeds, 1 stopped")


@pytest.mark.parametrize(
    ("target", "at"), [(0.0, 0.0), (1.0, 5.0), (1.5, 7.5), (1.9, 9.5), (3.0, 20.0), (3.5, math.inf)]
)
def test_the_first_time_at_which_a_curve_reaches_a_reward(target: float, at: float) -> None:
    assert first_reached([(0, 0.0), (5, 1.0), (10, 2.0), (15, 1.0), (20, 3.0)], target) == at


def test_a_speed_up_over_rewards_has_one_value_for_each_seed(tmp_path: Path) -> None:
    tuned = finish_trials(PROGRAMME, tmp_path)
    for reward, gains in (("clipscore", (0.4, 0.8, 0.8)), ("hpsv2", (0.4, 1.6, 1.6))):
        for recipe, by_seed in (("sol_rl", gains), ("diffusionnft", (0.4,) * 3)):
            for one, gain in zip(tuned.arm(recipe, reward=reward).experiments, by_seed, strict=True):
                finish(one, tmp_path, gain)

    context = context_of(PROGRAMME, tmp_path)

    def at(share: float, *rewards: str, ours: str = "sol_rl", theirs: str = "diffusionnft") -> Figure:
        return pace(*([context.arm(recipe, reward=one) for one in rewards] for recipe in (ours, theirs)), share)

    alone = over_seeds(np.log([1, np.sqrt(8), np.sqrt(8)]))
    both = at(0.9, "clipscore", "hpsv2").value
    assert isinstance(both, Estimate)
    assert (both.mean, both.low, both.seeds) == (pytest.approx(np.exp(alone.mean)), pytest.approx(np.exp(alone.low)), 3)
    turned = at(0.9, "clipscore", "hpsv2", ours="diffusionnft", theirs="sol_rl")
    assert str(turned) == "reached by 2 of 6 runs"
    assert str(at(-0.1, "clipscore")) == "the baseline did not rise in 3 of 3 runs"
    assert str(at(0.9)) == str(at(0.9, "clipscore", "pickscore")) == "not run"


def test_true_scenes_show_what_their_prompts_say(tmp_path: Path) -> None:
    ceiling.measure_ceiling("mini-sana", ["verifier", "clipscore"], 8, tmp_path)
    prompts = [one.text for one in read_prompts(find_prompts("shapes"), "test")[:8]]
    found = ceiling.ceiling_of("mini-sana", prompts, tmp_path)
    assert found["verifier"].mean() > 0.9
    assert found["clipscore"].mean() > 0.48  # images of the base have 0.43
    assert ceiling.ceiling_of("mini-sana", prompts[:7], tmp_path) == {}
    assert ceiling.ceiling_of("mini-sd3", prompts, tmp_path) == {}


def test_a_ceiling_is_over_the_base_as_judged_runs_scored_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "ceiling_of", lambda *about: {"clipscore": np.full(PROMPTS, 0.6)})
    for one in trials(PROGRAMME, USUAL).values():
        finish(one, tmp_path, 0.1, within={"clipscore": 0.2})
    assert context_of(PROGRAMME, tmp_path).ceilings == {}
    finish(context_of(PROGRAMME, tmp_path).arm("sol_rl").experiments[0], tmp_path, 0.5)
    assert context_of(PROGRAMME, tmp_path).ceilings == {"clipscore": pytest.approx(1.0)}


def test_the_judge_is_read_when_each_family_reaches_the_reward(tmp_path: Path) -> None:
    programme = Programme(rewards=("clipscore",), judges=("judge",))
    context = finish_all(programme, tmp_path, "families")
    for one in algorithms.arms(finish_all(programme, tmp_path, "algorithms"))["clipscore", "Sol-RL"].experiments:
        # It gains twice as much as 24-in-24, and half as much in the judge.
        curve = [(0, {"clipscore": 0.5, "judge": 0.5}), (40, {"clipscore": 0.6, "judge": 0.525})]
        finish(one, tmp_path, 1.0, curve=curve)
    context = context_of(programme, tmp_path)
    row = algorithms.hacking(context)["at equal reward"].rows["mean of all"]
    found = [row[name].value for name in ("24-in-24 BF16", "Sol-RL", "AWM")]
    assert found == pytest.approx([0.45, 0.1125, 0.45])
    assert row["Sol-RL less 24-in-24 BF16"].value.mean == pytest.approx(0.1125 - 0.45)


def test_seconds_are_those_of_the_stored_iterations() -> None:
    page = (RESULTS / "equal_gpus.md").read_text()
    for shape, costs in families.measured((families.OURS, families.BF16)).items():
        (part,) = re.findall(rf"^## {re.escape(shape.removesuffix(', seconds'))}.*?(?=^## |\Z)", page, re.M | re.S)
        ours, bf16 = (float(re.findall(rf"^\| 1 \| {one} \| ([\d.]+)", part, re.M)[0]) for one in ("sol_rl", "naive"))
        assert costs[families.OURS] / costs[families.BF16] == pytest.approx(ours / bf16, rel=1e-3)


def test_the_gap_is_decided_only_by_its_whole_interval() -> None:
    assert verdict(Estimate(0.01, -0.09, 0.09, 3)) == "yes"
    assert verdict(Estimate(0.01, -0.09, 0.11, 3)) == "not decided"
    assert verdict(Estimate(0.2, 0.11, 0.3, 3)) == "no"


@pytest.mark.slow
def test_show_writes_the_page_without_running_and_again_from_its_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, _ = finish_trials(Programme(), tmp_path / "runs").arm("sol_rl").experiments

    def show(*more: str) -> tuple[str, bytes]:
        monkeypatch.setattr(sys, "argv", ["paper", "families", "--show", "--out", str(tmp_path), "--runs", *more])
        assert main() == 1
        return (tmp_path / "paper.md").read_text(), (tmp_path / ARCHIVE).read_bytes()

    for one in (first, second):
        finish(one, tmp_path / "runs", 0.5)
    shown = show(str(tmp_path / "runs"))
    assert "Finished: 6 of mini-sana; 4 of them are trials of learning rates." in shown[0]
    assert {path.name for path in (tmp_path / "paper").iterdir()} == {"finished.tar.gz", "costs.json"}
    assert "46 runs of families are missing" in capsys.readouterr().err
    assert show(str(tmp_path / "others"), "--stored") == shown
    other = finish_trials(Programme(), tmp_path / "runs").arm("sol_rl", {"model": "a/folder"}).experiments[0]
    finish(other, tmp_path / "runs", 0.5)
    more = show(str(tmp_path / "runs"), "--unprepared", "a/folder")
    assert "Finished: 6 of mini-sana and 1 of a/folder; 4 of them are trials" in more[0]
    # Tables without that model leave its run in the archive.
    assert show(str(tmp_path / "third"), "--stored") == (shown[0], more[1])
    (tmp_path / ARCHIVE).unlink()
    with pytest.raises(SystemExit, match=r"--stored: got no .*finished.tar.gz"):
        show(str(tmp_path / "others"), "--stored")
