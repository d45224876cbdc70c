"""The miniature AutoencoderDC: 64 px to 8×8×8 latents of unit variance."""

import torch
import torch.nn.functional as F
from diffusers import AutoencoderDC

from solrl_minis.recipe.data import Source


def build() -> AutoencoderDC:
    """An untrained autoencoder of the shipped shape."""
    return AutoencoderDC(
        latent_channels=8,
        encoder_block_out_channels=(40, 40, 80, 80),
        decoder_block_out_channels=(40, 40, 80, 80),
        encoder_layers_per_block=(0, 1, 1, 2),
        decoder_layers_per_block=(0, 1, 1, 2),
        encoder_qkv_multiscales=((), (), (), ()),
        decoder_qkv_multiscales=((), (), (), ()),
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        decoder_conv_act_fn="silu",
        upsample_block_type="interpolate",
    )


def train(steps: int, batch: int, device: str, seed: int = 0) -> tuple[AutoencoderDC, list[float]]:
    """Train on rendered scenes.

    Returns:
        The autoencoder with its scaling factor set, and the loss at each step.
    """
    torch.manual_seed(seed)
    source = Source(seed)
    model = build().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.05)
    pool = source.images(source.draw(min(60_000, 32 * steps)), device)
    losses = []
    for step in range(steps):
        images = pool[torch.randint(len(pool), (batch,), device=device)] * 2 - 1
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            latents = model.encode(images).latent
            # A little noise on the latents makes the decoder forgive the small errors of a sampler.
            restored = model.decode(latents + 0.02 * torch.randn_like(latents)).sample
        error = restored.float() - images
        moments = latents.float().mean() ** 2 + (latents.float().var() - 1) ** 2
        loss = error.square().mean() + 0.1 * error.abs().mean() + 0.01 * moments
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 500 == 0:
            print(f"autoencoder step {step} of {steps}: loss {float(losses[-1]):.4f}", flush=True)
    model.eval()
    with torch.no_grad():
        deviation = model.encode(pool[:2048] * 2 - 1).latent.float().std().item()
    model.register_to_config(scaling_factor=1.0 / deviation)
    return model, losses


@torch.no_grad()
def psnr(model: AutoencoderDC, device: str, seed: int = 1) -> float:
    """Peak signal-to-noise ratio of reconstructed held-out scenes, in dB."""
    source = Source(seed, held_out=True)
    images = source.images(source.draw(512), device)
    restored = (model.decode(model.encode(images * 2 - 1).latent).sample / 2 + 0.5).clamp(0, 1)
    return float(-10 * torch.log10(F.mse_loss(restored, images)))
