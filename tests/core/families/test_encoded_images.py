"""Latents of given images, as a family's own autoencoder and its decoder understand them."""

import copy

import pytest
import torch
from tiny_models import ONE_EACH, Tiny


@pytest.mark.parametrize("tiny", ONE_EACH, indirect=True)
def test_the_decoder_gets_what_the_autoencoder_found(tiny: Tiny) -> None:
    """`decode` undoes the normalisation of `encode_images`, whatever it is: the autoencoder decodes its own latents."""
    backbone = tiny.backbone
    vae = copy.copy(backbone.pipeline.vae)
    frames = [backbone.frames] if backbone.frames > 1 else []
    images = torch.rand(2, *frames, 3, backbone.height, backbone.width, generator=torch.Generator().manual_seed(1))
    latents = backbone.encode_images(images)
    assert latents.shape == (2, *backbone.latent_shape)
    assert latents.dtype == torch.float32
    video = images.transpose(1, 2) if frames else images
    if any(one.ndim == 5 for one in vae.parameters()) and not frames:
        video = images[:, :, None]
    with torch.no_grad():
        encoded = vae.encode((2 * video - 1).to(vae.dtype), return_dict=False)[0]
        own = encoded if isinstance(encoded, torch.Tensor) else encoded.mode()
        expected = vae.decode(own, return_dict=False)[0]
        expected = expected.transpose(1, 2) if frames else expected.view(*images.shape)
    assert torch.allclose(backbone.decode(latents), (expected.float() / 2 + 0.5).clamp(0, 1), atol=2e-2)


@pytest.mark.parametrize("tiny", ["sana/mini"], indirect=True)
def test_a_trained_autoencoder_gives_the_image_back(tiny: Tiny) -> None:
    made = tiny.generator.generate(["two red circles"], [7], steps=4).images
    again = tiny.backbone.decode(tiny.backbone.encode_images(made))
    assert float((again - made).square().mean().log10() * -10) > 25
