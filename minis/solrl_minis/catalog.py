"""Paths of the shipped miniatures. Users reach the models by name, through the `solrl.models` entry points."""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"


def mini_sana() -> Path:
    """Folder of the miniature SANA pipeline."""
    return WEIGHTS / "mini-sana"


def mini_sd3() -> Path:
    """Folder of the miniature Stable Diffusion 3 pipeline."""
    return WEIGHTS / "mini-sd3"


def mini_flux() -> Path:
    """Folder of the miniature FLUX.1 pipeline."""
    return WEIGHTS / "mini-flux"


def mini_text() -> Path:
    """Folder of the miniature Stable Diffusion 3 pipeline that writes words."""
    return WEIGHTS / "mini-text"


def mini_wan() -> Path:
    """Folder of the miniature Wan pipeline, which makes clips."""
    return WEIGHTS / "mini-wan"


def moving() -> Path:
    """Folder of the moving shapes world's prompts, with the metadata of the reward `motion_verifier`."""
    return Path(__file__).parent / "moving"


def words() -> Path:
    """Folder of the text world's prompts, with the metadata of the reward `ocr`."""
    return Path(__file__).parent / "words"


def prompts() -> Path:
    """Folder of the shapes world's prompts, with GenEval-style metadata."""
    return Path(__file__).parent / "prompts"
