"""Training of every miniature with every reward: `python benchmarks/all_pairs.py --jobs 2`.

Each pair runs `sol_rl` for 15 iterations against its own service. The command can be stopped (`--minutes` stops it
automatically) and run again: finished pairs are skipped, and an unfinished one resumes from its last checkpoint.
Writes docs/results/all_pairs.{json,md} and a grid for each finished pair.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from solrl_trainer.commands.demo import rollout_service
from solrl_trainer.records.evaluations import JUDGE, STRICT
from solrl_trainer.report.gallery import load_gallery
from solrl_trainer.report.grid import write_grid
from support.caveats import PREPARED_FOR_NVFP4, STRICT_ACCURACY
from support.results import Results, Row, options, table

MODELS = ("mini-sana", "mini-sd3", "mini-flux")
REWARDS = ("clipscore", "pickscore", "hpsv2", "imagereward")
SETTINGS = ("optimizer.learning_rate=2e-3", "explore.precision=nvfp4", "explore.lag=0")
"""Changes to the presets, which are tuned for 40 iterations."""
NEEDED = 0.4
"""Required gain, in standard deviations of the base within a prompt."""
GRID_ROWS = 8
HEAD = (
    *("model", "reward", "before", "after", "gain, sd", "strict accuracy, %", "by the judge, %"),
    *("Spearman", "grid"),
)
NOTE = "pair.json"
"""File in a pair's folder with its settings and the devices it ran on."""
READY_SECONDS = 600.0
"""On a GPU every service compiles at its start, and several share the CPU cores."""

Pair = tuple[str, str]
"""(model, reward)."""


def main() -> None:
    """Run the missing pairs and write the table."""
    parser = options(__doc__)
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--jobs", type=int, default=1, help="parallel pairs; they share the CPU cores")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time limit; run again to continue")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--rewards", nargs="+", default=REWARDS)
    parser.add_argument("--runs", type=Path, default=Path("runs/pairs"))
    parser.add_argument("--set", nargs="*", default=[], help="further settings for all runs, key=value")
    args = parser.parse_args()
    results = Results("all_pairs", args.out, page)
    if args.render:
        return results.show()
    until = time.monotonic() + 60 * args.minutes
    settings = [f"iterations={args.iterations}", *SETTINGS, *args.set]
    pairs = [(model, reward) for model in args.models for reward in args.rewards]
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Rounded up, because service and trainer of a pair rarely compute at the same time.
    os.environ["OMP_NUM_THREADS"] = str(math.ceil(len(os.sched_getaffinity(0)) / args.jobs))

    for pair in pairs:
        noted = note_of(folder_of(pair, args.runs))
        if noted["settings"] not in (None, settings):
            sys.exit(
                f"{folder_of(pair, args.runs)} has results with the settings {noted['settings']}; expected {settings}: "
                "use another --runs, or the same settings"
            )

    def run(pair: Pair) -> None:
        folder = folder_of(pair, args.runs)
        if (folder / "result.json").is_file() or time.monotonic() >= until:
            return
        try:
            train(pair, folder, settings, until)
            outcome = "done"
        except subprocess.TimeoutExpired:
            outcome = "stopped"
        except (subprocess.CalledProcessError, RuntimeError) as error:
            outcome = f"failed, see its logs ({str(error).splitlines()[0]})"  # the other pairs continue
        print(f"{' '.join(pair)}: {outcome}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run, pairs[::-1]))  # the slowest first
    done = [pair for pair in pairs if (folder_of(pair, args.runs) / "result.json").is_file()]
    if done:
        rows = [row(*pair, folder_of(pair, args.runs)) for pair in done]
        missing = [" ".join(pair) for pair in pairs if pair not in done]
        results.found = {"settings": settings, "missing": missing, "rows": rows}
        results.write()
        results.show()
    for pair in done:
        write_grid_of(pair, args.runs, args.out / "pairs")
    if done != pairs:
        sys.exit(f"{len(done)} of {len(pairs)} pairs are done; run the command again to continue")
    return None


def folder_of(pair: Pair, runs: Path) -> Path:
    """Folder of a pair's run."""
    return runs / "-".join(pair)


def note_of(folder: Path) -> dict[str, Any]:
    """Read a pair's settings and devices; None and none if the pair has not started."""
    file = folder / NOTE
    return json.loads(file.read_text()) if file.is_file() else {"settings": None, "devices": []}  # type: ignore[no-any-return]


def train(pair: Pair, folder: Path, settings: Sequence[str], until: float) -> None:
    """Train one pair against its own service; the result goes to `folder`.

    Raises:
        subprocess.TimeoutExpired: the training was stopped at the monotonic time `until`.
        subprocess.CalledProcessError, RuntimeError: trainer or service failed.
    """
    model, reward = pair
    folder.mkdir(parents=True, exist_ok=True)
    devices = {*note_of(folder)["devices"], torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"}
    (folder / NOTE).write_text(json.dumps({"settings": list(settings), "devices": sorted(devices)}) + "\n")
    with rollout_service(model, folder / "service.log", rewards=(reward,), ready_seconds=READY_SECONDS) as url:
        command = [sys.executable, "-m", "solrl_trainer", "run"]
        command += ["--preset", f"{model}/sol_rl/{reward}", "--rollout-url", url, "--resume", str(folder)]
        command += [part for setting in settings for part in ("--set", setting)]
        timeout = max(0.0, until - time.monotonic()) if until < math.inf else None
        with (folder / "train.log").open("a") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True, timeout=timeout)


def write_grid_of(pair: Pair, runs: Path, folder: Path) -> None:
    """Write the images of a pair before and after training."""
    model, reward = pair
    folder.mkdir(exist_ok=True)
    path = folder / f"{model}-{reward}.png"
    about = f"{model}, sol_rl, trained on {reward}"
    write_grid(load_gallery(folder_of(pair, runs)), path, path.stem, about, rows=GRID_ROWS)


def page(found: Mapping[str, Any]) -> str:
    """Markdown page."""
    rows: Sequence[Row] = found["rows"]
    devices = ", ".join(sorted({name for row in rows for name in row["devices"]}))
    met = sum(r["gain_sd"] >= NEEDED and r["low_sd"] > 0 and r["strict_after"] >= r["strict_before"] for r in rows)
    lines = [
        f"# `sol_rl`, {rows[0]['iterations']} iterations, every miniature with every reward",
        "",
        f"By `python benchmarks/all_pairs.py` on {devices}: the presets",
        f"with {', '.join(f'`{s}`' for s in found['settings'])}.",
        f"{rows[0]['images']} images of held-out prompts, same seeds before and after, averaged weights.",
        "The gain of the trained reward is in standard deviations of the base within a prompt, with its 95 % interval.",
        "One training seed per pair.",
        "",
        *STRICT_ACCURACY,
        "",
        *PREPARED_FOR_NVFP4,
        "",
        *table(HEAD, map(_cells, rows)),
        "",
        f"{met} of {len(rows)} pairs gain at least {NEEDED} sd without losing accuracy.",
    ]
    if found["missing"]:
        lines += ["", f"Not finished: {', '.join(found['missing'])}."]
    return "\n".join(lines) + "\n"


def _cells(r: Row) -> Sequence[str]:
    strict, judged = (f"{r[f'{by}_before']:.1f} → {r[f'{by}_after']:.1f}" for by in ("strict", "judge"))
    gain = f"{r['gain_sd']:+.2f} [{r['low_sd']:+.2f}, {r['high_sd']:+.2f}]"
    grid = f"[grid](pairs/{r['model']}-{r['reward']}.png)"
    before, after = f"{r['before']:.4f}", f"{r['after']:.4f}"
    return r["model"], r["reward"], before, after, gain, strict, judged, f"{r['spearman']:.3f}", grid


def row(model: str, reward: str, folder: Path) -> Row:
    """Table row of one pair."""
    result = json.loads((folder / "result.json").read_text())
    trained, strict, judged = (result["rewards"][name] for name in (reward, STRICT, JUDGE))
    return {
        "model": model,
        "reward": reward,
        "devices": note_of(folder)["devices"],
        "iterations": result["iterations"],
        "images": result["images"],
        "before": trained["before"],
        "after": trained["after"],
        **{f"{key}_sd": trained[key] / trained["within"] for key in ("gain", "low", "high")},
        "strict_before": 100 * strict["before"],
        "strict_after": 100 * strict["after"],
        "judge_before": 100 * judged["before"],
        "judge_after": 100 * judged["after"],
        "spearman": result["spearman"],
        "seconds": result["seconds"]["total"],
    }


if __name__ == "__main__":
    main()
