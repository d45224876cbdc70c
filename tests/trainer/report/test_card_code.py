"""The code of a model card gives the image that the evaluation made."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from solrl_core.adapter import Adapter, encode_for_diffusers, lora_a_key, lora_b_key
from solrl_core.families import load_backbone
from solrl_core.lora import adapter_layout
from solrl_core.rewards.images import as_pil
from solrl_core.sampling.generator import Generator
from solrl_trainer.report.model_card import LORA, how_to_load, model_card
from solrl_trainer.settings.presets import resolve

PROMPT, SEED, STEPS = "a red circle", 0, 4


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.tensor(list(image.getdata())).float()


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
@pytest.mark.parametrize("model", ["mini-sana", "mini-sd3", "mini-flux"])
def test_the_card_s_code_makes_the_image_of_the_evaluation(model: str, solver: str, tmp_path: Path) -> None:
    settings = [f"solver={solver}", f"evaluate.steps={STEPS}", "lora.rank=4", "lora.alpha=8"]
    config = resolve(f"{model}/sol_rl/clipscore", overrides=settings, arguments={"output": tmp_path}).config
    backbone = load_backbone(model, dtype=torch.float32)
    generator, random = Generator(backbone, "bf16"), torch.Generator().manual_seed(1)
    tensors = {}
    for name, (out, into) in adapter_layout(backbone.transformer, backbone.lora_targets).items():
        tensors[lora_a_key(name)] = torch.randn(4, into, generator=random) / 8
        tensors[lora_b_key(name)] = torch.randn(out, 4, generator=random) / 32
    adapter = Adapter(rank=config.lora.rank, alpha=config.lora.alpha, tensors=tensors)

    def image(solver: str) -> torch.Tensor:
        made = generator.generate(PROMPT, [SEED], steps=STEPS, solver=solver, guidance=config.guidance).images
        return pixels(as_pil(made)[0])

    base = image(solver)
    generator.set_adapter(adapter)
    (tmp_path / LORA).write_bytes(encode_for_diffusers(adapter))
    (tmp_path / "README.md").write_text(model_card(config, 1, None, str(tmp_path)))
    code = how_to_load(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code.replace("torch.bfloat16", "torch.float32"), "README.md", "exec"), names)
    theirs = pixels(names["image"])
    # Of 255. The evaluation merges the LoRA and rounds the weights to BF16.
    assert float((theirs - image(solver)).abs().max()) <= 6
    other = "euler" if solver == "dpm2" else "dpm2"
    assert float((theirs - image(other)).abs().max()) > 20
    assert float((theirs - base).abs().max()) > 20
