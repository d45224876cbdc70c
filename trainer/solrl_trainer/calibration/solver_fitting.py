"""Solvers of few steps, fitted on training prompts that nothing else of a calibration uses."""

from collections.abc import Sequence

from pydantic import TypeAdapter
from solrl_core.sampling.fitting import Examples, fit, make_examples, passes
from solrl_core.sampling.generator import Generator
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import FittedSolver, PromptItem

from solrl_trainer.ranks.rank_runtime import RankRuntime
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.prompts import prompts_of_run

FITTED_PROMPTS, FITTED_SEEDS = 24, 4
"""Training prompts, and candidates per prompt, whose trajectories the fitted solvers match."""
_SOLVERS = TypeAdapter(list[FittedSolver])


def recipe_examples(config: RunConfig, generator: Generator) -> Examples:
    """The recipe's trajectories on training prompts; `generator` must be BF16."""
    prompts = prompts_of_run(config.prompt_sources, "train").all[:FITTED_PROMPTS]
    return make_examples(
        generator,
        [prompt.text for prompt in prompts for _ in range(FITTED_SEEDS)],
        [seed for prompt in prompts for seed in expand_seeds(config.seed, f"fit/{prompt.id}", FITTED_SEEDS)],
        steps=config.regenerate.steps,
        solver=config.solver,
        guidance=config.guidance,
    )


def fit_solvers(generator: Generator, examples: Examples, schedules: Sequence[Sequence[float]]) -> list[FittedSolver]:
    """Fit a solver to the examples for each schedule."""
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
    """Training prompts to measure on, after those for fitting; without `fits`, a smaller set may share these.

    Raises:
        ValueError: the set has too few.
    """
    train = prompts_of_run(config.prompt_sources, "train").all
    least = count + FITTED_PROMPTS * fits
    if len(train) < least:
        sources = " and ".join(config.prompt_sources)
        apart = f": {FITTED_PROMPTS} to fit on and {count} others to measure on" if fits else " to measure on"
        raise ValueError(f"{sources} has {len(train)} training prompts; expected at least {least}{apart} (--prompts)")
    start = min(FITTED_PROMPTS, len(train) - count)
    return train[start : start + count]
