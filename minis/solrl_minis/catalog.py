"""Functions that return folders of shipped miniatures and prompts. Entry points name them."""

from functools import partial
from pathlib import Path

_HERE = Path(__file__).parent
WEIGHTS = _HERE / "weights"

mini_sana = partial(Path, WEIGHTS, "mini-sana")
mini_sd3 = partial(Path, WEIGHTS, "mini-sd3")
mini_flux = partial(Path, WEIGHTS, "mini-flux")
mini_text = partial(Path, WEIGHTS, "mini-text")
"""A Stable Diffusion 3 that writes words."""
mini_wan = partial(Path, WEIGHTS, "mini-wan")
"""A model that makes clips."""

# Prompts, with the metadata that the world's rewards read.
prompts = partial(Path, _HERE, "prompts")
words = partial(Path, _HERE, "words")
moving = partial(Path, _HERE, "moving")
