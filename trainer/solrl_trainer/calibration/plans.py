"""Exploration plans that a calibration measures, and solvers of few steps, fitted on training prompts of their own."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pydantic import TypeAdapter
from solrl_core.precision.support import numerics, supported_precisions
from solrl_core.sampling.fitting import SCHEDULES, Examples, fit, make_examples, passes
from solrl_core.sampling.generator import Generator
from solrl_proto.identifiers import Precision
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import FittedSolver, Plan, PromptItem, RequestedPrecision

from solrl_trainer.prompts.prompt_sets import prompts_of_run
from solrl_trainer.ranks.rank_runtime import RankRuntime
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.defaults import CALIBRATED_STEPS

FITTED_PROMPTS, FITTED_SEEDS = 24, 4
"""Training prompts, and candidates per prompt, whose trajectories the fitted solvers match."""
_SOLVERS = TypeAdapter(list[FittedSolver])


@dataclass(frozen=True)
class PlanSet:
    """Numbers of solver steps to measure, beside the reference's, and noise levels of each fitted solver."""

    steps: tuple[int, ...] = CALIBRATED_STEPS
    schedules: tuple[tuple[float, ...], ...] = SCHEDULES


def plans(
    config: RunConfig, precisions: Sequence[Precision], solvers: Sequence[FittedSolver], limits: PlanSet
) -> list[Plan]:
    """Plans to measure: each precision, in each number of steps and fitted ones."""
    counts = sorted({*limits.steps, config.explore.steps})
    ways: list[tuple[int, FittedSolver | None]] = [(steps, None) for steps in counts]
    ways += [(len(solver.sigmas), solver) for solver in solvers]
    return [
        Plan(steps=steps, solver=config.solver, fitted=fitted, guidance=config.guidance, precision=precision)
        for precision, (steps, fitted) in itertools.product(precisions, ways)
    ]


def reference_plan(config: RunConfig, precisions: Sequence[Precision]) -> Plan:
    """The plan that all plans are compared with: the run's steps at the fastest precision, `precisions[0]`."""
    return Plan(steps=config.explore.steps, solver=config.solver, guidance=config.guidance, precision=precisions[0])


def explored_precisions(precision: RequestedPrecision, device: torch.device) -> list[Precision]:
    """BF16 and the given precision; for auto, all native ones. An emulation is measured only if it is requested."""
    return [
        candidate
        for candidate in supported_precisions(device)
        if candidate in ("bf16", precision) or (precision == "auto" and numerics(candidate, device) == "native")
    ]


def name(plan: Plan) -> str:
    """Short name of a plan, such as "nvfp4 6 steps" or "nvfp4 4 fitted steps (1, 0.87, …)"."""
    by = plan.fitted
    steps = "steps" if by is None else f"fitted steps ({', '.join(f'{s:g}' for s in by.sigmas)})"
    return f"{plan.precision} {plan.steps} {steps}"


def recipe_examples(config: RunConfig, generator: Generator) -> Examples:
    """The recipe's trajectories on training prompts; `generator` must be BF16."""
    prompts = prompts_of_run(config.prompt_sources, "train").by_digest[:FITTED_PROMPTS]
    return make_examples(
        generator,
        [prompt.text for prompt in prompts for _ in range(FITTED_SEEDS)],
        [seed for prompt in prompts for seed in expand_seeds(config.seed, f"fit/{prompt.id}", FITTED_SEEDS)],
        steps=config.regenerate.steps,
        solver=config.solver,
        guidance=config.guidance,
    )


def fit_solvers(generator: Generator, examples: Examples, schedules: Sequence[Sequence[float]]) -> list[FittedSolver]:
    return [fit(generator, examples, sigmas) for sigmas in schedules]


def fit_on_rank_zero(
    config: RunConfig, generator: Generator, schedules: Sequence[Sequence[float]], processes: RankRuntime
) -> list[FittedSolver]:
    """A solver for each schedule, fitted by the first rank, on every rank; `generator` must be BF16."""
    fitted: list[FittedSolver] = []
    if processes.is_rank_zero and schedules:
        fitted = fit_solvers(generator, recipe_examples(config, generator), schedules)
    text = _SOLVERS.dump_json(fitted).decode() if processes.is_rank_zero else None
    return _SOLVERS.validate_json(processes.broadcast_text(text))


def fitting_steps(config: RunConfig, schedules: Sequence[Sequence[float]]) -> int:
    """Solver steps of the examples, and of fitting solvers to them."""
    if not schedules:
        return 0
    fitted = sum(passes(len(sigmas)) for sigmas in schedules)
    return FITTED_PROMPTS * FITTED_SEEDS * (config.regenerate.steps + fitted)


def measured_prompts(config: RunConfig, count: int, *, fits: bool) -> list[PromptItem]:
    """Training prompts after the fitting prompts; without `fits`, also among them if few. ValueError: too few."""
    train = prompts_of_run(config.prompt_sources, "train").by_digest
    least = count + FITTED_PROMPTS * fits
    if len(train) < least:
        sources = " and ".join(config.prompt_sources)
        apart = f": {FITTED_PROMPTS} to fit on and {count} other prompts to measure on" if fits else " to measure on"
        raise ValueError(f"{sources} has {len(train)} training prompts; expected at least {least}{apart} (--prompts)")
    start = min(FITTED_PROMPTS, len(train) - count)
    return train[start : start + count]
