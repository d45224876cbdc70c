"""Motion of clips by the differences of their frames: a guard against clips that stand still."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from solrl_core.fingerprint import combined_digest


class Motion:
    """Scores min(1, d / `enough`), where d is the mean absolute difference of brightness of neighbouring frames.

    Brightness is the mean of a pixel's three channels, in [0, 1]. The difference cannot distinguish motion from
    flicker or cuts, so more than enough of it earns nothing.

    Args:
        enough: least difference of a clip that moves enough.
        device: unused; clips are scored where they are.

    Raises:
        ValueError: `enough` is not above 0.
    """

    takes_clips = True
    parameters = 0

    def __init__(self, enough: float = 0.02, *, device: str = "cpu") -> None:
        if not enough > 0:
            raise ValueError(f"got enough {enough}; expected a difference of brightness above 0, such as 0.02")
        self._enough = enough
        self.digest = combined_digest("motion", repr(float(enough)))

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Score clips [N, F, 3, H, W] in [0, 1]; float32 [N], from 0 for still ones to 1.

        Raises:
            ValueError: these are images.
        """
        if images.ndim != 5:
            raise ValueError(f"got images of shape {tuple(images.shape)}; expected clips, of a model that makes clips")
        brightness = images.float().mean(2)
        return (brightness.diff(dim=1).abs().mean((1, 2, 3)) / self._enough).clamp(max=1)
