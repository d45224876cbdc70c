"""Flow-Factory's DiffusionNFT and FlowGRPO, X-GenGroup/Flow-Factory: examples/{nft,grpo}/lora/flux1 with our work.

Its settings that become those of the others are among the STUBS.
"""

import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
import yaml

from peer_drives.stubs import Stage, install, module
from peer_drives.turns import BEHAVIOUR, COMPUTED, EULER, RECORDED, STOCHASTIC, Turns, Work, timed_as

NAME = "Flow-Factory"
MARK = "src/flow_factory/trainers/nft.py"
COMMIT = "a0b2bc5"
COMPILES = False
RECIPES = ("diffusionnft", "flowgrpo")
MODELS = ("flux",)
WORK: dict[str, dict[str, Any]] = {
    "diffusionnft": {"example": "nft", "steps": 10, "levels": 4, "updates": 1, "kl": 1e-4},
    "flowgrpo": {"example": "grpo", "steps": 6, "levels": 5, "updates": 2, "kl": 0},
}
"""Recipe → its example, and steps, noise levels, optimiser steps of a prompt and KL weight as ours has them."""
BATCH = 4
STUBS = (
    "datasets, imageio: imported, never called",
    "cuDNN's attention, whose backward pass fails: flash attention",
    "its LoRA of rank 64 and α 128: rank 32 and α 64, on the same layers",
    "its DiffusionNFT's 8 steps and 2 noise levels at 384², and KL weight 0: 10 steps, 4 levels at 512², and 0.0001",
    "its GRPO's 10 steps, one of them stochastic: 6 steps, all but the last stochastic, with noise 0.9",
    "its guidance 3.5, an input of FLUX.1: 1",
    f"its micro-batches of 1 or 2, and 16 samples of each of 48 prompts: of {BATCH}, and one prompt's samples",
)


def constants(model: str, recipe: str) -> dict[str, str]:
    solver = STOCHASTIC if recipe == "flowgrpo" else EULER
    steps, behaviour = str(WORK[recipe]["steps"]), RECORDED if recipe == "flowgrpo" else COMPUTED
    return {"solver": solver, "steps": steps, "guidance": "1", "attention": "flash", BEHAVIOUR: behaviour}


def run(clone: Path, work: Work, turns: Turns) -> None:
    """Run the trainer's loop until there are no more turns."""
    install()
    torch.backends.cuda.enable_cudnn_sdp(False)
    stage = Stage(work, turns)
    score = stage.multi_score()
    like = WORK[work.recipe]
    batch = min(BATCH, -(-work.samples // like["updates"]))
    samples = -(-work.samples // (batch * like["updates"])) * batch * like["updates"]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    for name in ("datasets", "datasets.utils", "datasets.utils.logging", "imageio", "imageio.v3"):
        module(name, __getattr__=lambda _: MagicMock(), __path__=[])
    sys.path.insert(0, str(clone / "src"))
    imported("models.flux.flux1").FluxPipeline = stage
    imported("trainers.abc").get_dataloader = lambda **_: (Batches(stage, batch), None)
    rewards = imported("rewards")

    class Rewarded(rewards.PointwiseRewardModel):  # type: ignore[misc, name-defined]
        use_tensor_inputs = True

        def __call__(self, prompt: list[str], image: list[torch.Tensor], **_: Any) -> Any:
            return rewards.RewardModelOutput(
                rewards=score(torch.stack(list(image)), prompt, [{} for _ in prompt])[0]["avg"]
            )

    imported("rewards.loader").get_reward_model_class = lambda _: Rewarded
    settings = yaml.safe_load((clone / f"examples/{like['example']}/lora/flux1/default.yaml").read_text())
    settings["model"] |= {"lora_rank": 32, "lora_alpha": 64, "target_modules": ["to_q", "to_k", "to_v", "to_out.0"]}
    settings["train"] |= {
        **{"resolution": stage.size, "num_inference_steps": like["steps"]},
        **{"kl_beta": like["kl"], "guidance_scale": 1.0, "group_size": samples, "unique_sample_num_per_epoch": 1},
        **{"per_device_batch_size": batch, "ema_device": work.device, "ref_param_device": work.device},
        "latent_storage_dtype": None,  # autocast to bfloat16 refuses the default, float16
    }
    if work.recipe == "flowgrpo":
        settings["scheduler"] |= {"noise_level": 0.9, "num_sde_steps": like["levels"], "sde_steps": None}
        passes = samples // batch * like["levels"]
        settings["train"]["gradient_accumulation_steps"] = passes // like["updates"]
    else:
        settings["train"]["num_train_timesteps"] = like["levels"]
    settings["eval"]["eval_freq"] = 0
    settings["rewards"] = [{"name": "reward", "reward_model": "reward", "device": work.device}]
    del settings["eval_rewards"]
    with tempfile.TemporaryDirectory() as folder:
        settings["log"] |= {"save_dir": folder, "save_freq": 0, "logging_backend": "none", "verbose": False}
        trainer: Any = imported("trainers").load_trainer(imported("hparams").Arguments.from_dict(settings))
        for part, method in (("sample", "sample"), ("train", "optimize")):
            setattr(trainer, method, timed_as(part, turns, samples, getattr(trainer, method)))
        adapter = trainer.adapter
        adapter.decode_latents = stage.described(adapter.decode_latents, lambda *_: adapter.pipeline)
        trainer.should_continue_training = lambda: turns.wait() or True
        turns.facts |= {"levels": like["levels"], "sampled at once": batch, "trained at once": batch}
        trainer.start()


class Batches:
    """In the place of a data loader of encoded prompts."""

    def __init__(self, stage: Stage, size: int) -> None:
        prompts = [stage.work.prompts[0]] * size
        states, pooled, _ = stage.embeddings(prompts)
        self._batch = {
            "prompt": prompts,
            "prompt_ids": torch.zeros(size, states.shape[1], dtype=torch.int64),
            "prompt_embeds": states,
            "pooled_prompt_embeds": pooled,
        }

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield self._batch


def imported(name: str) -> Any:
    """A module of the clone."""
    found: ModuleType = importlib.import_module(f"flow_factory.{name}")
    return found
