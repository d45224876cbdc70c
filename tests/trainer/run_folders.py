"""Synthetic run folders, shared by the tests of grid, report and progress."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from solrl_proto.status import ScoringTime, Spread
from solrl_trainer.evaluation.gallery import Gallery, ImageComparison, save_gallery
from solrl_trainer.policy.update import UpdateFigures
from solrl_trainer.records.evaluations import Verdicts
from solrl_trainer.records.records import IterationRecord
from solrl_trainer.settings.presets import resolve

HOSTILE = 'a <script>alert("red")</script> circle & a "square"'
PROMPTS = [HOSTILE, *(f"a picture of {i} cyan crosses to the left of a purple triangle" for i in range(1, 20))]

RESULT: dict[str, Any] = {
    **{"model": "mini-sana", "preset": "mini-sana/sol_rl/clipscore", "run": "made-up", "trained": {"clipscore": 1.0}},
    **{"iterations": 30, "version": 30, "prompts": 128, "images": 512},
    "rewards": {
        "clipscore": {"before": 0.2412, "after": 0.2731, "gain": 0.0319, "low": 0.0281, "high": 0.0357},
        "verifier": {"before": 0.482, "after": 0.673, "gain": 0.191, "low": 0.145, "high": 0.236},
    },
    "spearman": 0.873,
    "seconds": {"explore": 126.0, "wait": 105.0, "regenerate": 42.0, "train": 150.0, "push": 3.0}
    | {"evaluate": 61.0, "total": 385.0},
}
SCORING = (
    ScoringTime(of="candidates", by="service", reward="clipscore", server="there:8200", seconds=1.2),
    ScoringTime(of="samples", by="trainer", reward="clipscore", seconds=0.25),
    ScoringTime(of="samples", by="trainer", reward="verifier", seconds=0.0),
)

LONG_REWARD = "my_company.a_very_long_package_of_rewards:redness_of_the_whole_picture"
SUM: dict[str, float] = {"clipscore": 1.0, LONG_REWARD: -0.2}


def result_of_sum(prompts: int) -> dict[str, Any]:
    """The result of a run on a sum of two rewards, though its preset names one."""
    row = RESULT["rewards"]["clipscore"]
    rows = {"weighted sum": row, **dict.fromkeys(SUM, row), "verifier": RESULT["rewards"]["verifier"]}
    return RESULT | {"trained": SUM, "prompts": prompts, "images": 4 * prompts, "rewards": rows}


def iteration_record(iteration: int) -> IterationRecord:
    score = Spread(mean=0.232, best=0.272 + 0.001 * iteration, worst=0.192 + 0.002 * iteration)
    return IterationRecord(
        **{"iteration": iteration, "explored_version": iteration, "precision": "nvfp4", "numerics": "emulated"},
        **{"score": score, "without_spread": 0.25, "rewards": {"clipscore": score}, "shares": {"clipscore": 1.0}},
        **{"proxy_mean": 0.235 + 0.001 * iteration, "spearman": 0.873 if iteration == 0 else None},
        digest=f"sha256:{iteration:064x}",
        update=UpdateFigures(loss=0.11 - 0.001 * iteration, grad_norm=0.4, grad_norm_max=0.9, figures={}),
        seconds={"explore": 4.2, "wait": 3.5, "regenerate": 1.4, "train": 5.0, "push": 0.1},
        scoring=SCORING,
    )


def iteration_line(iteration: int) -> dict[str, Any]:
    """The line of metrics.jsonl that `iteration_record` becomes."""
    return {"event": "iteration", **iteration_record(iteration).line()}


def write_metrics(folder: Path, iterations: int, ranks: Sequence[float] = (0.873,)) -> None:
    """Write metrics.jsonl after `iterations` iterations, the base evaluation alone; `ranks` at each tenth version."""
    before = {"event": "evaluation", "version": 0, "rewards": {"clipscore": 0.2412, "verifier": 0.482}}
    fidelity: dict[str, Any] = {"event": "fidelity", "prompts": 4, "top_overlap": {"4": 0.44, "8": 0.59, "12": 0.69}}
    fidelity |= {"bottom_overlap": {"4": 0.5, "8": 0.63, "12": 0.73}, "top_rank": 14.2, "bottom_rank": 82.4}
    fidelity |= {"perfect_top": 6.5, "perfect_bottom": 90.5, "best_share": 0.0104}
    measured = [fidelity | {"version": 10 * i, "spearman": spearman} for i, spearman in enumerate(ranks)]
    write_lines(folder, [before, *measured, *(iteration_line(i) for i in range(iterations))])


def sample_images(count: int, side: int = 64, seed: int = 0) -> torch.Tensor:
    """Smooth pictures, each with different colours, float [count, 3, side, side]."""
    coarse = torch.rand(count, 3, 3, 3, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, size=(side, side), mode="bilinear", align_corners=True)


PAIRS = [
    ImageComparison(HOSTILE, 11, "best", 0.3126, 0.3068),
    ImageComparison(HOSTILE, 2**53 - 1, "worst", 0.1923, 0.1995),
]


def write_gallery(folder: Path, prompts: list[str] = PROMPTS, **images: torch.Tensor) -> None:
    """Save a gallery with marks and two pairs; `images` replace the made ones."""
    sizes = {"before": len(prompts), "after": len(prompts), "explored": 2, "regenerated": 2}
    made = {name: sample_images(size, seed=seed) for seed, (name, size) in enumerate(sizes.items(), 1)}
    marks = [(i % 3 == 0, i % 3 != 1) for i in range(len(prompts))]
    seeds = [4_700_000_001 + i for i in range(len(prompts))]
    said = Verdicts("verifier", marks)
    save_gallery(folder, Gallery(prompts=prompts, verdicts=said, pairs=PAIRS, seeds=seeds, **(made | images)))


def run_of_sum(folder: Path, prompts: int) -> None:
    """A complete folder of a finished run on a sum of two rewards, its second in the verifier's place."""
    finished_run(folder)
    (folder / "result.json").write_text(json.dumps(result_of_sum(prompts)))
    metrics = (folder / "metrics.jsonl").read_text().replace('"verifier"', json.dumps(LONG_REWARD))
    lines = [json.loads(line) for line in metrics.splitlines()]
    for line in lines:
        if "low" in line:
            line["low"]["weighted sum"], line["high"]["weighted sum"] = 0.13, 0.15
    write_lines(folder, lines)


def write_lines(folder: Path, lines: list[dict[str, Any]]) -> None:
    """Replace metrics.jsonl."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_config(folder: Path) -> None:
    config = resolve("mini-sana/sol_rl/clipscore", arguments={"run": "made-up", "iterations": 30}).config
    (folder / "config.json").write_text(config.model_dump_json())


def finished_run(folder: Path) -> Path:
    write_metrics(folder, RESULT["iterations"])
    after = {
        "event": "evaluation",
        "version": 30,
        "rewards": {"clipscore": 0.2731, "verifier": 0.673},
        "low": {"clipscore": 0.2693, "verifier": 0.627},
        "high": {"clipscore": 0.2769, "verifier": 0.7},
    }
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(after) + "\n")
    write_config(folder)
    (folder / "result.json").write_text(json.dumps(RESULT))
    write_gallery(folder)
    return folder
