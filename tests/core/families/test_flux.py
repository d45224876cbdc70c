"""FLUX.1: its packed latents and its schedule."""

import torch
from solrl_core.families.flux import pack, position_ids, unpack
from solrl_core.sampling.noise import initial_noise
from tiny_models import Tiny, sized, variants
from tiny_pipelines import PROMPTS, difference


@variants("flux")
def test_the_position_of_a_patch_affects_the_velocity(tiny: Tiny) -> None:
    backbone = tiny.backbone
    rows, at = backbone.encode(PROMPTS[:1]), torch.tensor([0.5])
    noise = initial_noise([3], backbone.latent_shape)
    with torch.no_grad():
        here = backbone.velocity(backbone.transformer, noise, at, rows)
        there = backbone.velocity(backbone.transformer, noise.mT.contiguous(), at, rows)
    assert here.shape == noise.shape
    assert difference(here.mT, there) > 1e-3


@variants("flux")
def test_packing_equals_the_pipelines_and_unpacking_inverts_it(tiny: Tiny) -> None:
    latents = torch.randn(2, 4, 8, 12)
    packed = pack(latents)
    assert torch.equal(packed, tiny.pipeline._pack_latents(latents, *latents.shape))
    assert torch.equal(unpack(packed, 4, 6), latents)
    assert torch.equal(unpack(packed, 4, 6), tiny.pipeline._unpack_latents(packed, 64, 96, 8))
    theirs = tiny.pipeline._prepare_latent_image_ids(2, 4, 6, "cpu", torch.float32)
    assert torch.equal(position_ids(4, 6, torch.device("cpu")), theirs)


@variants("flux")
def test_the_shift_depends_on_the_size_if_it_is_dynamic(tiny: Tiny) -> None:
    shifted = tiny.pipeline.scheduler.config.use_dynamic_shifting
    assert (sized(tiny, 640, 640).backbone.sigmas(6) != tiny.backbone.sigmas(6)) == shifted
