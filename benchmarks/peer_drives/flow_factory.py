"""Flow-Factory's DiffusionNFT, X-GenGroup/Flow-Factory: examples/nft/lora/flux1 with the work of the others.

Its trainer's samples, steps, noise levels, size, rank, layers and pull to the reference become those of the others.
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
from peer_drives.turns import Turns, Work, timed_as

NAME = "Flow-Factory"
MARK = "src/flow_factory/trainers/nft.py"
RECIPE = "diffusionnft"
MODELS = ("flux",)
STUBS = ("datasets, imageio: imported, never called", "cuDNN's attention, whose backward pass fails: flash attention")
STEPS, LEVELS, BATCH = 10, 4, 4


def run(clone: Path, work: Work, turns: Turns) -> None:
    """Run the trainer's loop until there are no more turns."""
    install()
    torch.backends.cuda.enable_cudnn_sdp(False)
    stage = Stage(work, turns)
    score = stage.multi_score()
    samples = -(-work.samples // BATCH) * BATCH
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    for name in ("datasets", "datasets.utils", "datasets.utils.logging", "imageio", "imageio.v3"):
        module(name, __getattr__=lambda _: MagicMock(), __path__=[])
    sys.path.insert(0, str(clone / "src"))
    imported("models.flux.flux1").FluxPipeline = stage
    imported("trainers.abc").get_dataloader = lambda **_: (Batches(stage), None)
    rewards = imported("rewards")

    class Rewarded(rewards.PointwiseRewardModel):  # type: ignore[misc, name-defined]
        use_tensor_inputs = True

        def __call__(self, prompt: list[str], image: list[torch.Tensor], **_: Any) -> Any:
            return rewards.RewardModelOutput(
                rewards=score(torch.stack(list(image)), prompt, [{} for _ in prompt])[0]["avg"]
            )

    imported("rewards.loader").get_reward_model_class = lambda _: Rewarded
    settings = yaml.safe_load((clone / "examples/nft/lora/flux1/default.yaml").read_text())
    settings["model"] |= {"lora_rank": 32, "lora_alpha": 64, "target_modules": ["to_q", "to_k", "to_v", "to_out.0"]}
    settings["train"] |= {
        **{"resolution": stage.size, "num_inference_steps": STEPS, "num_train_timesteps": LEVELS},
        **{"kl_beta": 1e-4, "guidance_scale": 1.0, "group_size": samples, "unique_sample_num_per_epoch": 1},
        **{"per_device_batch_size": BATCH, "ema_device": work.device, "ref_param_device": work.device},
        "latent_storage_dtype": None,  # autocast to bfloat16 refuses the default, float16
    }
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
        turns.facts |= {"levels": LEVELS, "sampled at once": BATCH, "trained at once": BATCH}
        trainer.start()


class Batches:
    """In the place of a data loader of encoded prompts."""

    def __init__(self, stage: Stage) -> None:
        prompts = [stage.work.prompts[0]] * BATCH
        states, pooled, _ = stage.embeddings(prompts)
        self._batch = {
            "prompt": prompts,
            "prompt_ids": torch.zeros(BATCH, states.shape[1], dtype=torch.int64),
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
