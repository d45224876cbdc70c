"""Flow-GRPO's trainer, yifan123/flow_grpo: scripts/train_sd3.py with its settings for PickScore."""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from peer_drives.stubs import Stage, install, load_source, module, on_cpu, package, run_sd3
from peer_drives.turns import BEHAVIOUR, RECORDED, STOCHASTIC, TORCH, Turns, Work

NAME = "Flow-GRPO"
MARK = "scripts/train_sd3.py"
COMMIT = "ac4c86e"
COMPILES = False
RECIPES = ("flowgrpo",)
MODELS = ("sd3-medium",)
STUBS = ("its prompt lists and first evaluation: nothing", "the model is wrapped as on several GPUs")


def constants(model: str, recipe: str) -> dict[str, str]:
    """Accelerate converts within the model's `forward`, which the measured fact of its caller does not see."""
    facts = {"solver": STOCHASTIC, "steps": "10", "guidance": "4.5", "attention": TORCH, "autocast": "float16"}
    return facts | {BEHAVIOUR: RECORDED}


def run(clone: Path, work: Work, turns: Turns) -> None:
    """Run the script's `main` until there are no more turns."""
    flags, stage = install(), Stage(work, turns)
    sys.path.insert(0, str(clone))
    flow_grpo = package("flow_grpo", clone / "flow_grpo")
    flow_grpo.prompts = module("flow_grpo.prompts")
    flow_grpo.rewards = module("flow_grpo.rewards", multi_score=stage.multi_score)
    config = load_source("config", clone / "config/grpo.py").get_config("pickscore_sd3")
    script: Any = load_source("script", clone / MARK)
    script.eval = lambda *_: None
    script.Accelerator = Wrapping
    if work.device == "cpu":
        on_cpu(script)
        config.mixed_precision = "no"
    else:
        torch.distributed.init_process_group("nccl", rank=0, world_size=1)

    sample, train = config.sample, config.train
    batch = min(sample.train_batch_size, work.samples)
    if work.learning is not None:
        batch, train.learning_rate = work.samples, work.learning.learning_rate
        sample.guidance_scale, train.cfg = 1.0, False
    sample.train_batch_size = train.batch_size = batch
    # As many batches for each of the two optimiser steps.
    of_step = -(-work.samples * len(work.prompts) // (2 * batch))
    train.gradient_accumulation_steps, sample.num_batches_per_epoch = of_step, 2 * of_step
    config.seed = work.seed
    batches = [[work.prompts[number * len(work.prompts) // (2 * of_step)]] * batch for number in range(2 * of_step)]
    run_sd3(script, config, flags, stage, batches)


class Wrapping(Accelerator):  # type: ignore[misc]
    """Wraps the model on a single device, too, as the script expects it."""

    def prepare(self, model: Any, *others: Any, **options: Any) -> Any:
        prepared = super().prepare(model)
        if not isinstance(prepared, DistributedDataParallel):
            prepared = DistributedDataParallel(prepared)
        return prepared, *super().prepare(*others, **options)
