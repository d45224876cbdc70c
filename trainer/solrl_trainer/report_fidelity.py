"""What the fidelity line of the metrics means, in a sentence and on a strip of ranks."""

from typing import Any


def describe_fidelity(line: dict[str, Any], config: dict[str, Any] | None) -> dict[str, Any]:
    """Turn a `fidelity` event into what the report shows.

    Args:
        line: the event, `vars(Fidelity)` as JSON has it.
        config: the run's settings; without them the sentence names no numbers of candidates or steps.

    Returns:
        `sentence`, `figures` (name → text), `overlaps` (size, top, bottom), and `strip`: per cent positions of mean
        true ranks on a line from the best to the worst candidate, or None without settings.
    """
    explore = (config or {}).get("explore", {})
    count, keep = explore.get("candidates"), explore.get("keep")
    spearman = line["spearman"]
    sentence = (
        f"Sorted by the quick images, candidates come in {_words(spearman)} as sorted by their BF16 images "
        f"(mean Spearman {spearman:.2f} within a prompt, where 1 is the same order and 0 is chance)."
    )
    strip = None
    if count and keep:
        half = keep // 2
        sentence += (
            f" The {half} that the proxy takes for the best of {count} truly stand at rank "
            f"{line['top_rank']:.1f} on average ({_perfect(half):.1f} would be perfect, {(count + 1) / 2:.1f} chance), "
            f"the {half} it takes for the worst at {line['bottom_rank']:.1f} ({count + 1 - _perfect(half):.1f} would be)."
        )
        strip = {
            "count": count,
            "half": 100 * half / count,
            "top": _place(line["top_rank"], count),
            "bottom": _place(line["bottom_rank"], count),
            "perfect_top": _place(_perfect(half), count),
            "perfect_bottom": _place(count + 1 - _perfect(half), count),
        }
    return {
        "sentence": sentence,
        "prompts": line.get("prompts"),
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
    for least, words in ((0.95, "almost the same order"), (0.8, "nearly the same order"), (0.5, "a similar order")):
        if spearman >= least:
            return words
    return "a loosely similar order" if spearman >= 0.2 else "an order that has little to do with that"


def _perfect(half: int) -> float:
    return (half + 1) / 2


def _place(rank: float, count: int) -> float:
    return 100 * (rank - 0.5) / count
