"""FP8 decoders: operations against torch's arithmetic on rounded numbers, whole decoders against the usual ones."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderDC
from diffusers.models.normalization import RMSNorm
from solrl_core.errors import DecoderError
from solrl_core.families import load_backbone, pipeline
from solrl_core.families.decoder_fp8 import MARGIN, fp8_decoder, input_scales
from solrl_core.families.decoder_fused import Fp8Convolution, fused_decoder
from solrl_core.fingerprint import module_digest
from solrl_core.kernels import convolve, convolve_norm, group_norm_silu
from solrl_core.kernels.convolve import packed_codes, packed_weight, plain_convolve, plain_convolve_norm
from solrl_core.kernels.rows import scaled_codes
from solrl_core.sampling.generator import decode_in_batches
from solrl_core.sampling.noise import initial_noise
from solrl_proto.rollouts import DecoderPrecision
from tests.core.gpu_marks import HOPPER, relative
from tests.core.test_decoder_fused import dc, given, kl, reference
from torch import Tensor, nn

E4M3 = torch.float8_e4m3fn


pytestmark = pytest.mark.usefixtures("inference")


def rounded(x: Tensor, scale: float) -> Tensor:
    return scaled_codes(x, scale).float() / scale


def test_codes_keep_what_is_not_finite_cut_what_is_too_large_and_norms_return_them() -> None:
    x = torch.tensor([1.0, 1e6, -1e6, 2.0**-8, torch.nan])
    assert scaled_codes(x, 2.0)[:4].float().tolist() == [2, 448, -448, 2.0**-7]
    assert scaled_codes(x, 2.0)[4].float().isnan()
    x, weight, bias = 3 * torch.randn(2, 12, 5, 7) + 5, torch.randn(12), torch.randn(12)
    found = group_norm_silu(x, 4, weight, bias, 1e-6, torch.tensor(16.0))
    expected = F.silu(F.group_norm(x, 4, weight, bias, 1e-6))
    assert found.dtype == E4M3
    assert relative(found.float() / 16, expected) < 0.03


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("enlarge", [False, True])
def test_codes_convolve_as_the_numbers_that_they_stand_for(enlarge: bool, silu: bool) -> None:
    x, weight, bias = given(2, 3, 5, 7, 4)
    weight *= torch.tensor([1, 10, 0.01, 1])[:, None, None, None]
    codes, scales = packed_codes(weight, enlarge=enlarge)
    packed = packed_weight(weight, enlarge=enlarge)
    assert codes.dtype == E4M3
    assert relative(codes.float() * scales[:, None], packed) < 0.03
    found = convolve(scaled_codes(x, 8.0), codes, bias, scales / 8, enlarge, silu, None)
    expected = plain_convolve(rounded(x, 8.0), codes.float() * scales[:, None], bias, None, enlarge, silu)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    unrounded = reference(x, weight, bias, enlarge, silu)
    assert relative(found, unrounded) < 0.05
    as_codes = convolve(scaled_codes(x, 8.0), codes, bias, scales / 8, enlarge, silu, torch.tensor(4.0))
    assert torch.equal(as_codes.float(), scaled_codes(found, 4.0).float())
    assert as_codes.dtype == E4M3
    assert as_codes.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("as_codes", [False, True])
def test_a_convolution_normalises_and_adds_as_diffusers_does(as_codes: bool) -> None:
    x, weight, bias = given(2, 3, 5, 7, 4)
    residual = torch.randn(2, 4, 5, 7).to(memory_format=torch.channels_last)
    norm = RMSNorm(4, 1e-5, bias=True)
    norm.weight.copy_(torch.randn(4))
    norm.bias.copy_(torch.randn(4))
    expected = norm(F.conv2d(x, weight, bias, padding=1).movedim(1, -1)).movedim(-1, 1) + residual
    packed, scale = packed_weight(weight, enlarge=False), torch.tensor(16.0) if as_codes else None
    found, codes = convolve_norm(x, packed, bias, None, norm.weight, norm.bias, 1e-5, residual, scale)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(codes.float(), scaled_codes(found, 16.0).float()) if as_codes else not codes.numel()


def test_the_compiler_knows_the_types_of_codes() -> None:
    x, weight, bias = given(2, 3, 5, 7, 4)
    with torch.inference_mode(False):
        x, weight, bias, scale = x.clone(), weight.clone(), bias.clone(), torch.tensor(4.0)
        codes, scales = packed_codes(weight, enlarge=False)
        for operation, arguments in (
            (torch.ops.solrl.convolve.default, (scaled_codes(x, 4.0), codes, bias, scales, False, True, scale)),
            (
                torch.ops.solrl.convolve_norm.default,
                (x, weight.flatten(1), bias, None, bias.clone(), bias.clone(), 1e-6, torch.randn(2, 4, 5, 7), scale),
            ),
            (torch.ops.solrl.group_norm_silu.default, (x, 3, torch.ones(3), torch.ones(3), 1e-6, scale)),
        ):
            torch.library.opcheck(operation, arguments, test_utils="test_faketensor")


def deep() -> AutoencoderDC:
    """With stages of several blocks, and a norm over more channels than a program of the kernel computes."""
    return dc(decoder_block_out_channels=(128, 512, 256), decoder_layers_per_block=(3, 2, 1))


BUILDS = [(kl, (2, 4, 8, 12)), (dc, (1, 8, 16, 16)), (deep, (1, 8, 8, 8))]
IN_FP8 = {kl: 13, dc: 6, deep: 12}
"""Convolutions of a decoder that compute in FP8: all but the first and the last."""
WIDE_BUILDS = [(kl, (2, 4, 64, 72)), (dc, (1, 8, 32, 32)), (deep, (1, 8, 32, 32))]


@pytest.mark.parametrize(("build", "latents"), BUILDS)
def test_an_fp8_decoder_is_close_to_the_decoder(build: Callable[[], nn.Module], latents: tuple[int, ...]) -> None:
    vae = build().eval().to(memory_format=torch.channels_last)
    before, given = module_digest(vae), torch.randn(latents)
    scales = input_scales(vae, lambda own: own.decode(given))
    decoders = fused_decoder(vae, scales), fp8_decoder(vae, lambda own: own.decode(given))
    for decoder in decoders:
        found = [part for part in decoder.modules() if isinstance(part, Fp8Convolution)]
        assert len(found) == len(scales) == IN_FP8[build]
    expected, fused, rounded = (module.decode(given, return_dict=False)[0] for module in (vae, *decoders))
    assert 0.01 < relative(rounded, expected) < 0.15
    # Not equal: fused modules add up the weights of an enlarged image before they round them.
    assert 0.8 < relative(fused, expected) / relative(rounded, expected) < 1.25
    assert module_digest(vae) == before
    if build is deep:  # blocks of a stage pass codes on
        stages = [[block.following is not None for block in stage] for stage in decoders[0].decoder.up_blocks[:2]]
        assert stages == [[True, True, True, False], [True, True, False]]


def test_scales_are_powers_of_two_that_leave_a_margin() -> None:
    vae = kl().eval()
    largest: list[float] = []
    given = torch.randn(1, 4, 8, 8)
    name = "up_blocks.0.resnets.0.conv1"
    hook = vae.decoder.get_submodule(name).register_forward_pre_hook(
        lambda _, inputs: largest.append(float(inputs[0].abs().max()))
    )
    vae.decode(given)
    hook.remove()
    scale = input_scales(vae, lambda own: own.decode(given))[name]
    assert scale.hex().startswith("0x1.0000000000000p")
    assert 448 / 2 < MARGIN * largest[0] * scale <= 448


def test_a_decoder_without_convolutions_of_images_is_refused() -> None:
    holder = nn.Module()
    holder.decoder = nn.ModuleDict({"up_blocks": nn.ModuleList([nn.Conv3d(4, 4, 3, padding=1)])})
    with pytest.raises(DecoderError, match=r"no convolution .* in FP8; got 'Module'; .*omit decoder_precision"):
        fp8_decoder(holder, list)


@pytest.mark.parametrize("model", ["mini-sana", "mini-sd3"])
def test_a_backbone_decodes_in_fp8(model: str) -> None:
    backbone = load_backbone(model)
    digest, latents = module_digest(backbone.parts["vae"]), initial_noise(range(4), backbone.latent_shape)
    whole, found = backbone.decode(latents), decode_in_batches(backbone, latents, precision="fp8")
    assert 0 < (found - whole).abs().mean() < 0.01
    assert torch.equal(backbone.decode(latents), whole)
    assert module_digest(backbone.parts["vae"]) == digest
    for rows in ([0], [2, 3], [3, 0, 1]):
        assert torch.equal(decode_in_batches(backbone, latents[rows], precision="fp8"), found[rows])


def test_threads_share_one_fp8_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, made = load_backbone("mini-sana"), []
    monkeypatch.setattr(pipeline, "fp8_decoder", lambda *given: made.append(fp8_decoder(*given)) or made[-1])
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: backbone._fp8_vae(), range(4)))
    assert len(made) == 1
    assert all(one is made[0] for one in found)


@pytest.mark.parametrize(("precision", "expected"), [(None, [2, 2]), ("fp8", [4])])
def test_twice_as_many_images_are_decoded_at_once(
    precision: DecoderPrecision | None, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone, met = load_backbone("mini-sana"), []
    monkeypatch.setattr(type(backbone), "decodes_by_kernels", True)
    monkeypatch.setattr("solrl_core.sampling.generator._DECODED_PIXELS", 2 * backbone.height * backbone.width)
    monkeypatch.setattr(backbone, "decode", lambda latents, precision: met.append(len(latents)) or latents)
    decode_in_batches(backbone, torch.zeros(3, *backbone.latent_shape), precision=precision)
    assert met == expected


@HOPPER
@pytest.mark.parametrize("as_codes", [False, True])
@pytest.mark.parametrize(("enlarge", "silu"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("channels", "out"), [(128, 128), (512, 256)])
@pytest.mark.parametrize(("height", "width"), [(5, 8), (2, 72), (2, 300)])
def test_the_kernel_convolves_codes(
    as_codes: bool, enlarge: bool, silu: bool, channels: int, out: int, height: int, width: int
) -> None:
    x, weight, bias = given(2, channels, height, width, out)
    (codes, scales), bias = packed_codes(weight, enlarge=enlarge), bias.bfloat16()
    images = scaled_codes(x, 8.0)
    expected = plain_convolve(images, codes, bias.float(), scales / 8, enlarge, silu)
    scale = torch.tensor(16.0, device="cuda") if as_codes else None
    found = convolve(images.cuda(), codes.cuda(), bias.cuda(), scales.cuda() / 8, enlarge, silu, scale)
    assert found.dtype == (E4M3 if as_codes else torch.bfloat16)
    assert relative(found.cpu().float() / (16 if as_codes else 1), expected) < (0.03 if as_codes else 4e-3)


@HOPPER
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("as_codes", [False, True])
@pytest.mark.parametrize(("channels", "out"), [(128, 128), (256, 256)])
@pytest.mark.parametrize(("height", "width"), [(2, 72), (5, 128)])
def test_the_kernel_normalises(fp8: bool, as_codes: bool, channels: int, out: int, height: int, width: int) -> None:
    x, weight, bias = given(2, channels, height, width, out)
    (weight, scales), images = packed_codes(weight, enlarge=False), scaled_codes(x, 8.0)
    if not fp8:
        weight, scales, images = (weight.float() * scales[:, None] / 8).bfloat16(), None, images.bfloat16()
    norm_weight, norm_bias, bias = torch.randn(out).bfloat16(), torch.randn(out).bfloat16(), bias.bfloat16()
    residual = torch.randn(2, out, height, width).bfloat16().to(memory_format=torch.channels_last)
    factors = None if scales is None else scales / 8
    norm = (norm_weight, norm_bias, 1e-5, residual, torch.tensor(16.0) if as_codes else None)
    expected, _ = plain_convolve_norm(images, weight, bias.float(), factors, *norm[:4], None)
    moved = [part.cuda() if isinstance(part, Tensor) else part for part in (images, weight, bias, factors, *norm)]
    found, codes = convolve_norm(*moved)
    assert relative(found.cpu(), expected) < 4e-3
    assert codes.numel() == (found.numel() if as_codes else 0)
    if as_codes:
        assert relative(codes.cpu().float() / 16, expected) < 0.03


@HOPPER
@pytest.mark.parametrize(("build", "latents"), BUILDS + WIDE_BUILDS)
def test_an_fp8_decoder_on_a_gpu_equals_torchs(build: Callable[[], nn.Module], latents: tuple[int, ...]) -> None:
    vae, given = build().eval().bfloat16().float(), torch.randn(latents).bfloat16().float()
    whole = vae.decode(given, return_dict=False)[0]
    expected = fp8_decoder(vae, lambda own: own.decode(given)).decode(given, return_dict=False)[0]
    vae.cuda().bfloat16().to(memory_format=torch.channels_last)
    fused = fp8_decoder(vae, lambda own: own.decode(given.cuda().bfloat16()))
    assert any(isinstance(part, Fp8Convolution) and part._has_kernel for part in fused.modules())
    found = fused.decode(given.cuda().bfloat16(), return_dict=False)[0].cpu()
    assert relative(found, whole) < 1.3 * relative(expected, whole) + 5e-3
