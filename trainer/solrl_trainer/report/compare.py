"""`solrl-train compare`: one page with the curves of several runs, their held-out figures and their settings."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from solrl_trainer.records import figures
from solrl_trainer.records.metrics_file import own_time
from solrl_trainer.report.charts import COUNTS, TIMES, Chart, Series, Unit, line_chart
from solrl_trainer.report.page import reward_card, write_page
from solrl_trainer.report.run_files import RunFiles, setting_text

MOST_RUNS = 8
"""Largest number of runs whose colours can be told apart."""
_TRAINING = {
    "proxy_mean": "All candidates, as explored",
    "reward_best": "Selected best",
    "reward_worst": "Selected worst",
    "loss": "Loss",
}
"""Figures of an iteration that are compared → title."""
_OF_ONE_RUN = ("run", "output", "rollout_url", "served_as", "track")
"""Settings that differ between any two runs, or matter to none of their figures."""
_MISSING = "–"


@dataclass(frozen=True)
class Axis:
    """A choice of the x axis.

    Attributes:
        key, title: name in the page, and as shown.
        positions: run → position of each version, from 0.
        units: choice of units.
    """

    key: str
    title: str
    positions: Callable[[RunFiles], list[float]]
    units: Sequence[Unit]


def _versions(run: RunFiles) -> list[float]:
    last = max((line["version"] for line in run.lines if "version" in line), default=0)
    return [float(version) for version in range(last + 1)]


def _seconds(run: RunFiles) -> list[float]:
    spent = {line["version"]: sum(own_time(line["seconds"]).values()) for line in run.iterations}
    return list(accumulate(spent.get(int(version), 0.0) for version in _versions(run)))


def _candidates(run: RunFiles) -> list[float]:
    explore = (run.config or {}).get("explore", {})
    each = explore.get("prompts", 0) * explore.get("candidates", 0)
    return [version * each for version in _versions(run)]


AXES = (
    Axis("iterations", "by iteration", _versions, COUNTS),
    Axis("seconds", "by time", _seconds, TIMES),
    Axis("candidates", "by candidates", _candidates, COUNTS),
)


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Write a page that compares the runs in some folders.

    Raises:
        ValueError: fewer than two runs, more than `MOST_RUNS`, or one twice.
        FileNotFoundError: a folder contains no run.
    """
    if not 2 <= len(folders) <= MOST_RUNS:
        raise ValueError(f"got {len(folders)} runs; expected 2 to {MOST_RUNS} folders")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError("got a folder twice; expected different runs")
    runs = [RunFiles.read(folder) for folder in folders]
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_page("compare.html.j2", _content(runs), path)


def _content(runs: Sequence[RunFiles]) -> dict[str, Any]:
    names, held_out = _names(runs), _curve_kinds(runs)
    return {
        "runs": [_described(run, name, index) for index, (run, name) in enumerate(zip(runs, names, strict=True))],
        "axes": AXES,
        "curve_images": _curve_images(runs),
        "curves_alike": len(set(held_out)) == 1,
        "held_out": _charts(runs, names, "evaluation", _held_out_figures(runs, held_out)),
        "training": _charts(runs, names, "iteration", _training_figures(runs)),
        "rewards": _rewards(runs, names),
        "evaluated_alike": len({_evaluated(run) for run in runs}) == 1,
        "settings": list(_different_settings(runs)),
    }


def _names(runs: Sequence[RunFiles]) -> list[str]:
    """Names of the runs; their folders if two have the same."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def _described(run: RunFiles, name: str, index: int) -> dict[str, Any]:
    facts, iterations = run.facts, run.iterations
    about = figures.trained_text(facts["model"], facts["preset"], run.weights) if facts else ""
    return {
        "name": name,
        "colour": index,
        "about": about,
        "finished": run.result is not None,
        "done": iterations[-1]["version"] if iterations else 0,
        "planned": facts.get("iterations"),
        "seconds": _seconds(run)[-1],
        "candidates": round(_candidates(run)[-1]),
    }


@dataclass(frozen=True)
class Figure:
    """A figure that is compared.

    Attributes:
        title: of its charts.
        value: in a line of metrics.jsonl; None if the line lacks it.
        kinds: of each run's values; only those of one kind can share an axis.
    """

    title: str
    value: Callable[[dict[str, Any]], float | None]
    kinds: Sequence[str]


def _training_figures(runs: Sequence[RunFiles]) -> list[Figure]:
    sums = [figures.sum_text(run.weights) for run in runs]
    algorithms = [str((run.config or {}).get("algorithm", {}).get("name", _MISSING)) for run in runs]
    kinds = {key: algorithms if key == "loss" else sums for key in _TRAINING}
    return [Figure(title, lambda line, key=key: line.get(key), kinds[key]) for key, title in _TRAINING.items()]  # type: ignore[misc]


def _held_out_figures(runs: Sequence[RunFiles], kinds: Sequence[str]) -> list[Figure]:
    names = _ordered(name for run in runs for line in run.latest("evaluation") for name in line["rewards"])
    return [Figure(figures.reward_axis(name)[0], _held_out_value(name), kinds) for name in names]


def _held_out_value(name: str) -> Callable[[dict[str, Any]], float | None]:
    factor = figures.reward_axis(name)[1]
    return lambda line: line["rewards"][name] * factor if name in line["rewards"] else None


def _curve_kinds(runs: Sequence[RunFiles]) -> list[str]:
    """For each run, the images of its held-out curves as far as they differ from another's."""
    told = [_curve_images_of(run) for run in runs]
    differ = [key for key in told[0] if len({one[key] for one in told}) > 1]
    return [", ".join(f"{key} {one[key]}" for key in differ) for one in told]


def _curve_images_of(run: RunFiles) -> dict[str, str]:
    config, lines = run.config or {}, run.latest("evaluation")
    evaluate = config.get("evaluate", {})
    return {
        "images": str(next((line["images"] for line in reversed(lines) if "images" in line), _MISSING)),
        "prompts": str(config.get("prompts", _MISSING)),
        **{f"evaluate.{key}": str(evaluate.get(key, _MISSING)) for key in ("prompts", "steps")},
    }


def _charts(
    runs: Sequence[RunFiles], names: Sequence[str], event: str, compared: Sequence[Figure]
) -> list[tuple[str, dict[str, Chart]]]:
    """Title of each figure and its chart over each axis, for each kind; only of figures that change in some run."""
    charts = []
    smooth = event == "iteration"
    for figure in compared:
        found = [[(line["version"], figure.value(line)) for line in run.latest(event)] for run in runs]
        known = [[(version, value) for version, value in points if value is not None] for points in found]
        kinds = _ordered(kind for kind, points in zip(figure.kinds, known, strict=True) if len(points) > 1)
        for kind in kinds:
            title = figure.title if len(kinds) == 1 else f"{figure.title}: {kind}"
            drawn = [index for index, points in enumerate(known) if points and figure.kinds[index] == kind]
            by_axis = {}
            for axis in AXES:
                curves = []
                for index in drawn:
                    positions = axis.positions(runs[index])
                    xs = [positions[version] for version, _ in known[index]]
                    values = [value for _, value in known[index]]
                    curves.append(Series(names[index], index, xs, values, dots=not smooth))
                by_axis[axis.key] = line_chart(title, curves, units=axis.units, start=0.0, smooth=smooth)
            charts.append((title, by_axis))
    return charts


def _rewards(runs: Sequence[RunFiles], names: Sequence[str]) -> list[dict[str, Any]]:
    """Each reward of the results, with a row per run and whiskers on one scale; those without a result have no card.

    Each trained sum is a reward of its own.
    """
    rewards = []
    sums = [figures.sum_text(run.weights) for run in runs]
    for reward in _ordered(name for run in runs for name in (run.result or {}).get("rewards", {})):
        rows = [(run.result or {}).get("rewards", {}).get(reward) for run in runs]
        kinds = sums if reward == figures.TRAINED_SUM else [""] * len(runs)
        for kind in _ordered(kind for kind, row in zip(kinds, rows, strict=True) if row):
            alike = [index for index in range(len(runs)) if kinds[index] == kind]
            reach = max(max(abs(rows[i]["low"]), abs(rows[i]["high"])) for i in alike if rows[i]) * 1.1 or 1.0
            shown = [
                {
                    "name": names[index],
                    "colour": index,
                    "card": reward_card(reward, rows[index], runs[index].weights, reach) if rows[index] else None,
                    "so_far": _so_far(runs[index], reward),
                    "few": figures.few_prompts_text(runs[index].prompts),
                }
                for index in alike
            ]
            rewards.append({"label": ": ".join(filter(None, (figures.reward_label(reward), kind))), "rows": shown})
    return rewards


def _so_far(run: RunFiles, reward: str) -> str:
    """Mean before training and at the last evaluation of a run without a result."""
    found = [line for line in run.latest("evaluation") if reward in line["rewards"]]
    if len(found) < 2:
        return _MISSING
    means = " → ".join(figures.reward_text(reward, line["rewards"][reward]) for line in (found[0], found[-1]))
    return f"{means} at iteration {found[-1]['version']}, without an interval"


def _evaluated(run: RunFiles) -> tuple[Any, ...]:
    """Settings that held-out figures must share to be compared."""
    config = run.config or {}
    evaluate = config.get("evaluate", {})
    return (config.get("prompts"), *(evaluate.get(key) for key in ("prompts", "seeds", "steps")))


def _curve_images(runs: Sequence[RunFiles]) -> str:
    """Numbers of images of the held-out curves, if the figures of results are over others."""
    lines = [line for run in runs for line in run.latest("evaluation") if "images" in line]
    curves, results = {line["images"] for line in lines}, {run.result["images"] for run in runs if run.result}
    if not curves or not results - curves:
        return ""
    return f": {' or '.join(map(str, sorted(curves)))} images of the {' or '.join(map(str, sorted(results)))} above"


def _different_settings(runs: Sequence[RunFiles]) -> Iterable[tuple[str, list[str]]]:
    """Settings that are not the same in all runs, with their texts."""
    flat = [_flat(run.config or {}) for run in runs]
    for key in _ordered(key for settings in flat for key in settings):
        texts = [setting_text(settings[key]) if key in settings else _MISSING for settings in flat]
        if key not in _OF_ONE_RUN and len(set(texts)) > 1:
            yield key, texts


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by dotted names; those of a section with mappings of their own stay whole."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and name not in ("rewards", "reward_options"):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat


def _ordered(names: Iterable[str]) -> list[str]:
    """Each name once, in the order of first appearance."""
    return list(dict.fromkeys(names))
