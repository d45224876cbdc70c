"""Solvers of few steps and an early decoder, fitted on training prompts that nothing else of a calibration uses."""

from collections.abc import Callable, Sequence

from solrl_core.early_decoder import REWARD_PIXELS, early_stage, fit_early_decoder
from solrl_core.families.early_exit import EarlyDecoderError
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.fitting import Examples, fit, identity_solver, make_examples, passes
from solrl_core.generator import Generator
from solrl_proto.identifiers import Message
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import EarlyDecoder, FittedSolver, PromptItem

from solrl_trainer.config import RunConfig
from solrl_trainer.prompts import find_prompts, read_prompts
from solrl_trainer.ranks.process_group import ProcessGroup

FITTED_PROMPTS, FITTED_SEEDS = 24, 4
"""Training prompts, and candidates per prompt, whose trajectories the fitted solvers match."""


class Fits(Message):
    """Everything that is fitted to a model.

    Attributes:
        solvers: one for each schedule.
        early_decoder: None if it would save nothing.
    """

    solvers: tuple[FittedSolver, ...] = ()
    early_decoder: EarlyDecoder | None = None

    def __bool__(self) -> bool:
        return bool(self.solvers or self.early_decoder)


def expected_fits(
    backbone: PipelineBackbone, schedules: Sequence[Sequence[float]], note: Callable[[str], None]
) -> Fits:
    """Fits before fitting, with the same steps: they give the same number of plans."""
    early = EarlyDecoder.model_construct() if _saves_by_leaving_early(backbone, note) else None
    return Fits.model_construct(solvers=tuple(map(identity_solver, schedules)), early_decoder=early)


def recipe_examples(config: RunConfig, generator: Generator) -> Examples:
    """The recipe's trajectories on training prompts; `generator` must be BF16."""
    prompts = read_prompts(find_prompts(config.prompts), "train")[:FITTED_PROMPTS]
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
    config: RunConfig, backbone: PipelineBackbone, generator: Generator, known: Fits, processes: ProcessGroup
) -> Fits:
    """The solvers and the early decoder that the first rank fits, on every rank.

    Args:
        config: the run's settings.
        backbone: the model.
        generator: its generator of BF16.
        known: see `expected_fits`.
        processes: all ranks.
    """
    fits = Fits()
    if processes.is_rank_zero and known:
        examples = recipe_examples(config, generator)
        solvers = fit_solvers(generator, examples, [solver.sigmas for solver in known.solvers])
        early = None
        if known.early_decoder is not None:
            early = fit_early_decoder(backbone, examples.latents[-1].to(backbone.device), least=REWARD_PIXELS)
        fits = Fits(solvers=tuple(solvers), early_decoder=early)
    text = fits.model_dump_json() if processes.is_rank_zero else None
    return Fits.model_validate_json(processes.broadcast_text(text))


def fitting_steps(config: RunConfig, known: Fits) -> int:
    """Solver steps of the examples, and of fitting solvers to them."""
    if not known:
        return 0
    fitted = sum(passes(len(solver.sigmas)) for solver in known.solvers)
    return FITTED_PROMPTS * FITTED_SEEDS * (config.regenerate.steps + fitted)


def _saves_by_leaving_early(backbone: PipelineBackbone, note: Callable[[str], None]) -> bool:
    """Whether an inner stage of the decoder is as large as rewards need, and smaller than the image."""
    try:
        early_stage(backbone, REWARD_PIXELS)
    except EarlyDecoderError as error:
        note(f"all plans decode whole images: {error}")
        return False
    return True


def measured_prompts(config: RunConfig, count: int, *, fits: bool) -> list[PromptItem]:
    """Training prompts to measure on, after those for fitting; without `fits`, a smaller set may share these.

    Raises:
        ValueError: the set has too few.
    """
    train = read_prompts(find_prompts(config.prompts), "train")
    least = count + FITTED_PROMPTS * fits
    if len(train) < least:
        apart = f": {FITTED_PROMPTS} to fit on and {count} others to measure on" if fits else " to measure on"
        raise ValueError(
            f"{config.prompts} has {len(train)} training prompts; expected at least {least}{apart} (--prompts)"
        )
    start = min(FITTED_PROMPTS, len(train) - count)
    return train[start : start + count]
