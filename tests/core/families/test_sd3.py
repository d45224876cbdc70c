"""Stable Diffusion 3: its parts, and quantised layers and LoRA targets compared with the paper's list."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel
from solrl_core.families.load import locate, pipeline_call
from solrl_core.families.sd3 import StableDiffusion3
from solrl_core.families.skeleton import load_skeleton
from solrl_core.lora import adapter_layout
from solrl_core.precision import LayerPolicy, linear_flops, share_of_flops
from support.true_shapes import write_skeleton
from tiny_models import Tiny, named_layers, variants
from torch import nn

POLICY = LayerPolicy(StableDiffusion3.quantize, StableDiffusion3.keep, StableDiffusion3.keep_max_dim)


@variants("sd3")
def test_digests_cover_all_parts_of_an_image(tiny: Tiny) -> None:
    encoders = {f"{kind}{end}" for kind in ("text_encoder", "tokenizer") for end in ("", "_2", "_3")}
    assert set(tiny.backbone.parts) == {"transformer", "vae", "scheduler"} | encoders


@pytest.fixture(scope="module")
def large() -> SD3Transformer2DModel:
    """SD3.5-Large without weights, by its published configuration."""
    with torch.device("meta"):
        return SD3Transformer2DModel(
            sample_size=128,
            patch_size=2,
            in_channels=16,
            num_layers=38,
            attention_head_dim=64,
            num_attention_heads=38,
            joint_attention_dim=4096,
            caption_projection_dim=2432,
            pooled_projection_dim=2048,
            out_channels=16,
            pos_embed_max_size=192,
            dual_attention_layers=(),
            qk_norm="rms_norm",
        )


def test_the_papers_list_quantises_the_image_feed_forward_of_sd35_large(large: SD3Transformer2DModel) -> None:
    """Attention is 2432 wide, which the list keeps along with everything of the text stream."""
    selected = POLICY.select(large)
    assert selected == [f"transformer_blocks.{i}.ff.net.{layer}" for i in range(38) for layer in ("0.proj", "2")]

    share = share_of(large, selected, 128)
    print(f"SD3.5-Large at 1024 px: {share:.1%} of the blocks' linear FLOPs are quantised")
    assert share == pytest.approx(0.635, abs=0.002)


def share_of(transformer: nn.Module, layers: Sequence[str], side: int) -> float:
    """Share of the blocks' linear FLOPs in `layers`, for latents of `side` × `side` and 77 + 128 text tokens."""

    def run() -> None:
        inputs = [torch.zeros(shape, device="meta") for shape in ((1, 16, side, side), (1, 77 + 128, 4096), (1, 2048))]
        transformer(*(x.to(next(transformer.parameters()).dtype) for x in inputs), torch.zeros(1, device="meta"))

    return share_of_flops(linear_flops(transformer, run), layers, StableDiffusion3.blocks)


@variants("sd3")
def test_lora_targets_of_sd35_large_are_the_papers(large: SD3Transformer2DModel, tiny: Tiny) -> None:
    own = ["add_k_proj", "add_q_proj", "add_v_proj", "to_add_out", "to_k", "to_out.0", "to_q", "to_v"]
    names = [f"attn.{name}" for name in own]
    for model in (large, tiny.backbone.transformer):
        assert set(adapter_layout(model, StableDiffusion3.lora_targets)) == named_layers(model, names)
    # The last block has no text output.
    assert len(adapter_layout(large, StableDiffusion3.lora_targets)) == 38 * 8 - 1


def test_sd35_medium(tmp_path: Path) -> None:
    """Size, layers and LoRA targets at its true configuration, whose first 13 blocks have a second attention."""
    folder = write_skeleton("sd3-medium", Path(locate("mini-sd3")), tmp_path / "medium")
    medium = load_skeleton(str(folder))
    assert (medium.height, medium.width, medium.latent_shape) == (512, 512, (16, 64, 64))
    call = {"guidance_scale": 4.5, "height": 512, "width": 512, "max_sequence_length": 128}
    assert pipeline_call(str(folder), 4.5) == call, "the pipeline's own size is 1024 px"
    # The second attention is kept as the first is, and adapted no more than DiffusionNFT and Flow-GRPO do.
    selected = [policy.select(medium.transformer) for policy in (medium.policy, medium.fp8_policy)]
    at_nvfp4, at_fp8 = ({name.split(".", 2)[2] for name in names} for names in selected)
    assert at_nvfp4 == {"ff.net.0.proj", "ff.net.2"}
    assert at_fp8 > {"attn.to_q", "attn2.to_q"}
    layout = adapter_layout(medium.transformer, medium.lora_targets)
    assert len(layout) == 24 * 8 - 1
    assert not any("attn2" in name for name in layout)
    shares = [share_of(medium.transformer, names, 64) for names in selected]
    print(f"SD3.5-Medium at 512 px: {shares[0]:.1%} of the blocks' linear FLOPs at NVFP4, {shares[1]:.1%} at FP8")
    assert shares == [pytest.approx(0.485, abs=0.002), pytest.approx(0.999, abs=0.001)]
