"""Our trainer: the run's own loop, with the settings of the recipe that the peers train."""

import tempfile
from itertools import count
from pathlib import Path

from solrl_core.adapter import encode_adapter
from solrl_core.rewards import RewardSet
from solrl_trainer.loop import collect_samples, train_step
from solrl_trainer.policy.update import trained_steps
from solrl_trainer.records.run_log import RunLog
from solrl_trainer.rollouts.device_source import DeviceSource
from solrl_trainer.rollouts.loading import Loaded
from solrl_trainer.rollouts.models import Models
from solrl_trainer.session import connect
from solrl_trainer.settings.presets import resolve
from training_phase import PRESETS

from peer_drives.models import loaded, named, reward_of
from peer_drives.turns import BEHAVIOUR, DPM, EULER, STOCHASTIC, TORCH, Turns, Work, prompt_set


def constants(model: str, recipe: str) -> dict[str, str]:
    """Facts of our trainer that a model's preset fixes, by column of the page."""
    config = resolve(f"{PRESETS[model]}/{recipe}/hpsv2").config
    sampling = {"flux": TORCH, "sana": "linear; to text, torch's"}.get(model, "our own kernel")
    return {
        "solver": STOCHASTIC if config.training_data.recorded else {"dpm2": DPM, "euler": EULER}[config.solver],
        "steps": str(config.sample_steps),
        "guidance": f"{config.guidance:g}",
        "attention": f"{sampling}; trained: fastest correct",
        BEHAVIOUR: "computed once it differs",
    }


def run(work: Work, turns: Turns) -> None:
    """Train until there are no more turns."""
    with tempfile.TemporaryDirectory() as folder:
        own = [f"explore.{name}={work.samples}" for name in ("candidates", "keep")]
        own += [f"batch={work.samples}"]  # other sizes are padded
        own += [f"explore.prompts={len(work.prompts)}", f"seed={work.seed}", f"output={Path(folder) / 'run'}"]
        own += ["iterations=1000", "checkpoint_every=1000", "evaluate.every=0"]
        # As planned on a GPU of its own; here, the others' weights are on it, too.
        own += ["optimizer.activation_checkpointing=false", "optimizer.encoders=gpu"]
        if work.recipe == "fast":  # 4 of the samples are trained on, at the rate of miniatures
            own += ["explore.keep=4", "explore.steps=10", "explore.precision=bf16", "regenerate.at=none"]
            own += ["optimizer.learning_rate=0.001", "iterations=100", "evaluate.stop_after=null"]
        elif work.learning is not None:
            own += [f"optimizer.learning_rate={work.learning.learning_rate}", f"optimizer.batch={work.samples}"]
            own += [f"algorithm.timestep_fraction={work.learning.timestep_fraction}", "guidance=1.0"]
        config = resolve(f"{PRESETS[work.model]}/{work.recipe}/hpsv2", overrides=own).config
        backbone = loaded(work, config.guidance)
        models = Models.build(backbone, config)
        rewards = RewardSet({"hpsv2": reward_of(work, backbone)})
        prompts = prompt_set(work)
        source = DeviceSource(config, Loaded(backbone, rewards), models, prompts)
        session = connect(config, source, prompts, prompts)
        session.adapters = {0: encode_adapter(models.policy.behaviour())}
        session.source.start(session.adapters, ())
        steps = config.sample_steps - source.algorithm.trains_on.recorded  # the last step is not stochastic
        levels = trained_steps(steps, config.algorithm.timestep_fraction)
        checkpointed = sum(block.checkpointed for block in models.policy.blocks)
        turns.facts |= {
            "levels": levels,
            "compiled": "no" if work.device == "cpu" else "blocks",
            "weights": named(backbone.dtype),
            "autocast": "none",
            "recomputed": f"{checkpointed} of {len(models.policy.blocks)} blocks" if checkpointed else "no block",
            "decoder": named(backbone.pipeline.vae.dtype),
            "sampled at once": min(config.batch, work.samples),
            "trained at once": min(config.optimizer.batch, work.samples * len(work.prompts)),
        }
        for iteration in count():
            turns.wait()
            with turns.part("sample", work.samples * len(work.prompts)):
                samples = collect_samples(session, RunLog(), iteration)
            turns.scores.append(samples.proxy_mean)
            if work.compiled:
                continue
            with turns.part("train", work.samples * len(work.prompts)):
                train_step(session, RunLog(), iteration, samples)
