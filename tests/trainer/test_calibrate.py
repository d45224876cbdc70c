"""`solrl-train calibrate`: plans are measured, and the cheapest that selects well enough is written for a run."""

from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from solrl_core.families import load_backbone
from solrl_core.generator import Generator
from solrl_core.rewards import RewardSet
from solrl_proto.rollouts import Plan, Prune
from solrl_trainer import calibrate as module
from solrl_trainer.calibrate import calibrate, plans, score_group
from solrl_trainer.frontier import frontier
from solrl_trainer.presets import resolve
from solrl_trainer.prompts import find_prompts, read_prompts

PRESET = "mini-sana/sol_rl/clipscore"
SMALL = ("explore.candidates=24", "explore.keep=8", "explore.precision=nvfp4", "regenerate.steps=4")


def test_every_tier_is_tried_at_all_lengths_whole_and_pruned() -> None:
    found = plans(("nvfp4", "bf16"), 96, 24, "dpm2", 1.0)
    assert len(found) == 2 * (5 + 3)
    assert {plan.prune.keep for plan in found if plan.prune} == {48}
    assert all(plan.prune.after < plan.steps for plan in found if plan.prune)
    assert all(plan.solver == "dpm2" for plan in found)
    assert not any(plan.prune for plan in plans(("bf16",), 24, 24, "euler", 1.0))


def test_survivors_score_as_in_a_whole_group() -> None:
    config = resolve(PRESET, overrides=SMALL).config
    backbone = load_backbone("mini-sana")
    generator, rewards = Generator(backbone, "bf16"), RewardSet.load(["clipscore"], backbone)
    prompt = read_prompts(find_prompts("shapes"), "test")[0]
    whole = Plan(steps=4)
    pruned = whole.model_copy(update={"prune": Prune(after=2, keep=8)})
    full, part = (score_group(generator, rewards, config, plan, prompt, range(24)) for plan in (whole, pruned))
    made = ~part.isnan()
    assert int(made.sum()) == 8
    assert not full.isnan().any()
    assert torch.allclose(part[made], full[made], atol=1e-4)


def test_the_cheapest_good_plan_is_written_for_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", (1, 4))
    notes: list[str] = []
    config = resolve(PRESET, overrides=SMALL).config
    summary = calibrate(config, tmp_path, notes.append, prompts=2, wanted=0.3)
    by_name = {row["name"]: row for row in summary["plans"]}
    assert len(by_name) == 6
    # The same steps in the same precision as the truth: nothing is lost.
    assert by_name["bf16 4 steps"]["spearman"] == pytest.approx(1.0, abs=1e-3)
    assert by_name["bf16 4 steps"]["separation"] == pytest.approx(1.0, abs=1e-3)
    good = [row for row in summary["plans"] if row["separation"] >= 0.3]
    chosen = min(good, key=lambda row: row["seconds"])
    assert summary["chosen"] == chosen["name"]
    written = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    explore = resolve(PRESET, overrides=SMALL[:2], file=written).config.explore
    assert (explore.steps, explore.precision) == (chosen["plan"]["steps"], chosen["plan"]["precision"])
    with Image.open(tmp_path / "frontier.png") as picture:
        assert picture.width > 800


def test_no_plan_is_chosen_where_none_is_good_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", (1,))
    config = resolve(PRESET, overrides=[*SMALL, "explore.precision=bf16"]).config
    summary = calibrate(config, tmp_path, lambda text: None, prompts=1, wanted=1.0)
    assert summary["chosen"] is None
    assert not (tmp_path / "plan.yaml").exists()


def test_the_frontier_is_what_nothing_beats_in_both() -> None:
    points = [("a", 1.0, 0.2), ("b", 2.0, 0.1), ("c", 2.0, 0.5), ("d", 3.0, 0.5), ("e", 4.0, 0.9)]
    assert [name for name, _, _ in frontier(points)] == ["a", "c", "e"]
