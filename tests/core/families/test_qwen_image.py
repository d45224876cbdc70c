"""Qwen-Image: its padding and positions."""

import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from solrl_core.families.qwen_image import Positions
from solrl_core.sampling.noise import initial_noise
from tiny_models import Tiny, variants
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
