"""Qwen-Image: its padding and positions, and its layers compared with those that the published baselines adapt."""

from collections import Counter

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from solrl_core.families.qwen_image import Positions, QwenImage
from solrl_core.lora import adapter_layout
from solrl_core.precision import LayerPolicy, linear_flops, share_of_flops
from solrl_core.sampling.noise import initial_noise
from tiny_models import Tiny, named_layers, variants
from tiny_pipelines import PROMPTS, difference


@variants("qwen-image")
def test_padding_changes_no_velocity(tiny: Tiny) -> None:
    backbone = tiny.backbone
    rows, noise = backbone.encode(PROMPTS[:1]), initial_noise([3], backbone.latent_shape)
    assert backbone.encode(PROMPTS)["mask"].sum(1).tolist() == [8, 15]
    other = rows | {"states": torch.where(rows["mask"][..., None], rows["states"], 7.0)}
    velocities = [backbone.velocity(backbone.transformer, noise, torch.tensor([0.5]), each) for each in (rows, other)]
    assert difference(*velocities) <= 1e-6


@pytest.mark.parametrize(("rows", "columns"), [(4, 6), (5, 3)])
def test_positions_equal_diffusers(rows: int, columns: int) -> None:
    sizes, device = [[(1, rows, columns)]] * 2, torch.device("cpu")
    theirs = QwenEmbedRope(10000, [4, 6, 6], scale_rope=True)(sizes, max_txt_seq_len=9, device=device)
    ours = Positions((4, 6, 6))(sizes, max_txt_seq_len=9, device=device)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def large() -> QwenImageTransformer2DModel:
    """Qwen-Image without weights, by its published configuration, which has diffusers' defaults."""
    with torch.device("meta"):
        return QwenImageTransformer2DModel()


def test_all_but_the_modulation_is_quantised(large: QwenImageTransformer2DModel) -> None:
    selected = LayerPolicy(QwenImage.quantize, QwenImage.keep).select(large)
    assert selected == QwenImage.fp8_policy.select(large)
    assert Counter(name.split(".", 2)[2] for name in selected).keys() == {
        *(f"attn.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"attn.{layer}" for layer in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
        *(f"{stream}_mlp.net.{layer}" for stream in ("img", "txt") for layer in ("0.proj", "2")),
    }

    def run() -> None:
        large(
            hidden_states=torch.zeros(1, 1024, 64, device="meta"),
            encoder_hidden_states=torch.zeros(1, 256, 3584, device="meta"),
            timestep=torch.ones(1, device="meta"),
            img_shapes=[[(1, 32, 32)]],
        )

    share = share_of_flops(linear_flops(large, run), selected, QwenImage.blocks)
    print(f"Qwen-Image at 512 px: {share:.2%} of the blocks' linear FLOPs are quantised")
    assert share == pytest.approx(0.9992, abs=0.0003)


@variants("qwen-image")
def test_lora_targets_are_the_baselines(large: QwenImageTransformer2DModel, tiny: Tiny) -> None:
    """verl-omni, examples/flowgrpo_trainer/qwen_image/run_qwen_image_ocr_lora.sh."""
    names = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
    names += ["img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"]
    for model in (large, tiny.backbone.transformer):
        assert set(adapter_layout(model, QwenImage.lora_targets)) == named_layers(model, names)
    assert len(adapter_layout(large, QwenImage.lora_targets)) == 60 * 12
