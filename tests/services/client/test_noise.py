"""The client's noise and noise levels equal those of the core, which takes them from torch and diffusers."""

from pathlib import Path
from typing import Any

import pytest
from solrl_client.noise import initial_noise
from solrl_client.noise_levels import sigmas
from solrl_core.families import load_backbone
from solrl_core.families.skeleton import load_skeleton
from solrl_core.sampling.noise import initial_noise as noise_of_torch
from solrl_proto.noise import PROBE_SEED
from support.tiny_skeletons import write_tiny
from support.true_shapes import write_skeleton


@pytest.mark.parametrize("shape", [(16,), (17,), (4, 5, 5), (8, 8, 8), (3, 33, 5)])
def test_noise_is_that_of_torch(shape: tuple[int, ...]) -> None:
    seeds = [0, 7, 2**32 + 7, 2**53 - 1, PROBE_SEED]
    found = initial_noise(seeds, shape)
    assert (found.dtype, found.shape) == ("float32", (5, *shape))
    assert found == pytest.approx(noise_of_torch(seeds, shape).numpy(), abs=2e-6)
    assert initial_noise([], shape).shape == (0, *shape)


def test_noise_that_no_candidate_has_and_an_unknown_family_are_refused() -> None:
    for seed, shape in ((2**53, (16,)), (-1, (16,)), (0, (3, 5))):
        with pytest.raises(ValueError, match="expected"):
            initial_noise([seed], shape)
    with pytest.raises(ValueError, match="got family 'unet'; expected"):
        sigmas("unet", 4)


@pytest.mark.parametrize("steps", [1, 4, 10])
@pytest.mark.parametrize("model", ["mini-sana", "mini-sd3", "mini-flux"])
def test_noise_levels_are_those_of_the_family(model: str, steps: int) -> None:
    backbone = load_backbone(model)
    scheduler = backbone._pipeline.scheduler.config  # type: ignore[attr-defined]
    settings = {"shift": scheduler.shift, "low": scheduler.base_shift, "high": scheduler.max_shift, "tokens": 64}
    assert sigmas(backbone.family, steps, **settings) == pytest.approx(backbone.sigmas(steps), abs=1e-6)


@pytest.mark.parametrize("steps", [1, 4, 10])
@pytest.mark.parametrize(
    ("model", "settings"),
    [("z-image", {"shift": 6.0}), ("qwen-image", {"high": 0.9, "most": 8192}), ("flux2-klein", {}), ("wan", {})],
)
def test_noise_levels_of_other_families(model: str, settings: dict[str, Any], steps: int, tmp_path: Path) -> None:
    folder = tmp_path / model
    written = write_skeleton(model, None, folder) if model == "z-image" else write_tiny(model, folder)
    backbone = load_skeleton(str(written))
    assert sigmas(backbone.family, steps, **settings) == pytest.approx(backbone.sigmas(steps), abs=1e-6)
