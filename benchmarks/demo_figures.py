"""Figures of finished demos: `python benchmarks/demo_figures.py RUN_FOLDER… [--world WORLD] [--note TEXT]`.

To be run on their machine. The folders are from `solrl-train demo --seed N --output FOLDER`, one per seed. It only
reads their files, and writes benchmarks/results/demo.{json,md}, or demo_shapes.{json,md} with `--world shapes`.
"""

import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from solrl_trainer.commands.demo import WORLDS, World, demo_config
from solrl_trainer.commands.demo_words import HANDICAP, by_tesseract
from solrl_trainer.evaluation.gallery import load_gallery
from solrl_trainer.run_folder.figures import (
    READ_RIGHT,
    duration_text,
    gain_text,
    interval_text,
    reward_label,
    reward_text,
)
from solrl_trainer.run_folder.folder import saved_settings
from solrl_trainer.run_folder.metrics_file import read_metrics
from solrl_trainer.settings.config import RunConfig
from support.caveats import PREPARED_FOR_NVFP4, STRICT_ACCURACY
from support.results import Results, Row, options, table

OWN = ("seed", "run", "output", "rollout_url")
"""Settings in which demos differ."""
RESULTS = {"words": "demo", "shapes": "demo_shapes"}
"""World of a demo → name of its results."""
PLAN = """Exploration takes four steps fitted to the model, by the
[plan](../../minis/solrl_minis/weights/mini-sana/plan.json) of `python benchmarks/demo_plan.py`."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("runs", nargs="*", type=Path, help="folders of finished demos, with different seeds")
    parser.add_argument("--world", choices=tuple(WORLDS), default="words", help="of the demos (default: words)")
    parser.add_argument("--note", default="", help="a sentence about the machine at that time, such as its other work")
    args = parser.parse_args()
    results = Results(RESULTS[args.world], args.out, page)
    if args.render:
        return results.show()
    if not args.runs:
        parser.error("got no folder; expected those of finished demos")
    try:
        rows = sorted((row(folder, WORLDS[args.world]) for folder in args.runs), key=lambda one: one["seed"])
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    if len({one["seed"] for one in rows}) < len(rows):
        sys.exit(f"got runs of the seeds {[one['seed'] for one in rows]}; expected different ones")
    world = WORLDS[args.world]
    about = {"world": args.world, "processor": processor(), "note": args.note, "settings": world.settings}
    results.found = {**about, "plan": PLAN if world.plan else "", "runs": rows}
    results.write()
    return results.show()


def row(folder: Path, world: World) -> Row:
    """Figures of one run of a world's demo; of words also the shares that Tesseract reads right, if it is installed.

    Raises:
        FileNotFoundError: the folder contains no finished run.
        ValueError: it is not such a demo of this version.
    """
    config = saved_settings(folder)
    expected = comparable(demo_config(world))
    if differing := sorted(key for key, value in comparable(config).items() if value != expected[key]):
        raise ValueError(f"{folder} is not of this demo: its settings differ in {', '.join(differing)}")
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    last = [line for line in read_metrics(folder / "metrics.jsonl") if line["event"] == "iteration"][-1]
    figures = {name: result[name] for name in ("iterations", "images", "rewards", "spearman", "seconds")}
    if world is WORLDS["words"] and (shares := by_tesseract(load_gallery(folder))) is not None:
        figures["tesseract"] = dict(zip(("before", "after"), shares, strict=True))
    return {"seed": config.seed, "explored_in": f"{last['precision'].upper()} ({last['numerics']})", **figures}


def comparable(config: RunConfig) -> dict[str, Any]:
    """Settings that must be those of the demo."""
    return config.model_dump(mode="json", exclude=set(OWN))


def processor() -> str:
    """Kind and cores of this machine's processor, and the instructions that torch uses."""
    found = {"model name": platform.machine(), "cpu family": "?", "model": "?"}
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else ():
        name, _, value = line.partition(":")
        if name.strip() in found:
            found[name.strip()] = value.strip()
    kind, family, model = found.values()
    cores = len(os.sched_getaffinity(0))
    used = torch.backends.cpu.get_cpu_capability()  # type: ignore[no-untyped-call]
    return f"{kind} (family {family}, model {model}), {cores} cores, {used}, torch {torch.__version__}"


def page(result: Mapping[str, Any]) -> str:
    rows: Sequence[Row] = result["runs"]
    where = {one["explored_in"] for one in rows}
    world, shapes = WORLDS[result["world"]], result["world"] == "shapes"
    seeds = ", ".join(str(one["seed"]) for one in rows)
    settings = ", ".join(f"`{setting}`" for setting in result["settings"][1:])
    lines = [
        "# The demo of shapes" if shapes else "# The demo",
        "",
        f"`solrl-train demo{' --world shapes' * shapes}` with the seeds {seeds}, one run each, gathered by",
        f"`python benchmarks/demo_figures.py`. {rows[0]['iterations']} iterations of `{world.preset}` with",
        f"{settings}; explored in {' and '.join(sorted(where))}.",
        *([result["plan"]] if result["plan"] else []),
        f"Means over {rows[0]['images']} images of held-out prompts, same seeds before and after, averaged weights;",
        "gains with their 95 % interval over prompts.",
        "",
        f"{result['processor']}.",
        "Gains differ between kinds of processor, by the rounding of BF16.",
        *([result["note"]] if result["note"] else []),
        "",
        *([*STRICT_ACCURACY, "", *PREPARED_FOR_NVFP4, ""] if shapes else [HANDICAP, ""]),
        *table(("reward", "seed", "before", "after", "gain"), _gains(rows)),
    ]
    phases = ("explore", "wait", "regenerate", "train", "push", "evaluate", "total")
    lines += [
        "",
        "Time in the trainer, without the start of the service. Exploration is partly in parallel with other phases;",
        "wait is the part that the trainer waited for it.",
        "",
        *table(("seed", *phases, *["Spearman of proxy against BF16"] * shapes), (_times(one, phases) for one in rows)),
    ]
    return "\n".join(lines) + "\n"


def _gains(rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    for name in rows[0]["rewards"]:
        label = reward_label(name)
        for one in rows:
            figures = one["rewards"][name]
            before, after = (reward_text(name, figures[when]) for when in ("before", "after"))
            gain = f"{gain_text(name, figures['gain'])} {interval_text(name, figures['low'], figures['high'])}"
            yield label, one["seed"], before, after, gain
        if len(rows) > 1:
            yield label, "mean", "", "", gain_text(name, statistics.mean(one["rewards"][name]["gain"] for one in rows))
    for one in rows:
        if "tesseract" in one:
            before, after = (one["tesseract"][when] for when in ("before", "after"))
            gain = gain_text(READ_RIGHT, after - before)
            yield "read right (Tesseract)", one["seed"], *(reward_text(READ_RIGHT, v) for v in (before, after)), gain


def _times(one: Row, phases: Sequence[str]) -> Sequence[str]:
    seconds = (duration_text(one["seconds"].get(phase, 0.0)) for phase in phases)
    return one["seed"], *seconds, *([] if one["spearman"] is None else [f"{one['spearman']:.3f}"])


if __name__ == "__main__":
    main()
