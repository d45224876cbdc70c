"""`solrl-train calibrate`: cost and selection quality of exploration plans, measured on the user's model."""

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from solrl_client.remote_reward import connect_reward
from solrl_core.early_decoder import REWARD_PIXELS, early_stage, fit_early_decoder
from solrl_core.families import load_backbone
from solrl_core.families.early_exit import EarlyDecoderError
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.fidelity import Fidelity, rank_fidelity, separations
from solrl_core.fingerprint import model_digest, part_digests
from solrl_core.fitting import SCHEDULES, Examples, fit, identity_solver, make_examples
from solrl_core.generator import Generator
from solrl_core.precision import numerics, supported_tiers
from solrl_core.rewards import RewardSet
from solrl_proto.identifiers import Message, Tier
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import EarlyDecoder, FittedSolver, ModelBinding, Plan, Precision, PromptItem, Prune

from solrl_trainer.config import RunConfig
from solrl_trainer.evaluation import mean_interval
from solrl_trainer.long_prompts import note_long_prompts
from solrl_trainer.preflight import require_judges
from solrl_trainer.prompts import find_prompts, read_prompts
from solrl_trainer.ranks.process_group import SINGLE_PROCESS, ProcessGroup
from solrl_trainer.report.figures import few_prompts_text, sum_text
from solrl_trainer.report.frontier import write_frontier
from solrl_trainer.rollouts.batch_limit import BatchLimit
from solrl_trainer.rollouts.candidates import PlannedCandidates
from solrl_trainer.rollouts.overlap import SideStream
from solrl_trainer.rollouts.scoring import Scorer
from solrl_trainer.time_left import OnProgress, Work
from solrl_trainer.world import gather_rows, gather_values, pick_device, share

STEPS = (2, 3, 4, 6, 8)
FITTED_PROMPTS, FITTED_SEEDS = 24, 4
"""Training prompts, and candidates per prompt, whose trajectories the fitted solvers match."""


@dataclass(frozen=True)
class Measured:
    """Cost and fidelity of a plan.

    Attributes:
        seconds: mean time of a whole group, including rewards.
        fidelity: rank fidelity, relative to the recipe's BF16 candidates of the same seeds.
        separation: difference in true rank between the selected best and worst, mean over prompts: 1 perfect, 0 chance.
        low, high: 95 % bootstrap interval of the separation over prompts.
    """

    plan: Plan
    seconds: float
    fidelity: Fidelity
    separation: float
    low: float
    high: float


class Fits(Message):
    """Everything that is fitted to a model.

    Attributes:
        solvers: one for each schedule.
        early_decoder: None if it would save nothing.
    """

    solvers: tuple[FittedSolver, ...] = ()
    early_decoder: EarlyDecoder | None = None


def plans(config: RunConfig, tiers: Sequence[Tier], fits: Fits) -> list[Plan]:
    """Plans to measure: each precision at each number of steps and with fitted steps, with and without pruning.

    Pruning keeps half of the candidates after half of the steps. Fitted steps prune before the last step, because their
    early predictions are better than another solver's. With an early decoder, each plan is measured with it, too.
    """
    half = config.explore.candidates // 2
    found = []
    ways: list[tuple[int, FittedSolver | None, int]] = [(steps, None, steps // 2) for steps in STEPS]
    ways += [(len(solver.sigmas), solver, len(solver.sigmas) - 1) for solver in fits.solvers]
    for tier, (steps, by, after) in itertools.product(tiers, ways):
        whole = Plan(steps=steps, solver=config.solver, fitted=by, guidance=config.guidance, precision=tier)
        found.append(whole)
        if config.explore.keep <= half and steps >= 4:
            found.append(whole.model_copy(update={"prune": Prune(after=after, keep=half)}))
    return [plan for one in found for plan in (one, *_decoded_early(one, fits.early_decoder))]


def _decoded_early(plan: Plan, early: EarlyDecoder | None) -> list[Plan]:
    """The plan with the early decoder for all scores and, if it prunes, only for those by which it prunes."""
    if early is None:
        return []
    uses = ("all",) if plan.prune is None else ("pruning", "all")
    return [plan.model_copy(update={"early_decoder": early.model_copy(update={"scores": use})}) for use in uses]


def explored_tiers(precision: Precision, device: torch.device) -> list[Tier]:
    """BF16 and the given precision; for auto, all native ones. An emulation is measured only if it is requested."""

    def wanted(tier: Tier) -> bool:
        return tier in ("bf16", precision) or (precision == "auto" and numerics(tier, device) == "native")

    return [tier for tier in supported_tiers(device) if wanted(tier)]


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


def _saves_by_leaving_early(backbone: PipelineBackbone, note: Callable[[str], None]) -> bool:
    """Whether an inner stage of the decoder is as large as rewards need, and smaller than the image."""
    try:
        early_stage(backbone, REWARD_PIXELS)
    except EarlyDecoderError as error:
        note(f"all plans decode whole images: {error}")
        return False
    return True


def calibrate(
    config: RunConfig,
    folder: Path,
    note: Callable[[str], None],
    *,
    prompts: int,
    wanted: float,
    processes: ProcessGroup = SINGLE_PROCESS,
    progress: OnProgress = lambda done, total: None,
) -> dict[str, Any]:
    """Measure every plan on this machine; writes calibration.json, frontier.png and plan.yaml to `folder`.

    Args:
        config: a run's model, rewards, prompts, and numbers of candidates and selected candidates.
        folder: output folder; plan.yaml is for `solrl-train run --config`.
        note: called with each progress message.
        prompts: number of training prompts to measure on. Held-out prompts are reserved for evaluation.
        wanted: required separation. The cheapest plan whose whole interval reaches it is chosen.
        processes: processes that share the prompts; the first writes.
        progress: called with the solver steps of candidates that this rank has taken, and will take.

    Returns:
        Content of calibration.json; `chosen` is null if no plan reaches the separation.
    """
    if config.explore.sampler == "training":
        raise ValueError(
            "calibrate compares plans of the ODE, and explore.sampler is training, whose steps are the algorithm's; "
            "expected explore.sampler=ode"
        )
    measured_on = _prompts(config, prompts)
    require_judges(config.rewards, measured_on, "train", config.reward_options)
    world = processes.world(config.device, config.patience)
    device = pick_device(config.device, world)
    note(f"loading {config.model}")
    backbone = load_backbone(config.model, device=device, revision=config.revision)
    note_long_prompts(backbone, {"training": measured_on}, note)
    options = {name: value for name, value in config.reward_options.items() if name in config.rewards}
    connect = partial(connect_reward, patience=config.patience)
    rewards = RewardSet.load(list(config.rewards), backbone, options, connect=connect)
    if few := few_prompts_text(prompts):
        note(few)
    scorer = Scorer(
        rewards,
        [spec.name for spec in config.trained],
        config.trained,
        SideStream(backbone.device),
        BatchLimit(note, doing="scoring"),
    )
    explore = config.explore
    seeds = {
        prompt.id: expand_seeds(config.seed, f"calibrate/{prompt.id}", explore.candidates) for prompt in measured_on
    }

    truth = Plan(steps=config.regenerate.steps, solver=config.solver, guidance=config.guidance)
    tiers = explored_tiers(explore.precision, backbone.device)
    leaves_early = _saves_by_leaving_early(backbone, note)
    known = Fits(
        solvers=tuple(identity_solver(sigmas) for sigmas in SCHEDULES),
        early_decoder=EarlyDecoder.model_construct() if leaves_early else None,
    )
    expected = plans(config, tiers, known)
    own = share(measured_on, world)
    measuring = sum((1 + len(own)) * solver_steps(plan, explore.candidates) for plan in expected)
    work = Work(len(own) * solver_steps(truth, explore.candidates) + _fitting_steps(config) + measuring, progress)

    limits = {tier: BatchLimit(note) for tier in ("bf16", *tiers)}

    def scores(generator: Generator, plan: Plan, prompt: PromptItem) -> torch.Tensor:
        maker = PlannedCandidates(generator, lambda: plan, scorer, limits[generator.precision])
        found = maker.scores(prompt, seeds[prompt.id])
        work.finish(solver_steps(plan, explore.candidates))
        return found

    true_generator = Generator(backbone, "bf16")

    def scores_of_all(generator: Generator, plan: Plan) -> tuple[torch.Tensor, float]:
        """Scores [prompts, N] of all ranks' prompts, and seconds for one prompt."""
        started = time.perf_counter()
        groups = [scores(generator, plan, prompt) for prompt in own]
        seconds = sum(gather_values(time.perf_counter() - started, world)) / len(measured_on)
        return gather_rows(torch.stack(groups) if groups else torch.empty(0, explore.candidates), world), seconds

    true, _ = scores_of_all(true_generator, truth)
    note(f"fitting {len(SCHEDULES)} solvers of few steps")
    fits = Fits()
    if processes.is_rank_zero:
        examples = recipe_examples(config, true_generator)
        early = None
        if leaves_early:
            early = fit_early_decoder(backbone, examples.latents[-1].to(backbone.device), least=REWARD_PIXELS)
        fits = Fits(solvers=tuple(fit_solvers(true_generator, examples, SCHEDULES)), early_decoder=early)
    fits = _on_all(fits, processes)
    work.finish(_fitting_steps(config))
    measured = []
    for tier, group in itertools.groupby(plans(config, tiers, fits), key=lambda plan: plan.precision):
        generator = true_generator if tier == "bf16" else Generator(backbone, tier)
        for plan in group:
            scores(generator, plan, measured_on[0])  # warm-up
            proxy, seconds = scores_of_all(generator, plan)
            fidelity = rank_fidelity(proxy, true, explore.keep)
            one = Measured(plan, seconds, fidelity, *mean_interval(separations(proxy, true, explore.keep)))
            measured.append(one)
            interval = f"[{one.low:.3f}, {one.high:.3f}]"
            note(f"{name(plan)}: {seconds:.2f} s per group, separation {one.separation:.3f} {interval}")
    good = [one for one in measured if one.low >= wanted]
    chosen = min(good, key=lambda one: one.seconds) if good else None
    binding = ModelBinding(
        model=model_digest(part_digests(backbone.parts)), solver=config.solver, guidance=config.guidance
    )
    summary = _summary(config, measured_on, measured, chosen, wanted)
    if processes.is_rank_zero:
        weights = sum_text(config.weights)
        about = f"{config.model}, {weights}, {prompts} prompts × {explore.candidates} candidates"
        _write(folder, summary, chosen, binding, about)
    return summary


def _on_all(fits: Fits, processes: ProcessGroup) -> Fits:
    """The fits of the first rank, on every rank."""
    return Fits.model_validate_json(
        processes.broadcast_text(fits.model_dump_json() if processes.is_rank_zero else None)
    )


def _prompts(config: RunConfig, count: int) -> list[PromptItem]:
    """Training prompts to measure on, after those used for fitting solvers."""
    train = read_prompts(find_prompts(config.prompts), "train")
    if len(train) < FITTED_PROMPTS + count:
        raise ValueError(
            f"{config.prompts} has {len(train)} training prompts; expected at least {FITTED_PROMPTS + count}: "
            f"{FITTED_PROMPTS} to fit solvers on and {count} others to measure on (--prompts)"
        )
    return train[FITTED_PROMPTS : FITTED_PROMPTS + count]


def solver_steps(plan: Plan, candidates: int) -> int:
    """Solver steps that a group of candidates takes under a plan."""
    if plan.prune is None:
        return candidates * plan.steps
    return candidates * plan.prune.after + plan.prune.keep * (plan.steps - plan.prune.after)


def _fitting_steps(config: RunConfig) -> int:
    """Solver steps of the examples, and of the solvers that are fitted to them."""
    return FITTED_PROMPTS * FITTED_SEEDS * (config.regenerate.steps + sum(map(len, SCHEDULES)))


def name(plan: Plan) -> str:
    """Short name of a plan, such as "nvfp4 6 steps, pruned to 48 after 3" or "nvfp4 4 fitted steps (1, 0.87, …)"."""
    by = plan.fitted
    steps = "steps" if by is None else f"fitted steps ({', '.join(f'{s:g}' for s in by.sigmas)})"
    pruned = f", pruned to {plan.prune.keep} after {plan.prune.after}" if plan.prune else ""
    early = {"pruning": ", decoded early for pruning", "all": ", decoded early"}
    decoded = early[plan.early_decoder.scores] if plan.early_decoder else ""
    return f"{plan.precision} {plan.steps} {steps}{pruned}{decoded}"


def _summary(
    config: RunConfig,
    prompts: Sequence[PromptItem],
    measured: Sequence[Measured],
    chosen: Measured | None,
    wanted: float,
) -> dict[str, Any]:
    rows = [
        {
            "name": name(one.plan),
            "plan": one.plan.model_dump(mode="json", exclude={"early_decoder": {"weights"}}),
            "seconds": one.seconds,
            "separation": one.separation,
            "interval": [one.low, one.high],
            **vars(one.fidelity),
        }
        for one in measured
    ]
    return {
        "model": config.model,
        "rewards": config.rewards,
        "prompts": len(prompts),
        "candidates": config.explore.candidates,
        "keep": config.explore.keep,
        "wanted": wanted,
        "chosen": name(chosen.plan) if chosen else None,
        "plans": rows,
    }


def _write(
    folder: Path, summary: Mapping[str, Any], chosen: Measured | None, binding: ModelBinding, about: str
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "calibration.json").write_text(json.dumps(summary, indent=1) + "\n")
    points = [(plan["name"], plan["seconds"], plan["separation"]) for plan in summary["plans"]]
    write_frontier(points, summary["wanted"], summary["chosen"], about, folder)
    if chosen is not None:
        plan = chosen.plan.model_dump(mode="json", include={"steps", "precision", "prune", "fitted", "early_decoder"})
        plan["calibrated_for"] = binding.model_dump(mode="json")
        (folder / "plan.yaml").write_text(yaml.safe_dump({"explore": plan}, sort_keys=False))
