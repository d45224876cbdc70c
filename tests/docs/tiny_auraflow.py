"""A folder with a tiny AuraFlow with random weights."""

import json
from pathlib import Path

import torch
from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
)
from tests.core.families.tiny_pipelines import save, t5_tokenizer
from tests.support.tiny_skeletons import VAE
from transformers import UMT5Config, UMT5EncoderModel

TOKENS = 16
SIDE = 64


def write_auraflow(folder: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = t5_tokenizer()
    pipeline = AuraFlowPipeline(
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel(
            UMT5Config(vocab_size=len(tokenizer), d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
        ),
        vae=AutoencoderKL(**VAE | {"shift_factor": None}),
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
    save(pipeline, folder)
    (folder / "solrl.json").write_text(json.dumps({"max_sequence_length": TOKENS}))
    return folder
