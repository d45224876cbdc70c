"""Explanation of a fidelity measurement: a sentence and a strip of ranks."""

from typing import Any


def describe_fidelity(line: dict[str, Any], config: dict[str, Any] | None) -> dict[str, Any]:
    """Describe a `fidelity` event for the report.

    Args:
        line: the event, `vars(Fidelity)` read from JSON.
        config: the run's settings; without them the sentence does not mention numbers of candidates.

    Returns:
        `sentence`, `prompts`, `when`, `figures` (name → text), `overlaps` (size, top, bottom), and `strip`: positions
        of the mean true ranks in per cent, on a line from the best candidate to the worst; None without settings.
    """
    explore = (config or {}).get("explore", {})
    count, keep = explore.get("candidates"), explore.get("keep")
    spearman = line["spearman"]
    sentence = (
        f"Ranking a prompt's candidates by their explored images gives {_words(spearman)} ranking by their BF16 "
        f"images (mean Spearman {spearman:.2f}, where 1 is the same order and 0 is chance)."
    )
    strip = None
    if count and keep:
        half = keep // 2
        best, worst = f"{line['top_rank']:.1f}", f"{line['bottom_rank']:.1f}"
        sentence += (
            f" The {half} candidates that the proxy ranks best of {count} have a mean true rank of {best} "
            f"(perfect {_perfect(half):.1f}, chance {(count + 1) / 2:.1f}); the {half} that it ranks worst "
            f"have {worst} (perfect {count + 1 - _perfect(half):.1f})."
        )
        strip = {
            "count": count,
            "half": 100 * half / count,
            "top": _place(line["top_rank"], count),
            "bottom": _place(line["bottom_rank"], count),
        }
    return {
        "sentence": sentence,
        "prompts": line.get("prompts"),
        "when": f"at version {line['version']}" if line.get("version") else "before training",
        "strip": strip,
        "figures": {
            "Spearman": f"{spearman:.3f}",
            "Kendall": f"{line['kendall']:.3f}",
            "true rank of the proxy's best": f"{line['top_rank']:.1f}",
            "true rank of the proxy's worst": f"{line['bottom_rank']:.1f}",
        },
        "overlaps": [
            (size, f"{100 * share:.0f} %", f"{100 * line['bottom_overlap'][size]:.0f} %")
            for size, share in line["top_overlap"].items()
        ],
    }


def _words(spearman: float) -> str:
    steps = (
        (0.95, "almost the same order as"),
        (0.8, "nearly the same order as"),
        (0.5, "an order similar to"),
        (0.2, "an order only loosely like"),
    )
    return next((words for least, words in steps if spearman >= least), "an order quite unlike")


def _perfect(half: int) -> float:
    return (half + 1) / 2


def _place(rank: float, count: int) -> float:
    return 100 * (rank - 0.5) / count
