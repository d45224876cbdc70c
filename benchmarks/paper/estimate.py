"""How long the missing runs take: their passes, times the seconds of a pass in the runs that are finished."""

from collections import Counter
from collections.abc import Iterable, Sequence

from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.prompts import find_prompts, read_prompts
from support.results import table

from paper.compute import Passes, passes_of_iteration
from paper.experiments import Experiment
from paper.finished import Finished
from paper.tables import TABLES
from paper.tables.common import Context

Rates = dict[str, float]
"""Seconds of a pass by phase: "explore bf16", "explore nvfp4", "regenerate", "train", "evaluate"."""


def passes_by_phase(config: RunConfig) -> Passes:
    """Passes of a whole run by phase, with its evaluations; training counts its forward and backward passes alike."""
    per_iteration = passes_of_iteration(config)
    regenerated = config.explore.prompts * config.explore.keep * config.regenerate.steps if config.two_stage else 0
    generated = {name: count for name, count in per_iteration.items() if name.startswith("generate")}
    phases: Passes = Counter({"regenerate": regenerated})
    explored = sum(generated.values()) - regenerated
    phases[f"explore {config.explore.precision}"] = explored
    phases["train"] = sum(per_iteration.values()) - sum(generated.values())
    whole: Passes = Counter({name: count * config.iterations for name, count in phases.items()})
    judge = config.evaluate
    held_out = min(judge.prompts, len(read_prompts(find_prompts(config.prompts), "test")))
    evaluations = (config.iterations - 1) // judge.every + 1 if judge.every else 1
    whole["evaluate"] = evaluations * held_out * judge.seeds * judge.steps
    if config.two_stage:
        per_candidate = config.explore.steps + config.regenerate.steps
        whole["evaluate"] += judge.fidelity_prompts * config.explore.candidates * per_candidate
    return whole


def rates(runs: Iterable[Finished]) -> Rates:
    """Seconds of a pass in these runs, as they shared their device."""
    seconds: Counter[str] = Counter()
    passes: Passes = Counter()
    for run in runs:
        if run.stopped is not None:
            continue
        for phase, count in passes_by_phase(run.config).items():
            spent = run.seconds.get(phase.partition(" ")[0], 0.0)
            if count and spent:
                seconds[phase] += spent  # type: ignore[assignment]
                passes[phase] += count
    return {phase: seconds[phase] / passes[phase] for phase in passes}


def hours(experiments: Sequence[Experiment], found: Rates) -> float | None:
    """Hours of these runs one after another; None without any measured run.

    A kind of pass that no run has measured counts like the slowest one of its phase, or of all but evaluations.
    """
    if not found:
        return None
    others = [rate for name, rate in found.items() if name != "evaluate"] or list(found.values())
    total = 0.0
    for one in experiments:
        for phase, count in passes_by_phase(one.config).items():
            alike = [rate for name, rate in found.items() if name.partition(" ")[0] == phase.partition(" ")[0]]
            total += count * found.get(phase, max(alike or others))
    return total / 3600


def plan(context: Context, jobs: int) -> str:
    """Runs that each table needs, how many of them are finished, their passes, and the time of the missing ones."""
    found = rates(context.runs.values())
    shared = max((run.jobs for run in context.runs.values()), default=None)
    rows, seen = [], set[str]()
    for name, module in TABLES.items():
        needed = list(dict.fromkeys(module.experiments(context, whole=True)))
        missing = [one for one in needed if one.name not in context.runs]
        new = [one for one in missing if one.name not in seen]
        seen |= {one.name for one in missing}
        passes = sum(sum(passes_by_phase(one.config).values()) for one in new)
        rows.append(
            [
                name,
                *map(str, (len(needed), len(needed) - len(missing), len(new))),
                f"{passes / 1e6:.1f} M",
                _time(hours(new, found)),
            ]
        )
    head = ["table", "runs", "finished", "missing, not in a table above", "their passes", "hours, one after another"]
    if shared is None:
        note = "No run is finished yet, so there is no estimate of hours: run one table for a few minutes first."
    else:
        note = (
            f"Hours as measured with {shared} at a time: divide by {shared} for the time on the clock"
            f"{'' if jobs == shared else f', and measure again for {jobs} jobs'}. Starting a process is not included."
        )
    return "\n".join([*table(head, rows), "", note])


def _time(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1f}"
