"""Tables for `delta_survival.py`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from caveats import PREPARED_FOR_NVFP4
from solrl_trainer.evaluation import mean_interval

SURVIVAL = (
    "*Size* is |D| / |W|, *off grid* |Q(W) − W| / |W|, *share* ⟨D′, D⟩ / |D|², and *error* |D′ − D| / |D|: 0 if D "
    "survives whole, 1 if nothing of it does, more if rounding adds more than D. Norms are over all adapted quantised "
    "layers. Random weights are 1024 × 1024, random adapters of rank 32. Trained adapters are those of the runs below."
)
RANKS = (
    "After {iterations} iterations of a small run (2 prompts × 24 candidates, 6 optimiser steps at 2e-3): Spearman of "
    "clipscore in NVFP4 at 6 steps with clipscore in BF16 at 10 steps under the same policy, on {prompts} held-out "
    "prompts × {candidates} candidates. *Unmerged* adds the adapter's product in BF16 to the outputs of the quantised "
    "base; *without it* explores under the base. The gain is paired with merging, with its 95 % interval over prompts, "
    "which are few. True ranks are of the 12 best and 12 worst."
)
COST = (
    "Medians of 5 rounds in turns: 24 candidates at 6 steps without decoding, and a change of the adapter, on "
    "a machine that other programs used too. On a GPU: not measured."
)


def write(result: Mapping[str, Any], out: Path) -> None:
    """Write delta_survival.{json,md}, and print the tables."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "delta_survival.json").write_text(json.dumps(result, indent=1) + "\n")
    text = "\n".join(tables(result)) + "\n"
    (out / "delta_survival.md").write_text(text)
    print(text)


def tables(result: Mapping[str, Any]) -> Iterator[str]:
    """Lines of the page."""
    yield from (
        "# An adapter in quantised weights",
        "",
        "By `python benchmarks/delta_survival.py` on 2 CPU cores. Merging an adapter of change D replaces a quantised",
        "weight Q(W) by Q(W + D), so exploration sees the change D′ = Q(W + D) − Q(W).",
        "",
        *PREPARED_FOR_NVFP4,
    )
    yield from ("", "## Share that survives", "", *wrap(SURVIVAL, 118), "")
    yield from ("| weights | adapter | precision | size | off grid | share | error |", "|---|---|---|---|---|---|---|")
    for row in result["survival"]:
        yield (
            f"| {row['weights']} | {row['adapter']} | {row['precision'].upper()} | {row['size']:.2%} "
            f"| {row['off_grid']:.2%} | {row['share']:.3f} | {row['error']:.2f} |"
        )
    yield from ("", "## Rank fidelity", "", *wrap(RANKS.format_map(result), 118), "")
    yield from ("| model | adapter | Spearman | gain over merging | true ranks |", "|---|---|---|---|---|")
    for row in result["ranks"]:
        yield (
            f"| {row['model']} | {row['adapter']} | {np.mean(row['spearman']):.3f} "
            f"| {_gain(row, result['ranks'])} | {row['top_rank']:.1f} / {row['bottom_rank']:.1f} |"
        )
    yield from ("", "## Cost on the CPU", "", *wrap(COST, 118), "")
    yield from ("| model | candidates, merged | unmerged | change, merged | unmerged |", "|---|---|---|---|---|")
    for row in result["cost"]:
        values = (row[name] for name in ("merged", "unmerged", "merged, change", "unmerged, change"))
        yield f"| {row['model']} | {' | '.join(f'{value:.3f} s' for value in values)} |"


def _gain(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    if row["adapter"] == "merged":
        return ""
    (other,) = (one for one in rows if (one["model"], one["adapter"]) == (row["model"], "merged"))
    gain, low, high = mean_interval(np.array(row["spearman"]) - np.array(other["spearman"]))
    return f"{gain:+.3f} [{low:+.3f}, {high:+.3f}]"
