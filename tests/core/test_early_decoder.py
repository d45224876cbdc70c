"""Early decoders, fitted to miniatures and compared with cheaper images and with the whole decoder."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from solrl_core.early_decoder import (
    Stage,
    early_psnr,
    early_stage,
    fit_early_decoder,
    inner_stages,
    scaled_by_area,
)
from solrl_core.families import load_backbone
from solrl_core.families.load import locate
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.families.skeleton import load_skeleton
from solrl_core.fingerprint import part_digests
from solrl_core.generator import Generator, decode_in_batches
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import Decoding, EarlyDecoder
from true_shapes import write_skeleton

LEAST = 32
"""Half of the miniatures' images."""
FITTED_ON = (
    *("a red circle", "two blue squares", "a green cross to the left of a yellow triangle", "a small purple square"),
    *("two orange triangles", "a cyan cross below a purple circle", "four green squares", "a large blue triangle"),
)
HELD_OUT = ("three cyan triangles", "a blue circle above a red cross", "a large yellow square", "two green circles")


class Fitted:
    """A miniature, its early decoder, and latents that this was and was not fitted to."""

    def __init__(self, model: str) -> None:
        self.backbone = load_backbone(model)
        self.known, self.new = (self._latents(texts) for texts in (FITTED_ON, HELD_OUT))
        self.early = fit_early_decoder(self.backbone, self.known, least=LEAST)

    def _latents(self, texts: tuple[str, ...]) -> torch.Tensor:
        prompts = [text for text in texts for _ in range(len(texts))]
        seeds = expand_seeds(3, texts[0], len(prompts))
        return Generator(self.backbone, "bf16").generate(prompts, seeds, steps=6, decode=False).latents

    def whole(self, latents: torch.Tensor) -> torch.Tensor:
        """Images of the whole decoder, at the early one's size."""
        return scaled_by_area(decode_in_batches(self.backbone, latents), LEAST, LEAST)

    def psnr_of_a_map(self, features: Mapping[str, torch.Tensor]) -> float:
        """PSNR of the best linear map from features at the early decoder's size."""
        known, new = (F.pad(_colours(features[name]), (0, 1), value=1.0) for name in ("known", "new"))
        found = torch.linalg.lstsq(known, _colours(self.whole(self.known))).solution
        off = (new @ found).clamp(0, 1) - _colours(self.whole(self.new))
        return float(-10 * off.square().mean().log10())


def _colours(images: torch.Tensor) -> torch.Tensor:
    return images.double().movedim(1, -1).flatten(0, -2)


@pytest.fixture(scope="module", params=["mini-sana", "mini-sd3", "mini-flux"])
def fitted(request: pytest.FixtureRequest) -> Fitted:
    return Fitted(request.param)


@pytest.fixture(scope="module")
def sana() -> Fitted:
    return Fitted("mini-sana")


def test_images_are_closer_than_a_constant_or_a_map_of_the_latents(fitted: Fitted) -> None:
    latents = {"known": fitted.known, "new": fitted.new}
    constant = fitted.psnr_of_a_map({name: torch.zeros(len(x), 0, LEAST, LEAST) for name, x in latents.items()})
    nearest = fitted.psnr_of_a_map({name: F.interpolate(x, size=(LEAST, LEAST)) for name, x in latents.items()})
    found = early_psnr(fitted.backbone, fitted.early, fitted.new)
    assert constant < nearest
    assert found > max(24, nearest + 4)


def test_the_map_is_the_least_squares_fit(sana: Fitted) -> None:
    stage = early_stage(sana.backbone, LEAST)
    features = {
        name: sana.backbone.features(latents, stage.number)
        for name, latents in (("known", sana.known), ("new", sana.new))
    }
    assert features["new"].shape[1:] == (stage.channels, LEAST, LEAST)
    around = {name: F.unfold(x, 3, padding=1).unflatten(2, (LEAST, LEAST)) for name, x in features.items()}
    found = early_psnr(sana.backbone, sana.early, sana.new)
    assert found == pytest.approx(sana.psnr_of_a_map(around), abs=0.05)
    assert found > sana.psnr_of_a_map(features) + 2


def test_images_are_small_and_within_range(fitted: Fitted) -> None:
    images = decode_in_batches(fitted.backbone, fitted.new, decoding=Decoding(fitted.early))
    assert images.shape == (len(fitted.new), 3, LEAST, LEAST)
    assert images.dtype == torch.float32
    assert 0 <= float(images.min()) < float(images.max()) <= 1


def test_the_whole_decoder_stays_as_it_was(fitted: Fitted) -> None:
    before = decode_in_batches(fitted.backbone, fitted.new)
    decode_in_batches(fitted.backbone, fitted.new, decoding=Decoding(fitted.early))
    assert torch.equal(decode_in_batches(fitted.backbone, fitted.new), before)
    assert not torch.equal(before, decode_in_batches(fitted.backbone, fitted.known))


def test_the_generator_decodes_early_if_it_is_told_to(sana: Fitted) -> None:
    generator = Generator(sana.backbone, "bf16")
    made = generator.generate(HELD_OUT[0], [1, 2], steps=2, decoding=Decoding(sana.early))
    assert torch.equal(made.images, decode_in_batches(sana.backbone, made.latents, decoding=Decoding(sana.early)))
    assert generator.generate(HELD_OUT[0], [1, 2], steps=2).images.shape[-1] == sana.backbone.width


def test_an_image_does_not_depend_on_the_rest_of_its_batch(fitted: Fitted) -> None:
    together = decode_in_batches(fitted.backbone, fitted.new, decoding=Decoding(fitted.early))
    for rows in ([0], [5, 2], list(range(15, 3, -1))):
        part = decode_in_batches(fitted.backbone, fitted.new[rows], decoding=Decoding(fitted.early))
        assert float((part - together[rows]).abs().max()) <= 1e-5
    assert float((together[0] - together[5]).abs().max()) > 0.1


def test_it_is_bound_to_the_autoencoder(sana: Fitted) -> None:
    other = load_backbone("mini-sd3")
    assert sana.early.fitted_for == part_digests(sana.backbone.parts)["vae"]
    assert sana.early.fitted_for != part_digests(other.parts)["vae"]
    with pytest.raises(ValueError, match="early decoder for 40 channels; this stage has 24"):
        other.decode(torch.zeros(1, *other.latent_shape), Decoding(sana.early))
    too_many = sana.early.model_copy(update={"stages": 5})
    with pytest.raises(ValueError, match="got 5 stages of the decoder; it has 4"):
        sana.backbone.decode(sana.new, Decoding(too_many))


def test_it_survives_json(sana: Fitted) -> None:
    text = sana.early.model_dump_json()
    assert EarlyDecoder.model_validate_json(text) == sana.early
    assert len(text) < 54 * 40 * 4 / 3 + 300


def test_nothing_is_fitted_where_nothing_is_to_gain(sana: Fitted) -> None:
    message = "images of 64×64 px; no inner stage of it has at least 224 px"
    with pytest.raises(ValueError, match=message):
        fit_early_decoder(sana.backbone, sana.known)


@pytest.mark.parametrize(("family", "stage", "pixels"), [("flux", 2, 512), ("sd3", 1, 1024), ("sana", 4, 1024)])
def test_the_large_models_have_a_stage_of_256_px(tmp_path: Path, family: str, stage: int, pixels: int) -> None:
    folder = write_skeleton(family, Path(locate(f"mini-{family}")), tmp_path / family)
    backbone = load_skeleton(str(folder))
    assert backbone.width == pixels
    assert early_stage(backbone) == Stage(stage, channels=512, height=256, width=256)


@pytest.mark.parametrize(
    ("model", "stages"),
    [("mini-sana", [(1, 80, 8), (2, 80, 16), (3, 40, 32)]), ("mini-flux", [(1, 40, 32)])],
)
def test_inner_stages_are_smaller_than_the_image(model: str, stages: list[tuple[int, int, int]]) -> None:
    backbone = load_backbone(model)
    assert isinstance(backbone, PipelineBackbone)
    assert [(s.number, s.channels, s.height) for s in inner_stages(backbone)] == stages
