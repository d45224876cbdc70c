"""Sol-RL's trainer, in NVlabs/Sana: train_{flux1,sd3,sana}.py with the settings of their `diffusionnft`."""

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from peer_drives import sana
from peer_drives.stubs import Stage, install, load_source, module, on_cpu, package
from peer_drives.turns import BEHAVIOUR, COMPUTED, DPM, EULER, TORCH, Turns, Work, timed_as

NAME = "Sol-RL"
MARK = "train_scripts/sol_rl/train_flux1.py"
COMMIT = "5498e5b of meefs/Sana, a fork"
COMPILES = True
RECIPES = ("diffusionnft",)
MODELS = {"flux": "flux1", "sd3": "sd3", "sana": "sana"}
"""Model → its name in those of the script and of the settings."""
STUBS = ("diffusion/__init__.py, which imports SANA's samplers: nothing", *sana.STUBS)


def constants(model: str, recipe: str) -> dict[str, str]:
    solver = EULER if model == "sana" else DPM
    attention = {"flux": "flash", "sd3": TORCH, "sana": "linear; to text, memory-efficient"}
    return {"solver": solver, "steps": "10", "guidance": "1", "attention": attention[model], BEHAVIOUR: COMPUTED}


def run(clone: Path, work: Work, turns: Turns) -> None:
    """Run the script's `main` until there are no more turns."""
    name, flags, stage = MODELS[work.model], install(), Stage(work, turns)
    sys.path.insert(0, str(clone / "train_scripts/sol_rl"))
    diffusion = package("diffusion", clone / "diffusion")
    diffusion.post_training = package("diffusion.post_training", clone / "diffusion/post_training")
    diffusion.post_training.rewards = module("diffusion.post_training.rewards", multi_score=stage.multi_score)
    if work.model == "sana":
        sana.install(clone)
    kind = "compile" if work.compiled else "diffusionnft"
    config = load_source("config", clone / f"configs/sol_rl/{name}.py").get_config(f"{name}_{kind}_pickscore")
    script: Any = load_source("script", clone / f"train_scripts/sol_rl/train_{name}.py")
    if work.device == "cpu":
        on_cpu(script)
        script.DistributedTimeLogger = MagicMock()
        if work.model == "sd3":  # the script knows one shape of latents alone
            built = script._build_sd3_latents_from_seeds
            script._build_sd3_latents_from_seeds = lambda seeds, **options: built(seeds, **options | stage.latents)

    sample, train = config.sample, config.train
    train.batch_size = min(train.batch_size, work.samples)
    if work.learning is not None:
        train.batch_size, train.learning_rate = work.samples, work.learning.learning_rate
        train.timestep_fraction, config.mixed_precision = work.learning.timestep_fraction, "no"
    config.seed = work.seed
    each = -(-work.samples // train.batch_size) * train.batch_size
    samples = each * len(work.prompts)
    sample.rollout_batch_size = max(size for size in range(1, 25) if each % size == 0)
    sample.per_prompt_iter_num = each // sample.rollout_batch_size
    sample.num_image_per_prompt = sample.best_of_n = sample.full_rollout_num = each
    sample.per_gpu_to_process_prompts, sample.per_gpu_total_samples_to_train = len(work.prompts), samples
    config.debug, config.resume, config.enable_debug_image_save = True, False, False
    config.resolution = stage.size
    steps, batches = config.rollout_sample_num_steps, samples // train.batch_size
    levels = int(steps * train.timestep_fraction)

    def prompts() -> tuple[tuple[str, ...]]:
        """The prompts of a turn. The warm-up has few steps and one micro-batch."""
        train.n_batch_per_epoch = train.gradient_accumulation_steps = 1 if turns.warming else batches
        config.rollout_sample_num_steps = levels if turns.warming else steps
        return (work.prompts,)

    script.FluxPipeline = script.StableDiffusion3Pipeline = script.SanaPipeline = stage
    script.compute_text_embeddings = stage.embeddings
    script.build_datasets_and_loaders = lambda *_: (None, stage.batches(prompts), None, None, None)
    script.PerPromptStatTracker = stage.tracker(script.PerPromptStatTracker, samples)
    sampler = f"pipeline_with_logprob_{work.model}"
    setattr(script, sampler, stage.described(getattr(script, sampler), pipeline_of))
    script._rollout_for_one_prompt = timed_as("sample", turns, each, script._rollout_for_one_prompt)
    turns.facts |= {"levels": levels, "sampled at once": sample.rollout_batch_size, "trained at once": train.batch_size}
    with tempfile.TemporaryDirectory() as folder:
        config.save_dir = config.logdir = folder
        if work.model == "sana":
            config.resolution = 32 * stage.latents["latent_shape"][-1]  # the script divides it by 32
            flags.native_config = sana.native_config(clone / config.native_config, script, stage, folder)
        flags.config = config
        script.main(None)


def pipeline_of(pipeline: Any, *decoder: Any) -> Any:
    """The pipeline that a sampler gets. SANA's gets its transformer and its autoencoder instead."""
    return SimpleNamespace(transformer=pipeline, vae=decoder[0]) if decoder else pipeline
