"""Every family either decodes in FP8, or refuses it because its autoencoder is one of videos."""

import pytest
from solrl_core.errors import DecoderError
from solrl_core.sampling.noise import initial_noise
from tiny_models import ONE_EACH, Tiny

OF_VIDEOS = {"qwen-image/base": "AutoencoderKLQwenImage", "wan/2.1": "AutoencoderKLWan"}


@pytest.mark.parametrize("tiny", [name for name in ONE_EACH if name not in OF_VIDEOS], indirect=True)
def test_a_family_decodes_in_fp8(tiny: Tiny) -> None:
    latents = initial_noise([1, 2], tiny.backbone.latent_shape)
    whole, found = tiny.backbone.decode(latents), tiny.backbone.decode(latents, "fp8")
    assert found.shape == whole.shape
    assert 0 < (found - whole).abs().mean() < 0.05


@pytest.mark.parametrize("tiny", OF_VIDEOS, indirect=True)
def test_a_decoder_of_videos_is_refused(tiny: Tiny) -> None:
    latents = initial_noise([1], tiny.backbone.latent_shape)
    with pytest.raises(DecoderError, match=f"got '{OF_VIDEOS[tiny.name]}'; expected .an autoencoder of images"):
        tiny.backbone.decode(latents, "fp8")
