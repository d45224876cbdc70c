"""`solrl-train calibrate`: cost and selection quality of exploration plans, measured on the user's model."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from solrl_core.fingerprint import model_digest, part_digests
from solrl_core.model_options import ImageSize
from solrl_core.sampling.fitting import identity_solver
from solrl_core.sampling.generator import Generator
from solrl_engine.batch_size import AdaptiveBatchSize
from solrl_engine.sampler import Sampler
from solrl_engine.scorer import Scorer
from solrl_engine.side_stream import SideStream
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import ModelBinding, Plan

from solrl_trainer.calibration.deciding import MeasuredPlan, assess, cheapest, verdict
from solrl_trainer.calibration.measuring import PlanBenchmark, SamplerFactory
from solrl_trainer.calibration.plans import (
    PlanSet,
    explored_precisions,
    fit_on_rank_zero,
    fitting_steps,
    measured_prompts,
    name,
    plans,
    reference_plan,
)
from solrl_trainer.commands.preflight import require_usable
from solrl_trainer.policy.progress import OnProgress, ProgressCounter
from solrl_trainer.prompts.prompt_rewards import scored_prompts
from solrl_trainer.ranks.communicator import pick_device
from solrl_trainer.ranks.rank_runtime import SINGLE_PROCESS, RankRuntime
from solrl_trainer.records.waits import Waits
from solrl_trainer.rollouts.candidates import GroupSampler
from solrl_trainer.rollouts.exploration import training_plan
from solrl_trainer.rollouts.loading import Loaded, load_model
from solrl_trainer.rollouts.sample_scorer import SampleScorer
from solrl_trainer.rollouts.truncation_warnings import warn_of_long_prompts
from solrl_trainer.run_folder.figures import few_prompts_text
from solrl_trainer.run_folder.output_files import write_file
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.yaml_text import dump_yaml

logger = logging.getLogger(__name__)


def calibrate(
    config: RunConfig,
    folder: Path,
    *,
    prompts: int,
    minimum: float,
    limits: PlanSet | None = None,
    processes: RankRuntime = SINGLE_PROCESS,
    progress: OnProgress = lambda done, total: None,
) -> dict[str, Any]:
    """Measure every plan on this machine; writes calibration.json and plan.yaml to `folder`.

    Args:
        config: a run's model, rewards, prompts, and numbers of candidates and selected candidates.
        folder: output folder; plan.yaml is for `solrl-train run --config`.
        prompts: number of training prompts to measure on. Held-out prompts are reserved for evaluation.
        minimum: separation that the whole interval of a plan must reach; the cheapest such plan is chosen.
        limits: limits of the measured set; by default all plans are measured.
        processes: processes that share the prompts; the first writes.
        progress: called with the solver steps of candidates that this rank has taken, and will take.

    Returns:
        Content of calibration.json; `chosen` is null if no plan does.
    """
    config.require_exploring("calibrate")
    if config.explore.sampler == "training":
        raise ValueError(
            "calibrate compares plans of the ODE, and explore.sampler is training, whose steps are the algorithm's; "
            "expected explore.sampler=ode"
        )
    limits = limits or PlanSet()
    measured_on = measured_prompts(config, prompts, fits=bool(limits.schedules))
    for reward in config.rewards:
        require_usable(reward, scored_prompts(reward, measured_on), "train", config.reward_options)
    world = processes.world(config.device, config.patience)
    device = pick_device(config.device, world)
    precisions = explored_precisions(config.explore.precision, torch.device(device))
    plans(config, precisions, [], limits)  # refuses numbers of steps that no plan has, before the model is loaded
    logger.info(f"loading {config.model}")
    options = {name: value for name, value in config.reward_options.items() if name in config.rewards}
    loaded = load_model(config, device, list(config.rewards), options, Waits())
    backbone = loaded.backbone
    expected = plans(config, precisions, list(map(identity_solver, limits.schedules)), limits)
    warn_of_long_prompts(backbone, {"training": measured_on})
    if caution := few_prompts_text(prompts):
        logger.warning(caution)
    explore = config.explore
    seeds = {
        prompt.id: expand_seeds(config.seed, f"calibrate/{prompt.id}", explore.candidates) for prompt in measured_on
    }
    generators = {"bf16": Generator(backbone, "bf16")}
    benchmark = PlanBenchmark(
        _sampler_factory(config, loaded, generators), measured_on, seeds, world, lambda part: work.finish(part)
    )
    truth, reference = training_plan(config, config.regenerate.steps), reference_plan(config, precisions)
    work = ProgressCounter(benchmark.steps(expected, truth) + fitting_steps(config, limits.schedules), progress)

    true = benchmark.scores(truth)
    if limits.schedules:
        logger.info(f"fitting {len(limits.schedules)} solvers of few steps")
    solvers = fit_on_rank_zero(config, generators["bf16"], limits.schedules, processes)
    work.finish(fitting_steps(config, limits.schedules))
    logger.info(f"measuring {len(expected)} plans in turns")
    # Plans take turns, so all precisions stay on the device.
    generators |= {precision: Generator(backbone, precision) for precision in precisions if precision != "bf16"}
    observed = benchmark.measure(plans(config, precisions, solvers, limits))
    measured = assess(observed, true, explore.keep, reference)
    for plan in measured:
        logger.info(
            f"{name(plan.plan)}: {plan.seconds:.2f} s per group, {plan.cost.text('.2f')} of the reference; separation "
            f"{plan.separation.text('.3f')}, loss {plan.loss.text('.3f')}"
        )
    chosen = cheapest(measured, minimum)
    conclusion = verdict(measured, chosen, reference, minimum)
    summary = content(config, measured, minimum, chosen, reference, conclusion)
    if processes.is_rank_zero:
        digest = model_digest(part_digests(backbone.parts))
        binding = ModelBinding(model=digest, solver=config.solver, guidance=config.guidance)
        size = ImageSize(backbone.height, backbone.width, backbone.frames if backbone.frames > 1 else None)
        write(folder, summary, chosen, binding, size)
    return summary


def _sampler_factory(config: RunConfig, loaded: Loaded, generators: dict[str, Generator]) -> SamplerFactory:
    names = [spec.name for spec in config.trained]
    images = Scorer(loaded.rewards, AdaptiveBatchSize(config.batch, doing="scoring", on_exhausted=logger.warning))
    scorer = SampleScorer(images, names, config.trained, SideStream(loaded.backbone.device))
    batches: dict[str, AdaptiveBatchSize] = {}

    def sampler_of(plan: Plan) -> GroupSampler:
        batch = batches.setdefault(plan.precision, AdaptiveBatchSize(config.batch, on_exhausted=logger.warning))
        return GroupSampler(Sampler(generators[plan.precision], lambda: plan, batch=batch), scorer)

    return sampler_of


def content(
    config: RunConfig,
    measured: Sequence[MeasuredPlan],
    minimum: float,
    chosen: MeasuredPlan | None,
    reference: Plan,
    conclusion: Sequence[str],
) -> dict[str, Any]:
    """Content of calibration.json; other plans are compared with the `reference`."""
    return {
        "model": config.model,
        "rewards": config.rewards,
        "prompts": len(measured[0].times),
        "candidates": config.explore.candidates,
        "keep": config.explore.keep,
        "separation": minimum,
        "reference": name(reference),
        "chosen": name(chosen.plan) if chosen else None,
        "verdict": list(conclusion),
        "plans": [
            {
                "name": name(plan.plan),
                "plan": plan.plan.model_dump(mode="json"),
                "seconds": plan.seconds,
                "cost": plan.cost.value,
                "cost_interval": [plan.cost.low, plan.cost.high],
                "separation": plan.separation.value,
                "interval": [plan.separation.low, plan.separation.high],
                "loss": plan.loss.value,
                "loss_interval": [plan.loss.low, plan.loss.high],
                **vars(plan.fidelity),
            }
            for plan in measured
        ],
    }


def frontier(plans: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows of calibration.json's `plans` that no other one is both cheaper and better than, the cheapest first."""
    optimal: list[Mapping[str, Any]] = []
    for row in sorted(plans, key=lambda row: (row["seconds"], -row["separation"])):
        if not optimal or row["separation"] > optimal[-1]["separation"]:
            optimal.append(row)
    return optimal


def write(
    folder: Path,
    summary: Mapping[str, Any],
    chosen: MeasuredPlan | None,
    binding: ModelBinding,
    size: ImageSize,
) -> None:
    """Write the files, with the `summary` of `content`; plan.yaml only if a plan was chosen.

    It was chosen for the `binding` and images of this `size`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "calibration.json", json.dumps(summary, indent=1) + "\n")
    if chosen is not None:
        fields = {"steps", "precision", "fitted"}
        plan = chosen.plan.model_dump(mode="json", include=fields)
        plan["calibrated_for"] = binding.model_dump(mode="json")
        settings = {"explore": plan, "generate": {name: value for name, value in size._asdict().items() if value}}
        write_file(folder / "plan.yaml", dump_yaml(settings))
