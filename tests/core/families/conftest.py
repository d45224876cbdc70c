"""Tiny models of each family, written and loaded once."""

import pytest
from tiny_pipelines import Tiny, load_both, write_flux, write_sd3, write_z_image
from tiny_qwen import write_flux2_klein, write_qwen_image

SD3 = {
    "sd3": {"sd35": False},
    "sd3.5": {"sd35": True},
    "sd3-dynamic": {"sd35": False, "dynamic": True},
}


@pytest.fixture(scope="session", params=SD3)
def sd3(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Stable Diffusion 3 and 3.5, and one whose schedule depends on the size."""
    return load_both(write_sd3(tmp_path_factory.mktemp("models") / request.param, **SD3[request.param]))


@pytest.fixture(scope="session", params=["dev", "schnell"])
def flux(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """FLUX.1 with and without a guidance embedding."""
    return load_both(write_flux(tmp_path_factory.mktemp("models") / request.param, dev=request.param == "dev"))


@pytest.fixture(scope="session", params=["static", "dynamic"])
def z_image(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Z-Image, and one whose schedule depends on the size."""
    folder = tmp_path_factory.mktemp("models") / f"z-image-{request.param}"
    return load_both(write_z_image(folder, dynamic=request.param == "dynamic"))


@pytest.fixture(scope="session")
def qwen_image(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Qwen-Image, which has no variants."""
    return load_both(write_qwen_image(tmp_path_factory.mktemp("models") / "qwen-image"))


@pytest.fixture(scope="session", params=["base", "distilled"])
def klein(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """FLUX.2 [klein], with classifier-free guidance and without."""
    folder = tmp_path_factory.mktemp("models") / request.param
    return load_both(write_flux2_klein(folder, distilled=request.param == "distilled"))
