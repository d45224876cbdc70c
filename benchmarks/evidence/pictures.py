"""Pictures of the evidence pages, in the house style of the reports, from stored results."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence.claims import MODELS, Read
from solrl_trainer.report import style

NAMES = {"flux": "FLUX.1 512²", "sd3": "SD3.5-Large 1024²", "sana": "SANA 1.6B 1024²"}
FAMILIES = {"24-in-24 BF16": "24 in 24, BF16", "24-in-96 BF16": "24 in 96, BF16", "Sol-RL": "Sol-RL"}


def write(figure: Any, path: Path) -> None:
    """Write a figure as SVG, in colours for a light or a dark page."""
    shades = [";".join(f"--{name}:{pair[dark]}" for name, pair in style.COLOURS.items()) for dark in (0, 1)]
    rules = f":root{{{shades[0]}}}@media(prefers-color-scheme:dark){{:root{{{shades[1]}}}}}"
    head, _, rest = style.svg(figure).partition(">")
    head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"')
    path.write_text(f"{head}><style>{rules}</style>{rest}\n", encoding="utf-8")


def speed(read: Read, path: Path) -> None:
    """Bars of one prompt's rollout phase, with the speed-up over naive scaling at their ends."""
    found = {(row["model"], row["part"]): row for row in read("equal_gpus")["rows"] if row["gpus"] == 1}
    parts = {"naive": "naive scaling", "sol_rl": "six steps", "sol_rl, 4 fitted steps": "four fitted steps"}
    with style.figure(800, 330) as figure:
        panels = figure.subplots(1, len(MODELS))
        for model, axes in zip(MODELS, panels, strict=True):
            for at, part in enumerate(parts):
                row = found[model, part]
                explored = axes.barh(at, row["explore"], color="C2")
                again = axes.barh(at, row["regenerate"], left=row["explore"], color="C1")
                times = f" {found[model, 'naive']['s'] / row['s']:.2f} ×" if at else ""
                axes.text(row["s"], at, times, va="center", fontweight="bold")
            axes.set(title=NAMES[model], xlabel="seconds", yticks=range(len(parts)))
            axes.set_yticklabels(parts.values() if model == MODELS[0] else [])
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
            axes.margins(x=0.02)
        figure.legend([explored, again], ["explore", "regenerate"], loc="outside lower center", ncols=2)
        write(figure, path)


def training(read: Read, path: Path) -> None:
    """Dots of strict accuracy before and after training, a row for each pair of miniature and reward."""
    pairs: Sequence[Mapping[str, Any]] = read("all_pairs")
    with style.figure(800, 360) as figure:
        axes = figure.subplots()
        for at, pair in enumerate(pairs):
            before, after = pair["strict_before"], pair["strict_after"]
            axes.plot([before, after], [at, at], color="C7", linewidth=1.5, zorder=1)
            axes.plot(before, at, "o", color="C7", label="before" if not at else None)
            axes.plot(after, at, "o", color="C0", label="after" if not at else None)
            axes.text(after + 0.8, at, f"+{after - before:.0f}", va="center", fontsize=9)
        axes.set(yticks=range(len(pairs)), xlabel="images that show exactly what their prompt says, %")
        axes.set_yticklabels([f"{pair['model']}, {pair['reward']}" for pair in pairs])
        axes.set_xlim(right=84)
        axes.invert_yaxis()
        axes.legend(loc="lower right")
        write(figure, path)


def plateaus(read: Read, path: Path) -> None:
    """Mean learning curves of the long runs, a panel for each reward."""
    curves = read("paper")["tables"]["plateaus"]["curves"]
    rewards = list(dict.fromkeys(name.rpartition(", ")[2] for name in curves))
    with style.figure(800, 330) as figure:
        panels = figure.subplots(1, len(rewards), sharey=True)
        for reward, axes in zip(rewards, panels, strict=True):
            for name, said in FAMILIES.items():
                axes.plot(*zip(*curves[f"{name}, {reward}"], strict=True), label=said if reward == rewards[0] else None)
            axes.set(title=f"trained on {reward}", xlabel="iterations")
        panels[0].set_ylabel("gain of the held-out reward, sd")
        figure.legend(loc="outside lower center", ncols=len(FAMILIES))
        write(figure, path)


def plans(read: Read, path: Path) -> None:
    """Loss in rank over the steps spent in FP8, a panel for each miniature, a line for each way to prune."""
    rows = [row for row in read("refitted/plan_fidelity")["rows"] if row["decoded"] == "whole" and row["cost"] < 1]
    models = list(dict.fromkeys(row["model"] for row in rows))
    with style.figure(800, 340) as figure:
        panels = figure.subplots(1, len(models), sharey=True)
        for model, axes in zip(models, panels, strict=True):
            own = [row for row in rows if row["model"] == model]
            for at, kind in enumerate(dict.fromkeys((row["steps"], row["after"]) for row in own)):
                points: dict[tuple[float, int], list[float]] = {}
                for row in own:
                    if (row["steps"], row["after"]) == kind:
                        worse = max(mean for mean, _, _ in row["worse"].values())
                        points.setdefault((row["cost"], row["keep"]), []).append(worse)
                means = [(cost, sum(each) / len(each), keep) for (cost, keep), each in points.items()]
                steps, after = kind
                name = f"{'six' if steps == 6 else 'four fitted'} steps" + (
                    f", pruned after {after}" if after < steps else ""
                )
                axes.plot([c for c, _, _ in means], [m for _, m, _ in means], "o-", color=f"C{at}", label=name, ms=3)
                for cost, mean, keep in means:
                    axes.annotate(str(keep), (cost, mean), xytext=(3, 3), textcoords="offset points", fontsize=7)
            axes.axhline(1, color="C7", linestyle="--", linewidth=1)
            axes.set(title=model, xlabel="share of six steps", ylim=(-1, 8))
            axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        panels[0].set_ylabel("ranks lost by the best or worst 12")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        write(figure, path)


def service(read: Read, path: Path) -> None:
    """Cost of a candidate relative to the cheapest case, by the size of a request and by the number of experiments."""
    figures = read("load")["scale"]["figures"]
    parts = {"ms_by_request_size": "candidates per request", "ms_by_experiments": "experiments at a time"}
    with style.figure(800, 270) as figure:
        panels = figure.subplots(1, len(parts), sharey=True)
        for (key, said), axes in zip(parts.items(), panels, strict=True):
            cost = {int(count): ms for count, ms in figures[key].items()}
            axes.plot(list(cost), [ms / min(cost.values()) for ms in cost.values()], "o-")
            axes.set(xscale="log", xlabel=said, ylim=(0, 1.3))
            axes.set_xticks(list(cost), [f"{count:,}" for count in cost], fontsize=8)
            axes.minorticks_off()
        panels[0].set_ylabel("cost of a candidate")
        write(figure, path)


PICTURES: Mapping[str, Callable[[Read, Path], None]] = {
    "speed.svg": speed,
    "training.svg": training,
    "plateaus.svg": plateaus,
    "plans.svg": plans,
    "service.svg": service,
}
"""File in docs/evidence → function that draws it."""
