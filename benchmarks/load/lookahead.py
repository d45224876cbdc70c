"""Share of exploration hidden behind training at a lag of one.

Service and trainer each get half of the CPU cores, so that they do not compete.
"""

import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from common import adapter_file, client_of, seconds_of, service
from fault_trials.adapters import layout
from solrl_trainer.prompts.prompt_sets import find_prompts, prompts_of_iteration, read_prompts
from solrl_trainer.run_folder.metrics_file import own_time, read_metrics
from solrl_trainer.service.run_requests import RunRequests
from solrl_trainer.settings.presets import resolve
from support.targets import Row

PRESET = "mini-sana/sol_rl/clipscore"
_SETTINGS = ("explore.prompts=4", "evaluate.prompts=8", "evaluate.fidelity_prompts=0")


def lookahead(iterations: int) -> Row:
    """Measure the share of the shorter of exploration and the rest that a lag of one hides."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    if not half:
        raise RuntimeError("got one CPU core; expected at least two, for service and trainer")
    os.environ["OMP_NUM_THREADS"] = str(half)
    try:
        os.sched_setaffinity(0, cores[:half])
        with service() as url:
            os.sched_setaffinity(0, cores[half:])
            explore = _explore_seconds(url)
            rest = _seconds(url, 0, iterations, lambda line: line["regenerate"] + line["train"] + line["push"])
            whole = _seconds(url, 1, iterations, lambda line: sum(own_time(line).values()))
    finally:
        os.sched_setaffinity(0, cores)
        del os.environ["OMP_NUM_THREADS"]
    hidden = (explore + rest - whole) / min(explore, rest)
    return Row(
        "exploration hidden behind training, lag 1, two processes",
        "≥ 95 % of the shorter of the two",
        f"{hidden:.1%}: explore {explore:.2f} s, the rest {rest:.2f} s, together {whole:.2f} s per iteration",
        hidden >= 0.95,
        {"explore": explore, "rest": rest, "together": whole, "hidden": hidden},
    )


def _explore_seconds(url: str) -> float:
    """Median seconds of an iteration's exploration on an otherwise idle machine."""
    config = resolve(PRESET, overrides=_SETTINGS, arguments={"rollout_url": url, "run": "alone"}).config
    config = config.model_copy(update={"explore": config.explore.model_copy(update={"precision": "auto"})})
    prompts, times = read_prompts(find_prompts(config.prompts), "train"), []
    with client_of(url) as client:
        source = RunRequests(config, client)
        client.push(config.run, 0, None, config.model_name, adapter_file(layout(), rank=config.lora.rank, seed=0))
        for i in range(4):
            asked = prompts_of_iteration(prompts, config.explore.prompts, config.seed, i)
            times.append(seconds_of(lambda asked=asked, i=i: source.candidates_of(asked, 0, i, iteration=i)))
    return statistics.median(times[1:])


def _seconds(url: str, lag: int, iterations: int, of: Callable[[dict[str, float]], float]) -> float:
    """Median of `of`(seconds by phase) over the later iterations of a real run."""
    output = Path(f"runs/load/lag-{lag}")
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "solrl_trainer", "run", "--preset", PRESET, "--rollout-url", url]
    command += ["--output", str(output), "--iterations", str(iterations)]
    settings = (*_SETTINGS, f"explore.lag={lag}", f"run=lag-{lag}", "explore.precision=auto")
    command += [part for setting in settings for part in ("--set", setting)]
    with Path(f"runs/load/lag-{lag}.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True)
    lines = read_metrics(output / "metrics.jsonl")
    pushes = {line["version"]: line["seconds"] for line in lines if line["event"] == "push"}
    each = [of(line["seconds"] | pushes[line["version"]]) for line in lines if line["event"] == "iteration"]
    return statistics.median(each[2:])
