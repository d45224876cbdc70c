"""A whole run at a guidance above 1 of each family with Qwen's text encoders."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from solrl_trainer.commands import run
from tests.core.families.tiny_pipelines import write_flux2_klein, write_qwen_image
from tests.trainer.training_helpers import QUICK, run_config

QWEN = {"qwen-image": write_qwen_image, "flux2-klein": write_flux2_klein}
SMALL = (
    *(*QUICK, "rollout_url=null", "explore.prompts=1", "optimizer.updates=1", "optimizer.learning_rate=3e-2"),
    *("prompts=shapes", "guidance=2.5", "rewards={'tests.trainer.training_helpers:redness': 1}"),
)


@pytest.mark.parametrize("family", QWEN)
def test_a_guided_run_explores_trains_and_exports(family: str, tmp_path: Path) -> None:
    """core/families has images at a guidance, and adapters in diffusers."""
    folder = str(QWEN[family](tmp_path / family))
    run.run(run_config(f"{family}/sol_rl/clipscore", tmp_path / "run", *SMALL, model=folder))
    exported = load_file(tmp_path / "run" / "lora.safetensors")
    assert any(bool(tensor.any()) for name, tensor in exported.items() if "lora_B" in name)
