"""GPU time to a reward: seconds of a prompt, ratios, and runs that never get there."""

import math
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from fast.arms import CONFIRM, FAST, STAGES, experiment
from fast.cost import SHAPES, seconds_of_iteration, seconds_of_prompt
from fast.layouts import layouts, speeds
from fast.page import figures, judge_at_target, kept, page, ratio
from solrl_trainer.settings.presets import resolve


def row(arm: str, curve: list[list[float]], seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    """A stored run whose curve has gains in standard deviations, of the reward and the judge."""
    return {
        "stage": "confirm",
        "world": "w",
        "arm": arm,
        "seed": 1,
        "changes": {},
        "iterations": 10,
        "seconds": dict.fromkeys(SHAPES, seconds),
        "curve": curve,
        "within": [1.0, 1.0],
        **more,
    }


BASE = row("24-in-24, β 1", [[0, 0.0, 0.0], [10, 1.0, 0.5]], 20.0)


def test_published_presets_take_the_measured_seconds() -> None:
    """40.06 and 29.32 s of equal_gpus.md less decoding apart, and the parts of 24-in-24 in BF16."""
    ours = seconds_of_prompt(resolve("flux1/sol_rl/clipscore", overrides=["explore.precision=fp8"]).config, "flux")
    assert ours == pytest.approx({"explore": 10.02, "regenerate": 6.92, "train": 12.37}, abs=0.01)
    plain = seconds_of_prompt(resolve("flux1/diffusionnft/clipscore").config, "flux")
    assert plain == pytest.approx({"explore": 27.66 / 4, "regenerate": 0, "train": 12.37}, abs=0.01)


def test_fewer_samples_steps_and_passes_take_less() -> None:
    config = resolve("flux1/fast/clipscore", overrides=["explore.precision=fp8"]).config
    phases = seconds_of_prompt(config, "flux")
    assert phases["explore"] == pytest.approx(10.02 / 4, abs=0.01)
    assert phases["regenerate"] == pytest.approx(6.92 / 6, abs=0.01)
    # 4 of 24 samples at all four levels, without the reference's pass.
    assert phases["train"] == pytest.approx(12.37 / 6 * (1 - 332.3 / 1445.4), abs=0.01)
    assert seconds_of_iteration(config, "flux") == pytest.approx(12 * sum(phases.values()))


def test_the_slower_side_sets_the_pace_and_a_share_of_exploring_evens_it() -> None:
    seconds = {"explore": 2.0, "regenerate": 1.0, "train": 2.0}
    assert speeds(seconds, 1, 1) == pytest.approx((2.5 / 3, 1.0))
    assert speeds(seconds, 1, 3) == pytest.approx((0.625, 0.625))


def test_the_page_of_many_gpus_has_the_computed_table_and_a_ratio_for_each_model() -> None:
    table = layouts()
    assert table in (Path(__file__).parents[2] / "docs/many-gpus.md").read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in row.split("|")[2:-1]] for row in table.splitlines()[2:]]
    rows = [[float(cell.partition(",")[0]) for cell in row] for row in cells]
    assert min(max(model) for model in zip(*rows, strict=True)) >= 0.94


def test_a_ratio_is_of_gpu_time_at_the_baselines_target() -> None:
    quick = row("fast", [[0, 0.0, 0.0], [5, 1.0, 0.2], [10, 1.2, 0.4]], 4.0)
    assert ratio(quick, BASE, 0.5) == pytest.approx(5 * 20 / (2.5 * 4))
    assert judge_at_target(quick, BASE) == pytest.approx(0.9 * 0.2 - 0.9 * 0.5)
    never = row("fast", [[0, 0.0, 0.0], [10, 0.6, 0.1]], 4.0)
    assert ratio(never, BASE, 0.9) == pytest.approx(9 * 20 / (15 * 4))
    assert judge_at_target(never, BASE) is None
    assert math.isfinite(ratio(never, BASE, 0.7))


def test_the_page_has_each_world_and_the_pooled_ratio() -> None:
    quick = row("fast", [[0, 0.0, 0.0], [5, 1.0, 0.2], [10, 0.8, 0.4]], 4.0)
    text = page({"rows": [BASE, quick]})
    assert "| fast | 9.00 | 10.00 |" not in text
    assert "### w" in text
    assert "### all worlds" in text
    assert "| fast | 0.3 | 10.00 | 10.00 | 10.00 | 10.00 | 10.00 | 1.00 | +0.00 | -0.27 | 1.00 | 0.80 | 0 | 1 |" in text


def test_a_stage_without_the_baseline_is_compared_with_fast() -> None:
    """90 % of the best of `fast` after 9 iterations, of the change after 4.5; it ends at 0.8 of its best."""
    fast = row("fast", [[0, 0.0, 0.0], [10, 1.0, 0.2]], 4.0)
    quicker = row("wd.1", [[0, 0.0, 0.0], [5, 1.0, 0.2], [10, 0.8, 0.4]], 4.0)
    text = page({"rows": [{**fast, "stage": "screen"}, {**quicker, "stage": "screen"}]})
    assert "| w | fast | 1.00 | +0.000 | 1.00 |" in text
    assert "| w | wd.1 | 0.50 | +0.000 | 0.80 |" in text


def test_figures_pool_the_worlds_that_an_arm_has_and_a_run_keeps_its_plateau() -> None:
    """9 of world w and 4 of world v have the geometric mean 6; the arm of w alone keeps its figure there."""
    quick = row("fast", [[0, 0.0, 0.0], [5, 1.0, 0.2], [10, 0.8, 0.4]], 4.0)
    slower = {**quick, "seconds": dict.fromkeys(SHAPES, 9.0), "world": "v"}
    plain = row("12-in-12", [[0, 0.0, 0.0], [10, 1.0, 0.5]], 10.0)
    of_stage = figures([BASE, quick, {**BASE, "world": "v"}, slower, plain])
    pooled = of_stage["all worlds"]
    assert pooled["fast"]["time"]["flux"]["90%"]["mean"] == pytest.approx(10 * (4 / 9) ** 0.5)
    assert pooled["12-in-12"]["worlds"] == 1
    assert pooled["12-in-12"]["over"]["90%"]["mean"] == pytest.approx(10 / 2)
    assert of_stage["w"]["fast"]["kept"] == [1.0]
    falls = row("fast", [[0, 0.0, 0.0], [2, 0.5, 0.0], [6, 0.4, 0.0], [10, 1.0, 0.0]])
    assert kept(falls) == 0.5


def test_the_page_on_algorithms_has_the_settings_of_the_runs_on_miniatures() -> None:
    text = (Path(__file__).parents[2] / "docs/algorithms.md").read_text(encoding="utf-8")
    section = text.partition("\n## `fast`, exactly\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?:\d )?`([\w.]+)`[^|]*\|([^|]*)\|[^|]*\|([^|]*)\|$", section, re.MULTILINE)
    config = experiment(CONFIRM, CONFIRM.worlds[0], FAST, 201).config
    for name, preset, changed in rows:
        value = reduce(getattr, name.split("."), config)
        assert (changed.strip() or preset.strip()) == ("off" if value is None else f"{value:.7g}"), name
    judged = config.evaluate
    images = (
        f"{judged.prompts} prompts × {judged.seeds} images in {judged.steps} steps, every {judged.every} iterations"
    )
    said = " ".join(section.split())
    assert f"explored in {config.explore.precision.upper()}, and evaluated {images}" in said


def test_every_arm_of_a_stage_resolves_with_seeds_of_its_own() -> None:
    for stage in STAGES.values():
        for world in stage.worlds:
            runs = [experiment(stage, world, arm, seed) for arm in stage.arms for seed in stage.seeds]
            assert len({run.name for run in runs}) == len(runs)
            for run in runs:
                assert run.config.guidance == world.guidance
                assert run.config.optimizer.cosine_iterations == run.config.iterations
