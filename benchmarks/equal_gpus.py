"""Seconds per prompt with every GPU counted: `torchrun --nproc-per-node 4 benchmarks/equal_gpus.py`.

FLUX.1, SD3.5-L and SANA at their true shapes with random weights, the presets' settings, and a reward of CLIP-H's size
(HPSv2). Naive scaling generates 96 candidates in BF16 with all steps and trains on the best and worst 24. `sol_rl`
explores the 96 in FP8, regenerates 24 and trains on those. Both run the trainer's own loop on one loaded model, in
turns. The baseline trainer (diffusers' blocks uncompiled, PEFT's layers) trains the same frozen weights.

First, each rank measures its own GPU alone; then all ranks share the work. Numbers of GPUs that were not run are
computed from the measured parts, and marked. Rows are written as soon as they are measured; those of other models and
numbers of GPUs stay. Writes benchmarks/results/equal_gpus.{json,md}.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from solrl_core.adapter import encode_adapter
from solrl_core.families import Backbone
from solrl_core.rewards import RewardSet
from solrl_core.sampling.fitting import SCHEDULES, identity_solver
from solrl_proto.rollouts import PromptItem
from solrl_trainer.loop import collect_samples, train_step, training_samples
from solrl_trainer.policy.policy import CURRENT, OLD, Policy
from solrl_trainer.policy.update import trained_steps
from solrl_trainer.prompts.prompt_sets import PromptSet
from solrl_trainer.ranks.communicator import Communicator, gather_values, pick_device
from solrl_trainer.ranks.rank_info import read_rank_info
from solrl_trainer.ranks.rank_runtime import process_group
from solrl_trainer.records.run_log import RunLog
from solrl_trainer.rollouts.device_source import DeviceSource
from solrl_trainer.rollouts.exploration import IterationSamples
from solrl_trainer.rollouts.loading import Loaded
from solrl_trainer.rollouts.models import Models
from solrl_trainer.session import Session, connect
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import resolve
from support.results import Results, Row, device_name, options, table, timed
from support.true_size import random_backbone, random_hps
from training_phase import NAMES, PRESETS, RECOMPUTED, PeftPolicy, beside, with_settings

ROLL_OUTS = ("naive", "sol_rl", "sol_rl, 4 fitted steps")
"""Recipes, and names of their rows: the samples of one prompt per GPU."""
TRAINING, OLD_TRAINING = "training", "training, baseline"
GPUS = (1, 2, 4, 8)
INTRODUCTION = """By `torchrun --nproc-per-node 4 benchmarks/equal_gpus.py` on {}: true shapes, random weights, the
presets' settings (24 of 96 candidates, 10 steps in BF16, 6 in FP8), and a reward of CLIP-H's size in float32. All rows
generate with the same compiled BF16 or FP8 transformer. Each part was timed once. 4 fitted steps are a plan that
[plan_fidelity.md](plan_fidelity.md) judges on the miniatures; how FP8 ranks at this size is not known.
The baseline trainer has diffusers' uncompiled blocks and PEFT's layers, and recomputes the activations of FLUX.1 and
SD3.5. Every GPU does all stages for its share of the prompts. Layouts with a service: `solrl-train layout`, and
[runs that share a service](shared_service.md)."""
OLD_MICRO_BATCHES = 8
"""Micro-batches of the baseline trainer that are timed, at least; the time of all is computed from them."""
NAIVE = {"explore.steps": 10, "explore.precision": "bf16", "regenerate.at": "none"}
FITTED = {"explore.steps": 4, "explore.fitted": identity_solver(SCHEDULES[-1]).model_dump()}
"""A plan that plan_fidelity.md judges on the miniatures. Time does not depend on the coefficients."""
WARM_UP = {"explore.candidates": 24, "explore.steps": 2, "regenerate.steps": 2}
"""Compiles all batch sizes."""
SETTINGS = dict(zip(ROLL_OUTS, (NAIVE, {}, FITTED), strict=True))


@dataclass
class Bench:
    """A loaded model, which the sessions of all recipes share.

    Attributes:
        model: flux, sd3 or sana.
        config: settings of `sol_rl` with both stages on this GPU.
        backbone: of true size.
        rewards: of CLIP-H's size.
        old: policy of the baseline trainer, on the same weights.
        models: generators and policy.
    """

    model: str
    config: RunConfig
    backbone: Backbone
    rewards: RewardSet
    old: PeftPolicy
    models: Models

    def session(self, world: Communicator, settings: dict[str, Any]) -> Session:
        """A session of a recipe, at version 0."""
        config = with_settings(self.config, settings)
        explorer = self.models.explorer if config.two_stage else self.models.generator
        models = replace(self.models, explorer=explorer, world=world)
        prompts = [PromptItem(id=str(number), text=f"{number + 2} red circles") for number in range(64)]
        train = PromptSet((prompts,))
        session = connect(
            config, DeviceSource(config, Loaded(self.backbone, self.rewards), models, train), train, train
        )
        session.adapters = {0: encode_adapter(models.policy.behaviour())}
        session.source.start(session.adapters, ())
        return session


def main() -> None:
    parser = options(__doc__, device="cuda")
    parser.add_argument("--models", nargs="+", default=list(PRESETS), choices=list(PRESETS))
    parser.add_argument("--set", nargs="*", default=[], help="further settings of all recipes, key=value")
    args = parser.parse_args()
    results = Results("equal_gpus", args.out, page)
    if not args.render:
        with process_group(read_rank_info()) as processes:
            world = processes.world(args.device, 0.0)
            for model in args.models:
                measure_model(model, args, world, results)
            if not processes.is_rank_zero:
                return
    results.show()


def measure_model(model: str, args: argparse.Namespace, world: Communicator, results: Results) -> None:
    """Measure one model's rows; rank 0 writes them."""
    device = pick_device(args.device, world)
    bench = load(model, device, args.set)
    warm_up(bench)
    for row in chain(alone(bench), shared(bench, world) if world.size > 1 else ()):
        every = gather_values(row["s"], world)
        row |= {"model": model, "device": device_name(device), "torch": torch.__version__, "ranks": every}
        if world.rank == 0:
            results.add(row, "model", "gpus", "part")


def warm_up(bench: Bench) -> None:
    """Compile everything on this GPU alone, and give the policies their first weights back."""
    first = weights(bench)
    warm = bench.session(Communicator(), WARM_UP)
    train_step(warm, RunLog(), 0, collect_samples(warm, RunLog(), 0))
    warm = bench.session(Communicator(), {**NAIVE, **WARM_UP, "explore.steps": 1})
    collect_samples(warm, RunLog(), 0)
    restore(bench, first)


def alone(bench: Bench) -> Iterator[Row]:
    """Rows of one GPU: seconds of one prompt by part."""
    solo, first = Communicator(), weights(bench)
    sessions = {way: bench.session(solo, settings) for way, settings in SETTINGS.items()}
    for way, session in sessions.items():
        row, samples = rolled_out(session, way, 0)
        yield row
    yield training(sessions["sol_rl"], samples, 0)
    yield old_training(bench, sessions["sol_rl"], samples)
    restore(bench, first)


def shared(bench: Bench, world: Communicator) -> Iterator[Row]:
    """Rows of all GPUs, one prompt per rank; seconds of as many prompts as there are GPUs."""
    for way, settings in SETTINGS.items():
        session = bench.session(world, {**settings, "explore.prompts": world.size})
        world.broadcast(torch.zeros(1))
        row, samples = rolled_out(session, way, 1)
        yield row
    world.broadcast(torch.zeros(1))
    yield training(session, samples, 1)


def rolled_out(session: Session, way: str, iteration: int) -> tuple[Row, IterationSamples]:
    """Row of an iteration's samples, and the samples."""
    log = RunLog()
    seconds, samples = timed(lambda: collect_samples(session, log, iteration))
    row = {"gpus": session.world.size, "part": way, "s": seconds}
    return row | {"explore": log.elapsed("wait"), "regenerate": log.elapsed("regenerate")}, samples


def training(session: Session, samples: IterationSamples, iteration: int) -> Row:
    """Row of an iteration's training: update, decay, average, digest, and merging the new version."""
    with patch.object(Policy, "is_behaviour", lambda _: False):  # as in later iterations, where the policies differ
        seconds, _ = timed(lambda: train_step(session, RunLog(), iteration, samples))
    return {"gpus": session.world.size, "part": TRAINING, "s": seconds}


def old_training(bench: Bench, session: Session, samples: IterationSamples) -> Row:
    """Row of the update by the baseline trainer, computed from a share of the timesteps if there are many."""
    config, kept, algorithm = session.config, samples.scores.shape[1], session.updater.algorithm
    steps = config.regenerate.steps
    all_steps = trained_steps(steps, config.algorithm.timestep_fraction)
    some = min(all_steps, math.ceil(OLD_MICRO_BATCHES * config.optimizer.batch / kept))
    updater = replace(
        session.updater,
        policy=bench.old,
        optimizer=torch.optim.AdamW(bench.old.parameters, lr=config.optimizer.learning_rate),
        algorithm=type(algorithm)(algorithm.settings.model_copy(update={"timestep_fraction": (some + 0.5) / steps})),
        config=with_settings(config, {"optimizer.activation_checkpointing": False, "optimizer.updates": 1}),
    )
    chosen = training_samples(session, samples, algorithm.advantages(samples.scores))
    seconds, _ = timed(lambda: updater.update(chosen, 0))
    return {"gpus": 1, "part": OLD_TRAINING, "s": seconds * all_steps / some, "timed": some, "steps": all_steps}


def load(model: str, device: str, further: Sequence[str] = ()) -> Bench:
    """Load a model with random weights, equal on all ranks."""
    torch.manual_seed(0)
    settings = {"explore.prompts": 1, "iterations": 1000, "checkpoint_every": 1000}
    overrides = [*(f"{name}={value}" for name, value in settings.items()), *further]
    config = resolve(f"{PRESETS[model]}/sol_rl/hpsv2", overrides=overrides).config
    if device == "cpu":
        config = with_settings(config, {"explore.precision": "bf16", "optimizer.batch": 12})
    else:
        torch.cuda.set_device(torch.device(device).index or 0)
    backbone = random_backbone(model, device, config.guidance)
    rewards = RewardSet({"hpsv2": random_hps(device)})
    old = PeftPolicy(beside(backbone), config.lora, RECOMPUTED[model])
    return Bench(model, config, backbone, rewards, old, Models.build(backbone, config))


def weights(bench: Bench) -> dict[str, dict[str, torch.Tensor]]:
    return {name: bench.models.policy.tensors(name) for name in (CURRENT, OLD)}


def restore(bench: Bench, saved: dict[str, dict[str, torch.Tensor]]) -> None:
    """Give the policies these weights, so that all ranks begin alike."""
    for name, tensors in saved.items():
        bench.models.policy.restore(name, tensors)


def page(found: Mapping[str, Any]) -> str:
    rows = found["rows"]
    devices = sorted({row["device"] for row in rows})
    lines = [
        "# Is it worth it? Seconds per prompt, with every GPU counted",
        "",
        INTRODUCTION.format(", ".join(devices)),
        "",
    ]
    for model, name in NAMES.items():
        own = {(row["gpus"], row["part"]): row for row in rows if row["model"] == model}
        if all((1, part) in own for part in (*ROLL_OUTS, TRAINING, OLD_TRAINING)):
            parts = table(("seconds of one prompt on one GPU", ""), _parts(own))
            lines += [f"## {name}", "", *parts, "", *_layouts(own), ""]
    return "\n".join(lines)


def _parts(own: dict[tuple[int, str], Row]) -> Iterator[Sequence[str]]:
    for way in ROLL_OUTS:
        row = own[1, way]
        yield f"{way}: explore", f"{row['explore']:.2f}"
        if way != "naive":
            yield f"{way}: regenerate", f"{row['regenerate']:.2f}"
    yield "training", f"{own[1, TRAINING]['s']:.2f}"
    old = own[1, OLD_TRAINING]
    share = "" if old["timed"] == old["steps"] else f", from {old['timed']} of {old['steps']} timesteps"
    yield f"training, baseline{share}", f"{old['s']:.2f}"


def _layouts(own: dict[tuple[int, str], Row]) -> Iterator[str]:
    old, rows = own[1, OLD_TRAINING]["s"], []
    for gpus in GPUS:
        naive, train = (_of(own, gpus, part) for part in (ROLL_OUTS[0], TRAINING))
        for way in reversed(ROLL_OUTS):
            measured = {(gpus, way), (gpus, TRAINING)} <= own.keys()
            seconds = _of(own, gpus, way) + train
            ratios = (f"{(naive + training) / seconds:.2f}" for training in (train, old))
            rows.append((gpus, way, f"{seconds / gpus:.2f}", *ratios, "" if measured else "computed"))
    yield from table(("GPUs", "recipe", "s per prompt", "× naive, same trainer", "× naive, baseline trainer", ""), rows)
    if {(2, ROLL_OUTS[-1]), (2, TRAINING)} <= own.keys():
        trained, iteration = (
            2 * sum(own[1, part]["s"] for part in parts) / sum(own[2, part]["s"] for part in parts)
            for parts in ((TRAINING,), (ROLL_OUTS[-1], TRAINING))
        )
        yield ""
        yield f"Two GPUs train {trained:.2f} × as fast as one, and run an iteration {iteration:.2f} × as fast."


def _of(own: dict[tuple[int, str], Row], gpus: int, part: str) -> float:
    """Seconds of a part for one prompt per GPU, as on one GPU where it was not measured."""
    return float(own.get((gpus, part), own[1, part])["s"])


if __name__ == "__main__":
    main()
