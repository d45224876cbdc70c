"""Service and trainer at true size on one GPU each: `python benchmarks/true_run.py --weights FOLDER [--model sana]`.

Writes the model and a reward of HPSv2's size with random weights (FLUX.1: 38 GB) to FOLDER. `solrl-rollout serve` and
`solrl-train run` load them like published ones. Measures how much of the exploration is hidden behind training at a
lag of one, and how long an iteration takes if trainer, service or both regenerate. Writes
docs/results/true_run.{json,md}, which keep the newest run of each.
"""

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from solrl_client.rollouts import RolloutClient
from solrl_core.sampling.fitting import SCHEDULES, identity_solver
from solrl_proto.rollouts import Candidates, Plan, PromptItem, RewardSpec, RolloutRequest
from solrl_trainer.commands.demo import rollout_service
from solrl_trainer.records.folder import saved_settings
from solrl_trainer.records.metrics_file import read_metrics
from support.results import Results, device_name, options, table
from support.true_size import written
from training_phase import PRESETS

OUTPUT = Path("runs/true_run")
CANDIDATES, STEPS = 96, 6
SETTINGS = (
    "prompts=shapes",
    "explore.prompts=1",
    "explore.lag=1",
    "explore.precision=auto",
    "checkpoint_every=1000",
    "evaluate.prompts=2",
    "evaluate.seeds=1",
    "evaluate.steps=2",
    "evaluate.fidelity_prompts=0",
)
"""Changes to the preset …/sol_rl/hpsv2: small evaluations and one prompt per iteration."""
BOTH = ("regenerate.at=service", "explore.prompts=4")
FITTED = f"explore.fitted={json.dumps(identity_solver(SCHEDULES[-1]).model_dump())}"
"""Time does not depend on the coefficients."""
WAYS = {"trainer": (), "both": BOTH, "both, 4 fitted steps": (*BOTH, "explore.steps=4", FITTED)}
"""Side that regenerates → its settings. Both divide the prompts of an iteration by their times."""
PARTS = ("wait", "regenerate", "train", "push")


def main() -> None:
    """Start the service, time exploration alone, train in each way, and write the results."""
    parser = options(__doc__)
    parser.add_argument("--model", default="flux", choices=["flux", "sd3", "sana"])
    parser.add_argument("--weights", type=Path, default=Path("runs/true_size"), help="folder of the random weights")
    parser.add_argument("--iterations", type=int, default=5, help="at least 3")
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"], help="devices of service and trainer")
    parser.add_argument("--regenerate", nargs="+", default=["trainer"], choices=list(WAYS), help="a run for each")
    parser.add_argument("--set", nargs="*", default=[], help="further settings of all runs, key=value")
    parser.add_argument("--naive", type=Path, help="equal_gpus.json to compare runs on its kind of GPU with")
    args = parser.parse_args()
    if args.iterations < 3:
        parser.error(f"got {args.iterations} iterations; expected at least 3, because the first two compile")
    results = Results("true_run", args.out, page)
    if args.naive:
        results.found.setdefault("naive", {}).update(naive(json.loads(args.naive.read_text())["rows"]))
        results.write()
    if args.render:
        return results.show()
    serving, training = args.devices
    model, reward = written(args.weights, serving, args.model)
    subprocess.run(["rm", "-rf", str(OUTPUT)], check=True)
    OUTPUT.mkdir(parents=True)
    # Random weights do not rank.
    flags = ("--device", serving, "--reward-options", json.dumps(reward), "--checks", "off")
    began = time.perf_counter()
    with rollout_service(str(model), OUTPUT / "service.log", ("hpsv2",), flags) as url:
        ready = time.perf_counter() - began
        explore, served = alone(url)
        print(f"ready after {ready:.0f} s; exploring alone: {explore}", file=sys.stderr, flush=True)
        where = [f"{device_name(device)} ({device})" for device in args.devices]
        settings = (
            *SETTINGS,
            f"model={model}",
            f"device={training}",
            f"reward_options={json.dumps(reward)}",
        )
        for way in args.regenerate:
            folder = OUTPUT / way.replace(" ", "-").replace(",", "")
            preset = f"{PRESETS[args.model]}/sol_rl/hpsv2"
            trained(url, folder, preset, args.iterations, (*settings, *WAYS[way], *args.set))
            result = {"model": served, "devices": where, "ready": ready, **compared(explore, folder)}
            results.found.setdefault("runs", {})[of_model(args.model, way)] = result
            results.write()
    return results.show()


def of_model(model: str, text: str) -> str:
    """The key of a result: `text`, after the model's name unless it is FLUX.1."""
    return text if model == "flux" else f"{model}: {text}"


def trained(url: str, folder: Path, preset: str, iterations: int, settings: tuple[str, ...]) -> None:
    """Train into `folder`, with the trainer's output in its train.log."""
    folder.mkdir()
    command = [sys.executable, "-m", "solrl_trainer", "run", "--preset", preset]
    command += ["--rollout-url", url, "--output", str(folder), "--iterations", str(iterations)]
    command += [part for setting in (*settings, f"run=true-{folder.name}") for part in ("--set", setting)]
    with (folder / "train.log").open("w+") as log:
        if code := subprocess.run(command, stdout=log, stderr=log).returncode:
            sys.exit(f"the trainer ended with {code}; the end of its log:\n{Path(log.name).read_text()[-4000:]}")


def alone(url: str) -> tuple[list[float], str]:
    """Seconds of exploring one prompt on an idle service, and a description of the model."""
    with RolloutClient(url, patience=600) as client:
        hosted = client.models().models[0]
        seconds = []
        for root in range(3):
            asked = RolloutRequest(
                model=hosted.name,
                prompts=(PromptItem(id="alone", text=f"{root + 2} red circles"),),
                candidates=Candidates(count=CANDIDATES, seed_root=root),
                plan=Plan(steps=STEPS, solver="dpm2"),
                rewards=(RewardSpec(name="hpsv2"),),
            )
            start = time.perf_counter()
            served = client.rollouts(asked)
            seconds.append(time.perf_counter() - start)
    return seconds[1:], f"{hosted.family}, {hosted.width}×{hosted.height} px, {served.precision}"


def compared(explore: list[float], folder: Path) -> dict[str, Any]:
    """Share of the shorter of exploration and the rest that is hidden, over the iterations after the first two.

    `repeated` is the largest difference, relative to the root mean square, of latents that both sides generated.
    """
    lines, prompts = read_metrics(folder / "metrics.jsonl"), saved_settings(folder).explore.prompts
    pushes = {line["version"]: line["seconds"] for line in lines if line["event"] == "push"}
    iterations = [line for line in lines if line["event"] == "iteration"]
    each = [line["seconds"] | pushes[line["version"]] for line in iterations]
    wall = statistics.median(after["time"] - before["time"] for before, after in pairwise(iterations[1:]))
    middle = {name: statistics.median(one[name] for one in each[2:]) for name in each[-1]}
    alone = statistics.median(explore) * prompts
    rest = sum(middle[name] for name in ("regenerate", "train", "push"))
    hidden = (alone - middle["wait"]) / min(alone, rest)
    noted = re.findall(r"differ\s+by\s+rounding:\s+([\d.e+-]+)", (folder / "train.log").read_text())
    found = {"explore_alone": explore, "prompts": prompts, "iterations": each, "medians": middle, "wall": wall}
    return found | {"rest": rest, "hidden": hidden, "repeated": max(map(float, noted), default=0.0)}


def naive(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Kind of GPU, of a model → seconds per prompt of naive scaling on two, or by one if two were not measured.

    Raises:
        KeyError: a part of naive scaling was not measured.
    """
    found = {}
    for model in {row["model"] for row in rows}:
        own = [row for row in rows if row["model"] == model]
        seconds = {(row["part"], row["gpus"]): row["s"] for row in own}
        parts = [seconds.get((part, 2), seconds[part, 1]) for part in ("naive", "training")]
        found[of_model(model, own[0]["device"])] = sum(parts) / 2
    return found


def page(found: Mapping[str, Any]) -> str:
    """Markdown page of all ways."""
    names = [of_model(model, way) for model in PRESETS for way in WAYS if of_model(model, way) in found["runs"]]
    chosen = [found["runs"][name] for name in names]
    models = [run["model"] for run in chosen]
    repeated = max(run["repeated"] for run in chosen)
    parts = {part: [run["medians"][part] / run["prompts"] for run in chosen] for part in PARTS}
    by_clock = [f"{run['wall'] / run['prompts']:.2f}" if "wall" in run else "not kept" for run in chosen]
    kinds = [run["devices"][0].partition(" (")[0] for run in chosen]
    compare = []
    keys = [of_model(model.partition(",")[0], kind) for model, kind in zip(models, kinds, strict=True)]
    if set(keys) <= set(found.get("naive", ())) and all("wall" in run for run in chosen):
        theirs = [found["naive"][key] for key in keys]
        by_phases = [seconds / sum(values) for seconds, *values in zip(theirs, *parts.values(), strict=True)]
        walls = [seconds * run["prompts"] / run["wall"] for seconds, run in zip(theirs, chosen, strict=True)]
        compare = [
            ("naive scaling on two such GPUs, without what is between phases", ".2f", theirs),
            ("× naive scaling", ".2f", by_phases),
            ("× naive scaling, by the clock", ".2f", walls),
        ]
    rows = [
        ("model", "", models),
        ("two of", "", kinds),
        ("prompts per iteration", "d", [run["prompts"] for run in chosen]),
        ("service ready, including reading weights from disk", ".1f", [run["ready"] for run in chosen]),
        (
            f"exploring {CANDIDATES} candidates of one prompt, alone",
            ".2f",
            [statistics.median(run["explore_alone"]) for run in chosen],
        ),
        *((part, ".2f", values) for part, values in parts.items()),
        ("these four together", ".2f", [sum(values) for values in zip(*parts.values(), strict=True)]),
        ("by the clock, text encoders' way to the GPU and back included", "", by_clock),
        *compare,
        (
            "hidden at a lag of one, of the shorter of exploration and the rest",
            ".1%",
            [run["hidden"] for run in chosen],
        ),
    ]
    cells = [(title, *(format(value, form) for value in values)) for title, form, values in rows]
    lines = [
        "# Service and trainer at true size, random weights",
        "",
        "By `python benchmarks/true_run.py`: the service on one GPU, the trainer on one.",
        "Seconds per prompt, medians of the iterations after the first two.",
        "",
        *table(("regenerated by", *names), cells),
        "",
    ]
    if repeated:
        lines += [f"Latents that both sides generated differ by up to {repeated:.2g} of their root mean square.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
