"""A whole run at a guidance above 1 of each family with Qwen's text encoders, and its LoRA in diffusers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from solrl_core.families import load_backbone
from solrl_core.families.load import pipeline_call
from solrl_core.sampling.generator import Generator
from solrl_core.sampling.noise import initial_noise
from solrl_core.sampling.sampler import solve
from solrl_trainer.commands import run
from solrl_trainer.policy.policy import CURRENT, Policy
from solrl_trainer.run_folder import checkpoints
from tests.core.families.tiny_pipelines import write_flux2_klein, write_qwen_image
from tests.trainer.training_helpers import QUICK, run_config

QWEN = {"qwen-image": write_qwen_image, "flux2-klein": write_flux2_klein}
SMALL = (
    *(*QUICK, "rollout_url=null", "explore.prompts=1", "optimizer.updates=1", "optimizer.learning_rate=3e-2"),
    *("prompts=shapes", "guidance=2.5", "rewards={'tests.trainer.training_helpers:redness': 1}"),
)
PROMPT = "a red circle"


@pytest.mark.parametrize("family", QWEN)
def test_a_guided_run_explores_trains_and_exports(family: str, tmp_path: Path) -> None:
    folder = str(QWEN[family](tmp_path / family))
    config = run_config(f"{family}/sol_rl/clipscore", tmp_path / "run", *SMALL, model=folder)
    run.run(config)

    backbone = load_backbone(folder)

    base = Generator(backbone, "bf16").generate(PROMPT, [3], steps=2, guidance=config.guidance).images
    found = checkpoints.latest(config.output / "checkpoints")
    adapter = found.averaged
    assert any(bool(tensor.any()) for name, tensor in adapter.tensors.items() if "lora_B" in name)
    Policy(backbone, config.lora, config.seed).restore(CURRENT, adapter.tensors)

    noise = initial_noise([3], backbone.latent_shape)
    pipeline = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.load_lora_weights(str(config.output), weight_name="lora.safetensors")
    call: dict[str, Any] = pipeline_call(folder, config.guidance) or {}
    latents = pipeline._pack_latents(noise, *noise.shape) if family == "qwen-image" else noise
    theirs = pipeline(prompt=PROMPT, num_inference_steps=2, latents=latents, output_type="pt", **call).images

    def velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
        return backbone.velocity(backbone.transformer, x, torch.tensor([sigma]), rows, config.guidance)

    rows = backbone.encode([PROMPT], config.guidance)
    with torch.no_grad():
        ours = backbone.decode(solve(velocity, noise, backbone.sigmas(2)))
    assert float((theirs - ours).abs().max()) <= 1e-5
    assert float((theirs - base).abs().max()) > 1e-3
