"""Miniature autoencoders: SANA's DC-AE (64 px to 8×8×8) and the KL autoencoder of SD3 and FLUX.1 (to 16×16×4)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderDC, AutoencoderKL, AutoencoderKLWan

from minis_recipe.data import Source, World
from minis_recipe.loop import Budget, Rates, fit

RATES = Rates(1e-3, weight_decay=1e-4, betas=(0.9, 0.999))
KL_WEIGHT = 1e-4


def build_dc() -> AutoencoderDC:
    """Build an untrained AutoencoderDC of the shipped size."""
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


def build_kl() -> AutoencoderKL:
    """Build an untrained AutoencoderKL of the shipped size; 2×2 patches of its latents give 64 image tokens."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(24, 40, 40),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def to_latents(autoencoder: Any, images: torch.Tensor) -> torch.Tensor:
    """Encode images in [0, 1] to scaled latents, on which the transformer trains."""
    encoded = autoencoder.encode(_given(images))
    raw = (encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latent).float()
    if images.ndim == 5:
        mean, std = _statistics(autoencoder, raw.device)
        scaled: torch.Tensor = (raw - mean) / std
        return scaled
    latents: torch.Tensor = (raw - _shift(autoencoder)) * autoencoder.config.scaling_factor
    return latents


def from_latents(autoencoder: Any, latents: torch.Tensor) -> torch.Tensor:
    """Decode scaled latents to images, not clamped."""
    if latents.ndim == 5:
        mean, std = _statistics(autoencoder, latents.device)
        clips: torch.Tensor = autoencoder.decode(latents * std + mean).sample.float() / 2 + 0.5
        return clips.transpose(1, 2)
    raw = latents / autoencoder.config.scaling_factor + _shift(autoencoder)
    images: torch.Tensor = autoencoder.decode(raw).sample.float() / 2 + 0.5
    return images


def _given(images: torch.Tensor) -> torch.Tensor:
    """What an autoencoder is given: images [N, 3, H, W], or clips [N, 3, F, H, W], in [−1, 1]."""
    return (images if images.ndim == 4 else images.transpose(1, 2)) * 2 - 1


def _statistics(autoencoder: Any, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Mean and standard deviation of each channel of the latents of clips."""
    config = autoencoder.config
    found = (torch.tensor(values, device=device) for values in (config.latents_mean, config.latents_std))
    return tuple(values.view(-1, 1, 1, 1) for values in found)


def _shift(autoencoder: Any) -> float:
    return autoencoder.config.get("shift_factor") or 0.0


def mixed(model: Any, device: str) -> torch.autocast:
    """BF16 on a GPU, but not for clips: some versions of cuDNN have no fast convolution in BF16 for those."""
    return torch.autocast(device, torch.bfloat16, device == "cuda" and not isinstance(model, AutoencoderKLWan))


def train(model: Any, budget: Budget, device: str, source: Callable[..., World] = Source) -> list[float]:
    """Train on rendered scenes, in place, then set scale and shift so that latents have unit variance.

    Returns:
        The loss at each step.
    """
    torch.manual_seed(0)
    world = source(0)
    model.to(device).train()
    pool = world.images(world.draw(budget.pool), device)

    def loss() -> tuple[torch.Tensor, torch.Tensor]:
        images = _given(pool[torch.randint(len(pool), (budget.batch,), device=device)])
        with mixed(model, device):
            latents, prior = _noisy_latents(model, images)
            restored = model.decode(latents).sample
        error = restored.float() - images
        value = error.square().mean() + 0.1 * error.abs().mean() + prior
        return value, value

    losses = fit("autoencoder", list(model.parameters()), loss, budget, RATES)
    model.eval()
    with torch.no_grad():
        if pool.ndim == 5:
            model.register_to_config(latents_mean=[0.0] * model.config.z_dim, latents_std=[1.0] * model.config.z_dim)
            channels = to_latents(model, pool[:256]).transpose(0, 1).flatten(1)
            model.register_to_config(latents_mean=channels.mean(1).tolist(), latents_std=channels.std(1).tolist())
            return losses
        shifted = "shift_factor" in model.config
        model.register_to_config(scaling_factor=1.0, **({"shift_factor": 0.0} if shifted else {}))
        latents = to_latents(model, pool[:2048])
        model.register_to_config(scaling_factor=1.0 / latents.std().item())
        if shifted:
            model.register_to_config(shift_factor=latents.mean().item())
    return losses


def _noisy_latents(model: Any, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy latents, for a decoder that is robust to a sampler's small errors, and the loss of their prior."""
    encoded = model.encode(images)
    if hasattr(encoded, "latent_dist"):
        posterior = encoded.latent_dist
        return posterior.sample(), KL_WEIGHT * posterior.kl().mean() / posterior.mean[0].numel()
    latents = encoded.latent
    moments = latents.float().mean() ** 2 + (latents.float().var() - 1) ** 2
    return latents + 0.02 * torch.randn_like(latents), 0.01 * moments


@torch.no_grad()
def psnr(model: Any, device: str, count: int = 512, source: Callable[..., World] = Source) -> float:
    """Peak signal-to-noise ratio of the reconstruction of held-out scenes, in dB."""
    world = source(1, held_out=True)
    images = world.images(world.draw(count), device)
    parts = [from_latents(model, to_latents(model, part)).clamp(0, 1) for part in torch.split(images, 64)]
    return float(-10 * torch.log10(F.mse_loss(torch.cat(parts), images)))
