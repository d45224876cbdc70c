"""Exploration plans that a calibration measures."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from solrl_core.precision import numerics, supported_precisions
from solrl_core.sampling.fitting import SCHEDULES
from solrl_proto.identifiers import Precision
from solrl_proto.rollouts import FittedSolver, Plan, Prune, RequestedPrecision

from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.defaults import CALIBRATED_STEPS

_LEAST_PRUNED = 4
"""Fewest steps of a plan that prunes."""


@dataclass(frozen=True)
class PlanSet:
    """Limits of the measured set.

    Attributes:
        steps: numbers of steps of the run's solver. The reference's number is always added.
        keep: numbers of candidates that pruning keeps; empty for a third, half and two thirds of the group.
        schedules: noise levels of fitted steps, a solver for each.
        frames: numbers of frames of clips, beside whole ones.
    """

    steps: tuple[int, ...] = CALIBRATED_STEPS
    keep: tuple[int, ...] = ()
    schedules: tuple[tuple[float, ...], ...] = SCHEDULES
    frames: tuple[int, ...] = ()


def plans(
    config: RunConfig, precisions: Sequence[Precision], solvers: Sequence[FittedSolver], limits: PlanSet
) -> list[Plan]:
    """Plans to measure: each precision and number of frames, in each number of steps and fitted ones, pruned and not.

    Pruning begins after half of the steps. Fitted steps prune before the last step, because their early predictions
    are better than another solver's. All decode in the precision that the run explores with, except the reference.
    Plans that prune after the same step of the same solver follow each other.
    """
    kept = _kept(config, limits)
    found = [] if config.explore.decoder_precision is None else [reference_plan(config, precisions)]
    lengths = (None, *limits.frames)
    counts = sorted({*limits.steps, config.explore.steps})
    ways: list[tuple[int, FittedSolver | None, int]] = [(steps, None, steps // 2) for steps in counts]
    ways += [(len(solver.sigmas), solver, len(solver.sigmas) - 1) for solver in solvers]
    for precision, frames, (steps, by, after) in itertools.product(precisions, lengths, ways):
        whole = Plan(
            steps=steps,
            solver=config.solver,
            fitted=by,
            guidance=config.guidance,
            precision=precision,
            decoder_precision=config.explore.decoder_precision,
            frames=frames,
        )
        keeps = kept if steps >= _LEAST_PRUNED else []
        pruned = [whole.model_copy(update={"prune": Prune(after=after, keep=keep)}) for keep in keeps]
        found += [whole, *pruned]
    return found


def _kept(config: RunConfig, limits: PlanSet) -> list[int]:
    """Numbers of candidates that the measured plans keep."""
    explore = config.explore
    if not limits.keep:
        thirds = {explore.candidates // 3, explore.candidates // 2, explore.candidates * 2 // 3}
        return sorted(keep for keep in thirds if explore.keep <= keep)
    for keep in limits.keep:
        if not explore.keep <= keep < explore.candidates:
            raise ValueError(
                f"got --keep {keep}; expected at least the {explore.keep} that are selected (explore.keep), and fewer "
                f"than the {explore.candidates} candidates (explore.candidates)"
            )
    return sorted(set(limits.keep))


def reference_plan(config: RunConfig, precisions: Sequence[Precision]) -> Plan:
    """The run's own number of steps without pruning, at the fastest measured precision: all plans are compared with it.

    Its images are decoded in the autoencoder's own precision.

    Args:
        config: the run's settings.
        precisions: measured precisions, the fastest first.
    """
    return Plan(steps=config.explore.steps, solver=config.solver, guidance=config.guidance, precision=precisions[0])


def true_plan(config: RunConfig) -> Plan:
    """The recipe's regeneration in BF16, whose rewards define the true ranks."""
    return Plan(steps=config.regenerate.steps, solver=config.solver, guidance=config.guidance, precision="bf16")


def explored_precisions(precision: RequestedPrecision, device: torch.device) -> list[Precision]:
    """BF16 and the given precision; for auto, all native ones. An emulation is measured only if it is requested."""

    def wanted(one: Precision) -> bool:
        return one in ("bf16", precision) or (precision == "auto" and numerics(one, device) == "native")

    return [one for one in supported_precisions(device) if wanted(one)]


def solver_steps(plan: Plan, candidates: int) -> int:
    """Solver steps that a group of candidates takes under a plan."""
    if plan.prune is None:
        return candidates * plan.steps
    return candidates * plan.prune.after + plan.prune.keep * (plan.steps - plan.prune.after)


def name(plan: Plan) -> str:
    """Short name of a plan, such as "nvfp4 6 steps, pruned to 48 after 3" or "nvfp4 4 fitted steps (1, 0.87, …)"."""
    by = plan.fitted
    steps = "steps" if by is None else f"fitted steps ({', '.join(f'{s:g}' for s in by.sigmas)})"
    pruned = f", pruned to {plan.prune.keep} after {plan.prune.after}" if plan.prune else ""
    rounded = f", decoded in {plan.decoder_precision}" if plan.decoder_precision else ""
    cut = f", {plan.frames} frames" if plan.frames else ""
    return f"{plan.precision} {plan.steps} {steps}{cut}{pruned}{rounded}"
