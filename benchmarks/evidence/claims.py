"""Figures of the page of the paper's claims, docs/findings.md, by their names in its template."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paper.published import GAP, SPEED_UP

Read = Callable[[str], Any]
"""Content of a stored result by its name, the path in benchmarks/results without `.json`."""
UNPREPARED = "clipscore, runs/unprepared/mini-flux"
MODELS = ("flux", "sd3", "sana")
FAMILIES = {"bf16": "24-in-96 BF16", "naive": "naive quant", "ours": "Sol-RL"}
WORDS = ("none", "one", "two", "three", "four")

PUBLISHED = {
    "paper_spearman": "0.90 to 0.94",
    "paper_kendall": "0.75 to 0.83",
    "paper_phase": "2.33, 2.41 and 1.41 ×",
    "paper_whole": "1.62, 1.61 and 1.25 ×",
    "paper_sync": "about 2 %",
    "paper_matches": "96.9, 95.0 and 93.3 %",
}
"""Figures of the paper on its large models that no table of ours repeats."""


def figures(read: Read) -> dict[str, str]:
    """All figures by their names in the template."""
    paper = read("paper")
    tables, programme = paper["tables"], paper["programme"]
    return {
        "iterations": str(programme["iterations"]),
        "long": str(programme["long"]),
        **PUBLISHED,
        **_published(),
        **_ranks(read),
        **_algorithms(tables["algorithms"]),
        **_authors(tables["authors"]["gains"]),
        **_pace(tables["families"]),
        **_plateaus(tables["plateaus"]),
        **_gap(tables["gap"]["gap"] | tables["margin"]["gap"], programme),
        **_naive(tables["quantised"]),
        **_sweeps(tables["sweeps"]),
        **_hacking(tables["hacking"]["gains"]),
        **_times(read),
        **_text(tables["text"]),
        **_damaged(tables["damaged"]["families"]),
        **_law(tables["law"]),
    }


def _published() -> dict[str, str]:
    low, high = SPEED_UP
    return {"paper_speed_up": f"{low:g} to {high:g} ×", "paper_gap": f"{GAP:.0%}".replace("%", " %")}


def _ranks(read: Read) -> dict[str, str]:
    found = {}
    for name, path in (
        ("ranks", "rank_fidelity"),
        ("families", "family_lists/rank_fidelity"),
        ("unprepared", "unprepared/rank_fidelity"),
    ):
        rows = read(path)["rows"]
        for precision in sorted({one["precision"] for one in rows}):
            own = [one for one in rows if one["precision"] == precision and "/prepared/" not in one["model"]]
            found[f"{name}_{precision}"] = _range(one["spearman"] for one in own)
            found[f"{name}_kendall_{precision}"] = _range(one["kendall"] for one in own)
            if name == "ranks":
                found[f"best_{precision}"] = _range((one["top_rank"] for one in own), 0)
                found[f"worst_{precision}"] = _range((one["bottom_rank"] for one in own), 0)
    group, side = 96, 12
    found["perfect"] = f"{(1 + side) / 2:g} and {group - (side - 1) / 2:g}"
    return found | {"chance": f"{(1 + group) / 2:g}"}


def _algorithms(table: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, one in table["compared"].items():
        key = name.lower()
        found |= {
            f"{key}_more": _percent(one["more"]),
            f"{key}_more_paper": f"{100 * one['more, paper']:.1f} %",
            f"{key}_less": _signed(one["less"]),
            f"{key}_ahead": f"{one['ahead']} of {one['pairs']}",
        }
    for name, one in table["spent"].items():
        found[f"{name.lower().replace('-', '')}_steps"] = str(one["steps"])
    again = [table["spent"][name]["recomputed"] for name in ("FlowGRPO", "DanceGRPO")]
    denoising, ceiling = table["spent"]["Sol-RL"]["denoising"], table["ceiling"]
    found["ceiling"] = _range(ceiling.values())
    near = [table["gains"][name] for name in ("AWM", "DiffusionNFT", "Sol-RL")]
    shares = (100 * one[reward]["mean"] / most for one in near for reward, most in ceiling.items())
    found["ceiling_share"] = _range(shares, 0)
    return found | {"recomputed": _range((100 * one for one in again), 0), "denoising": f"{100 * denoising:.0f} %"}


def _authors(table: Mapping[str, Any]) -> dict[str, str]:
    """Sol-RL's lead over each algorithm by its authors' settings, over rewards."""
    found = {
        f"authors_{name.lower()}": _range((one["sol_rl"]["mean"] for key, one in table.items() if name in key), 3)
        for name in ("FlowGRPO", "DanceGRPO")
    }
    return found | {"authors_ahead": f"{sum(one['sol_rl']['low'] > 0 for one in table.values())} of {len(table)}"}


def _pace(table: Mapping[str, Any]) -> dict[str, str]:
    own, preset = list(table["cost of an iteration"]["Sol-RL"])[:2]
    ours, compute, predicted = table["iterations"]["Sol-RL"], table["compute"], table["predicted"]
    *_, late, last = ours
    less = table["iterations of BF16"][last]
    return {
        "ours": _times_text(ours[last]),
        "ours_compute": _times_text(compute[f"Sol-RL, {last}"][own]),
        "bf16": _times_text(table["iterations"]["24-in-96 BF16"][last]),
        "bf16_late_compute": _times_text(compute[f"24-in-96 BF16, {late}"][own]),
        "bf16_late_preset": _times_text(compute[f"24-in-96 BF16, {late}"][preset]),
        "fraction_own": own.rpartition(", ")[2],
        "fraction_preset": preset.rpartition(", ")[2],
        "proxy_costs": _times_text({"mean": 1 / less["mean"], "low": 1 / less["high"], "high": 1 / less["low"]}),
        "predicted": f"{predicted['base']:.2f} ×",
        "predicted_along": f"{predicted['along the run']:.2f}",
        "predicted_cost": f"{predicted['exact'] / predicted['base']:.2f} ×",
    }


def _plateaus(table: Mapping[str, Any]) -> dict[str, str]:
    iterations, compute, gains = table["iterations"], table["compute"], table["gains"]
    own, preset = [clock for clock in compute if clock.startswith("Sol-RL, FLUX.1")]
    families = {"small": "24-in-24 BF16", "bf16": FAMILIES["bf16"], "ours": FAMILIES["ours"]}
    return {
        "plateau": _times_text(iterations["Sol-RL"]["95%"]),
        "plateau_half": _times_text(iterations["Sol-RL"]["50%"]),
        **{
            f"plateau_bf16_{key}": _times_text(compute[f"{FAMILIES['bf16']}, {clock.partition(', ')[2]}"]["90%"])
            for key, clock in (("compute", own), ("preset", preset))
        },
        "plateau_below": _signed(table["best less BF16"]),
        "plateau_compute": _times_text(compute[own]["95%"]),
        "plateau_compute_preset": _times_text(compute[preset]["95%"]),
        **{
            f"{at}_{key}": " and ".join(
                f"{round(one[at]['mean'], 2) + 0:.2f}" for row, one in gains.items() if row.startswith(name)
            )
            for at in ("best", "end")
            for key, name in families.items()
        },
    }


def _text(table: Mapping[str, Any]) -> dict[str, str]:
    iterations, compute, families = table["iterations"], table["compute"], table["families"]
    found = {"text_before_tesseract": _share(table["base"]["tesseract"])}
    right = [100 * one["tesseract"]["mean"] for one in families.values()]
    found["text_after_tesseract"] = f"{min(right):.0f} to {max(right):.0f} %"
    for key, name in FAMILIES.items():
        if name in iterations:
            found |= {
                f"text_{key}": _reached(iterations[name]["95%"]),
                f"text_{key}_compute": _reached(compute[f"{name}, FLUX.1"]["95%"]),
                f"text_{key}_compute_preset": _reached(compute[f"{name}, FLUX.1, its preset"]["95%"]),
            }
    rows = [
        f"| {name} | {one['end']['mean']:.3f} | {one['best']['mean']:.3f} | "
        f"{_reached(iterations[name]['95%']) if name in iterations else '1'} | "
        f"{_share(one['rapidocr'])} | {_share(one['tesseract'])} |"
        for name, one in families.items()
    ]
    for key, variant in (("guided", "guidance 2"), ("fast", "rate 0.001")):
        found[f"text_{key}"] = _reached(table["variants"][f"{variant} Sol-RL"]["iterations"]["95%"])
    found["text_guided_awm"] = _reached(table["variants"]["guidance 2 AWM"]["iterations"]["95%"])
    fast, cost = table["variants"]["rate 0.001 Sol-RL"]["iterations"]["95%"], table["cost of an iteration"]["Sol-RL"]
    found["text_fast_compute"] = _times_text({name: fast[name] / cost["FLUX.1"] for name in ("mean", "low", "high")})
    for name in ("AWM", "AWM two-stage", "FlowGRPO"):
        found[f"text_{name.lower().replace(' ', '_').replace('-', '_')}_compute"] = _reached(
            compute[f"{name}, FLUX.1"]["95%"]
        )
    return found | {"text_rows": "\n".join(rows)}


def _damaged(table: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for key, layers in (("every", "every layer"), ("most", "all but the timestep embedder")):
        bf16, naive, ours = (table[f"{layers}, {name}"] for name in FAMILIES.values())
        found |= {
            f"damaged_{key}": _signed(naive["samples"]),
            f"damaged_{key}_naive": _plain(naive["gain"]),
            f"damaged_{key}_ours": _plain(ours["less naive quant"]),
            f"damaged_{key}_bf16": _plain(bf16["less Sol-RL"]),
            f"damaged_{key}_spearman": f"{ours['spearman']:.2f}",
            f"damaged_{key}_small": _signed(ours["less 24-in-24 BF16"]),
            f"damaged_{key}_naive_judge": _plain(naive["judge"]),
            f"damaged_{key}_ours_judge": _plain(ours["judge"]),
            f"damaged_{key}_fall": _plain(naive["fall from its best, sd"]),
        }
    return found


def _law(table: Mapping[str, Any]) -> dict[str, str]:
    settings, fits = table["settings"], table["fits"]
    own, preset = settings["96 12 6"]["compute"]
    alone, ranked, ours = (one["70%"][own] for one in table["controls"].values())
    rows = [
        f"| {size} | {2 * int(side)} | {steps} | {one['spearman'][1]:.2f} | {_reached(one['iterations']['90%'])} | "
        f"{_reached(one['compute'][own])} | {_reached(one['compute'][preset])} |"
        for side in ("12", "4")
        for size in ("24", "96", "384")
        for steps in ("2", "3", "6")
        if (one := settings.get(f"{size} {side} {steps}"))
    ]
    return {
        "law_rows": "\n".join(rows),
        "law_large": _times_text(settings["384 12 6"]["iterations"]["90%"]),
        "law_usual": _times_text(settings["96 12 6"]["iterations"]["90%"]),
        "law_large_compute": _times_text(settings["384 12 6"]["compute"][own]),
        "law_three_compute": _times_text(settings["96 12 3"]["compute"][own]),
        "law_few_compute": _times_text(settings["96 4 6"]["compute"][own]),
        "law_few_of_24_compute": _times_text(settings["24 4 6"]["compute"][own]),
        "law_alone_compute": _times_text(alone),
        "law_ranked_compute": _times_text(ranked),
        "law_ours_compute": _times_text(ours),
        "law_12_error": f"{100 * fits['12']['error']:.0f} %",
        "law_slower": f"{1 / fits['4']['ratio']:.2f} ×",
        "law_two_compute": _times_text(settings["96 12 2"]["compute"][own]),
        "law_usual_compute": _times_text(settings["96 12 6"]["compute"][own]),
    }


def _reached(one: Mapping[str, float] | None) -> str:
    """A ratio of times, or that not all seeds reach the reward."""
    return _times_text(one) if one and one["high"] is not None else "not by all seeds"


def _share(one: Mapping[str, float]) -> str:
    """A share in per cent."""
    return f"{100 * one['mean']:.0f} %"


def _gap(table: Mapping[str, Any], programme: Mapping[str, Any]) -> dict[str, str]:
    rows = {**{reward: table[reward] for reward in programme["rewards"]}, "pooled": table["mean of all"]}
    rows["long"] = table[f"{programme['reward']}, {programme['long']}"]
    return {
        **{f"gap_{name}": _percent(one["share"]) for name, one in rows.items()},
        **{f"gap_seeds_{name}": str(one["share"]["seeds"]) for name, one in rows.items()},
    }


def _naive(table: Mapping[str, Any]) -> dict[str, str]:
    naive, ranks = table["naive quant"], table["ranks of Sol-RL"]["mini-sana, 100 iterations"]
    (pooled,) = (one for name, one in naive.items() if name.startswith("mean of all"))
    long = {key: table["families"][f"mini-sana, 100 iterations, {name}"] for key, name in FAMILIES.items()}
    first, *_, last = sorted(ranks, key=int)
    return {
        "samples_sana": _signed(pooled["samples"]),
        "samples_flux": _signed(naive[UNPREPARED]["samples"]),
        "naive_ahead": _signed(pooled["ahead"]),
        "naive_iterations": _times_text(pooled["iterations"]),
        "naive_flux": _signed(naive[UNPREPARED]["ahead"]),
        "ours_flux": _signed(table["families"]["runs/unprepared/mini-flux, 40 iterations, Sol-RL"]["less"]),
        "rank_first": f"{ranks[first]['mean']:.2f}",
        "rank_last": f"{ranks[last]['mean']:.2f}",
        "rank_last_at": last,
        "long_less": _signed(long["ours"]["less"]),
        **{f"fall_{key}": _plain(one["fall"]) for key, one in long.items()},
    }


def _sweeps(table: Mapping[str, Any]) -> dict[str, str]:
    apart, rates = table["differences"], table["matches"].values()
    found = [table["matches"][f"96 candidates, {side} a side"][0] for side in (4, 8, 12)]
    clear = [name for name, one in apart.items() if one["p"] < 0.05]
    misses = [100 * (measured - predicted) for measured, predicted in rates]
    return {
        "doubling": _plain(table["per doubling"]["mean of all"]),
        "differences": str(len(apart)),
        "clear": WORDS[len(clear)],
        "clear_sizes": " and ".join(sorted({name.split(",")[0] for name in clear})),
        "few": _plain(apart["24 candidates, 12 a side"], -1),
        "many": _plain(apart["192 candidates, 12 a side"]),
        "old": _signed(apart["lag 4"]),
        "pruned": _signed(apart["6 steps, after 4 keep 48"]),
        **{f"steps_{count}": _signed(apart[f"{count} steps"]) for count in (2, 3, 4, 8)},
        "match_low": f"{min(misses):.0f}".replace("-", "−"),
        "match_high": f"{max(misses):.0f}",
        "match_settings": str(len(misses)),
        "matches": f"{100 * found[0]:.0f}, {100 * found[1]:.0f} and {100 * found[2]:.0f} %",
    }


def _hacking(table: Mapping[str, Any]) -> dict[str, str]:
    every = [one for judges in table.values() for one in judges.values()]
    fell = [name for name, judges in table.items() if any(one["high"] < 0 for one in judges.values())]
    return {
        "runs": str(len(table)),
        "fell": WORDS[len(fell)],
        "lowest": f"{min(one['mean'] for one in every):+.2f}",
        "judge": _range(judges["judge"]["mean"] for name, judges in table.items() if name.endswith("Sol-RL")),
    }


def _times(read: Read) -> dict[str, str]:
    phases, rows = read("rollout_phase")["models"], read("equal_gpus")["rows"]
    one_gpu = {(row["model"], row["part"]): row["s"] for row in rows if row["gpus"] == 1}
    whole = [
        (one_gpu[model, "naive"] + one_gpu[model, "training"]) / (one_gpu[model, "sol_rl"] + one_gpu[model, "training"])
        for model in MODELS
    ]
    equal = [one_gpu[model, "naive"] / one_gpu[model, "sol_rl"] for model in MODELS]
    phase = [
        one["baseline"]["s"] / (one["6 steps"]["s"] + one["regenerate"]["s"])
        for one in (phases[model]["phase"] for model in MODELS)
    ]
    runs = read("true_run")["runs"].values()
    sent = sorted(100 * run["medians"]["push"] / run["wall"] for run in runs)
    prompts = sorted(run["prompts"] for run in runs)
    return {
        "phase": _list(phase),
        "phase_equal": _list(equal),
        "whole": _list(whole),
        "sync": f"{sent[0]:.1f} to {sent[-1]:.1f} %",
        "sync_median": f"{statistics.median(sent):.1f} %",
        "sync_prompts": f"{prompts[0]} to {prompts[-1]}",
    }


def _list(ratios: Iterable[float]) -> str:
    *first, last = (f"{one:.2f}" for one in ratios)
    return f"{', '.join(first)} and {last} ×"


def _range(values: Iterable[float], digits: int = 2) -> str:
    found = sorted(values)
    return f"{found[0]:.{digits}f} to {found[-1]:.{digits}f}"


def _signed(one: Mapping[str, float]) -> str:
    """A mean with its interval, with signs."""
    return f"{one['mean']:+.3f} [{one['low']:+.3f}, {one['high']:+.3f}]".replace("-", "−")


def _plain(one: Mapping[str, float], sign: int = 1) -> str:
    """A mean with its interval, without a plus; −1 turns a change into a loss."""
    low, high = sorted((sign * one["low"], sign * one["high"]))
    return f"{sign * one['mean']:.3f} [{low:.3f}, {high:.3f}]".replace("-", "−")


def _percent(one: Mapping[str, float]) -> str:
    return f"{100 * one['mean']:.1f} % [{100 * one['low']:.1f}, {100 * one['high']:.1f}]".replace("-", "−")


def _times_text(one: Mapping[str, float]) -> str:
    return f"{one['mean']:.2f} × [{one['low']:.2f}, {one['high']:.2f}]"
