"""The report's charts, drawn from lines of the metrics: one line per version, in order."""

from collections.abc import Mapping, Sequence
from typing import Any

from solrl_trainer.report.charts import Chart, Series, line_chart, stacked_chart
from solrl_trainer.run_folder import figures
from solrl_trainer.run_folder.figures import LEAST_FIDELITY, TRAINED_SUM
from solrl_trainer.run_folder.metrics_file import own_time

PHASES = {"explore": 2, "explore_here": 1, "wait": 2, "regenerate": 0, "train": 4, "push": 3, "evaluate": 7}
"""Phases of an iteration, and held-out evaluations beside them → colour."""


def reward_chart(iterations: Sequence[dict[str, Any]]) -> Chart:
    """Chart of mean rewards: best, mean and worst of the selected, all candidates."""
    xs = _versions(iterations)
    series = [
        Series("selected best", 0, xs, [line["reward_best"] for line in iterations]),
        Series("selected worst", 1, xs, [line["reward_worst"] for line in iterations]),
        Series("mean of the selected", 2, xs, [line["reward_mean"] for line in iterations]),
        Series("all candidates", 7, xs, [line["proxy_mean"] for line in iterations], dashed=True),
    ]
    return line_chart("Mean reward per iteration", series, smooth=True, band=True, large=True)


def evaluation_charts(evaluations: Sequence[dict[str, Any]], weights: Mapping[str, float]) -> list[Chart]:
    """One chart per held-out reward with the interval of its gain, and a first one of their sum if several are trained.

    None with fewer than two evaluations.
    """
    if len(evaluations) < 2:
        return []
    means: list[dict[str, float]] = [line["rewards"] for line in evaluations]
    if len(weights) > 1 and all(weights.keys() <= row.keys() for row in means):
        sums = [{TRAINED_SUM: figures.trained_sum(row, weights)} for row in means]
        means = [one | row for one, row in zip(sums, means, strict=True)]
    charts = []
    for name in means[-1]:
        values = [row[name] for row in means if name in row]
        if len(values) == len(means):
            label, scale = figures.reward_axis(name)
            intervals = [_interval(line, name, value) for line, value in zip(evaluations, values, strict=True)]
            low, high = ([value * scale for value in ends] for ends in zip(*intervals, strict=True))
            scaled = [value * scale for value in values]
            line = Series(label, 0, _versions(evaluations), scaled, dots=True, interval=(low, high))
            charts.append(line_chart(f"{label}: {figures.sum_text(weights)}" if name == TRAINED_SUM else label, [line]))
    return charts


def _interval(line: Mapping[str, Any], name: str, mean: float) -> tuple[float, float]:
    """Ends of the interval of a held-out mean; that of the base has no width, since gains are over it.

    The base's mean plus an end of the gain may lie beyond what the reward can be.
    """
    if not line["version"]:
        return mean, mean
    low, high = (line.get(end, {}).get(name, mean) for end in ("low", "high"))
    return (max(low, 0.0), min(high, 1.0)) if figures.lies_in_unit_interval(name) else (low, high)


def time_chart(iterations: Sequence[dict[str, Any]]) -> Chart:
    """Chart of the seconds of each phase."""
    times = [own_time(line["seconds"]) for line in iterations]
    spent = [phase for phase in PHASES if any(phase in seconds for seconds in times)]
    layers = {phase: (PHASES[phase], [seconds.get(phase, 0.0) for seconds in times]) for phase in spent}
    return stacked_chart("Seconds per iteration and phase", _versions(iterations), layers)


def fidelity_chart(measured: Sequence[dict[str, Any]]) -> Chart | None:
    """Chart of the Spearman of each `fidelity` event, and of `LEAST_FIDELITY`; None with fewer than two events."""
    if len(measured) < 2:
        return None
    xs = _versions(measured)
    series = [
        Series("Spearman", 0, xs, [line["spearman"] for line in measured], dots=True),
        Series("wanted at least", 7, xs, [LEAST_FIDELITY] * len(xs), dashed=True),
    ]
    return line_chart("Rank fidelity by version", series, large=True)


def optimisation_charts(iterations: Sequence[dict[str, Any]]) -> list[Chart]:
    """Charts of loss, gradient norm, and of the gap of log-probabilities if the run has it."""
    xs = _versions(iterations)
    loss, mean, largest = ([line[key] for line in iterations] for key in ("loss", "grad_norm", "grad_norm_max"))
    norms = [Series("largest", 1, xs, largest), Series("mean", 0, xs, mean)]
    charts = [
        line_chart("Loss", [Series("loss", 0, xs, loss)], smooth=True),
        line_chart("Gradient norm before clipping", norms),
    ]
    if all("objective/gap" in line for line in iterations):
        gaps = [line["objective/gap"].values() for line in iterations]
        series = [
            Series("largest of a noise level", 1, xs, [max(gap) for gap in gaps]),
            Series("mean", 0, xs, [sum(gap) / len(gap) for gap in gaps]),
        ]
        charts.append(line_chart("Gap of log-probabilities between rollout and training", series))
    return charts


def _versions(lines: Sequence[dict[str, Any]]) -> list[int]:
    return [line["version"] for line in lines]
