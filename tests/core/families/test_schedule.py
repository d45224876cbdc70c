"""Noise levels by numbers, and the same with the oldest diffusers: other versions must not train on other ones."""

import math
import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from solrl_core.families import load_backbone
from tests.core.families.tiny_models import Tiny

ROOT = Path(__file__).parents[3]
OLDEST = Path(sys.prefix) / "oldest"
SIGMAS = {
    "mini-sana": [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0],
    "mini-sd3": [
        1,
        *(0.9525083, 0.8977312, 0.8338531, 0.7584002, 0.6679133, 0.5574015, 0.419391, 0.2421592, 0.0062174),
        0,
    ],
    "mini-flux": [
        1,
        *(0.959485, 0.9132354, 0.8599407, 0.7978588, 0.7246209, 0.6369232, 0.5300144, 0.3968053, 0.2262296),
        0,
    ],
}


@pytest.mark.parametrize("model", SIGMAS)
def test_ten_steps_have_these_noise_levels(model: str) -> None:
    assert load_backbone(model).sigmas(10) == pytest.approx(SIGMAS[model], abs=5e-7)


@pytest.mark.parametrize("tiny", ["sd3/3.5"], indirect=True)
def test_comfyui_s_scheduler_normal_has_the_noise_levels_of_sd35(tiny: Tiny) -> None:
    """As docs/checkpoints.md says. Source: ComfyUI's normal_scheduler and ModelSamplingDiscreteFlow, at shift 3."""

    def shifted(level: torch.Tensor) -> torch.Tensor:
        return 3 * level / (1 + 2 * level)

    levels = shifted(torch.linspace(1, shifted(torch.tensor(1 / 1000)).item(), 40))
    assert tiny.backbone.sigmas(40) == pytest.approx([*levels.tolist(), 0], abs=1e-6)


@pytest.mark.parametrize("tiny", ["flux/dev"], indirect=True)
def test_comfyui_s_scheduler_simple_has_the_noise_levels_of_flux(tiny: Tiny) -> None:
    """As docs/checkpoints.md says, but for the 10,000 levels that ComfyUI rounds to.

    Source: ComfyUI's simple_scheduler, and ModelSamplingFlux at its default shifts and the images' width and height.
    """
    height, width = (8 * side for side in tiny.backbone.latent_shape[1:])
    mu = 0.5 + (width * height / 256 - 256) * (1.15 - 0.5) / (4096 - 256)
    levels = [math.exp(mu) / (math.exp(mu) + 1 / (1 - step / 28) - 1) for step in range(28)]
    assert tiny.backbone.sigmas(28) == pytest.approx([*levels, 0], abs=1e-6)


@pytest.mark.release
@pytest.mark.skipif(os.environ.get("PYTHONPATH", "").startswith(str(OLDEST)), reason="is the run that this test starts")
def test_the_oldest_diffusers_gives_the_same_images_and_noise_levels_and_imports_as_little() -> None:
    allowed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (diffusers,) = (Requirement(one) for one in allowed if one.startswith("diffusers"))
    (oldest,) = (one.version for one in diffusers.specifier if one.operator == ">=")
    path = os.pathsep.join([str(OLDEST), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    found = subprocess.check_output([sys.executable, "-c", _VERSION], env=environment, text=True).strip()
    assert found.startswith(f"{oldest}."), "`make test` installs it"
    assert found != version("diffusers")
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in ("schedule", "parity", "named_parts")]
    # Before 0.39, Z-Image's pipeline took noise levels of its own.
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not z-image", *files]
    run = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:]


_VERSION = "import diffusers; print(diffusers.__version__)"
