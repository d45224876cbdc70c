"""report.html: a self-contained page about a run, rendered from the files in its folder.

It needs only these files, so it can be rendered again later, on another machine, or while the run is in progress.
"""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from solrl_core.fidelity import SATURATED
from solrl_core.image_files import tiled, webp
from solrl_proto.text_files import read_json

from solrl_trainer.evaluation.ended import PAGE, RESULT
from solrl_trainer.evaluation.gallery import Gallery, load_gallery
from solrl_trainer.records.reward_shares import SMALL, shares_text
from solrl_trainer.report import rendering, style
from solrl_trainer.report.charts import Chart, Series, line_chart, stacked_chart
from solrl_trainer.report.model_card import how_to_load
from solrl_trainer.run_folder import figures
from solrl_trainer.run_folder.figures import LEAST_FIDELITY, TRAINED_SUM
from solrl_trainer.run_folder.folder import SETTINGS, check_run_folder
from solrl_trainer.run_folder.metrics_file import own_time, read_metrics
from solrl_trainer.run_folder.output_files import replace_file

SHOWN_FIRST = 16
"""Prompts of the before/after grid that are shown at first; all other prompts unfold."""


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
        means = [total | row for total, row in zip(sums, means, strict=True)]
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


@dataclass(frozen=True)
class RunFiles:
    """Contents of config.json, of result.json (None before the run ends, also if it goes on) and of metrics.jsonl."""

    folder: Path
    config: dict[str, Any]
    result: dict[str, Any] | None
    lines: list[dict[str, Any]]

    @property
    def iterations(self) -> list[dict[str, Any]]:
        """The line of each iteration, with the seconds of its push."""
        seconds = {line["version"]: line["seconds"] for line in self.latest("push")}
        return [
            line | {"seconds": line["seconds"] | seconds.get(line["version"], {})} for line in self.latest("iteration")
        ]

    def latest(self, event: str) -> list[dict[str, Any]]:
        """Last line of each version, in order; a resumed run logs its first evaluation again."""
        lines = {line["version"]: line for line in self.lines if line["event"] == event}
        return [lines[version] for version in sorted(lines)]

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the trained rewards."""
        weights = self.result["trained"] if self.result else self.config["rewards"]
        return {name: weight for name, weight in weights.items() if weight}


def write_report(folder: Path) -> Path:
    """Write report.html into a run's folder. FileNotFoundError: it has no run. ValueError: a link or pipe is in it."""
    check_run_folder(folder)
    settings, result, metrics, path = (folder / n for n in (SETTINGS, RESULT, "metrics.jsonl", PAGE))
    config, ended = read_json(settings), read_json(result) if result.is_file() else None
    run = RunFiles(
        folder,
        config,
        ended if ended and (ended["iterations"] == config["iterations"] or ended.get("stopped")) else None,
        read_metrics(metrics) if metrics.is_file() else [],
    )
    environment = rendering.environment(autoescape=True)
    environment.filters |= {
        "duration": figures.duration_text,
        "image": data_uri,
        "strip": lambda clip: data_uri(tiled(clip[None], columns=4)[0]),
        "judging": figures.judging_text,
        "label": figures.reward_label,
        "setting": setting_text,
    }
    replace_file(path, environment.get_template("report.html.j2").render(_content(run), colours=style.COLOURS))
    return path


def setting_text(value: Any) -> str:
    """A setting as YAML has it, without quotes; lists are separated by commas."""
    if isinstance(value, list):
        return ", ".join(map(setting_text, value))
    return value if isinstance(value, str) else json.dumps(value)


def data_uri(image: torch.Tensor) -> str:
    """Encode a uint8 [3, H, W] image as a data URI: small ones as PNG, larger ones as JPEG, clips as animated WebP."""
    if image.ndim == 4:
        return f"data:image/webp;base64,{base64.b64encode(webp(image.movedim(-3, -1), quality=75)).decode()}"
    buffer = io.BytesIO()
    kind = "png" if max(image.shape[-2:]) <= 128 else "jpeg"
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(buffer, kind, quality=90)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _content(run: RunFiles) -> dict[str, Any]:
    config, result, iterations = run.config, run.result, run.iterations
    evaluations, measured = run.latest("evaluation"), run.latest("fidelity")
    gallery = None
    if result:
        with suppress(FileNotFoundError):
            gallery = load_gallery(run.folder)
    weights, shares = run.weights, _mean_shares(iterations)
    prompts = result["prompts"] if result else 0
    explored_in = iterations[-1]["precision"].upper() if iterations else "explored"
    arithmetics = {f"{line['precision'].upper()} ({line['numerics']})" for line in iterations}
    totals = {phase: sum(own_time(line["seconds"]).get(phase, 0.0) for line in iterations) for phase in PHASES}
    if result:
        # The other phases come from the metrics, which include the time before a resume.
        totals["evaluate"] = result["seconds"].get("evaluate", 0.0)
    explore, regenerate = config["explore"], config["regenerate"]
    explores = explore["source"] == "model"
    return {
        "title": config["run"],
        "about": figures.trained_text(config["model"], config["preset"], weights),
        "trained": figures.sum_text(weights),
        "regenerated": regenerate["at"] != "none",
        "images": (result or {}).get("images"),
        "prompts": prompts,
        "cautions": [
            figures.few_prompts_text(prompts),
            figures.hacked_text(result["rewards"], weights) if result else "",
        ],
        "finished": result is not None,
        "ended": figures.result_end(result or {}),
        "done": iterations[-1]["version"] if iterations else 0,
        "planned": config["iterations"],
        "served": " and ".join(sorted(arithmetics)) if explores else "",
        "rewards": [_reward_card(name, row, weights) for name, row in (result or {}).get("rewards", {}).items()],
        "shares": shares_text(shares),
        "small": ", ".join(name for name, share in shares.items() if share < SMALL),
        "reward_chart": reward_chart(iterations) if iterations and explores else None,
        "scoring": _scoring(iterations),
        "evaluation_charts": evaluation_charts(evaluations, weights),
        "evaluated_images": evaluations[-1].get("images") if evaluations else None,
        "loading": how_to_load(run.folder),
        "latest": evaluations[-1] if evaluations else None,
        "totals": {phase: seconds for phase, seconds in totals.items() if seconds},
        "explored": sum(line["seconds"].get("explore", 0.0) for line in iterations) if totals["wait"] else None,
        "time_chart": time_chart(iterations) if iterations else None,
        "optimisation_charts": optimisation_charts(iterations) if iterations else [],
        "phases": PHASES,
        "fidelity": describe_fidelity(measured[-1], **explore) if measured else None,
        "fidelity_chart": fidelity_chart(measured),
        "measured": measured,
        "explored_in": explored_in,
        "explore_steps": explore["steps"],
        "regenerate_steps": regenerate["steps"],
        "candidates": _candidates(gallery),
        "gallery": gallery,
        "shown_first": SHOWN_FIRST,
        "lineage": iterations[::-1],
        "settings": _sections(config),
        "reward_text": figures.reward_text,
    }


def _mean_shares(iterations: Sequence[dict[str, Any]]) -> dict[str, float]:
    lines = [line["shares"] for line in iterations if "shares" in line]
    return {name: sum(line[name] for line in lines) / len(lines) for name in lines[0]} if lines else {}


def _reward_card(name: str, row: dict[str, float], weights: dict[str, float]) -> dict[str, Any]:
    """Texts and whisker of a reward of a result, from its figures and the weights of the trained rewards."""
    low, high, gain = row["low"], row["high"], row["gain"]
    verdict = "up" if low > 0 else "down" if high < 0 else "unclear"
    # Of the whisker's either end, with zero in the middle: a little beyond the interval.
    reach = max(abs(low), abs(high)) * 1.1 or 1.0
    return {
        "label": figures.reward_label(name),
        "role": figures.role_text(name, weights) if weights else "",
        "before": figures.reward_text(name, row["before"]),
        "after": figures.reward_text(name, row["after"]),
        "gain": figures.gain_text(name, gain),
        "interval": figures.interval_text(name, low, high),
        "verdict": verdict,
        "whisker": {key: 50 + 50 * value / reach for key, value in (("low", low), ("gain", gain), ("high", high))},
    }


def _scoring(iterations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Seconds of each reward by images and place, over all iterations."""
    totals: dict[tuple[str, str, str], float] = {}
    for entry in (entry for line in iterations for entry in line["scoring"]):
        row = entry["of"], entry["reward"], figures.place_text(entry["by"], entry.get("server"))
        totals[row] = totals.get(row, 0.0) + entry["seconds"]
    rows = sorted(totals.items(), key=lambda item: item[0][0])
    return [{"of": of, "reward": name, "place": place, "seconds": spent} for (of, name, place), spent in rows]


def _candidates(gallery: Gallery | None) -> dict[str, dict[str, list[int]]]:
    groups: dict[str, dict[str, list[int]]] = {}
    for index, pair in enumerate(gallery.pairs if gallery else []):
        groups.setdefault(pair.prompt, {}).setdefault(pair.place, []).append(index)
    return groups


def _sections(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings by section; settings outside a section come first, as "run"."""
    sections: dict[str, dict[str, Any]] = {"run": {k: v for k, v in config.items() if not isinstance(v, dict)}}
    return sections | {name: values for name, values in config.items() if isinstance(values, dict) and values}


def describe_fidelity(line: dict[str, Any], *, candidates: int, keep: int, **_: Any) -> str:
    """Describe a `fidelity` event, `vars(Fidelity)` read from JSON, of a run with these settings of `explore`."""
    spearman, half = line["spearman"], keep // 2
    text = (
        f"Ranking a prompt's candidates by their explored images gives {_words(spearman)} ranking by their BF16 "
        f"images (mean Spearman {spearman:.2f}, where 1 is the same order and 0 is chance). The {half} candidates that "
        f"the proxy ranks best of {candidates} have a mean true rank of {line['top_rank']:.1f} (perfect "
        f"{line['perfect_top']:.1f}, chance {(candidates + 1) / 2:.1f}); the {half} that it ranks worst have "
        f"{line['bottom_rank']:.1f} (perfect {line['perfect_bottom']:.1f})."
    )
    if line["best_share"] <= SATURATED:
        return text
    return f"{text} Reward saturated: {100 * line['best_share']:.0f} % of a prompt's candidates share its best score."


def _words(spearman: float) -> str:
    steps = (
        (0.95, "almost the same order as"),
        (0.8, "nearly the same order as"),
        (0.5, "an order similar to"),
        (0.2, "an order only loosely like"),
    )
    return next((words for least, words in steps if spearman >= least), "an order quite unlike")
