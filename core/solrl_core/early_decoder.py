"""Early decoders: an inner stage of an autoencoder's decoder and a convolution of its features to RGB.

Rewards scale images down to 224 px. A decoder of 512 or 1024 px has features of 256 px after a part of its time, from
which the convolution makes an image of that size. It is a least-squares fit to images of the model; nothing is trained.
"""

import base64
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from solrl_proto.rollouts import Decoding, EarlyDecoder

from solrl_core.families.early_exit import EarlyDecoderError, stage_count
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.fingerprint import module_digest
from solrl_core.generator import CHUNK_SIZE, decode_in_batches, map_in_batches

REWARD_PIXELS = 224
"""Side of the square to which rewards scale images."""


@dataclass(frozen=True)
class Stage:
    """An inner stage of a decoder.

    Attributes:
        number: stages up to this one.
        channels, height, width: shape of its features.
    """

    number: int
    channels: int
    height: int
    width: int


def inner_stages(backbone: PipelineBackbone) -> list[Stage]:
    """The stages of a model's decoder whose features have fewer pixels than the image, found on the meta device.

    Raises:
        EarlyDecoderError: an autoencoder whose stages are not known.
    """
    count, meta = stage_count(backbone.parts["vae"]), backbone.on_meta()
    latents = torch.empty(1, *backbone.latent_shape, device="meta")
    found = []
    for number in range(1, count):
        stage = Stage(number, *meta.features(latents, number).shape[1:])
        if stage.height * stage.width < backbone.height * backbone.width:
            found.append(stage)
    return found


def early_stage(backbone: PipelineBackbone, least: int = REWARD_PIXELS) -> Stage:
    """The first stage of a model's decoder whose features are at least `least` px high and wide.

    Raises:
        EarlyDecoderError: there is none that is smaller than the image, so that nothing is to gain.
    """
    found = next((s for s in inner_stages(backbone) if min(s.height, s.width) >= least), None)
    if found is None:
        raise EarlyDecoderError(
            f"got a decoder of images of {backbone.width}×{backbone.height} px; no inner stage of it has at least "
            f"{least} px, so an early decoder saves nothing: decode whole images"
        )
    return found


@torch.inference_mode()
def fit_early_decoder(backbone: PipelineBackbone, latents: torch.Tensor, *, least: int = REWARD_PIXELS) -> EarlyDecoder:
    """Fit the early decoder whose images are closest to the whole decoder's, scaled down by area.

    Args:
        backbone: the model.
        latents: clean latents [N, ...] of the model's images, on its device.
        least: height and width in pixels that its images have at least.

    Raises:
        EarlyDecoderError: no inner stage is that large; see `early_stage`.
    """
    stage = early_stage(backbone, least)
    size, device = 9 * stage.channels + 1, latents.device
    products = torch.zeros(size, size, dtype=torch.float64, device=device)
    moments = torch.zeros(size, 3, dtype=torch.float64, device=device)
    for part in torch.split(latents, CHUNK_SIZE):
        features = map_in_batches(lambda rows: backbone.features(rows, stage.number), backbone, part)
        images = scaled_by_area(decode_in_batches(backbone, part), stage.height, stage.width)
        for row, image in zip(features, images, strict=True):
            columns = F.pad(F.unfold(row.float()[None], 3, padding=1)[0].double(), (0, 0, 0, 1), value=1.0)
            products += columns @ columns.T
            moments += columns @ (2 * image.double().flatten(1) - 1).T
    # The ridge only matters for channels that are linear combinations of others.
    products += 1e-9 * products.diagonal().mean() * torch.eye(size, dtype=torch.float64, device=device)
    found = torch.linalg.solve(products, moments).cpu()
    red, green, blue = found[-1].tolist()
    return EarlyDecoder(
        stages=stage.number,
        weights=base64.b64encode(found[:-1].T.numpy().astype("<f2").tobytes()).decode(),
        bias=(red, green, blue),
        fitted_for=module_digest(backbone.parts["vae"]),
    )


def early_psnr(backbone: PipelineBackbone, early: EarlyDecoder, latents: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB of early-decoded images, against whole images scaled down by area."""
    images = decode_in_batches(backbone, latents, decoding=Decoding(early))
    whole = scaled_by_area(decode_in_batches(backbone, latents), *images.shape[-2:])
    return float(-10 * (images - whole).square().mean().log10())


def scaled_by_area(images: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Images [N, 3, H, W] scaled down to [N, 3, h, w]; each pixel is the mean of those that it covers."""
    return F.interpolate(images, size=(height, width), mode="area")
