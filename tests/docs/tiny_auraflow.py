"""A folder with a tiny AuraFlow with random weights."""

import json
from pathlib import Path

import torch
from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, AutoencoderKL, FlowMatchEulerDiscreteScheduler
from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

TOKENS = 16
SIDE = 64
_PIECES = ("<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz")


def write_auraflow(folder: Path) -> Path:
    """Write the pipeline, with weights that are exact in BF16, so that every loader gets the same values."""
    torch.manual_seed(0)
    pipeline = AuraFlowPipeline(
        tokenizer=T5TokenizerFast(vocab=[(piece, -float(i)) for i, piece in enumerate(_PIECES)], extra_ids=0),
        text_encoder=UMT5EncoderModel(
            UMT5Config(vocab_size=len(_PIECES), d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
        ),
        vae=AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8, 8, 16, 16),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=4,
            scaling_factor=0.13,
        ),
        transformer=AuraFlowTransformer2DModel(
            sample_size=SIDE // 8,
            num_mmdit_layers=1,
            num_single_dit_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pos_embed_max_size=16,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
    )
    for part in (pipeline.text_encoder, pipeline.vae, pipeline.transformer):
        for tensor in part.state_dict().values():
            if part is pipeline.transformer:
                tensor.add_(torch.randn_like(tensor) * 0.05)
            tensor.copy_(tensor.bfloat16())
    pipeline.save_pretrained(folder)
    (folder / "solrl.json").write_text(json.dumps({"max_sequence_length": TOKENS}))
    return folder
