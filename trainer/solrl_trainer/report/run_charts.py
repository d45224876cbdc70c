"""The report's charts, drawn from lines of the metrics: one line per version, in order."""

from collections.abc import Sequence
from typing import Any

from solrl_trainer.metrics import own_time
from solrl_trainer.report import figures
from solrl_trainer.report.charts import Chart, Series, line_chart, stacked_chart

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


def evaluation_charts(evaluations: Sequence[dict[str, Any]]) -> list[Chart]:
    """One chart per held-out reward; none with fewer than two evaluations."""
    if len(evaluations) < 2:
        return []
    versions = [line["version"] for line in evaluations]
    charts = []
    for name in evaluations[-1]["rewards"]:
        values = [line["rewards"][name] for line in evaluations if name in line["rewards"]]
        if len(values) == len(versions):
            label, scale = figures.reward_axis(name)
            shown = [Series(label, "best", [value * scale for value in values])]
            charts.append(line_chart(label, versions, shown, dots=True, smooth=False))
    return charts


def time_chart(iterations: Sequence[dict[str, Any]]) -> Chart | None:
    """Chart of the seconds of each phase; None before the first iteration."""
    if not iterations:
        return None
    times = [own_time(line["seconds"]) for line in iterations]
    spent = [phase for phase in PHASES if any(phase in seconds for seconds in times)]
    layers = {phase: [seconds.get(phase, 0.0) for seconds in times] for phase in spent}
    return stacked_chart("Seconds per iteration and phase", _numbers(iterations), layers, "s")


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


def _numbers(iterations: Sequence[dict[str, Any]]) -> list[int]:
    return [line["version"] for line in iterations]
