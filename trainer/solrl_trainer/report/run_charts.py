"""The report's charts, drawn from lines of the metrics: one line per version, in order."""

from collections.abc import Mapping, Sequence
from typing import Any

from solrl_trainer.metrics import own_time
from solrl_trainer.report import figures
from solrl_trainer.report.charts import Chart, Series, line_chart, stacked_chart
from solrl_trainer.report.figures import TRAINED_SUM

PHASES = ("explore", "wait", "regenerate", "train", "push")


def reward_chart(iterations: Sequence[dict[str, Any]]) -> Chart | None:
    """Chart of mean rewards: best, mean and worst of the selected, all candidates; None before the first iteration."""
    if not iterations:
        return None
    series = [
        Series("selected best", "best", [line["reward_best"] for line in iterations]),
        Series("selected worst", "worst", [line["reward_worst"] for line in iterations]),
        Series("mean of the selected", "mean", [_mean(line) for line in iterations]),
        Series("all candidates", "proxy", [line["proxy_mean"] for line in iterations]),
    ]
    return line_chart("Mean reward per iteration", _numbers(iterations), series, band=True)


def evaluation_charts(evaluations: Sequence[dict[str, Any]], weights: Mapping[str, float]) -> list[Chart]:
    """One chart per held-out reward with the interval of its gain, and a first one of their sum if several are trained.

    Lines of older runs have no intervals. None with fewer than two evaluations.
    """
    if len(evaluations) < 2:
        return []
    versions = [line["version"] for line in evaluations]
    means: list[dict[str, float]] = [line["rewards"] for line in evaluations]
    if len(weights) > 1 and all(weights.keys() <= row.keys() for row in means):
        sums = [{TRAINED_SUM: sum(weights[name] * row[name] for name in weights)} for row in means]
        means = [one | row for one, row in zip(sums, means, strict=True)]
    charts = []
    for name in means[-1]:
        values = [row[name] for row in means if name in row]
        if len(values) == len(versions):
            label, scale = figures.reward_axis(name)
            shown = [Series(label, "best", [value * scale for value in values], dots=True)]
            found = [_interval(line, name, value) for line, value in zip(evaluations, values, strict=True)]
            ends = [[value * scale for value in end] for end in zip(*found, strict=True)] if None not in found else None
            title = f"{label}: {figures.sum_text(weights)}" if name == TRAINED_SUM else label
            interval = (ends[0], ends[1]) if ends else None
            charts.append(line_chart(title, versions, shown, interval=interval, smooth=False))
    return charts


def _interval(line: Mapping[str, Any], name: str, mean: float) -> tuple[float, float] | None:
    """Ends of the interval of a held-out mean; that of the base has no width, since gains are over it."""
    if not line["version"]:
        return mean, mean
    return (line["low"][name], line["high"][name]) if name in line.get("low", {}) else None


def _mean(line: Mapping[str, Any]) -> float:
    """Mean of the selected; lines of older runs have only those of its halves."""
    return float(line.get("reward_mean", (line["reward_best"] + line["reward_worst"]) / 2))


def time_chart(iterations: Sequence[dict[str, Any]]) -> Chart | None:
    """Chart of the seconds of each phase; None before the first iteration."""
    if not iterations:
        return None
    times = [own_time(line["seconds"]) for line in iterations]
    spent = [phase for phase in PHASES if any(phase in seconds for seconds in times)]
    layers = {phase: [seconds.get(phase, 0.0) for seconds in times] for phase in spent}
    return stacked_chart("Seconds per iteration and phase", _numbers(iterations), layers, "s")


def fidelity_chart(measured: Sequence[dict[str, Any]], wanted: float | None) -> Chart | None:
    """Chart of the Spearman of each `fidelity` event, and of the wanted one; None with fewer than two events."""
    if len(measured) < 2:
        return None
    series = [Series("Spearman", "best", [line["spearman"] for line in measured], dots=True)]
    if wanted is not None:
        series.append(Series("wanted at least", "proxy", [wanted] * len(measured)))
    return line_chart("Rank fidelity by version", _numbers(measured), series, smooth=False)


def optimisation_charts(iterations: Sequence[dict[str, Any]]) -> list[Chart]:
    """Charts of loss and gradient norm."""
    if not iterations:
        return []
    loss, mean, largest = ([line[key] for line in iterations] for key in ("loss", "grad_norm", "grad_norm_max"))
    norms = [Series("largest", "worst", largest), Series("mean", "best", mean)]
    return [
        line_chart("Loss", _numbers(iterations), [Series("loss", "best", loss)]),
        line_chart("Gradient norm before clipping", _numbers(iterations), norms, smooth=False),
    ]


def _numbers(lines: Sequence[dict[str, Any]]) -> list[int]:
    return [line["version"] for line in lines]
