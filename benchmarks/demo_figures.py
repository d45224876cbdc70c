"""Figures of the demo: `python benchmarks/demo_figures.py [--seeds N …] [--note TEXT]`.

Runs `solrl-train demo` with each seed, one after the other, on Linux. Writes benchmarks/results/demo.{json,md}.
"""

import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from solrl_trainer.commands.demo import PRESET, SETTINGS
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
from support.results import Results, Row, options, table

FIRST = 16
"""Words that the grid shows."""
PHASES = ("explore", "wait", "regenerate", "train", "push", "evaluate", "total")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 42], help="of the demos (default: 1 2 42)")
    parser.add_argument("--note", default="", help="a sentence about the machine at that time, such as its other work")
    args = parser.parse_args()
    results = Results("demo", args.out, page)
    if args.render:
        return results.show()
    rows = []
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "run"
            used = measured(["solrl_trainer", "demo", "--seed", str(seed), "--output", str(output)])
            rows.append(row(output) | {"used": used})
    results.found = {"processor": processor(), "note": args.note, "settings": SETTINGS, "runs": rows}
    results.write()
    return results.show()


def measured(module: Sequence[str]) -> dict[str, float]:
    """Seconds, CPU seconds and largest memory in GB of a Python module's process and its children.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    began, before, most = time.monotonic(), _cpu_seconds(), 0
    process = subprocess.Popen([sys.executable, "-m", *module])
    while process.poll() is None:
        most = max(most, memory(process.pid))
        time.sleep(0.5)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return {"seconds": time.monotonic() - began, "cpu_seconds": _cpu_seconds() - before, "gigabytes": most / 1e9}


def _cpu_seconds() -> float:
    """CPU seconds of all ended children, and their own."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def memory(process: int) -> int:
    """Bytes in RAM of a process and its children; pages that several share count in part for each."""
    with suppress(OSError, ValueError):  # it has ended
        (own,) = re.findall(r"^Pss: +(\d+)", Path(f"/proc/{process}/smaps_rollup").read_text(), re.MULTILINE)
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        return 1024 * int(own) + sum(memory(int(child)) for child in children)
    return 0


def row(folder: Path) -> Row:
    """Figures of a finished demo; Tesseract's are missing where it is not installed."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    last = [line for line in read_metrics(folder / "metrics.jsonl") if line["event"] == "iteration"][-1]
    figures = {name: result[name] for name in ("iterations", "images", "rewards", "seconds")}
    gallery = load_gallery(folder)
    marks = gallery.verdicts.marks if gallery.verdicts else ()
    figures["first"] = sum(after for _, after in marks[:FIRST])
    if (shares := by_tesseract(gallery)) is not None:
        figures["tesseract"] = dict(zip(("before", "after"), shares, strict=True))
    seed = saved_settings(folder).seed
    return {"seed": seed, "explored_in": f"{last['precision'].upper()} ({last['numerics']})", **figures}


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
    where = {row["explored_in"] for row in rows}
    seeds = ", ".join(str(row["seed"]) for row in rows)
    settings = ", ".join(f"`{setting}`" for setting in result["settings"][1:])
    lines = [
        "# The demo",
        "",
        f"`solrl-train demo` with the seeds {seeds}, one run each, by",
        f"`python benchmarks/demo_figures.py`. {rows[0]['iterations']} iterations of `{PRESET}` with",
        f"{settings}; explored in {' and '.join(sorted(where))}.",
        f"Means over {rows[0]['images']} images of held-out prompts, same seeds before and after, averaged weights;",
        "gains with their 95 % interval over prompts.",
        "",
        f"{result['processor']}.",
        "Gains differ between kinds of processor, by the rounding of BF16.",
        *([result["note"]] if result["note"] else []),
        "",
        HANDICAP,
        "",
        *table(("reward", "seed", "before", "after", "gain"), _gains(rows)),
        "",
        f"Of the first {FIRST}, RapidOCR reads {', '.join(str(row['first']) for row in rows)} right at the end.",
        "",
        "The whole demo, with its service and Redis.",
        "",
        *table(("seed", "from start to end", "CPU seconds", "memory, at most"), map(_used, rows)),
        "",
        "Time in the trainer, without the start of the service. Exploration is partly in parallel with other phases;",
        "wait is the part that the trainer waited for it.",
        "",
        *table(("seed", *PHASES), map(_times, rows)),
    ]
    return "\n".join(lines) + "\n"


def _gains(rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    for name in rows[0]["rewards"]:
        label = reward_label(name)
        for row in rows:
            figures = row["rewards"][name]
            before, after = (reward_text(name, figures[when]) for when in ("before", "after"))
            gain = f"{gain_text(name, figures['gain'])} {interval_text(name, figures['low'], figures['high'])}"
            yield label, row["seed"], before, after, gain
        if len(rows) > 1:
            yield label, "mean", "", "", gain_text(name, statistics.mean(row["rewards"][name]["gain"] for row in rows))
    for row in rows:
        if "tesseract" in row:
            before, after = (row["tesseract"][when] for when in ("before", "after"))
            gain = gain_text(READ_RIGHT, after - before)
            yield "read right (Tesseract)", row["seed"], *(reward_text(READ_RIGHT, v) for v in (before, after)), gain


def _used(row: Row) -> Sequence[str]:
    used = row["used"]
    return row["seed"], duration_text(used["seconds"]), f"{used['cpu_seconds']:.0f}", f"{used['gigabytes']:.2f} GB"


def _times(row: Row) -> Sequence[str]:
    return row["seed"], *(duration_text(row["seconds"].get(phase, 0.0)) for phase in PHASES)


if __name__ == "__main__":
    main()
