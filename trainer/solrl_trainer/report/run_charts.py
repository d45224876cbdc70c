"""The report's charts, drawn from lines of the metrics: one line per version, in order."""

from collections.abc import Mapping, Sequence
from typing import Any

from solrl_trainer.metrics import own_time
from solrl_trainer.report import figures
from solrl_trainer.report.charts import Chart, Series, line_chart, stacked_chart
from solrl_trainer.report.figures import TRAINED_SUM

PHASES = ("explore", "wait", "regenerate", "train", "push")


def reward_chart(iterations: Sequence[dict[str, Any]]) -> Chart | None:
    """Chart of mean rewards: selected best, selected worst, all candidates; None before the first iteration."""
    if not iterations:
        return None
    series = [
        Series("selected best", "best", [line["reward_best"] for line in iterations]),
        Series("selected worst", "worst", [line["reward_worst"] for line in iterations]),
        Series("all candidates", "proxy", [line["proxy_mean"] for line in iterations]),
    ]
    return line_chart("Mean reward per iteration", _numbers(iterations), series, band=True)


def evaluation_charts(evaluations: Sequence[dict[str, Any]], weights: Mapping[str, float]) -> list[Chart]:
    """One chart per held-out reward, and a first one of their sum if several are trained.

    None with fewer than two evaluations.
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
            charts.append(line_chart(label, versions, shown, smooth=False))
    return charts


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
