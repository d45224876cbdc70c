"""Runs that share a rollout service, every GPU counted: `python benchmarks/shared_service.py`.

Simulates the service's own queue with seconds that `equal_gpus.py` measured, and compares runs that share serving GPUs
with naive scaling in BF16 on as many GPUs, and with runs that use their GPUs alone without a service. The shares of the
prompts that the service explores and regenerates are the best of each layout, as `explore.share=auto` and
`regenerate.share=auto` find them. Runs that `true_run.py` measured are simulated, too. Needs no GPU.
Writes benchmarks/results/shared_service.{json,md}.
"""

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from solrl_trainer.layouts.layouts import Rates, Stages, served, shipped_rates, stages
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import resolve
from support.results import Results, Row, options, table
from support.service_simulation import simulate
from true_run import STEPS, of_model

MODELS = {"flux1": "FLUX.1 512²", "sd3": "SD3.5-L 1024²", "sana": "SANA 1.6B 1024²"}
PLANS = {"6 steps": {}, "4 fitted steps": {"explore.steps": 4}}
LAYOUTS = ((1, 1), (1, 2), (1, 3), (2, 6), (8, 8))
"""GPUs of the service and numbers of runs, each with a training GPU."""
SPEEDS = {"the same GPU": 1.0, "RTX 5090": 0.42, "L40S": 0.37}
"""Serving GPU → its speed relative to an H200, by the dense FP8 rates in the vendor's data sheets: 1,979, 838 and 733
TFLOPS."""
INTRODUCTION = """By `python benchmarks/shared_service.py`: a simulation of the service's queue, fed with the seconds
that [equal_gpus.md](equal_gpus.md), and of training [true_run.md](true_run.md), measured on an {gpu}. Nothing in
these tables was run as a whole. Each run has one training GPU, 48 prompts per iteration, 24 of 96 candidates and a lag
of one. "× naive" compares prompts per second with naive scaling in BF16 on as many GPUs with the same trainer. "Alone"
is the same for runs that explore on their own GPUs, without a service. A run's share of the service is at most
{unfair:.1%} from equal. `solrl-train layout` is within {error:.1%} of the simulation."""
MEASURED = """By `python benchmarks/true_run.py` on {gpu}s. Simulated with each run's own exploring, training, and
seconds between iterations. An iteration's first sample comes after a push and a regeneration, which weighs less with
more prompts."""


def main() -> None:
    args = options(__doc__).parse_args()
    results = Results("shared_service", args.out, page)
    if not args.render:
        results.found["rows"] = list(rows())
        true_run = args.out / "true_run.json"
        results.found["measured"] = (
            list(measured(json.loads(true_run.read_text())["runs"])) if true_run.is_file() else []
        )
        results.write()
    results.show()


def rows() -> Iterator[Row]:
    """A row for each model, plan, layout and serving GPU."""
    for model in MODELS:
        shipped = shipped_rates(model)
        assert shipped is not None
        gpu, rates = shipped.gpu, shipped.rates
        for plan, settings in PLANS.items():
            config = configured(model, settings)
            parts = stages(config, rates)
            for serving, runs in LAYOUTS:
                for served_by, speed in SPEEDS.items():
                    row = simulated(parts, config.explore.prompts, serving, runs, speed)
                    whole = naive(config, rates, parts)
                    row |= {"naive": whole, "alone": parts.total, "gpu": gpu}
                    yield {"model": model, "plan": plan, "served by": served_by, **row}


def configured(model: str, settings: Mapping[str, Any]) -> RunConfig:
    return resolve(f"{model}/sol_rl/hpsv2", overrides=[f"{name}={value}" for name, value in settings.items()]).config


def simulated(parts: Stages, prompts: int, serving: int, runs: int, speed: float, between: float = 1.0) -> Row:
    """One layout: planned by `solrl-train layout`, and simulated with so many seconds between iterations."""
    planned = served(parts, prompts, serving, 1, runs=runs, speed=speed)
    together, shares = simulate(
        parts,
        prompts=prompts,
        serving=serving,
        runs=runs,
        share=planned.share,
        explored=planned.explored,
        speed=speed,
        push=between,
    )
    return {
        "serving": serving,
        "runs": runs,
        "share": planned.share,
        "explored": planned.explored,
        "planned": planned.seconds / runs,
        "s": together,
        "unfair": max(abs(share * runs - 1) for share in shares),
    }


def measured(runs: Mapping[str, Any]) -> Iterator[Row]:
    """Seconds per prompt of the runs on the simulation's kind of GPU, as measured and as simulated."""
    for model, (plan, settings), number in product(MODELS, PLANS.items(), (1, 2, 3)):
        shipped = shipped_rates(model)
        assert shipped is not None
        family = model.removesuffix("1")
        way = f"both, {plan}" if settings else "both"
        run = runs.get(of_model(family, f"{way}, {number} runs" if number > 1 else way))
        if run is None or not run["devices"][0].startswith(shipped.gpu):
            continue
        parts = own_parts(configured(model, settings), shipped.rates, run)
        yield {
            **{"model": model, "plan": plan, "runs": number, "gpu": shipped.gpu, "prompts": run["prompts"]},
            "s": run["wall"] / run["prompts"],
            "simulated": simulated(parts, run["prompts"], 1, number, 1.0, between(run, parts))["s"],
        }


def own_parts(config: RunConfig, rates: Rates, run: Mapping[str, Any]) -> Stages:
    """Stages with the exploring and training of a measured run; the service was timed alone with `true_run.STEPS`."""
    explore = config.explore
    fewer = explore.candidates * (STEPS - explore.steps) * rates.fp8
    return replace(
        stages(config, rates),
        explore=statistics.median(run["explore_alone"]) - fewer,
        train=run["medians"]["train"] / run["prompts"],
    )


def between(run: Mapping[str, Any], parts: Stages) -> float:
    """Seconds of a measured iteration of pushing, and of regenerating beyond one prompt by the trainer."""
    return float(run["medians"]["push"] + run["medians"]["regenerate"] - parts.regenerate)


def naive(config: RunConfig, rates: Rates, parts: Stages) -> float:
    """Seconds of a prompt on one GPU with naive scaling: all candidates in BF16 with all steps, none regenerated."""
    steps = config.regenerate.steps
    return config.explore.candidates * (steps * rates.bf16 + rates.image) + parts.train


def page(found: Mapping[str, Any]) -> str:
    every = found["rows"]
    same = [row for row in every if row["served by"] == next(iter(SPEEDS))]
    unfair = max(row["unfair"] for row in every)
    error = max(abs(row["planned"] / row["s"] - 1) for row in every)
    introduction = INTRODUCTION.format(gpu=every[0]["gpu"], unfair=unfair, error=error)
    lines = ["# Runs that share a rollout service", "", introduction, ""]
    head = ("plan", "GPUs", "explored by the service", "regenerated by the service", "s per prompt", "× naive", "alone")
    for model, name in MODELS.items():
        lines += [f"## {name}", "", *table(head, (_cells(row) for row in same if row["model"] == model)), ""]
    if runs := found.get("measured"):
        found_cells = (
            (
                MODELS[row["model"]],
                row["plan"],
                f"1 + {row['runs']}",
                row["prompts"],
                f"{row['s']:.2f}",
                f"{row['simulated']:.2f}",
            )
            for row in runs
        )
        lines += ["## Measured", "", MEASURED.format(**runs[0]), ""]
        lines += [
            *table(
                ("model", "plan", "GPUs", "prompts per iteration", "s per prompt, measured", "simulated"), found_cells
            ),
            "",
        ]
    lines += [
        "## Cheaper serving GPUs",
        "",
        "Speed by the vendors' dense FP8 rates alone. Memory, and whether the model fits, are not considered.",
        '"× naive" counts a serving GPU like a training one. The rate of the RTX 5090 is for sums in float16;',
        "float32 has half.",
        "",
    ]
    other = [row for row in every if row["served by"] != next(iter(SPEEDS)) and row["runs"] <= 2]
    cells = ((MODELS[row["model"]], row["served by"], *_cells(row)) for row in other)
    return "\n".join([*lines, *table(("model", "served by", *head), cells), ""])


def _cells(row: Row) -> tuple[str, ...]:
    gpus = row["serving"] + row["runs"]
    fast, alone = row["naive"] / gpus / row["s"], row["naive"] / row["alone"]
    layout = f"{row['serving']} + {row['runs']}"
    shares = (f"{row[share]:.0%}" for share in ("explored", "share"))
    return row["plan"], layout, *shares, f"{row['s']:.2f}", f"{fast:.2f}", f"{alone:.2f}"


if __name__ == "__main__":
    main()
