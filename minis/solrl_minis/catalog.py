"""Where the shipped miniatures lie. Reached by name through the `solrl.models` entry points."""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"


def mini_sana() -> Path:
    """Folder of the miniature SANA pipeline."""
    return WEIGHTS / "mini-sana"


def prompts() -> Path:
    """Folder of the shapes world's prompts, with GenEval-style metadata."""
    return Path(__file__).parent / "prompts"
