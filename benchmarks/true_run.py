"""Service and trainer at FLUX.1's true size on one GPU each: `python benchmarks/true_run.py --weights FOLDER`.

Writes FLUX.1 and a reward of HPSv2's size with random weights (38 GB) to FOLDER. `solrl-rollout serve` and
`solrl-train run` load them like published ones. Measures how much of the exploration is hidden behind training at a
lag of one. Writes docs/results/true_run.{json,md}.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from solrl_proto.rollouts import Candidates, Plan, PromptItem, RewardSpec, RolloutRequest
from solrl_trainer.client import RolloutClient
from solrl_trainer.demo import rollout_service
from solrl_trainer.metrics import read_metrics
from true_size import written

OUTPUT = Path("runs/true_run")
CANDIDATES, STEPS = 96, 6
SETTINGS = (
    "prompts=shapes",
    "explore.prompts=1",
    "explore.lag=1",
    "explore.precision=auto",
    "evaluate.prompts=2",
    "evaluate.seeds=1",
    "evaluate.steps=2",
    "evaluate.fidelity_prompts=0",
)
"""Changes to the preset flux1/sol_rl/hpsv2: small evaluations and one prompt per iteration."""


def main() -> None:
    """Start the service, time exploration alone, train, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True, help="folder of the random weights; written if missing")
    parser.add_argument("--iterations", type=int, default=5, help="at least 3")
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"], help="devices of service and trainer")
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the trainer, key=value")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    if args.iterations < 3:
        parser.error(f"got {args.iterations} iterations; expected at least 3, because the first two compile")
    serving, training = args.devices
    model, options = written(args.weights, serving)
    subprocess.run(["rm", "-rf", str(OUTPUT)], check=True)
    OUTPUT.mkdir(parents=True)
    flags = ("--device", serving, "--reward-options", json.dumps(options))
    began = time.perf_counter()
    with rollout_service(str(model), OUTPUT / "service.log", ("hpsv2",), flags, ready_seconds=600) as url:
        ready = time.perf_counter() - began
        explore, served = alone(url)
        print(f"ready after {ready:.0f} s; exploring alone: {explore}", file=sys.stderr, flush=True)
        settings = (
            *SETTINGS,
            *args.set,
            f"model={model}",
            f"device={training}",
            f"reward_options={json.dumps(options)}",
        )
        command = [sys.executable, "-m", "solrl_trainer", "run", "--preset", "flux1/sol_rl/hpsv2"]
        command += ["--rollout-url", url, "--output", str(OUTPUT), "--iterations", str(args.iterations)]
        command += [part for setting in settings for part in ("--set", setting)]
        with (OUTPUT / "train.log").open("w+") as log:
            if code := subprocess.run(command, stdout=log, stderr=log).returncode:
                sys.exit(f"the trainer ended with {code}; the end of its log:\n{Path(log.name).read_text()[-4000:]}")
    where = ["a CPU" if name == "cpu" else f"{torch.cuda.get_device_name(name)} ({name})" for name in args.devices]
    result = {"model": served, "devices": where, "ready": ready, **compared(explore, OUTPUT / "metrics.jsonl")}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "true_run.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "true_run.md").write_text(table(result))
    print(table(result))


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


def compared(explore: list[float], metrics: Path) -> dict[str, Any]:
    """Share of the shorter of exploration and the rest that is hidden, over the iterations after the first two."""
    lines = read_metrics(metrics)
    pushes = {line["version"]: line["seconds"] for line in lines if line["event"] == "push"}
    each = [line["seconds"] | pushes[line["version"]] for line in lines if line["event"] == "iteration"]
    middle = {name: statistics.median(one[name] for one in each[2:]) for name in each[-1]}
    alone = statistics.median(explore)
    rest = sum(middle[name] for name in ("regenerate", "train", "push"))
    hidden = (alone - middle["wait"]) / min(alone, rest)
    return {"explore_alone": explore, "iterations": each, "medians": middle, "rest": rest, "hidden": hidden}


def table(result: dict[str, Any]) -> str:
    """Markdown table of the result."""
    middle, alone = result["medians"], statistics.median(result["explore_alone"])
    return "\n".join(
        [
            "# Service and trainer with FLUX.1 at true size, random weights",
            "",
            f"By `python benchmarks/true_run.py`: {result['model']}; the service on {result['devices'][0]},",
            f"the trainer on {result['devices'][1]}. Seconds, medians over the iterations after the first two.",
            "",
            "| | s |",
            "|---|---|",
            f"| service ready, including reading weights from disk | {result['ready']:.1f} |",
            f"| exploring {CANDIDATES} candidates of one prompt, alone | {alone:.2f} |",
            *(f"| {name} | {middle[name]:.2f} |" for name in ("regenerate", "train", "push", "wait")),
            "",
            f"At a lag of one, {result['hidden']:.1%} of the shorter of exploration and the rest is hidden.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
