"""Tables of training_phase.py."""

import statistics
from typing import Any

from true_size import MINIATURES

NAMES = {"flux": "FLUX.1 512²", "sd3": "SD3.5-L 1024²", "sana": "SANA 1.6B 1024²", "sd3-medium": "SD3.5-M 512²"}
WANTED = {"flux": 1.8, "sd3": 1.6, "sana": 1.5}
ROUNDS = 3
MICRO_BATCHES = 2
SEEDS = 12
PARTS = ("reference", "old", "current", "optimizer")
Row = dict[str, Any]


def table(rows: list[Row]) -> str:
    """Markdown page of the results."""
    models = [model for model in NAMES if any(row["model"] == model for row in rows)]
    device = rows[0]["device"] if rows else "?"
    lines = [
        "# A training micro-batch against diffusers and PEFT",
        "",
        f"By `python benchmarks/training_phase.py` on one {device}, torch {rows[0]['torch'] if rows else '?'}: random",
        "weights of the true shapes, the presets' settings (DiffusionNFT, a BF16 reference at weight 1e-4, rank 32),",
        f"both in turns, medians of {ROUNDS} rounds of {MICRO_BATCHES} micro-batches by the GPU's clock. The baseline",
        "has diffusers' uncompiled blocks, PEFT's layers and flash attention, and recomputes every block of FLUX.1 and",
        "SD3.5-L. Each option was measured once, after a warm-up.",
        "",
        "| model, micro-batch | | reference, ms | old | current, forward and backward | optimizer | total | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model in models:
        own = [row for row in rows if row["model"] == model and row["kind"] in ("way", "option")]
        baseline = next((row for row in own if row["way"] == "baseline"), None)
        for row in own:
            ratio = f"{baseline['all'] / row['all']:.2f}" if baseline else ""
            if row["way"] == "solrl":
                ratio = f"**{ratio}**" + (f" (goal {WANTED[model]})" if model in WANTED else "")
            title = f"{NAMES[model]}, {row['batch']}" if row is baseline else ""
            cells = " | ".join(f"{row[part]:.1f}" for part in (*PARTS, "all"))
            option = f"with {row['way']}" if row["kind"] == "option" else row["way"]
            lines.append(f"| {title} | {option} | {cells} | {ratio} |")
    lines += ["", "The optimizer's time is half of a step: a step has two micro-batches here, and more in a run.", ""]
    if equal := [row for row in rows if row["kind"] == "equal"]:
        same = ", ".join(NAMES[row["model"]] for row in equal if row["bits"]) or "none"
        lines += [f"The current and the old policy give equal velocities, bit for bit, for equal adapters: {same}.", ""]
    lines += [*memory_lines(rows, models), "", *gradient_lines(rows, models)]
    return "\n".join(lines) + "\n"


def memory_lines(rows: list[Row], models: list[str]) -> list[str]:
    """Planned and measured memory, all activations kept."""
    lines = [
        "Memory of training in addition to the weights, all activations kept, planned without a GPU and measured:",
        "",
        "| model | planned, GiB | measured | difference | first update, with compiling, s |",
        "|---|---|---|---|---|",
    ]
    for row in (row for model in models for row in rows if row["model"] == model and row["kind"] == "memory"):
        planned, measured = row["planned"] / 2**30, row["measured"] / 2**30
        off = f"{planned / measured - 1:+.1%}" if measured else ""
        lines.append(f"| {NAMES[row['model']]} | {planned:.2f} | {measured:.2f} | {off} | {row['compile_s']:.0f} |")
    return lines


def gradient_lines(rows: list[Row], models: list[str]) -> list[str]:
    """Distances of gradients to those in float32."""
    lines = [
        "Relative distance of a micro-batch's gradient to that in float32, on the miniature of the family: mean of",
        f"{SEEDS} seeds, smallest to largest; the current policy is one step from the old one:",
        "",
        "| miniature | baseline | solrl |",
        "|---|---|---|",
    ]
    for row in (row for model in models for row in rows if row["model"] == model and row["kind"] == "gradient"):
        each = [row["distances"][way]["distance"] for way in ("baseline", "solrl")]
        cells = [f"{statistics.mean(x):.4f} ({min(x):.4f} to {max(x):.4f})" for x in each]
        lines.append(f"| {MINIATURES[row['model']]} | {' | '.join(cells)} |")
    return lines
