"""DiffusionNFT's trainer, NVlabs/DiffusionNFT: scripts/train_nft_sd3.py with its settings for PickScore."""

import sys
from pathlib import Path
from typing import Any

from peer_drives.our_draws import draw_as_ours
from peer_drives.stubs import Stage, install, load_source, module, on_cpu, package, run_sd3
from peer_drives.turns import BEHAVIOUR, COMPUTED, DPM, TORCH, Turns, Work

NAME = "DiffusionNFT"
MARK = "scripts/train_nft_sd3.py"
COMMIT = "24af555"
COMPILES = False
RECIPES = ("diffusionnft",)
MODELS = ("sd3-medium",)
STUBS = ()


def constants(model: str, recipe: str) -> dict[str, str]:
    return {"solver": DPM, "steps": "10", "guidance": "1", "attention": TORCH, BEHAVIOUR: COMPUTED}


def run(clone: Path, work: Work, turns: Turns) -> None:
    """Run the script's `main` until there are no more turns."""
    flags, stage = install(), Stage(work, turns)
    sys.path.insert(0, str(clone))
    flow_grpo = package("flow_grpo", clone / "flow_grpo")
    flow_grpo.rewards = module("flow_grpo.rewards", multi_score=stage.multi_score)
    config = load_source("config", clone / "config/nft.py").get_config("sd3_pickscore")
    script: Any = load_source("script", clone / MARK)
    if work.device == "cpu":
        on_cpu(script)
        config.mixed_precision = "no"

    sample, train = config.sample, config.train
    batch = min(sample.train_batch_size, work.samples)
    if work.learning is not None:
        batch, train.learning_rate = work.samples, work.learning.learning_rate
        train.timestep_fraction = work.learning.timestep_fraction
    sample.train_batch_size = train.batch_size = batch
    batches = [[prompt] * batch for prompt in work.prompts for _ in range(-(-work.samples // batch))]
    sample.num_batches_per_epoch = train.gradient_accumulation_steps = len(batches)
    config.debug, config.seed = True, work.seed
    if work.learning is not None and work.learning.same_draws:
        draw_as_ours(script, config, work, stage.latents["latent_shape"])
    run_sd3(script, config, flags, stage, batches)
